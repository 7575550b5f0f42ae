"""Records and summaries that a test says only the relevant part of."""

from __future__ import annotations

from typing import Any

from ragcache.evaluation.grid import PLAIN, Setting
from ragcache.evaluation.record import Record
from ragcache.evaluation.summary import Interval, Summary

BETTER = Setting(encodings=("alone", "context"), order="conditioned")
REPAIRED = Setting(encodings=("alone", "context"), order="conditioned", repair="query", repair_ratio=0.15)


def record(**fields: Any) -> Record:
    given: dict[str, Any] = {
        "key": "k",
        "question": "Who?",
        "setting": PLAIN,
        "chunk_ids": ("a#0",),
        "dropped": (),
        "prompt_tokens": 100,
        "restored_tokens": 80,
        "prefilled_tokens": 20,
        "repaired_tokens": 0,
        "repair_ms": 0.0,
        "misses": (),
        "retrieve_ms": 1.0,
        "ttft_ms": 10.0,
        "full_ttft_ms": 100.0,
        "kl": (0.1, 0.3),
        "agrees": (True, False),
        "answer": "one",
        "full_answer": "two",
    }
    return Record(**given | fields)


def summary(setting: Setting, agreement: float, ttft_ms: float, kl: float = 0.1) -> Summary:
    return Summary(
        setting=setting,
        questions=3,
        kl=Interval(kl, kl / 2, kl * 2),
        worst_kl=1.0,
        agreement=Interval(agreement, agreement - 0.05, min(1.0, agreement + 0.05)),
        same_answers=0.5,
        gold=None,
        ttft_ms=ttft_ms,
        full_ttft_ms=1000.0,
        speedup=1000.0 / ttft_ms,
        prefilled_tokens=20.0,
        misses={},
    )
