"""Nothing counted is lost, whoever counts; and nothing that befalls the file is more than a warning."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.states import usage as module
from ragcache.states.canary_report import CanaryReport
from ragcache.states.eviction import Candidate, choose
from ragcache.states.miss import MissReason
from ragcache.states.usage import NEVER_USED, KeyUsage, Usage

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / module.USAGE


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for locks."""
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def frequencies(usage: Usage) -> dict[str, int]:
    return {key: used.frequency for key, used in usage.all().items()}


def counted(path: Path, keys: list[str]) -> Usage:
    """With a file that is there."""
    usage = Usage(path)
    usage.record(keys, len(keys), [])
    usage.flush()
    return usage


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        yield


steps = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.lists(st.sampled_from("abcde"), max_size=6)),
        st.tuples(st.just("forget"), st.lists(st.sampled_from("abcde"), max_size=2)),
        st.tuples(st.just("advance"), st.integers(0, 9).map(float)),
        st.tuples(st.sampled_from(["flush", "restart", "other"]), st.none()),
    ),
    max_size=15,
)


@settings(deadline=None, max_examples=40)
@given(steps)
def test_like_a_dict(actions: list[tuple[str, list[str] | float | None]]) -> None:
    """Through flushes and restarts, and for a second process's eyes once flushed."""
    used: dict[str, KeyUsage] = {}
    pending: set[str] = set()
    clock, hits, misses = 0.0, 0, 0
    with TemporaryDirectory() as folder:
        usage = Usage(Path(folder) / module.USAGE)
        for action, value in actions:
            if action == "record" and isinstance(value, list):
                usage.record(value, len(value), [MissReason.MISSING])
                for key in value:
                    used[key] = KeyUsage(used.get(key, NEVER_USED).frequency + 1, clock)
                pending.update(value)
                hits, misses = hits + len(value), misses + 1
            elif action == "forget" and isinstance(value, list):
                usage.forget(value)
                for key in value:
                    used.pop(key, None)
                pending.difference_update(value)
            elif action == "advance" and isinstance(value, float):
                # What is pending when the clock moves was used before; it is written after. Either would do.
                usage.advance_clock(value)
                clock = max(clock, value)
                used.update({key: KeyUsage(used[key].frequency, clock) for key in pending})
                pending.clear()
            else:
                usage.flush()
                pending.clear()
                usage = Usage(usage.path) if action == "restart" else usage
            for reader in [usage, Usage(usage.path)] if action == "other" else [usage]:
                assert reader.all() == used
                assert reader.of(["a", "e", "unknown"]) == {k: used[k] for k in ("a", "e") if k in used}
                assert reader.clock == clock
                assert reader.counts() == {"hits": hits, "misses": {"missing": misses} if misses else {}}


def test_a_restart_keeps_everything(path: Path) -> None:
    usage = Usage(path)
    usage.record(["a", "b", "a"], 2, [MissReason.CHECKSUM])
    assert not path.exists()
    usage.advance_clock(2.5)
    usage.record(["b"], 0, [MissReason.CHECKSUM, MissReason.MISSING])
    assert usage.all() == {"a": KeyUsage(2, 2.5), "b": KeyUsage(2, 2.5)}
    usage.flush()

    usage = Usage(path)
    usage.advance_clock(7.0)
    usage.advance_clock(3.0)
    usage.record(["a"], 1, [])
    usage.flush()
    usage = Usage(path)
    assert usage.all() == {"a": KeyUsage(3, 7.0), "b": KeyUsage(2, 2.5)}
    assert usage.counts() == {"hits": 3, "misses": {"checksum": 2, "missing": 1}}
    assert usage.clock == 7.0
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing is held open


def test_nothing_yet(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = Usage(path)
    usage.flush()
    usage.forget(["a"])
    assert usage.all() == usage.of(["a"]) == {}
    assert usage.counts() == {"hits": 0, "misses": {}}
    assert usage.clock == 0.0
    # What a process leaves that was killed between opening the file and making the tables.
    path.touch()
    assert usage.all() == {}
    assert counted(path, ["a"]).of(["a"]) == {"a": KeyUsage(1, 0.0)}
    assert not warnings(caplog)


def test_the_clock_must_be_finite(path: Path) -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="the clock cannot be"):
            Usage(path).advance_clock(value)


