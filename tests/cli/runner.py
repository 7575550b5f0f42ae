"""The command line, run in this process as the installed script does."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from ragcache.cli import main


class Outcome(NamedTuple):
    """What a command ends with."""

    code: int
    out: str
    err: str


def run_command(
    arguments: Iterable[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Outcome:
    """Run `ragcache` with some arguments."""
    monkeypatch.setattr(sys, "argv", ["ragcache", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    return Outcome(code, *capsys.readouterr())
