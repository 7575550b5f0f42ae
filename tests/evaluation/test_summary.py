"""Figures over questions, by hand and against a plain bootstrap."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.evaluation.summary import Gold, Interval, interval, summarise
from tests.evaluation.samples import record


def test_by_hand() -> None:
    records = [
        record(kl=(0.1, 0.3), agrees=(True, False), ttft_ms=10, full_ttft_ms=100, answer="red", full_answer="red"),
        record(kl=(0.0,), agrees=(True,), ttft_ms=20, full_ttft_ms=100, misses=("corrupt", "missing"), answer="blue"),
        record(kl=(0.5,), agrees=(False,), ttft_ms=30, full_ttft_ms=600, misses=("corrupt",), prefilled_tokens=50),
    ]
    found = summarise(records, [(), ("blue sky",), ("two",)])
    # Every question counts alike, however long its answer is.
    assert found.kl.mean == pytest.approx((0.2 + 0.0 + 0.5) / 3)
    assert found.agreement.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert (found.worst_kl, found.questions) == (0.5, 3)
    assert found.same_answers == pytest.approx(1 / 3)
    assert (found.ttft_ms, found.full_ttft_ms, found.speedup) == (20, 100, 10)
    assert found.prefilled_tokens == 30
    assert found.misses == {"corrupt": 2, "missing": 1}
    # F1 of "blue" against "blue sky" is 2/3, of "one" against "two" 0; the full prefill said "two" to both.
    assert found.gold == Gold(2, (2 / 3 + 0) / 2, 0.0, 0.5, 0.5)
    assert summarise(records, [(), (), ()]).gold is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 5))
def test_an_interval_is_around_its_mean_and_the_same_each_time(values: list[float], seed: int) -> None:
    found = interval(values, seed)
    assert found == interval(values, seed)
    assert min(values) - 1e-12 <= found.low <= found.high <= max(values) + 1e-12
    assert found.mean == pytest.approx(statistics.fmean(values))


def test_as_a_plain_bootstrap_has_it() -> None:
    values = [random.Random(1).betavariate(8, 1) for _ in range(40)]
    drawing = random.Random(2)
    means = sorted(statistics.fmean(drawing.choices(values, k=40)) for _ in range(4000))
    found = interval(values, seed=0)
    assert found.low == pytest.approx(means[100], abs=0.006)
    assert found.high == pytest.approx(means[3900], abs=0.006)


def test_one_question_has_no_width_and_infinity_no_end() -> None:
    assert interval([0.25], seed=0) == Interval(0.25, 0.25, 0.25)
    found = interval([0.1, math.inf, 0.2], seed=0)
    assert (found.mean, found.high) == (math.inf, math.inf)
    assert found.low < 0.3
