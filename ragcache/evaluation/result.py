"""What an evaluation found, with all that it depended on; the JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from ragcache.evaluation.grid import PLAIN, Setting
from ragcache.evaluation.passages import Asked
from ragcache.evaluation.recommend import Recommendation
from ragcache.evaluation.record import Record
from ragcache.evaluation.run import LeftOut
from ragcache.evaluation.summary import Summary, summarise
from ragcache.evaluation.versions import computing_versions
from ragcache.pipeline import RagCache
from ragcache.restore.measure import processor_name

FORMAT = 1
"""Of the JSON file."""


@dataclass(frozen=True)
class Circumstances:
    """What the figures were found with.

    Attributes:
        date: when, ISO 8601 with time zone.
        store: name of its folder.
        model, embedding_model, dtype: settings of the store.
        codecs: of the stored states, with the form of the layers, by number of states.
        fingerprint: digest of the model's fingerprint.
        device: `cpu` or `cuda`.
        machine: names of the processors.
        versions: of ragcache and of what computes.
        max_tokens: of an answer.
        seed: of sampling and of intervals.
    """

    date: str
    store: str
    model: str
    embedding_model: str
    dtype: str
    codecs: tuple[str, ...]
    fingerprint: str
    device: str
    machine: str
    versions: dict[str, str]
    max_tokens: int
    seed: int


def circumstances(cache: RagCache, max_tokens: int, seed: int) -> Circumstances:
    """Those of a run that ends now."""
    settings = cache.settings
    return Circumstances(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        store=cache.path.name,
        model=settings.model,
        embedding_model=settings.embedding_model,
        dtype=settings.dtype,
        codecs=tuple(f"{it['form']} {it['codec']}" for it in cache.stats().models),
        fingerprint=cache.model.fingerprint.digest,
        device=cache.model.device.type,
        machine=processor_name(cache.model.device),
        versions=computing_versions(),
        max_tokens=max_tokens,
        seed=seed,
    )


@dataclass(frozen=True)
class Evaluation:
    """All of it.

    Attributes:
        circumstances: what the figures were found with.
        asked: the questions with their passages.
        records: for each question those of all settings, in the order of `summaries`.
        summaries: one for each setting.
        left_out: settings that the store cannot serve.
        recommendation: where a target was given.
    """

    circumstances: Circumstances
    asked: Sequence[Asked]
    records: Sequence[Sequence[Record]]
    summaries: Sequence[Summary]
    left_out: Sequence[LeftOut]
    recommendation: Recommendation | None = None

    @property
    def plain(self) -> Summary | None:
        """Figures of plain concatenation, where it was measured; as states are stored, else in whatever codec."""
        plain = (it for it in self.summaries if it.setting.model_copy(update={"codec": None}) == PLAIN)
        return self.of(PLAIN) or next(plain, None)

    def of(self, setting: Setting) -> Summary | None:
        """Figures of a setting, where it was measured."""
        return next((it for it in self.summaries if it.setting == setting), None)

    def to_json(self) -> str:
        """One JSON object. A figure that is no number, or without limit, is `null`: JSON knows neither."""
        recommended = self.recommendation
        return json.dumps(
            _finite(
                {
                    "format": FORMAT,
                    **asdict(self.circumstances),
                    "questions": [
                        {"question": it.text, "answers": it.answers, "documents": it.documents}
                        for it in (asked.question for asked in self.asked)
                    ],
                    "settings": [_dumped(it) for it in self.summaries],
                    "left_out": [{"setting": it.setting.model_dump(), "reason": it.reason} for it in self.left_out],
                    "recommendation": None
                    if recommended is None
                    else {
                        "target_agreement": recommended.target,
                        "met": recommended.met,
                        "setting": recommended.summary.setting.model_dump(),
                    },
                    "records": [record.model_dump() for row in self.records for record in row],
                }
            ),
            indent=1,
            allow_nan=False,
        )


def summaries(asked: Sequence[Asked], records: Sequence[Sequence[Record]], seed: int) -> list[Summary]:
    """Figures of each setting over all questions."""
    answers = [it.question.answers for it in asked]
    return [summarise(column, answers, seed) for column in zip(*records, strict=True)]


def _dumped(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "setting": summary.setting.model_dump(), "label": summary.setting.label}


def _finite(value: Any) -> Any:
    """The same without what is no number in JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(it) for it in value]
    return value
