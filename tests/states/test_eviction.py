"""The policy against a plain simulation of it, and what it is there for."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.states.eviction import Candidate, Eviction, admits, choose, priority
from ragcache.states.usage import NEVER_USED, KeyUsage

candidates = st.builds(
    Candidate,
    key=st.sampled_from("abcdefgh"),
    bytes=st.integers(1, 9),
    cost=st.integers(0, 9).map(float),
    usage=st.builds(KeyUsage, frequency=st.integers(0, 4), clock=st.integers(0, 5).map(float)),
)


def keys(eviction: Eviction) -> list[str]:
    return [victim.key for victim in eviction.victims]


def naive_choice(offered: list[Candidate], bytes_to_free: int, clock: float) -> tuple[list[int], float]:
    """Places of the victims: the least again and again, of equals the last."""
    left = dict(enumerate(offered))
    victims: list[int] = []
    while bytes_to_free > 0 and left:
        worth = {place: c.usage.clock + max(1, c.usage.frequency) * c.cost / c.bytes for place, c in left.items()}
        place = max(place for place in left if worth[place] == min(worth.values()))
        victims.append(place)
        bytes_to_free -= left.pop(place).bytes
        clock = max(clock, worth[place])
    return victims, clock


@given(offered=st.lists(candidates, max_size=12), bytes_to_free=st.integers(-3, 80), clock=st.integers(0, 9))
def test_the_least_go_until_enough_is_free(offered: list[Candidate], bytes_to_free: int, clock: int) -> None:
    eviction = choose(offered, bytes_to_free, float(clock))
    places, expected_clock = naive_choice(offered, bytes_to_free, float(clock))
    assert all(victim is offered[place] for victim, place in zip(eviction.victims, places, strict=True))
    assert eviction.clock == expected_clock >= clock
    freed = sum(victim.bytes for victim in eviction.victims)
    assert freed >= bytes_to_free or len(eviction.victims) == len(offered)
    if eviction.victims:
        assert freed - eviction.victims[-1].bytes < bytes_to_free
        kept = [c for place, c in enumerate(offered) if place not in places]
        assert all(priority(c) >= priority(eviction.victims[-1]) for c in kept)


@dataclass
class Cache:
    """What a store does with the policy, over plain dicts."""

    capacity: int
    clock: float = 0.0
    resident: dict[str, Candidate] = field(default_factory=dict)
    used: dict[str, KeyUsage] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)

    def use(self, key: str, size: int, cost: float) -> None:
        self.used[key] = KeyUsage(self.used.get(key, NEVER_USED).frequency + 1, self.clock)
        new = key not in self.resident
        self.resident[key] = Candidate(key, size, cost, self.used[key])
        if new:
            others = [c for c in self.resident.values() if c.key != key]
            eviction = choose(others, sum(c.bytes for c in self.resident.values()) - self.capacity, self.clock)
            self.clock = eviction.clock
            for victim in eviction.victims:
                del self.resident[victim.key]
                self.evicted.append(victim.key)
            # As in the paper: what comes in is used after what went, so above it.
            self.used[key] = KeyUsage(self.used[key].frequency, self.clock)
            self.resident[key] = Candidate(key, size, cost, self.used[key])


def naive_gdsf(requests: list[str], sizes: dict[str, int], costs: dict[str, float], capacity: int) -> set[str]:
    """The paper's algorithm, word by word; frequencies outlive an eviction."""
    level, used = 0.0, 0
    worth: dict[str, float] = {}
    frequency: dict[str, int] = {}
    for key in requests:
        frequency[key] = frequency.get(key, 0) + 1
        if key not in worth:
            while used + sizes[key] > capacity and worth:
                least = min(worth.values())
                victim = [k for k in worth if worth[k] == least][-1]
                used -= sizes[victim]
                level = max(level, worth.pop(victim))
            used += sizes[key]
        worth[key] = level + frequency[key] * costs[key] / sizes[key]
    return set(worth)


