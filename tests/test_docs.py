"""Snippets in docs/ run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings

from ragcache.model.resolve import resolve

DOCS = Path(__file__).parents[1] / "docs"


def test_llama_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_CONTEXTS", "1")
    page = DOCS / "llama_index.md"
    names: dict[str, Any] = {
        "embedding_folder": str(resolve("all-minilm-l6-v2")),
        "store_path": tmp_path / "store",
        "other_path": tmp_path / "other",
    }
    before = Settings._embed_model
    text = page.read_text()
    try:
        for snippet in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            line = text[: snippet.start()].count("\n") + 1
            # So that a failure names a line of the page.
            exec(compile("\n" * line + snippet[1], str(page), "exec"), names)  # noqa: S102
    finally:
        Settings._embed_model = before
