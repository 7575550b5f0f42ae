"""How often the states of each chunk were wanted, in one SQLite file beside the catalog.

Every process that answers queries writes here, so the file is apart from the catalog: its writer never waits for them.
Losing the file costs nothing but a worse choice of what goes when the store is full (`ragcache.states.eviction`), so no
fault of it is an error: there is a warning, and answers go on.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict, TypeVar

from ragcache.states.canary_report import CanaryReport
from ragcache.states.miss import MissReason

USAGE = "usage.sqlite"

FLUSH_USES = 64
FLUSH_SECONDS = 5.0
# After a failure; a file that is locked would otherwise hold up query after query.
RETRY_SECONDS = 60.0
BUSY_SECONDS = 1.0
MAX_PENDING_KEYS = 100_000

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS uses (key TEXT PRIMARY KEY, frequency INTEGER NOT NULL, clock REAL NOT NULL)"
    " WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS misses (reason TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS totals (id INTEGER PRIMARY KEY CHECK (id = 0), hits INTEGER NOT NULL,"
    " clock REAL NOT NULL)",
    "INSERT OR IGNORE INTO totals VALUES (0, 0, 0.0)",
)
# Files of earlier versions lack these.
_SCHEMA_OF_CANARY = (
    "CREATE TABLE IF NOT EXISTS canary (id INTEGER PRIMARY KEY CHECK (id = 0), checked INTEGER NOT NULL,"
    " skipped INTEGER NOT NULL, failed INTEGER NOT NULL, tokens INTEGER NOT NULL, agreeing_tokens INTEGER NOT NULL,"
    " kl_sum REAL NOT NULL, worst_kl REAL NOT NULL)",
    "INSERT OR IGNORE INTO canary VALUES (0, 0, 0, 0, 0, 0, 0.0, 0.0)",
)
_ADD_USE = """
INSERT INTO uses SELECT ?, ?, clock FROM totals WHERE true
ON CONFLICT (key) DO UPDATE SET frequency = frequency + excluded.frequency, clock = excluded.clock
"""
_ADD_MISSES = "INSERT INTO misses VALUES (?, ?) ON CONFLICT (reason) DO UPDATE SET count = count + excluded.count"
_ADD_FINDINGS = """
UPDATE canary SET checked = checked + :checked, skipped = skipped + :skipped, failed = failed + :failed,
tokens = tokens + :tokens, agreeing_tokens = agreeing_tokens + :agreeing_tokens, kl_sum = kl_sum + :kl_sum,
worst_kl = max(worst_kl, :worst_kl)
"""
# The last: Python could not make a message of SQLite's that quotes what is in a damaged file.
_FAULTS = (sqlite3.Error, OSError, UnicodeDecodeError)
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")
_NOT_WRITABLE = ("SQLITE_CANTOPEN", "SQLITE_READONLY")
_WRITE = "mode=rwc"
_READ = "mode=rw"
# WAL mode needs files of its own beside this one. In a folder where they cannot be made nobody writes.
_READ_FILE_ALONE = "mode=ro&immutable=1"
_BATCH = 500

_logger = logging.getLogger(__name__)
_warned: set[Path] = set()
_T = TypeVar("_T")


@dataclass(frozen=True)
class KeyUsage:
    """How the states of one key were used.

    Attributes:
        frequency: how often queries wanted them, whether they were there or not.
        clock: the ageing clock at the last use.
    """

    frequency: int
    clock: float


NEVER_USED = KeyUsage(0, 0.0)


class Counts(TypedDict):
    """What became of all chunks that queries wanted states of."""

    hits: int
    misses: dict[str, int]


@dataclass
class _Pending:
    """What is not in the file yet."""

    keys: Counter[str] = field(default_factory=Counter)
    uses: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    clock: float = 0.0
    canary: CanaryReport = field(default_factory=CanaryReport)

    def __bool__(self) -> bool:
        return bool(self.uses or self.hits or self.misses or self.clock or self.canary != CanaryReport())

    def add_uses(self, keys: Counter[str]) -> None:
        if len(self.keys) + len(keys) > MAX_PENDING_KEYS:
            room = MAX_PENDING_KEYS - len(self.keys)
            new = [key for key in keys if key not in self.keys]
            keys = keys.copy()
            for key in new[room:]:
                del keys[key]
        self.keys.update(keys)
        self.uses += keys.total()

    def add(self, later: _Pending) -> None:
        self.add_uses(later.keys)
        self.hits += later.hits
        self.misses.update(later.misses)
        self.clock = max(self.clock, later.clock)
        self.canary = self.canary.plus(later.canary)

    def write(self, connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE totals SET hits = hits + ?, clock = max(clock, ?)", (self.hits, self.clock))
        connection.executemany(_ADD_USE, self.keys.items())
        connection.executemany(_ADD_MISSES, self.misses.items())
        connection.execute(_ADD_FINDINGS, asdict(self.canary))


class Usage:
    """Uses of states, hits and misses; several processes and threads add to the same file.

    A connection lives for one flush or one read only, so nothing is held open across a fork. Whoever owns this calls
    `flush` at the end, or the last uses are not counted.
    """

    def __init__(self, path: Path) -> None:
        # Absolute, so that it stays the same file when the process changes its folder.
        self.path = path.absolute()
        self._start()

    def record(self, keys: Iterable[str], hits: int, misses: Iterable[MissReason]) -> None:
        """Count one query; now and then this writes to the file.

        Args:
            keys: of all states it wanted, restored or not.
            hits: how many chunks were restored.
            misses: why each of the others was not.
        """
        self._follow_fork()
        uses, reasons = Counter(keys), Counter(reason.value for reason in misses)
        with self._lock:
            self._pending.add_uses(uses)
            self._pending.hits += hits
            self._pending.misses.update(reasons)
            now = time.monotonic()
            enough = self._pending.uses >= FLUSH_USES or now >= self._flushed + FLUSH_SECONDS
            due = enough and now >= self._not_before
        # When another thread is at the file, what is here goes with a later flush.
        if due and self._file_lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._file_lock.release()

    def record_canary(self, finding: CanaryReport) -> None:
        """Count what checks of answers found; it goes to the file with the next query or `flush`.

        Raises:
            ValueError: a sum is not finite, and would hide all that is found before and after.
        """
        if not math.isfinite(finding.kl_sum + finding.worst_kl):
            raise ValueError(f"sums cannot be {finding.kl_sum} and {finding.worst_kl}")
        self._follow_fork()
        with self._lock:
            self._pending.canary = self._pending.canary.plus(finding)

    def flush(self) -> None:
        """Add what is pending to the file. What cannot be written stays pending."""
        self._follow_fork()
        with self._file_lock:
            self._flush()

    def of(self, keys: Iterable[str]) -> dict[str, KeyUsage]:
        """Use of some states; keys that were never used are left out."""
        return self._load(list(keys))

    def all(self) -> dict[str, KeyUsage]:
        """Use of all states that ever were used and not forgotten."""
        return self._load(None)

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is known about keys that nothing refers to any longer."""
        self._follow_fork()
        gone = list(keys)
        with self._file_lock:
            with self._lock:
                for key in gone:
                    self._pending.uses -= self._pending.keys.pop(key, 0)
            if gone and _inode(self.path) is not None:
                rows = [(key,) for key in gone]
                self._write(lambda connection: connection.executemany("DELETE FROM uses WHERE key = ?", rows))

    def counts(self) -> Counts:
        """Hits, and misses by reason, of all processes together."""
        self._follow_fork()
        with self._file_lock:
            hits, misses = self._read(_select_counts) or (0, Counter[str]())
            with self._lock:
                misses.update(self._pending.misses)
                return {"hits": hits + self._pending.hits, "misses": dict(misses)}

    def canary(self) -> CanaryReport:
        """What checks of answers found, of all processes together."""
        self._follow_fork()
        with self._file_lock:
            stored = self._read(_select_canary) or CanaryReport()
            with self._lock:
                return stored.plus(self._pending.canary)

    @property
    def clock(self) -> float:
        """The ageing clock: the highest priority that was ever evicted."""
        self._follow_fork()
        with self._file_lock:
            stored = self._read(_select_clock) or 0.0
            with self._lock:
                return max(stored, self._pending.clock)

    def advance_clock(self, value: float) -> None:
        """Set the ageing clock forward; it never goes back.

        Raises:
            ValueError: the value is not finite, and everything used from then on would have the same priority.
        """
        if not math.isfinite(value):
            raise ValueError(f"the clock cannot be {value}")
        self._follow_fork()
        with self._lock:
            self._pending.clock = max(self._pending.clock, value)
        self.flush()

    def _start(self) -> None:
        # Where both are taken the lock of the file comes first: it is held while waiting for the disk, the other never.
        self._file_lock = threading.Lock()
        self._lock = threading.Lock()
        self._pending = _Pending()
        self._flushed = time.monotonic()
        self._not_before = self._flushed
        self._process = os.getpid()

    def _follow_fork(self) -> None:
        # What was pending is the parent's to write, and its locks may have been held by threads that are not here.
        if self._process != os.getpid():
            self._start()

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, _Pending()
        written = not pending
        try:
            written = written or self._write(pending.write)
        finally:
            with self._lock:
                self._flushed = time.monotonic()
                if not written:
                    self._not_before = self._flushed + RETRY_SECONDS
                    pending.add(self._pending)
                    self._pending = pending

    def _load(self, keys: Sequence[str] | None) -> dict[str, KeyUsage]:
        self._follow_fork()
        with self._file_lock:
            stored = self._read(lambda connection: (_select_uses(connection, keys), _select_clock(connection)))
            found, clock = stored or ({}, 0.0)
            with self._lock:
                clock = max(clock, self._pending.clock)
                pending = self._pending.keys
                for key in pending if keys is None else pending.keys() & set(keys):
                    frequency = found.get(key, NEVER_USED).frequency + pending[key]
                    found[key] = KeyUsage(frequency, clock)
        return found

    def _write(self, work: Callable[[sqlite3.Connection], object], *, again: bool = True) -> bool:
        """Do something in one transaction; whether it was done. Makes the file, never its folder."""
        try:
            with self._open(_WRITE) as connection:
                _transact(connection, work)
        except _FAULTS as error:
            if again and _is_damage(error):  # It has made way for a new one.
                return self._write(work, again=False)
            self._warn(error)
            return False
        return True

    def _read(self, work: Callable[[sqlite3.Connection], _T], options: str = _READ) -> _T | None:
        if _inode(self.path) is None:
            return None
        try:
            with self._open(options) as connection:
                return work(connection) if _has_tables(connection) else None
        except _FAULTS as error:
            if options == _READ and _error_name(error).startswith(_NOT_WRITABLE):
                return self._read(work, _READ_FILE_ALONE)
            if options != _READ or not _is_damage(error):
                self._warn(error)
            return None

    @contextmanager
    def _open(self, options: str) -> Iterator[sqlite3.Connection]:
        inode = _inode(self.path)
        uri = f"{self.path.as_uri()}?{options}"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
            try:
                yield connection
            except _FAULTS as error:
                # What is read without locks may look damaged while another process writes it.
                if options != _READ_FILE_ALONE and _is_damage(error):
                    self._discard(inode, error)
                raise

    def _discard(self, inode: tuple[int, int] | None, reason: Exception) -> None:
        # To be called while the file is open, so that its inode is not given to another: if the path has another one
        # by now, some other process has been here already.
        if inode is None or _inode(self.path) != inode:
            return
        for suffix in ("-wal", "-shm", ""):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        _logger.warning("%s is damaged (%s); counts of how often states are used start anew", self.path, reason)

    def _warn(self, error: Exception) -> None:
        if self.path not in _warned:
            _warned.add(self.path)
            _logger.warning(
                "counts of how often states are used cannot be kept in %s: %s; what goes when the store is full is"
                " chosen without them",
                self.path,
                error,
            )


