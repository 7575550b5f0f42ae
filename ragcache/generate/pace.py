"""How long a pass over some tokens takes here, learned from the passes that were run before."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque

REMEMBERED = 16
"""Passes that predictions rest on: the last ones, so that they follow what else the machine has to do."""


class Pace:
    """Predicts the time of a pass from its floating-point operations, with the error it would have made before.

    A pass has costs of its own and costs that grow with its tokens: a line through the passes that were timed. All
    predictions are raised by the factor that the slowest of these took longer than that line says, and a small pass is
    never said to be faster than the smallest that was timed.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._lock = threading.Lock()

    def record(self, flops: float, milliseconds: float) -> None:
        """A pass was run and timed."""
        with self._lock:
            self._passes.append((flops, milliseconds))

    def milliseconds(self, flops: float) -> float:
        """Time that a pass will take at most.

        Infinite as long as none was timed.
        """
        with self._lock:
            passes = list(self._passes)
        if not passes:
            return math.inf
        slope, own = _line(passes)
        factor = max(taken / (own + slope * work) for work, taken in passes)
        return factor * (own + slope * max(flops, min(work for work, _ in passes)))

    def within(self, milliseconds: float, flops_per_token: float, most: int) -> int:
        """Tokens that a pass has time for, `most` at most."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.milliseconds(middle * flops_per_token) <= milliseconds:
                low = middle
            else:
                high = middle - 1
        return low


def _line(passes: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept, neither negative."""
    work, taken = zip(*passes, strict=True)
    if len(set(work)) > 1:
        slope, own = statistics.linear_regression(work, taken)
        if slope > 0 and own > 0:
            return slope, own
    return sum(taken) / sum(work), 0.0
