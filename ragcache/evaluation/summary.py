"""Figures of a setting over all questions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragcache.evaluation.gold import exact_match, token_f1
from ragcache.evaluation.grid import Setting
from ragcache.evaluation.record import Record

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over questions, and where it would lie with other questions of the kind.

    Attributes:
        mean: over questions.
        low: 2.5% of bootstrap resamples of the questions have a mean below it.
        high: 2.5% have one above it.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Gold:
    """Answers beside gold answers, means over the questions that have some.

    Attributes:
        questions: how many have.
        f1: token F1.
        exact_match: share of answers that are one of the gold answers.
        full_f1: token F1 of the full prefill's answers, from passages in the same order.
        full_exact_match: of the full prefill's answers.
    """

    questions: int
    f1: float
    exact_match: float
    full_f1: float
    full_exact_match: float


@dataclass(frozen=True)
class Summary:
    """Figures of one setting.

    Attributes:
        setting: which.
        questions: how many.
        kl: of the mean along each answer, in nats.
        worst_kl: at any token of any answer.
        agreement: share of tokens at which the most probable one is the full prefill's.
        same_answers: share of answers that are the full prefill's, word for word.
        gold: beside gold answers, where there are some.
        ttft_ms: median.
        full_ttft_ms: median of the full prefills of the same prompts.
        speedup: median over questions of how many times sooner the first token comes.
        prefilled_tokens: mean of the tokens run through the model before the first one of the answer.
        misses: chunks whose states were not used, by reason.
    """

    setting: Setting
    questions: int
    kl: Interval
    worst_kl: float
    agreement: Interval
    same_answers: float
    gold: Gold | None
    ttft_ms: float
    full_ttft_ms: float
    speedup: float
    prefilled_tokens: float
    misses: dict[str, int]


def summarise(records: Sequence[Record], answers: Sequence[Sequence[str]], seed: int = 0) -> Summary:
    """Figures of one setting.

    Args:
        records: one for each question, all of the same setting; at least one.
        answers: gold answers of each question, if there are any.
        seed: of the bootstrap.
    """
    divergences = [record.divergence for record in records]
    return Summary(
        setting=records[0].setting,
        questions=len(records),
        kl=interval([it.mean_kl for it in divergences], seed),
        worst_kl=float(np.max([it.worst_kl for it in divergences])),
        agreement=interval([it.agreement for it in divergences], seed),
        same_answers=statistics.fmean(record.answer == record.full_answer for record in records),
        gold=_gold([(record, gold) for record, gold in zip(records, answers, strict=True) if gold]),
        ttft_ms=statistics.median(record.ttft_ms for record in records),
        full_ttft_ms=statistics.median(record.full_ttft_ms for record in records),
        speedup=statistics.median(record.speedup for record in records),
        prefilled_tokens=statistics.fmean(record.prefilled_tokens for record in records),
        misses=dict(Counter(reason for record in records for reason in record.misses)),
    )


def interval(values: Sequence[float], seed: int) -> Interval:
    """Mean and percentile bootstrap interval (Efron 1979) over questions; the same for the same seed.

    Args:
        values: one for each question, at least one.
        seed: of the resampling.
    """
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(sample), size=(RESAMPLES, len(sample)))
    tail = (1 - CONFIDENCE) / 2
    # Nearest ranks: between a finite and an infinite divergence nothing can be interpolated.
    low, high = np.quantile(sample[drawn].mean(1), [tail, 1 - tail], method="inverted_cdf")
    return Interval(float(sample.mean()), float(low), float(high))


def _gold(pairs: Sequence[tuple[Record, Sequence[str]]]) -> Gold | None:
    if not pairs:
        return None
    return Gold(
        questions=len(pairs),
        f1=statistics.fmean(token_f1(record.answer, gold) for record, gold in pairs),
        exact_match=statistics.fmean(exact_match(record.answer, gold) for record, gold in pairs),
        full_f1=statistics.fmean(token_f1(record.full_answer, gold) for record, gold in pairs),
        full_exact_match=statistics.fmean(exact_match(record.full_answer, gold) for record, gold in pairs),
    )