def _transact(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], object]) -> None:
    new = not _has_tables(connection)  # First: what comes next must not be what waits for a lock.
    # No fsync during a query. A process that is killed damages nothing, only a loss of power can.
    connection.execute("PRAGMA synchronous = OFF")
    # Refused when other processes are opening the same new file; a later transaction gets it.
    with suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in (*(_SCHEMA if new else ()), *_SCHEMA_OF_CANARY):
        connection.execute(statement)
    work(connection)
    connection.execute("COMMIT")


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])


def _select_uses(connection: sqlite3.Connection, keys: Sequence[str] | None) -> dict[str, KeyUsage]:
    query = "SELECT key, frequency, clock FROM uses"
    if keys is None:
        rows = connection.execute(query).fetchall()
    else:
        rows = []
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            marks = ",".join("?" * len(batch))
            rows += connection.execute(f"{query} WHERE key IN ({marks})", batch).fetchall()
    return {key: KeyUsage(_count(frequency), _finite(clock)) for key, frequency, clock in rows}


def _select_counts(connection: sqlite3.Connection) -> tuple[int, Counter[str]]:
    misses = connection.execute("SELECT reason, count FROM misses").fetchall()
    return _count(_total(connection, "hits")), Counter({reason: _count(count) for reason, count in misses})


