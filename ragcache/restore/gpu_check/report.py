"""The JSON file that a check leaves behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Report:
    """The JSON file."""

    def __init__(self, path: Path, deadline: float) -> None:
        """Set up.

        Args:
            path: of the file.
            deadline: on the monotonic clock.
        """
        self.content: dict[str, Any] = {"correctness": [], "pipeline": [], "timings": [], "left_out": 0}
        self._path = path
        self._deadline = deadline

    def add(self, part: str, name: dict[str, object], row: Callable[[], dict[str, object]]) -> None:
        """Add a row, if there is time; an error becomes the row, and the others go on."""
        from triton.errors import TritonError

        if time.monotonic() > self._deadline:
            self.content["left_out"] += 1
            return
        try:
            result = name | row()
        except (TritonError, RuntimeError) as error:
            result = name | {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        self.content[part].append(result)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()

    @property
    def failures(self) -> list[dict[str, object]]:
        """Rows that say so."""
        rows = [row for part in ("correctness", "pipeline", "timings") for row in self.content[part]]
        return [row for row in rows if not row.get("passed", True)]

    def write(self) -> None:
        """Write all that is there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")