def test_enough_uses_are_written(path: Path) -> None:
    usage = Usage(path)
    for _ in range(module.FLUSH_USES - 1):
        usage.record(["a"], 1, [])
    assert not path.exists()
    usage.record(["a"], 1, [])
    assert frequencies(Usage(path)) == {"a": module.FLUSH_USES}


def test_time_makes_it_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(path)
    usage.record(["a"], 1, [])
    assert not path.exists()
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.0)
    usage.record([], 0, [MissReason.MISSING])
    assert Usage(path).counts() == {"hits": 1, "misses": {"missing": 1}}


def test_many_keys(path: Path) -> None:
    keys = [f"key {number}" for number in range(1700)]
    usage = counted(path, keys)
    assert len(usage.of(keys)) == len(usage.all()) == 1700
    usage.forget(keys[:1699])
    assert usage.all() == {keys[-1]: KeyUsage(1, 0.0)}


WRITER = """
import logging, sys
from pathlib import Path
from ragcache.states.miss import MissReason
from ragcache.states.usage import Usage
logging.basicConfig(stream=sys.stdout)
print("ready", flush=True)
sys.stdin.readline()
usage = Usage(Path(sys.argv[1]))
for number in range(200):
    usage.record(["a", sys.argv[2], f"{number % 7}"], 2, [MissReason.MISSING])
    usage.flush()
    usage.clock
"""


def test_several_processes_add_up(path: Path) -> None:
    """They begin together, so all of them make the file; and each flush opens and closes it."""
    command = [sys.executable, "-c", WRITER, str(path)]
    processes = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for name in ("x", "y", "z")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in processes] == ["", "", ""]  # no warning
    expected = {"a": 600, "x": 200, "y": 200, "z": 200}
    expected |= {key: 3 * n for key, n in Counter(f"{number % 7}" for number in range(200)).items()}
    assert frequencies(Usage(path)) == expected
    assert Usage(path).counts() == {"hits": 1200, "misses": {"missing": 600}}


def test_several_threads_add_up(path: Path) -> None:
    usage = Usage(path)
    seen: list[int] = []

    def work() -> None:
        for _ in range(300):
            usage.record(["a", "b"], 1, [MissReason.MISSING])

    def look() -> None:
        while any(thread.is_alive() for thread in workers):
            seen.append(usage.counts()["hits"])
            usage.advance_clock(len(seen))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for thread in workers:
        thread.start()
    look()
    for thread in workers:
        thread.join()
    assert seen == sorted(seen)  # what is being written is missing at no time
    usage.flush()
    for reader in (usage, Usage(path)):
        assert frequencies(reader) == {"a": 1200, "b": 1200}
        assert reader.counts() == {"hits": 1200, "misses": {"missing": 1200}}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_counts_its_own(path: Path) -> None:
    usage = Usage(path)
    usage.record(["parent"], 1, [])
    with usage._lock, usage._file_lock:  # as if other threads held them
        child = os.fork()
        if child == 0:
            usage.record(["child"], 1, [])
            usage.flush()
            os._exit(0)
        deadline = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            time.sleep(0.01)
    usage.flush()
    assert frequencies(Usage(path)) == {"parent": 1, "child": 1}


