"""Which tokens of a prompt's chunks are computed again with everything before them in view.

Pure choice: how many and which, given what was measured of them. `ragcache.generate.repairing` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ragcache.settings import QueryOptions, Repair


@dataclass(frozen=True)
class RepairOptions:
    """What a request asks of repair.

    Attributes:
        method: see `ragcache.settings.Repair`.
        ratio: share of the chunks' tokens.
        budget_ms: time for it; takes the place of the ratio.
    """

    method: Repair = "off"
    ratio: float = 0.0
    budget_ms: float | None = None

    @classmethod
    def of(cls, options: QueryOptions) -> RepairOptions:
        """Those of a query."""
        return cls(options.repair, options.repair_ratio, options.repair_ms)


NO_REPAIR = RepairOptions()


@dataclass(frozen=True)
class ChunkSpans:
    """Where chunks stand in a prompt.

    Attributes:
        spans: slots of each chunk, in prompt order.
        first_exact: the first chunk was encoded after the prefix alone, which is all that stands before it: computing
            it again would change nothing, so none of its tokens is ever chosen.
    """

    spans: tuple[range, ...]
    first_exact: bool

    @classmethod
    def laid_out(cls, starts: Sequence[int], chunks: Sequence[Sequence[int]], *, first_exact: bool) -> ChunkSpans:
        """From the position and the token ids of each chunk."""
        spans = tuple(range(start, start + len(chunk)) for start, chunk in zip(starts, chunks, strict=True))
        return cls(spans, first_exact)

    @property
    def repairable(self) -> tuple[range, ...]:
        """Chunks whose tokens may be chosen."""
        return self.spans[1:] if self.first_exact else self.spans

    @property
    def most(self) -> int:
        """Tokens that may be chosen."""
        return sum(map(len, self.repairable))

    def share(self, ratio: float) -> int:
        """How many tokens a share of all chunks' tokens is, as far as there are as many to choose from."""
        return min(round(ratio * sum(map(len, self.spans))), self.most)


def choose_first(chunks: ChunkSpans, count: int) -> tuple[int, ...]:
    """The first tokens of each chunk, equally many of each as far as they go (EPIC, arXiv 2410.15332, section 3).

    Args:
        chunks: where they stand.
        count: tokens to choose; where it does not divide, the longest chunks, of equal ones the first, give one more.

    Returns:
        Slots, ascending.
    """
    left = min(count, chunks.most)
    taken: dict[range, int] = {}
    # The shortest first: what they cannot give, the others share.
    shortest_first = sorted(chunks.repairable, key=lambda span: (len(span), -span.start))
    for done, span in enumerate(shortest_first):
        taken[span] = min(len(span), left // (len(shortest_first) - done))
        left -= taken[span]
    return tuple(slot for span in chunks.repairable for slot in span[: taken[span]])


def choose_highest(chunks: ChunkSpans, scores: Tensor, count: int) -> tuple[int, ...]:
    """The tokens of the highest scores, whichever chunks they are in.

    Args:
        chunks: where they stand.
        scores: `[slots]`, for each slot up to the last chunk's end or beyond.
        count: tokens to choose; of equal ones the earlier.

    Returns:
        Slots, ascending.
    """
    slots = [slot for span in chunks.repairable for slot in span]
    order = scores[slots].argsort(descending=True, stable=True)[:count]
    return tuple(sorted(slots[index] for index in order.tolist()))
