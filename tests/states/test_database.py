"""Reading a database that cannot be written, beside writers that can: real files, real processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from ragcache.errors import StoreError
from ragcache.states import connection as connection_module
from ragcache.states.database import Database
from tests.unprivileged import ordinary_user, reachable_folder, read_only

Found = TypeVar("Found")

ROWS = 200
# All rows carry the version they were written in, over several pages: half a change shows as two versions.
SCHEMA = "CREATE TABLE numbers (id INTEGER PRIMARY KEY, version INTEGER NOT NULL, filling BLOB NOT NULL)"
VERSIONS = "SELECT count(*), min(version), max(version) FROM numbers"

WRITER = """
import os, random, sqlite3, sys, time
path, how, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])

def connect():
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    if how == "alone":
        # Without a -shm file, if it comes first: others can read only while -wal is empty.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA synchronous = OFF")
    return connection

def write(connection, version):
    connection.execute("UPDATE numbers SET version = ?, filling = randomblob(400)", (version,))

version = 0
connection = connect()
end = time.monotonic() + seconds
while time.monotonic() < end:
    version += 1
    write(connection, version)
    if how in ("truncate", "alone"):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if how == "alone":
        time.sleep(random.choice((0, 0, 0.03, 0.06)))
    if how == "reopen":
        connection.close()
        connection = connect()
if how == "killed":
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    write(connection, 1)
    os._exit(0)
if how == "steps":
    for line in sys.stdin:
        version += 1
        write(connection, version)
        print(version, flush=True)
