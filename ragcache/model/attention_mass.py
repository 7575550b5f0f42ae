"""How much a segment's tokens attend to each position, observed while they are run through the model."""

from __future__ import annotations

import torch
from torch import Tensor


class AttentionMass:
    """The attention probability that each slot of a cache receives, summed over layers, heads and tokens of a segment.

    A layer with a sliding window adds what it sees.

    Attributes:
        first_layer: what earlier layers attend to is not observed.
        received: `[slots]`, float32.
    """

    def __init__(self, slots: int, device: torch.device, first_layer: int = 0) -> None:
        """Begin with none.

        Args:
            slots: how many there are when the segment has been run.
            device: of the model.
            first_layer: the first that is observed.
        """
        self.first_layer = first_layer
        self.received = torch.zeros(slots, dtype=torch.float32, device=device)

    def add(self, probabilities: Tensor, low: int) -> None:
        """Add what some tokens attend to in one layer.

        Args:
            probabilities: `[kv_heads, rows, keys]`, float32.
            low: slot of the first key.
        """
        self.received[low : low + probabilities.shape[-1]] += probabilities.sum((0, 1))
