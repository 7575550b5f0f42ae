"""An order in which as many items as possible come after those that they should come after.

This is the linear ordering problem: wishes may form circles, so not all of them can be met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SEARCHED = 10
"""Items up to which the best order is searched for. The effort doubles with each: 10 take about 3 ms on one core."""


@dataclass(frozen=True)
class Wishes:
    """Which items should come before which. Items are numbered from 0; a set of them is the bits of an integer.

    Attributes:
        before: for each item the set of those that should come before it.
        before_too: as `before`, but any of its wishes counts less than one of those.
        starts: the items that may come first; at least one.
    """

    before: tuple[int, ...]
    before_too: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.before)

    def given_up(self, item: int, placed: int) -> int:
        """What it costs that an item comes after just these; it does not depend on the order among them."""
        first, second = self.before[item] & ~placed, self.before_too[item] & ~placed
        # All wishes of the second kind together are fewer than size².
        return first.bit_count() * self.size**2 + second.bit_count()

    def next_items(self, placed: int) -> Sequence[int]:
        """What may come after just these."""
        return [item for item in range(self.size) if not placed >> item & 1] if placed else self.starts


def best_order(wishes: Wishes) -> list[int]:
    """The order that gives up least; among equals the first in the order of the alphabet.

    With more than `SEARCHED` items, and wishes that cannot all be met, it is one that moving one item cannot improve.
    """
    if not wishes.size:
        return []
    order, given_up = _least_given_up_first(wishes)
    if not given_up:
        return order
    return _searched(wishes) if wishes.size <= SEARCHED else _improved(wishes, order)


def _least_given_up_first(wishes: Wishes) -> tuple[list[int], int]:
    """Take the item that gives up least each time, of equals the one of the lowest number.

    If nothing is given up in the end, each step took the lowest number that could come next in any such order, so this
    is the first of them all.

    Returns:
        The order, and what it gives up.
    """
    order: list[int] = []
    placed, given_up = 0, 0
    while len(order) < wishes.size:
        item = min(wishes.next_items(placed), key=lambda item: (wishes.given_up(item, placed), item))
        given_up += wishes.given_up(item, placed)
        placed |= 1 << item
        order.append(item)
    return order, given_up


def _searched(wishes: Wishes) -> list[int]:
    """The best order, by dynamic programming over sets of items (Held and Karp, 1962)."""
    everything = (1 << wishes.size) - 1
    # What all items outside a set give up at least when those in it come first.
    least = [0] * (everything + 1)

    def through(item: int, placed: int) -> int:
        return wishes.given_up(item, placed) + least[placed | 1 << item]

    for placed in range(everything - 1, 0, -1):
        least[placed] = min(through(item, placed) for item in wishes.next_items(placed))
    order: list[int] = []
    placed = 0
    while placed != everything:
        item = min(wishes.next_items(placed), key=lambda item: (through(item, placed), item))
        placed |= 1 << item
        order.append(item)
    return order


def _improved(wishes: Wishes, order: list[int]) -> list[int]:
    """Move single items to where they give up least, until none gains by it."""
    moved = True
    while moved:
        moved = False
        for item in range(wishes.size):
            at = order.index(item)
            to = _best_place(wishes, order, at)
            if to != at:
                order = [*order[:at], *order[at + 1 :]]
                order.insert(to, item)
                moved = True
    return order


def _best_place(wishes: Wishes, order: list[int], at: int) -> int:
    """Where the item at some place gives up least, the others staying in order; where it is, if nowhere less."""
    item = order[at]
    least, best = 0, at
    for direction, end in ((-1, -1), (1, wishes.size)):
        change = 0
        for to in range(at + direction, end, direction):
            other = order[to]
            # Each step swaps the item with one neighbour.
            earlier, later = (other, item) if direction < 0 else (item, other)
            change += _cost(wishes, later, earlier) - _cost(wishes, earlier, later)
            first = item if to == 0 else order[1] if at == 0 else order[0]
            if change < least and first in wishes.starts:
                least, best = change, to
    return best


def _cost(wishes: Wishes, one: int, other: int) -> int:
    """What one of two items gives up if it comes before the other."""
    everything = (1 << wishes.size) - 1
    return wishes.given_up(one, everything & ~(1 << other))
