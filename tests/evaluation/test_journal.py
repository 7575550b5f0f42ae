"""The file that a stopped run leaves: nothing whole in it is lost, nothing torn is believed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ragcache.errors import EvaluationError
from ragcache.evaluation.journal import open_journal
from tests.evaluation.samples import record


def test_what_was_appended_is_there(tmp_path: Path) -> None:
    first, second = record(key="a"), record(key="b", kl=(math.inf, 0.25), answer='line\nof "two"')
    with open_journal(tmp_path / "records") as journal:
        journal.append(first)
        journal.append(second)
    with open_journal(tmp_path / "records") as journal:
        assert journal.records == {"a": first, "b": second}
        assert journal.unreadable == 0


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_torn_line_is_passed_over_and_spoils_nothing(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "records"
    with open_journal(path) as journal:
        journal.append(record(key="a"))
        journal.append(record(key="b"))
    path.write_bytes(path.read_bytes()[:-cut])
    with open_journal(path) as journal:
        # Without its last byte, the end of the line, a record is still whole.
        assert set(journal.records) == ({"a", "b"} if cut == 1 else {"a"})
        assert journal.unreadable == (cut > 1)
        journal.append(record(key="b", answer="again"))
    with open_journal(path) as journal:
        assert journal.records["b"].answer == "again"
        assert set(journal.records) == {"a", "b"}


def test_lines_of_something_else_are_counted(tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(b'{"key": "a"}\n\xff\xfe\n\n[1]\n')
    with open_journal(tmp_path / "records") as journal:
        assert (journal.records, journal.unreadable) == ({}, 3)


def test_one_writer(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path / "records"),
        pytest.raises(EvaluationError, match="another evaluation"),
        open_journal(tmp_path / "records"),
    ):
        pass
    with open_journal(tmp_path / "records"):
        pass


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot write"), open_journal(tmp_path):
        pass
