"""A run: every question with every setting that the store can serve, less what an earlier run has done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ragcache.evaluation.grid import Setting
from ragcache.evaluation.journal import Journal
from ragcache.evaluation.measure import Measurement
from ragcache.evaluation.passages import Asked, encodings_of
from ragcache.evaluation.record import Record
from ragcache.settings import CodecName, EncodingName
from ragcache.states.miss import MissReason

TOLD_BY_KEY = frozenset({MissReason.NOT_STORED, MissReason.EVICTED})
"""Misses that a record's key tells of: it names the states that are stored."""


class EvaluationProgress(Protocol):
    """Is told how a run goes."""

    def start(self, measurements: int) -> None:
        """So many questions times settings are to be measured."""

    def advance(self) -> None:
        """One of them is done."""


@dataclass(frozen=True)
class LeftOut:
    """A setting that the store cannot serve.

    Attributes:
        setting: which.
        reason: for people.
    """

    setting: Setting
    reason: str


Passages = Mapping[CodecName | None, Sequence[Asked]]
"""The questions with their passages, for each codec with states in that; `None` is what they are stored in."""


def possible(
    settings: Sequence[Setting], passages: Passages, reasons: Mapping[CodecName, str]
) -> tuple[tuple[Setting, ...], tuple[LeftOut, ...]]:
    """The settings whose encodings the store holds of at least one passage, and the others.

    Args:
        settings: that are wanted.
        passages: in the codecs that they can be had in.
        reasons: why not in the others.
    """
    stored: set[EncodingName] = {name for it in passages[None] for chunk in it.chunks for name in encodings_of(chunk)}
    kept, left_out = [], []
    for setting in settings:
        missing = [name for name in setting.encodings if name not in stored]
        if missing:
            reason = f"no passage has an encoding {missing[0]!r} in the store; index with --encodings to have it"
            left_out.append(LeftOut(setting, reason))
        elif setting.codec is not None and setting.codec in reasons:
            left_out.append(LeftOut(setting, reasons[setting.codec]))
        else:
            kept.append(setting)
    return tuple(kept), tuple(left_out)


def run(
    measurement: Measurement,
    passages: Passages,
    settings: Sequence[Setting],
    journal: Journal,
    progress: EvaluationProgress,
) -> list[list[Record]]:
    """Measure what the journal does not hold yet, one question after the other, and write it there.

    What was measured while states could not be read is measured again: since then they may have been repaired, and
    nothing in the record's key would tell.

    Args:
        measurement: measures one question.
        passages: in each codec of the settings.
        settings: to measure.
        journal: what was measured before, and where it goes.
        progress: told how it goes.

    Returns:
        For each question the records of all settings, in their order.
    """
    columns = [passages[setting.codec] for setting in settings]
    rows = [list(zip(row, settings, strict=True)) for row in zip(*columns, strict=True)]
    keys = [[measurement.key(*it) for it in row] for row in rows]
    known = {key for key, record in journal.records.items() if TOLD_BY_KEY.issuperset(record.misses)}
    progress.start(sum(key not in known for row in keys for key in row))
    warm = False
    for row, row_keys in zip(rows, keys, strict=True):
        pending = [it for it, key in zip(row, row_keys, strict=True) if key not in known]
        if pending and not warm:
            measurement.warm_up(pending[0][0])
            warm = True
        for record in measurement.records(pending):
            journal.append(record)
            progress.advance()
    return [[journal.records[key] for key in row] for row in keys]
