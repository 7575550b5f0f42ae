"""One SQLite file used from several threads; what goes wrong with it is a `StoreError` that says what to do."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragcache.errors import StoreError

_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")


class Database:
    """Connections to one file, one for each thread.

    Once opened it stays with that very file: should the folder be deleted and made anew meanwhile, some threads would
    go on with the old file and others with the new one, so from then on every use is refused.
    """

    def __init__(self, path: Path) -> None:
        # Absolute, so that it stays the same file when the process changes its folder.
        self.path = path.absolute()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._pin: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None

    def create(self) -> None:
        """Make the file, in WAL mode."""
        with self._named_faults():
            connection = sqlite3.connect(self.path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.close()

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows that a query gives.

        Raises:
            StoreError: the file is damaged, cannot be read, or is no longer the one that was opened.
        """
        with self._named_faults():
            return self._connection().execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.

        Raises:
            StoreError: the file is damaged, cannot be written to, or is no longer the one that was opened.
        """
        with self._named_faults():
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some faults, such as a full disk.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def damaged(self, reason: object) -> StoreError:
        """The error for content that cannot be what was written."""
        return StoreError(f"{self.path} is damaged ({reason}); delete the store and index again")

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        with self._lock:
            if self._pin is None:
                # While a connection is open its inode is not given to another file. SQLite takes care that closing
                # one connection does not drop the locks of another, which a plain file handle would do.
                self._pin = self._connect(check_same_thread=False)
                self._file_id = _file_id(self.path)
        if _file_id(self.path) != self._file_id:
            raise StoreError(f"{self.path.parent} was deleted or replaced since it was opened; open it again")
        return connection

    def _connect(self, *, check_same_thread: bool = True) -> sqlite3.Connection:
        # Mode rw: a file that is gone is an error, not a new and empty one.
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode=rw",
            uri=True,
            timeout=30,
            isolation_level=None,
            check_same_thread=check_same_thread,
        )
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            # Without a name it comes from the Python side: text that is no UTF-8.
            if getattr(error, "sqlite_errorname", _DAMAGED[0]).startswith(_DAMAGED):
                raise self.damaged(error) from error
            raise StoreError(f"{self.path} cannot be used: {error}; see to its folder and to the disk") from error


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be used: {error.strerror}; see to its permissions") from error
    return stat.st_dev, stat.st_ino
