"""One SQLite file used from several threads; what goes wrong with it is a `StoreError` that says what to do."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragcache.errors import StoreError
from ragcache.states.connection import Connection, Stamp, UnsettledError, connect, unwritable

# How long to follow a writer with more rights whose changes come between; one that closes takes milliseconds.
_PATIENCE_S = 1.0
_PAUSE_S = 0.005
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
        self._pin: Connection | None = None
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
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self._named_faults():
                    return self._connection().rows(query, values)
            except UnsettledError:
                self._disconnect()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.

        Raises:
            StoreError: the file is damaged, cannot be written to, or is no longer the one that was opened.
        """
        with self._named_faults():
            connection = self._connection(write=True).sqlite
            # An interrupt can come at any place, also between two lines.
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some faults, such as a full disk.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def damaged(self, reason: object) -> StoreError:
        """The error for content that cannot be what was written."""
        store = self.path.parent
        return StoreError(f"{self.path} is damaged ({reason}); make it anew with: ragcache rebuild --store {store}")

    def close(self) -> None:
        """Close what this thread has open, so that SQLite tidies up; a later use opens it again."""
        self._disconnect()
        with self._lock:
            if self._pin is not None:
                self._pin.sqlite.close()
                self._pin = None

    def _connection(self, *, write: bool = False) -> Connection:
        """This thread's connection; one that can only read is made anew for writing."""
        with self._lock:
            if self._pin is None:
                # While a connection is open its inode is not given to another file. SQLite takes care that closing
                # one connection does not drop the locks of another, which a plain file handle would do.
                self._file_id = self._present_file_id()
                self._pin = connect(self.path, write=write, check_same_thread=False)
        self._require_same_file()
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None or (write and not connection.writable):
            self._disconnect()
            connection = self._local.connection = connect(self.path, write=write)
            self._require_same_file()
        return connection

    def _disconnect(self) -> None:
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            self._local.connection = None
            connection.sqlite.close()

    def _require_same_file(self) -> None:
        if self._present_file_id() != self._file_id:
            raise StoreError(f"{self.path.parent} was deleted or replaced since it was opened; open it again")

    def _present_file_id(self) -> tuple[int, int] | None:
        stamp = Stamp.of(self.path)
        return stamp and stamp.file_id

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except UnicodeDecodeError as error:
            # SQLite's own message quotes what it found in the file.
            raise self.damaged(error) from error
        except sqlite3.DatabaseError as error:
            # Without a name it comes from the Python side: text that is no UTF-8.
            name = getattr(error, "sqlite_errorname", _DAMAGED[0])
            if name.startswith(_DAMAGED):
                raise self.damaged(error) from error
            if name.startswith("SQLITE_READONLY"):
                raise unwritable(self.path) from error
            raise StoreError(f"{self.path} cannot be used: {error}; see to its folder and to the disk") from error