def flip_counts(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE totals SET clock = 9e999, hits = 'many'")


def other_tables(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (text)")


def overwrite_pages(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))


DAMAGE = {
    "no database": lambda path: path.write_bytes(b"no database at all" * 500),
    "malformed": overwrite_pages,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "other tables": other_tables,
    "odd values": flip_counts,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("first", ["write", "read"])
def test_a_damaged_file_makes_way(path: Path, caplog: pytest.LogCaptureFixture, damage: str, first: str) -> None:
    counted(path, ["a"] * 50)
    DAMAGE[damage](path)
    usage = Usage(path)
    usage.record(["b"], 1, [MissReason.CHECKSUM])
    if first == "write" and damage != "odd values":  # nobody looks at the values when adding to them
        usage.flush()
    else:
        assert usage.counts()["misses"] == {"checksum": 1}
        assert usage.clock == 0.0
    usage.flush()
    assert Usage(path).all() == {"b": KeyUsage(1, 0.0)}
    assert Usage(path).counts() == {"hits": 1, "misses": {"checksum": 1}}
    assert len(warnings(caplog)) == 1
    assert "start anew" in warnings(caplog)[0]
    assert str(path) in warnings(caplog)[0]


def test_any_flipped_bytes_never_raise(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    counted(path, [f"key {number}" for number in range(300)])
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:place] + bytes(byte ^ 0xFF for byte in whole[place : place + 8]) + whole[place + 8 :])
        usage = Usage(path)
        usage.record(["new"], 1, [MissReason.MISSING])
        usage.all(), usage.counts(), usage.clock
        usage.forget(["key 7"])
        usage.flush()
        usage.all(), usage.counts(), usage.clock
        for file in path.parent.iterdir():
            file.unlink()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        usage = Usage(tmp_path / "file" / module.USAGE)
        usage.record(["a"] * 200, 1, [])
        usage.flush()
        usage.advance_clock(3.0)
        usage.forget(["b"])
        assert usage.all() == {"a": KeyUsage(200, 3.0)}
        assert usage.counts() == {"hits": 1, "misses": {}}
        assert usage.clock == 3.0
    assert len(warnings(caplog)) == 1  # one for each store, however often it is opened
    assert "cannot be kept" in warnings(caplog)[0]
    assert "unable to open" in warnings(caplog)[0]


def test_a_folder_that_cannot_be_written_to_is_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = counted(path, ["a"])
    # Where SQLite would make a file for WAL mode.
    path.with_name(f"{path.name}-shm").mkdir()
    assert usage.all() == {"a": KeyUsage(1, 0.0)}
    assert usage.counts()["hits"] == 1
    assert not warnings(caplog)
    usage.record(["a", "b"], 1, [])
    usage.flush()
    assert frequencies(usage) == {"a": 2, "b": 1}
    assert len(warnings(caplog)) == 1
    path.with_name(f"{path.name}-shm").rmdir()
    usage.flush()
    assert frequencies(Usage(path)) == {"a": 2, "b": 1}


def test_a_folder_that_vanished_stays_away(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = counted(path, ["a"])
    shutil.rmtree(path.parent)
    usage.record(["b"], 1, [])
    usage.flush()
    usage.advance_clock(1.0)
    usage.forget(["a"])
    assert frequencies(usage) == {"b": 1}
    assert not path.parent.exists()
    assert len(warnings(caplog)) == 1
    # Made anew: what is pending goes there.
    path.parent.mkdir()
    usage.flush()
    assert Usage(path).all() == {"b": KeyUsage(1, 1.0)}


@pytest.mark.usefixtures("impatient")
def test_a_locked_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usage = counted(path, ["a"])
    with locked(path):
        usage.record(["a", "b"], 1, [])
        usage.flush()
        usage.flush()
        assert frequencies(usage) == {"a": 1, "b": 1}  # only what it knows itself
        usage.forget(["a"])
        usage.advance_clock(4.0)
    assert len(warnings(caplog)) == 1
    assert "locked" in warnings(caplog)[0]
    usage.flush()
    assert Usage(path).all() == {"a": KeyUsage(1, 0.0), "b": KeyUsage(1, 4.0)}


@pytest.mark.usefixtures("impatient")
def test_a_locked_file_does_not_hold_up_query_after_query(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = counted(path, ["a"])
    tried: list[float] = []
    monkeypatch.setattr(usage, "_warn", lambda error: tried.append(0))
    with locked(path):
        for _ in range(module.FLUSH_USES * 5):
            usage.record(["a"], 1, [])
    assert len(tried) == 1
    monkeypatch.setattr(usage, "_not_before", 0.0)  # the time has passed
    usage.record(["a"], 1, [])
    assert frequencies(Usage(path)) == {"a": module.FLUSH_USES * 5 + 2}


def test_a_thread_that_waits_for_the_file_holds_up_no_other(path: Path) -> None:
    usage = counted(path, ["a"])
    with locked(path):
        waiting = threading.Thread(target=usage.flush)
        usage.record(["a"], 1, [])
        waiting.start()
        time.sleep(0.1)
        begin = time.perf_counter()
        for _ in range(module.FLUSH_USES * 2):
            usage.record(["b"], 1, [])
        assert time.perf_counter() - begin < module.BUSY_SECONDS / 2
        waiting.join()
    usage.flush()
    assert frequencies(Usage(path)) == {"a": 2, "b": module.FLUSH_USES * 2}


def test_what_is_pending_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_KEYS", 3)
    usage = Usage(tmp_path / "gone" / module.USAGE)
    usage.record(["a", "b"], 2, [])
    usage.flush()
    usage.record(["c", "a", "d", "e"], 4, [])
    usage.flush()
    usage.record(["f", "b"], 2, [])
    assert frequencies(usage) == {"a": 2, "b": 2, "c": 1}
    assert usage.counts()["hits"] == 8


def test_what_was_popular_once_goes_in_time(path: Path) -> None:
    """The policy with the counts of several runs."""
    resident = ["old", "steady"]
    for _ in range(5):
        counted(path, ["old", "steady"])
    evicted: list[str] = []
    for number in range(40):
        usage = Usage(path)
        usage.record(["steady", f"new {number}"], 1, [MissReason.MISSING])
        usage.flush()
        used = usage.of(resident)
        eviction = choose([Candidate(key, 1, 1.0, used[key]) for key in resident], len(resident) - 3, usage.clock)
        usage.advance_clock(eviction.clock)
        evicted += [victim.key for victim in eviction.victims]
        resident = [key for key in resident if key not in evicted] + [f"new {number}"]
    assert "old" in evicted
    assert "steady" not in evicted
    assert evicted.index("old") >= 3


def test_a_damaged_file_that_cannot_be_removed(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    path.write_bytes(b"no database at all" * 500)
    usage = Usage(path)
    usage.record(["a"], 1, [])
    monkeypatch.setattr(Path, "unlink", refuse)
    usage.flush()
    assert frequencies(usage) == {"a": 1}
    monkeypatch.undo()
    assert len(warnings(caplog)) == 1
    assert "Permission denied" in warnings(caplog)[0]


def test_a_new_file_is_not_taken_for_the_damaged_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has replaced it between opening and finding it damaged."""
    path.write_bytes(b"no database at all" * 500)
    usage = Usage(path)

    def replaced(connection: sqlite3.Connection) -> bool:
        monkeypatch.undo()
        path.rename(path.with_name("damaged"))
        counted(path, ["a"])
        return module._has_tables(connection)

    monkeypatch.setattr(module, "_has_tables", replaced)
    usage.record(["b"], 1, [])
    usage.flush()
    assert frequencies(Usage(path)) == {"a": 1, "b": 1}


FINDING = CanaryReport(checked=1, tokens=8, agreeing_tokens=7, kl_sum=0.5, worst_kl=0.25)


def test_findings_of_all_processes_add_up(path: Path) -> None:
    usage = Usage(path)
    assert usage.canary() == CanaryReport()
    usage.record_canary(FINDING)
    assert usage.canary() == FINDING
    usage.flush()
    other = Usage(path)
    other.record_canary(CanaryReport(skipped=2, failed=1))
    assert other.canary() == FINDING.plus(CanaryReport(skipped=2, failed=1))
    other.flush()
    assert usage.canary() == CanaryReport(1, 2, 1, 8, 7, 0.5, 0.25)
    assert usage.canary().mean_kl == 0.5 / 8


def test_a_file_of_an_earlier_version_gets_room_for_findings(path: Path) -> None:
    usage = counted(path, ["a"])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE canary")
    assert usage.canary() == CanaryReport()
    usage.record_canary(FINDING)
    usage.flush()
    assert usage.canary() == FINDING
    assert frequencies(usage) == {"a": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_counted(path: Path, value: float) -> None:
    usage = Usage(path)
    with pytest.raises(ValueError, match="cannot be"):
        usage.record_canary(CanaryReport(checked=1, tokens=1, kl_sum=value))
    usage.record(["a"], 1, [])
    usage.flush()
    assert frequencies(Usage(path)) == {"a": 1}


@pytest.mark.parametrize("value", ["'many'", "1e999"])
def test_findings_that_make_no_sense_start_anew(path: Path, value: str, caplog: pytest.LogCaptureFixture) -> None:
    usage = counted(path, ["a"])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE canary SET kl_sum = {value}")  # noqa: S608
    assert usage.canary() == CanaryReport()
    assert "start anew" in "".join(warnings(caplog))
