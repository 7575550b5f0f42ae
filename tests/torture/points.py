"""Points at which a process can die: before, within and after every change that it makes to files.

Everything here replaces functions of the whole process, so it is meant for a forked child that ends with its job.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
import re
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from filelock import FileLock

import ragcache.states.store
from ragcache.states.durable import DurableFile


class Kind(StrEnum):
    """What a process is doing when it dies."""

    WRITE = "write"
    FSYNC = "fsync"
    RENAME = "rename"
    LINK = "link"
    UNLINK = "unlink"
    MKDIR = "mkdir"
    LOCK = "lock"
    BEGIN = "begin"
    STATEMENT = "statement"
    COMMIT = "commit"
    CLOSE = "close"
    """Of a connection: the last one copies SQLite's log into the file."""
    SQLITE_FILE = "sqlite file"
    """SQLite's own system calls, within statements."""


@dataclass(frozen=True)
class Point:
    """A point that a process has passed.

    Attributes:
        kind: of change.
        moment: before it, within it or after it.
        what: file or statement.
    """

    kind: Kind
    moment: str
    what: str

    def __str__(self) -> str:
        return f"{self.moment} {self.kind} {self.what}"


class Unsynced:
    """What a power cut would undo: content and names of files that no fsync has made durable.

    SQLite syncs by itself, and is not watched here; nor are files that were deleted and might come back.
    """

    def __init__(self) -> None:
        self._written: set[Path] = set()
        self._renamed: list[tuple[Path, Path]] = []
        self._linked: list[Path] = []

    def wrote(self, file: Path) -> None:
        """Content was added to a file."""
        self._written.add(file)

    def renamed(self, old: Path, new: Path, *, replaced: bool) -> None:
        """A file has another name; one that took another's place keeps it, since that is never half done."""
        if old in self._written:
            self._written.remove(old)
            self._written.add(new)
        if not replaced:
            self._renamed.append((old, new))

    def linked(self, new: Path) -> None:
        """A file has one more name."""
        self._linked.append(new)

    def synced(self, path: Path) -> None:
        """A file or folder is durable."""
        self._written.discard(path)
        self._linked = [new for new in self._linked if new.parent != path]
        self._renamed = [(old, new) for old, new in self._renamed if new.parent != path]

    def lose(self) -> None:
        """Cut the power."""
        for file in self._written:
            if file.exists():
                os.truncate(file, file.stat().st_size // 2)
        for name in self._linked:
            name.unlink(missing_ok=True)
        for old, new in reversed(self._renamed):
            if new.exists():
                _rename(new, old)


_rename = os.rename
"""As it is before it is watched."""


class Points:
    """The points that this process has passed; at one of them it dies.

    Attributes:
        passed: in order.
        unsynced: what is not durable.
    """

    def __init__(self, fatal: int | None = None, *, power_cut: bool = False) -> None:
        """Set up.

        Args:
            fatal: number of the point, from 0, to die at; none by default.
            power_cut: what is not durable then gets lost as well.
        """
        self.passed: list[Point] = []
        self.unsynced = Unsynced()
        self._fatal = fatal
        self._power_cut = power_cut
        self._lock = threading.RLock()

    def reach(self, kind: Kind, moment: str, what: str, prelude: Callable[[], object] = lambda: None) -> None:
        """Pass a point, or die.

        Args:
            kind: of change.
            moment: before, within or after.
            what: file or statement.
            prelude: done before dying: half of the change.
        """
        with self._lock:
            fatal = len(self.passed) == self._fatal
            self.passed.append(Point(kind, moment, what))
            if fatal:
                prelude()
                if self._power_cut:
                    self.unsynced.lose()
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def around(self, kind: Kind, what: str) -> Iterator[None]:
        """A change with a point before and one after."""
        self.reach(kind, "before", what)
        yield
        self.reach(kind, "after", what)


def instrument(points: Points) -> None:
    """From now on, let this process pass points."""
    for name, kind in {"unlink": Kind.UNLINK, "mkdir": Kind.MKDIR}.items():
        _replace(os, name, _watched(points, kind, getattr(os, name)))
    for name in ("rename", "replace"):
        _replace(os, name, _watched_rename(points, getattr(os, name)))
    _replace(os, "link", _watched_link(points, os.link))
    _replace(os, "fsync", _watched_fsync(points))
    _replace(DurableFile, "write", _watched_write(points))
    _replace(ragcache.states.store, "FileLock", _watched_lock(points))
    _replace(sqlite3, "connect", _watched_connect(points))
    _watch_sqlite_files(points)


_STATEMENTS = {"BEGIN": Kind.BEGIN, "COMMIT": Kind.COMMIT}
_HARMLESS = ("SELECT", "PRAGMA foreign_key", "PRAGMA synchronous", "PRAGMA schema_version", "PRAGMA integrity_check")


def _replace(owner: object, name: str, value: object) -> None:
    setattr(owner, name, value)


def _watched(points: Points, kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, *others: Any, **options: Any) -> Any:
        with points.around(kind, _name(file)):
            return function(file, *others, **options)

    return call


def _watched_rename(points: Points, function: Callable[..., Any]) -> Callable[..., Any]:
    def rename(old: Any, new: Any) -> None:
        with points.around(Kind.RENAME, _name(old)):
            replaced = Path(new).exists()
            function(old, new)
            points.unsynced.renamed(Path(old), Path(new), replaced=replaced)

    return rename


def _watched_link(points: Points, function: Callable[..., Any]) -> Callable[..., Any]:
    def link(old: Any, new: Any) -> None:
        with points.around(Kind.LINK, _name(new)):
            function(old, new)
            points.unsynced.linked(Path(new))

    return link


def _watched_fsync(points: Points) -> Callable[[int], None]:
    original = os.fsync

    def fsync(file: int) -> None:
        with points.around(Kind.FSYNC, _name(file)):
            original(file)
            points.unsynced.synced(_path(file))

    return fsync


def _watched_write(points: Points) -> Callable[..., int]:
    original = DurableFile.write

    def write(file: DurableFile, data: Any) -> int:
        if file._aborted:
            return original(file, data)
        name = _name(file.temporary)

        def write_half() -> None:
            content = memoryview(data).cast("B")
            file._file.write(content[: len(content) // 2])
            file._file.flush()

        points.reach(Kind.WRITE, "before", name)
        points.reach(Kind.WRITE, "within", name, write_half)
        written = original(file, data)
        points.unsynced.wrote(file.temporary)
        points.reach(Kind.WRITE, "after", name)
        return written

    return write


def _watched_lock(points: Points) -> type[FileLock]:
    class WatchedLock(FileLock):
        def acquire(self, *arguments: Any, **options: Any) -> Any:
            with points.around(Kind.LOCK, "acquire"):
                return super().acquire(*arguments, **options)

        def release(self, *arguments: Any, **options: Any) -> None:
            with points.around(Kind.LOCK, "release"):
                super().release(*arguments, **options)

    return WatchedLock


def _watched_connect(points: Points) -> Callable[..., sqlite3.Connection]:
    original = sqlite3.connect

    class WatchedConnection(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if sql.lstrip().startswith(_HARMLESS):
                return super().execute(sql, *arguments)
            with points.around(_kind(sql), _first_words(sql)):
                return super().execute(sql, *arguments)

        def executemany(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            with points.around(_kind(sql), _first_words(sql)):
                return super().executemany(sql, *arguments)

        def close(self) -> None:
            with points.around(Kind.CLOSE, "connection"):
                super().close()

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return original(*arguments, factory=WatchedConnection, **options)

    return connect


def _kind(sql: str) -> Kind:
    return _STATEMENTS.get(sql.partition(" ")[0], Kind.STATEMENT)


def _first_words(sql: str) -> str:
    return " ".join(sql.split()[:3])


def _name(file: Any) -> str:
    """A short name that is the same in each run."""
    if isinstance(file, int):
        file = _path(file)
    return re.sub(r"[0-9a-f]{16,}", "*", Path(os.fsdecode(file)).name)


def _path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


class _Vfs(ctypes.Structure):
    """SQLite's layer for files, `sqlite3_vfs`; its unix version lets each system call be replaced, for tests."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("longest_path", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("methods", ctypes.c_void_p * 13),
        ("set_system_call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)),
        ("get_system_call", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)),
        ("next_system_call", ctypes.c_void_p),
    )


_WRITE = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_PWRITE = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_UNLINK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
_installed: list[Any] = []
"""What SQLite calls must not be garbage-collected."""


def _watch_sqlite_files(points: Points) -> None:
    find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = find(None)
    vfs = _Vfs.from_address(address)

    def replace(name: bytes, prototype: Any, wrap: Callable[[Any], Callable[..., int]]) -> None:
        original = vfs.get_system_call(address, name)
        if original:  # Which of the ways to write there are depends on how SQLite was built.
            replacement = prototype(wrap(prototype(original)))
            _installed.append(replacement)
            vfs.set_system_call(address, name, ctypes.cast(replacement, ctypes.c_void_p))

    def watched_write(original: Callable[..., int]) -> Callable[..., int]:
        def write(file: int, data: int, count: int, *place: int) -> int:
            name = _name(file)
            points.reach(Kind.SQLITE_FILE, "before", f"write {name}")
            points.reach(Kind.SQLITE_FILE, "within", f"write {name}", lambda: original(file, data, count // 2, *place))
            return original(file, data, count, *place)

        return write

    def watched_change(original: Callable[..., int]) -> Callable[..., int]:
        def change(file: Any, *others: int) -> int:
            with points.around(Kind.SQLITE_FILE, f"change {_name(file)}"):
                return original(file, *others)

        return change

    replace(b"write", _WRITE, watched_write)
    replace(b"pwrite", _PWRITE, watched_write)
    replace(b"pwrite64", _PWRITE, watched_write)
    replace(b"ftruncate", _TRUNCATE, watched_change)
    replace(b"unlink", _UNLINK, watched_change)
