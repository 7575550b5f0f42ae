"""`ragcache index`: which encodings it is told to make, and says it made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache.settings import load_settings
from ragcache.states.store import StateStore
from tests.cli.runner import run_command


@pytest.fixture
def index(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_folder: Callable[[str], Path],
) -> Callable[..., tuple[int, str]]:
    """Index a folder of two files; exit code and everything printed."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "bees.md").write_text("Bees make honey in a hive.")
    (folder / "honey.md").write_text("Honey is made by bees.")

    def run(*options: object) -> tuple[int, str]:
        fixed = ["--store", tmp_path / "store", "--model", tiny_folder("llama"), "--dtype", "float32"]
        outcome = run_command(["index", folder, *fixed, *options], monkeypatch, capsys)
        return outcome.code, outcome.out + outcome.err

    return run


def test_encodings_context_and_its_length(index: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    options = ("--encodings", "alone,context", "--context", "neighbours", "--context-tokens", 40)
    code, printed = index(*options)
    assert (code, "2 chunks, 2 encoded in context, " in printed) == (0, True)
    settings = load_settings(tmp_path / "store")
    assert (settings.encodings, settings.context, settings.context_tokens) == (("alone", "context"), "neighbours", 40)
    (chunks,) = StateStore.open(tmp_path / "store").catalog.all_chunks()
    assert [[it.name for it in chunk.encodings] for chunk in chunks] == [["alone", "context"]] * 2
    code, printed = index()
    assert (code, "encoded in context" in printed, "0 chunks, 0 tokens" in printed) == (0, False, True)


@pytest.mark.parametrize(
    ("option", "value"), [("--encodings", "beside"), ("--context", "weather"), ("--context-tokens", 0)]
)
def test_what_makes_no_sense_is_refused(
    index: Callable[..., tuple[int, str]], tmp_path: Path, option: str, value: object
) -> None:
    code, printed = index(option, value)
    assert code != 0
    assert option[2:].replace("-", "_") in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "store").exists()