@settings(deadline=None)
@given(
    requests=st.lists(st.sampled_from("abcdefgh"), max_size=60),
    sizes=st.fixed_dictionaries({key: st.integers(1, 9) for key in "abcdefgh"}),
    costs=st.fixed_dictionaries({key: st.integers(1, 9).map(float) for key in "abcdefgh"}),
    capacity=st.integers(9, 30),
)
def test_over_time_it_is_greedy_dual_size_frequency(
    requests: list[str], sizes: dict[str, int], costs: dict[str, float], capacity: int
) -> None:
    cache = Cache(capacity)
    for key in requests:
        cache.use(key, sizes[key], costs[key])
    assert set(cache.resident) == naive_gdsf(requests, sizes, costs, capacity)


def test_what_was_popular_once_goes_in_time() -> None:
    cache = Cache(capacity=10)
    for _ in range(5):
        cache.use("old", 1, 1.0)
    for number in range(60):
        cache.use(f"new {number}", 1, 1.0)
    assert "old" in cache.evicted
    assert len(cache.evicted[: cache.evicted.index("old")]) > 20  # five uses were worth something


def test_without_ageing_it_would_stay() -> None:
    old = Candidate("old", 1, 1.0, KeyUsage(5, 0.0))
    young = [Candidate(f"new {number}", 1, 1.0, KeyUsage(1, 0.0)) for number in range(60)]
    assert "old" not in keys(choose([old, *young], 60, 0.0))


def test_frequency_beats_recency() -> None:
    cache = Cache(capacity=3)
    for _ in range(4):
        cache.use("often", 1, 1.0)
    for number in range(6):
        cache.use(f"once {number}", 1, 1.0)
    assert "often" in cache.resident
    assert "once 5" in cache.resident  # the latest use counts as well


def test_size_and_cost() -> None:
    usage = KeyUsage(2, 1.0)
    small, large = Candidate("small", 10, 100.0, usage), Candidate("large", 20, 100.0, usage)
    cheap = Candidate("cheap", 10, 40.0, usage)
    assert priority(small) == 21.0
    assert keys(choose([small, large, cheap], 31, 0.0)) == ["cheap", "large", "small"]
    assert keys(choose([large, small], 1, 0.0)) == ["large"]


def test_never_used_counts_as_used_once() -> None:
    assert priority(Candidate("a", 4, 8.0, NEVER_USED)) == priority(Candidate("a", 4, 8.0, KeyUsage(1, 0.0))) == 2.0


def test_a_run_that_exceeds_the_budget_keeps_what_is_there() -> None:
    there = [Candidate(f"{number}", 5, 10.0, NEVER_USED) for number in range(4)]
    new = Candidate("new", 5, 10.0, NEVER_USED)
    assert keys(choose([*there, new], 5, 0.0)) == ["new"]
    assert not admits(new, min(map(priority, there)))


def test_admission() -> None:
    least = priority(Candidate("there", 5, 10.0, NEVER_USED))
    assert admits(Candidate("wanted before", 5, 10.0, KeyUsage(2, 0.0)), least)
    assert admits(Candidate("wanted lately", 5, 10.0, KeyUsage(1, 0.5)), least)
    assert not admits(Candidate("larger", 6, 10.0, NEVER_USED), least)
    assert admits(Candidate("first", 5, 10.0, NEVER_USED), None)


def test_many() -> None:
    random_numbers = random.Random(0)
    offered = [Candidate(str(i), 1, random_numbers.random(), NEVER_USED) for i in range(2000)]
    eviction = choose(offered, 1000, 0.0)
    assert [c.cost for c in eviction.victims] == sorted(c.cost for c in offered)[:1000]


@pytest.mark.parametrize(("size", "cost"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, math.inf), (1, math.nan)])
def test_nonsense_is_refused(size: int, cost: float) -> None:
    with pytest.raises(ValueError, match="bytes at a cost of"):
        Candidate("a", size, cost, NEVER_USED)
