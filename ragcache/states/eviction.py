"""Which states go when the store's budget is short: GreedyDual-Size-Frequency.

A priority is the clock at the last use plus what an average byte saves: uses times cost per byte. Each eviction raises
the clock to the priority that went, so whatever is used from then on starts above it, and what was popular once and is
used no more is overtaken in time (Cherkasova: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy, HP Labs HPL-98-69R1, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ragcache.states.usage import KeyUsage


@dataclass(frozen=True)
class Candidate:
    """States that could go, or come.

    Attributes:
        key: of the states.
        bytes: what they take on disk.
        cost: what computing them again takes, in FLOPs.
        usage: `NEVER_USED` when no query ever wanted them.
    """

    key: str
    bytes: int
    cost: float
    usage: KeyUsage

    def __post_init__(self) -> None:
        if self.bytes <= 0 or not 0 <= self.cost < math.inf:
            raise ValueError(f"{self.key}: {self.bytes} bytes at a cost of {self.cost}")


@dataclass(frozen=True)
class Eviction:
    """What has to go.

    Attributes:
        victims: in the order of their priority, least first.
        clock: what the ageing clock is to be set to once they are gone.
    """

    victims: list[Candidate]
    clock: float


def priority(candidate: Candidate) -> float:
    """What keeping the states is worth: clock + FLOPs saved per byte. What was never used counts as used once."""
    usage = candidate.usage
    return usage.clock + max(usage.frequency, 1) * candidate.cost / candidate.bytes


def choose(candidates: Iterable[Candidate], bytes_to_free: int, clock: float) -> Eviction:
    """The states of least priority that together free enough; all of them when there are too few.

    Args:
        candidates: in the order they were added, oldest first. Of equals the latest goes, so a run that writes more
            than fits leaves what is there alone.
        bytes_to_free: nothing goes when it is 0 or less.
        clock: the ageing clock now.
    """
    ranked = sorted((priority(candidate), -age, candidate) for age, candidate in enumerate(candidates))
    victims: list[Candidate] = []
    for worth, _, candidate in ranked:
        if bytes_to_free <= 0:
            break
        victims.append(candidate)
        bytes_to_free -= candidate.bytes
        clock = max(clock, worth)
    return Eviction(victims, clock)


def admits(candidate: Candidate, least: float | None) -> bool:
    """Whether encoding new states is worthwhile when others have to go for them.

    Args:
        candidate: the new states.
        least: least priority of what is there; `None` when there is nothing. To be beaten, not just met: swapping
            equals would be work for nothing.
    """
    return least is None or priority(candidate) > least
