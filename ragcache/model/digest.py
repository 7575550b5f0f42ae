"""sha256 of large files, computed once and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragcache.errors import SettingsError


def file_digest(path: Path, cache_folder: Path) -> str:
    """sha256 of a file's bytes, as 64 hexadecimal digits.

    Remembered in `cache_folder/digests.json` under the file's real path together with its size, modification
    and change time; any of them differing means reading the file again.

    Raises:
        SettingsError: the cache folder cannot be used.
    """
    path = path.resolve()
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    remembered = cache_folder / "digests.json"
    entries = _read(remembered)
    if (entry := entries.get(str(path))) and entry["stamp"] == stamp:
        return str(entry["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Read again: another process may have added its own meanwhile. The last writer wins; what is lost is
    # computed again.
    _write(remembered, {**_read(remembered), str(path): {"stamp": stamp, "sha256": digest}})
    return digest


def _read(path: Path) -> dict[str, dict[str, object]]:
    try:
        with cache_folder_in_use(path.parent):
            entries = json.loads(path.read_text()) if path.exists() else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {
        key: entry for key, entry in entries.items() if isinstance(entry, dict) and {"stamp", "sha256"} <= entry.keys()
    }


def _write(path: Path, entries: dict[str, dict[str, object]]) -> None:
    with cache_folder_in_use(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".digests-")
        with os.fdopen(descriptor, "w") as file:
            json.dump(entries, file)
        Path(temporary).replace(path)


@contextmanager
def cache_folder_in_use(folder: Path) -> Iterator[None]:
    """Say what to do when the cache folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"the cache folder {folder} cannot be used: {error.strerror or error}; "
            "see to its permissions and space, or set RAGCACHE_CACHE_FOLDER to another one"
        ) from error
