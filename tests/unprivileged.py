"""To act as an ordinary user for a while: tests run as root in CI, whom permissions do not stop."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[None]:
    """The whole process, every thread of it, loses root's rights; nothing changes for any other user."""
    if os.geteuid() != 0:
        yield
        return
    with ExitStack() as back:
        try:
            # The user last, and first on the way back: only root may change the others.
            groups, group = os.getgroups(), os.getegid()
            os.setgroups([])
            back.callback(os.setgroups, groups)
            os.setegid(_NOBODY)
            back.callback(os.setegid, group)
            os.seteuid(_NOBODY)
            back.callback(os.seteuid, 0)
        except OSError as error:
            pytest.skip(f"this root may not act as another user: {error}")
        yield


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A new folder that every user can look into; those of `tmp_path` are their owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix="ragcache-test-"))
    try:
        folder.chmod(0o755)
        if not all(parent.stat().st_mode & 0o001 for parent in folder.parents):
            pytest.skip(f"other users cannot reach {folder}; set TMPDIR")
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be made, changed or removed in a folder, nor below it, by the user this process is meanwhile."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    modes = [path.stat().st_mode for path in folders]
    for path in folders:
        path.chmod(0o555)
    try:
        with ordinary_user():
            yield
    finally:
        for path, mode in zip(folders, modes, strict=True):
            path.chmod(mode)