connection.close()
if how != "steps":
    print(version, flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with reachable_folder() as path:
        yield path


@pytest.fixture
def path(folder: Path) -> Path:
    """A file with version 0 in all rows, closed in good order."""
    path = folder / "store" / "numbers.sqlite"
    path.parent.mkdir()
    database = Database(path)
    database.create()
    with database.transaction() as connection:
        connection.execute(SCHEMA)
        connection.executemany("INSERT INTO numbers VALUES (?, 0, randomblob(400))", [(i,) for i in range(ROWS)])
    close(database)
    assert names(path) == ["numbers.sqlite"]
    return path


@contextmanager
def writer(path: Path, how: str, seconds: float = 0) -> Iterator[subprocess.Popen[str]]:
    """A process with the rights of whoever runs the tests."""
    command = [sys.executable, "-c", WRITER, str(path), how, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def step(process: subprocess.Popen[str]) -> int:
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def kill_a_writer(path: Path) -> None:
    """Leave behind a change that is in `-wal` alone."""
    with writer(path, "killed") as process:
        assert process.wait() == 0
    assert names(path) == ["numbers.sqlite", "numbers.sqlite-shm", "numbers.sqlite-wal"]


def version(database: Database) -> int:
    """The one version that all rows are of."""
    [(count, first, last)] = database.rows(VERSIONS)
    assert count == ROWS
    assert first == last
    return int(first)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def wal(path: Path, suffix: str = "wal") -> Path:
    return path.with_name(f"{path.name}-{suffix}")


def is_immutable(database: Database) -> bool:
    return database._local.connection.stamp is not None


def close(database: Database) -> None:
    """Nothing of this process is open any more; Python itself would close at some time of its own choosing."""
    database._disconnect()
    if database._pin:
        database._pin.sqlite.close()


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    database = Database(path)
    try:
        yield database
    finally:
        close(database)


def set_version(database: Database, new: int) -> None:
    with database.transaction() as connection:
        connection.execute("UPDATE numbers SET version = ?", (new,))


def in_threads(what: Callable[[], Found]) -> list[Found]:
    found: list[Found] = []

    def run() -> None:
        found.append(what())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def fault(database: Database) -> str:
    try:
        return str(version(database))
    except StoreError as error:
        return str(error)


@contextmanager
def no_space() -> Iterator[None]:
    """No file can grow, as on a full disk: SQLite gets an error for each byte beyond the limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users")


class TestNobodyWrites:
    def test_reads_and_leaves_nothing_behind(self, path: Path) -> None:
        database = Database(path)
        with read_only(path.parent):
            assert version(database) == 0
            assert is_immutable(database)
            assert names(path) == ["numbers.sqlite"]

    def test_a_transaction_says_why_not(self, path: Path) -> None:
        database = Database(path)
        with read_only(path.parent):
            for _ in range(2):
                with pytest.raises(StoreError, match="cannot be written to"), database.transaction():
                    pass
                assert version(database) == 0

    def test_once_it_can_be_written_it_is(self, path: Path) -> None:
        database = Database(path)
        with read_only(path.parent):
            assert version(database) == 0
        set_version(database, 5)
        assert version(database) == 5
        assert not is_immutable(database)

    def test_a_file_that_may_only_be_read_in_a_folder_that_may_be_written(self, path: Path) -> None:
        path.parent.chmod(0o777)
        path.chmod(0o444)
        database = Database(path)
        with ordinary_user():
            assert version(database) == 0
            with pytest.raises(StoreError, match="cannot be written to"):
                set_version(database, 1)
        assert names(path) == ["numbers.sqlite"]

    @pytest.mark.parametrize("shm", [None, 0, 3])
    def test_an_empty_wal(self, path: Path, shm: int | None) -> None:
        wal(path).touch()
        if shm is not None:
            wal(path, "shm").write_bytes(b"\0" * shm)
        with read_only(path.parent):
            assert version(Database(path)) == 0

    def test_a_file_of_this_very_moment_is_left_to_settle(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another change within the same tick of the clock would not show."""
        monkeypatch.setattr(connection_module, "_TICK_NS", 3600 * 10**9)
        with read_only(path.parent), pytest.raises(connection_module.UnsettledError):
            connection_module.connect(path)

    def test_every_thread(self, path: Path) -> None:
        database = Database(path)
        with read_only(path.parent):
            assert in_threads(lambda: version(database)) == [0] * 8

    def test_a_file_that_may_not_be_read(self, path: Path) -> None:
        path.chmod(0o000)
        wal(path).write_bytes(b"something")
        started = time.monotonic()
        with read_only(path.parent), pytest.raises(StoreError, match="cannot be read by this user"):
            version(Database(path))
        assert time.monotonic() - started < 0.9

    def test_a_folder_that_may_not_be_looked_into(self, path: Path) -> None:
        path.parent.chmod(0o600)
        try:
            with ordinary_user(), pytest.raises(StoreError, match="see to its permissions"):
                version(Database(path))
        finally:
            path.parent.chmod(0o755)

    def test_nothing_there(self, path: Path) -> None:
        path.unlink()
        with read_only(path.parent), pytest.raises(StoreError, match="is gone"):
            version(Database(path))
        with pytest.raises(StoreError, match="is gone"):
            version(Database(path))
        assert names(path) == []


class TestDamage:
    @pytest.mark.parametrize("offset", [0, 40, 4096, 8192])
    def test_is_named_at_once(self, path: Path, offset: int) -> None:
        content = bytearray(path.read_bytes())
        content[offset : offset + 4096] = b"\xa5" * 4096
        path.write_bytes(content)
        time.sleep(0.05)
        started = time.monotonic()
        with read_only(path.parent), pytest.raises(StoreError, match="is damaged"):
            Database(path).rows("SELECT * FROM numbers")
        assert time.monotonic() - started < 0.5
        with pytest.raises(StoreError, match="is damaged"):
            Database(path).rows("SELECT * FROM numbers")

    def test_in_the_middle_of_a_change_is_none(self, path: Path) -> None:
        """What was read is thrown away with a file that looks otherwise afterwards, whatever it seemed to be."""
        whole = path.read_bytes()
        database = Database(path)
        with read_only(path.parent):
            assert version(database) == 0
        connection = database._local.connection
        path.write_bytes(b"\xa5" * len(whole))
        connection.sqlite.execute("PRAGMA cache_size = 0")
        with read_only(path.parent), pytest.raises(connection_module.UnsettledError):
            connection.rows("SELECT * FROM numbers", ())
        path.write_bytes(whole)
        with read_only(path.parent):
            assert version(database) == 0


class TestReplaced:
    @pytest.mark.parametrize("again", [True, False])
    def test_is_refused_in_every_thread(self, path: Path, again: bool) -> None:
        database = Database(path)
        with read_only(path.parent):
            assert version(database) == 0
        copy = path.parent.with_name("copy")
        shutil.copytree(path.parent, copy)
        shutil.rmtree(path.parent)
        if again:
            copy.rename(path.parent)
        with ordinary_user():
            for result in [*in_threads(lambda: fault(database)), fault(database)]:
                assert "was deleted or replaced" in result

    def test_the_inode_is_kept(self, path: Path) -> None:
        """Otherwise the next file could get the number of the one that was opened."""
        database = Database(path)
        with read_only(path.parent):
            assert version(database) == 0
        inode = path.stat().st_ino
        for _ in range(20):
            path.unlink()
            path.touch()
            assert path.stat().st_ino != inode


class TestAWriterWasKilled:
    def test_its_changes_are_read_through_what_it_left(self, path: Path) -> None:
        kill_a_writer(path)
        with read_only(path.parent):
            assert version(Database(path)) == 1

    @pytest.mark.parametrize("content", [b"", b"\0" * 3, b"\xa5" * 32768])
    def test_a_shm_of_no_use_does_no_harm(self, path: Path, content: bytes) -> None:
        kill_a_writer(path)
        wal(path, "shm").write_bytes(content)
        with read_only(path.parent):
            assert version(Database(path)) == 1

    @pytest.mark.parametrize("shm", ["gone", "unreadable"])
    def test_without_shm_nothing_old_is_shown(self, path: Path, shm: str) -> None:
        kill_a_writer(path)
        if shm == "gone":
            wal(path, "shm").unlink()
        else:
            wal(path, "shm").chmod(0o000)
        database = Database(path)
        with read_only(path.parent), pytest.raises(StoreError, match="and open the store there once"):
            version(database)
        wal(path, "shm").unlink(missing_ok=True)
        with opened(path) as other:
            assert version(other) == 1  # what the message says to do
        with read_only(path.parent):
            assert version(database) == 1

    @needs_root
    def test_the_next_writer_is_followed(self, path: Path) -> None:
        kill_a_writer(path)
        database = Database(path)
        with ordinary_user():
            assert version(database) == 1
        with writer(path, "steps") as process, ordinary_user():
            for _ in range(20):
                assert step(process) == version(database)


@needs_root
class TestAnotherUserWrites:
    def test_every_commit_is_followed(self, path: Path) -> None:
        database = Database(path)
        with ordinary_user():
            assert version(database) == 0
            assert is_immutable(database)
        with writer(path, "steps") as process, ordinary_user():
            for _ in range(50):
                assert step(process) == version(database)
            assert not is_immutable(database)
            assert in_threads(lambda: version(database)) == [50] * 8
            with pytest.raises(StoreError, match="cannot be written to"):
                set_version(database, 1)
        with ordinary_user():
            assert version(database) == 50
            assert version(Database(path)) == 50

    def test_a_killed_one_too(self, path: Path) -> None:
        database = Database(path)
        with writer(path, "steps") as process:
            with ordinary_user():
                for _ in range(10):
                    assert step(process) == version(database)
            process.send_signal(signal.SIGKILL)
            process.wait()
        with ordinary_user():
            assert version(database) == 10
            assert version(Database(path)) == 10
        with writer(path, "steps") as process, ordinary_user():
            assert step(process) == version(database) == 1

    @pytest.mark.parametrize("how", ["log", "truncate", "reopen", "alone"])
    @pytest.mark.parametrize("fresh", [True, False])
    def test_no_change_is_ever_seen_by_half(self, path: Path, how: str, fresh: bool) -> None:
        """
        `log` checkpoints when SQLite thinks fit, `truncate` empties `-wal` each time, `reopen` removes it each time,
        and `alone` leaves only immutable reading. `fresh` opens the file anew for each query.
        """
        database = Database(path)
        seen = [0]
        immutable = 0
        with writer(path, how, seconds=1.5) as process:
            with ordinary_user():
                while process.poll() is None:
                    if fresh:
                        close(database)
                        database = Database(path)
                    seen.append(version(database))
                    immutable += is_immutable(database)
            assert process.stdout
            last = int(process.stdout.read())
        with ordinary_user():
            assert version(database) == last
        assert seen == sorted(seen)
        assert len(set(seen)) > 5
        assert immutable or how != "alone"


class TestFullDisk:
    def test_reads_without_space_for_the_files_beside(self, path: Path) -> None:
        database = Database(path)
        with no_space():
            assert version(database) == 0
            assert is_immutable(database)
            with pytest.raises(StoreError, match="see to its folder and to the disk"):
                set_version(database, 1)
            assert version(database) == 0
        set_version(database, 2)
        assert version(database) == 2

    def test_what_a_killed_writer_left_is_not_passed_over(self, path: Path) -> None:
        kill_a_writer(path)
        wal(path, "shm").unlink()
        with no_space(), pytest.raises(StoreError, match="space on its disk"):
            version(Database(path))
        assert version(Database(path)) == 1


class TestWithAllRights:
    def test_is_never_immutable(self, path: Path) -> None:
        database = Database(path)
        assert version(database) == 0
        assert not is_immutable(database)
        set_version(database, 1)
        assert version(database) == 1

    @pytest.mark.parametrize("how", ["log", "truncate", "reopen"])
    def test_other_writers_are_followed(self, path: Path, how: str) -> None:
        database = Database(path)
        seen = [0]
        with writer(path, how, seconds=1) as process:
            while process.poll() is None:
                seen.append(version(database))
            assert process.stdout
            assert int(process.stdout.read()) == version(database)
        assert seen == sorted(seen)
