"""A connection to an SQLite file in WAL mode, also where nothing can be written: another user's store, a full disk.

SQLite reads such a file through two others beside it: `-wal` with the latest changes and `-shm`, the index of those.
Where it can neither make them nor find those of a writer, only an `immutable` connection is left. That one sees nothing
of `-wal`, takes no locks and never notices a change, so what it says counts only if the files look the same afterwards.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.errors import StoreError

# What SQLite says when it cannot make or extend the files beside, or finds them not in order and must not touch them.
_NO_FILES = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_IOERR_SHM")
# Times of files come from a clock that ticks every 1 to 10 ms: two changes within a tick look like one.
_TICK_NS = 20_000_000


class UnsettledError(StoreError):
    """A file that cannot be read now, but perhaps in a moment: somebody with more rights is at work."""


class Stamp(NamedTuple):
    """What the file system says about a file; any change of its content gives another stamp."""

    file_id: tuple[int, int]
    size: int
    changed_ns: tuple[int, int]
    wal_bytes: int

    @classmethod
    def of(cls, path: Path) -> Stamp | None:
        """The stamp of a file as it is now; None when it is gone.

        Raises:
            StoreError: permissions hide it.
        """
        # Nothing is read: to open the file and close it again would drop the locks of SQLite's connections.
        stat = _stat(path)
        if stat is None:
            return None
        wal = _stat(_beside(path, "-wal"))
        changed_ns = stat.st_mtime_ns, stat.st_ctime_ns
        return cls((stat.st_dev, stat.st_ino), stat.st_size, changed_ns, wal.st_size if wal else 0)


@dataclass
class Connection:
    """One connection, for use in one thread.

    Attributes:
        sqlite: what runs the statements.
        path: the file.
        writable: whether it may be written through.
        stamp: the file before an immutable connection to it was opened; None for others, which SQLite keeps up to date.
    """

    sqlite: sqlite3.Connection
    path: Path
    writable: bool
    stamp: Stamp | None = None

    def rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """The rows that a query gives.

        Raises:
            UnsettledError: they may be old or half of a change; a new connection is needed.
        """
        try:
            return self.sqlite.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            if self.writable or self.stamp or not _is_about_files(error):
                raise
            raise _unreadable_changes(self.path) from error
        finally:
            # After an error too: a file in the middle of a change looks damaged.
            if self.stamp and self.stamp != Stamp.of(self.path):
                raise _changing(self.path)


def connect(path: Path, *, write: bool = False, check_same_thread: bool = True) -> Connection:
    """Open an existing file, with no more rights than there are.

    Args:
        path: the file, absolute.
        write: nothing less than a writable connection will do.
        check_same_thread: as in `sqlite3.connect`.

    Raises:
        StoreError: it is to be written to and cannot.
        UnsettledError: it cannot be read now; worth another try.
    """
    stamp = Stamp.of(path)
    if stamp is None:
        raise StoreError(f"{path} is gone; index again")
    if not _may(path, os.R_OK):
        raise StoreError(f"{path} cannot be read by this user; see to its permissions")
    if can_write(path):
        try:
            # Mode rw: a file that is gone is an error, not a new and empty one.
            return Connection(_open(path, "mode=rw", check_same_thread), path, writable=True)
        except sqlite3.OperationalError as error:
            if write or not _is_about_files(error):
                raise
    elif write:
        raise unwritable(path)
    if _stat(_beside(path, "-wal")) and _stat(_beside(path, "-shm")):
        try:
            return Connection(_open(path, "mode=ro", check_same_thread), path, writable=False)
        except sqlite3.OperationalError as error:
            if not _is_about_files(error):
                raise
    if stamp.wal_bytes:
        # A writer takes `-shm` away before `-wal` when it closes, so this may be over in a moment.
        raise _unreadable_changes(path)
    if abs(time.time_ns() - max(stamp.changed_ns)) < _TICK_NS:
        raise _changing(path)
    try:
        return Connection(_open(path, "mode=ro&immutable=1", check_same_thread), path, writable=False, stamp=stamp)
    except sqlite3.DatabaseError as error:
        if stamp == Stamp.of(path):
            raise
        raise _changing(path) from error


def can_write(path: Path) -> bool:
    """Whether this user may change a file and put others beside it."""
    return _may(path, os.W_OK) and _may(path.parent, os.W_OK | os.X_OK)


def unwritable(path: Path) -> StoreError:
    """The error for a change to a file that may only be read."""
    return StoreError(
        f"{path.parent} cannot be written to by this user; see to its permissions, those of the files in it and whether"
        " its disk is read-only"
    )


def _open(path: Path, mode: str, check_same_thread: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?{mode}", uri=True, timeout=30, isolation_level=None, check_same_thread=check_same_thread
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        # SQLite opens its files only when it reads; what does not work is to show here.
        connection.execute("PRAGMA schema_version").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be used: {error.strerror}; see to its permissions") from error


def _may(path: Path, rights: int) -> bool:
    # By default the rights of the user who started the process are asked for, not of the one it acts as.
    return os.access(path, rights, effective_ids=os.access in os.supports_effective_ids)


def _is_about_files(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(_NO_FILES)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _changing(path: Path) -> UnsettledError:
    return UnsettledError(f"{path} keeps changing while it is read; try again when nothing is being written to it")


def _unreadable_changes(path: Path) -> UnsettledError:
    return UnsettledError(
        f"{path} has changes in {path.name}-wal that a writer left behind and that can be read only where files can be"
        f" written: make {path.parent} writable (with space on its disk) and open the store there once"
    )