def _select_canary(connection: sqlite3.Connection) -> CanaryReport:
    # A file of an earlier version gets the table when it is next written to.
    if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'canary'").fetchone()[0]:
        return CanaryReport()
    row = connection.execute("SELECT checked, skipped, failed, tokens, agreeing_tokens FROM canary").fetchone()
    sums = connection.execute("SELECT kl_sum, worst_kl FROM canary").fetchone()
    return CanaryReport(*map(_count, row), *map(_finite, sums)) if row and sums else CanaryReport()


def _select_clock(connection: sqlite3.Connection) -> float:
    return _finite(_total(connection, "clock"))


def _total(connection: sqlite3.Connection, column: str) -> object:
    row = connection.execute(f"SELECT {column} FROM totals").fetchone()  # noqa: S608
    return row[0] if row else None


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise sqlite3.DatabaseError(f"a count of {value!r}")
    return value


def _finite(value: object) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise sqlite3.DatabaseError(f"a clock or a sum of {value!r}")
    return value


def _is_damage(error: Exception) -> bool:
    return _error_name(error).startswith(_DAMAGED)


def _error_name(error: Exception) -> str:
    if isinstance(error, OSError):
        return ""
    # Without a name it is from the Python side: text that is no UTF-8, or a value that makes no sense.
    return getattr(error, "sqlite_errorname", _DAMAGED[0])


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
