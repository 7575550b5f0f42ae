"""Positions of a segment's tokens, and the masks that let each of them see itself and what lies before it."""

from __future__ import annotations

import torch
from torch import Tensor

Positions = range | tuple[int, ...]
"""Ascending; a range where they follow one another."""

KEPT_BYTES = 64 * 2**20
"""Most that the masks of one forward pass take when they are kept for its other layers."""


def as_positions(slots: tuple[int, ...]) -> Positions:
    """Ascending slots, at least one, as a range where they follow one another."""
    run = range(slots[0], slots[-1] + 1)
    return run if len(run) == len(slots) else slots


def to_tensor(positions: Positions, device: torch.device) -> Tensor:
    """Positions as a tensor `[tokens]`."""
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, device=device)
    return torch.tensor(positions, device=device)


class CausalMasks:
    """Which positions each query may see: 0 where it may, else minus infinity, to be added to its scores.

    The layers of a forward pass share them, so they are made once. Those of very long segments are made in each layer
    again: together they would take more memory than the KV cache.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[Positions, int, int | None, int], Tensor] = {}
        self._bytes = 0

    def get(self, positions: Positions, low: int, window: int | None, group: int, query: Tensor) -> Tensor:
        """For queries at some positions and keys from `low` to the last of them.

        Args:
            positions: of the queries.
            low: position of the first key.
            window: number of latest positions that a query sees.
            group: how many query heads lie one behind the other.
            query: of the dtype and on the device that the mask is needed in.

        Returns:
            `[group * queries, keys]`.
        """
        key = (positions, low, window, group)
        if key in self._masks:
            return self._masks[key]
        queries = to_tensor(positions, query.device)[:, None]
        keys = torch.arange(low, positions[-1] + 1, device=query.device)[None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        visible = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask = visible.masked_fill_(hidden, -torch.inf).repeat(group, 1)
        if self._bytes + mask.nbytes <= KEPT_BYTES:
            self._bytes += mask.nbytes
            self._masks[key] = mask
        return mask
