"""How long passes take is learned from those that were run, and never promised to be less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.generate.pace import REMEMBERED, Pace

passes = st.lists(
    st.tuples(st.floats(1.0, 1e6), st.floats(0.01, 1e5)), min_size=1, max_size=REMEMBERED, unique_by=lambda it: it[0]
)


def pace_of(timed: list[tuple[float, float]]) -> Pace:
    pace = Pace()
    for flops, milliseconds in timed:
        pace.record(flops, milliseconds)
    return pace


@settings(deadline=None)
@given(timed=passes)
def test_no_pass_took_longer_than_is_said_of_it(timed: list[tuple[float, float]]) -> None:
    pace = pace_of(timed)
    for flops, milliseconds in timed:
        assert pace.milliseconds(flops) >= milliseconds * (1 - 1e-6)


@settings(deadline=None)
@given(timed=passes, budget=st.floats(0.0, 1e6), each=st.floats(0.1, 1e5), most=st.integers(0, 3000))
def test_what_fits(timed: list[tuple[float, float]], budget: float, each: float, most: int) -> None:
    """The largest number of tokens whose pass is said to end in time; by trying them all."""
    pace = pace_of(timed)
    some = range(1, most + 1, max(1, most // 50))
    fitting = [tokens for tokens in some if pace.milliseconds(tokens * each) <= budget]
    count = pace.within(budget, each, most)
    assert max(fitting, default=0) <= count <= most
    assert count == 0 or pace.milliseconds(count * each) <= budget


@settings(deadline=None)
@given(
    own=st.floats(0.0, 100.0),
    slope=st.floats(0.01, 10.0),
    work=st.lists(st.integers(1, 500), min_size=2, max_size=REMEMBERED, unique=True),
)
def test_costs_of_a_pass_itself_are_told_from_those_of_tokens(own: float, slope: float, work: list[int]) -> None:
    pace = pace_of([(it, own + slope * it) for it in work])
    assert pace.milliseconds(1000) == pytest.approx(own + slope * 1000, rel=0.01)


def test_one_pass_is_enough_to_be_careful() -> None:
    """Twice the work, twice the time; half the work is not said to take less, for nobody knows what is fixed."""
    pace = pace_of([(100.0, 50.0)])
    assert pace.milliseconds(200.0) == 100.0
    assert pace.milliseconds(50.0) == 50.0
    assert pace.within(49.0, 1.0, 1000) == 0
    assert pace.within(80.0, 1.0, 1000) == 160
    assert pace.within(1e9, 1.0, 1000) == 1000


def test_nothing_is_promised_of_the_unknown() -> None:
    assert Pace().milliseconds(1.0) == math.inf
    assert Pace().within(1e9, 1.0, 10) == 0


def test_the_past_is_forgotten() -> None:
    """A slow pass counts as long as it is among the last."""
    pace = pace_of([(100.0, 1000.0)] + [(100.0, 50.0)] * (REMEMBERED - 1))
    assert pace.milliseconds(100.0) == pytest.approx(1000.0)
    pace.record(100.0, 50.0)
    assert pace.milliseconds(100.0) == pytest.approx(50.0)
