"""Readers and a writer at once, for some seconds; `make torture` does it for minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_readers_and_a_writer_at_once() -> None:
    command = [sys.executable, "-m", "tests.torture.concurrency", "--seconds", "15"]
    root = Path(__file__).parent.parent
    process = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^failures +0$", process.stdout, re.MULTILINE)
