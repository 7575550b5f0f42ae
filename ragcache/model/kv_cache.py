"""The KV cache of one sequence: one preallocated buffer per layer, written in place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragcache.model.attention import AttentionLayer


@dataclass
class KVCache:
    """Keys and values of one sequence; slot i holds position i.

    Growing a cache by concatenation copies all of it for each token. Here every layer has its room from the
    start, restored states and new tokens are written where they belong, and nothing is ever moved.

    Attributes:
        keys: one tensor per layer, `[kv_heads, capacity, head_dim]`, after RoPE.
        values: one tensor per layer, `[kv_heads, capacity, head_dim]`.
        length: number of leading slots that hold tokens.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int = field(default=0)

    @classmethod
    def allocate(
        cls, layers: tuple[AttentionLayer, ...], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Room for `capacity` tokens in every layer. Slots beyond `length` hold no defined values."""

        def buffer(layer: AttentionLayer) -> Tensor:
            return torch.empty(layer.kv_heads, capacity, layer.head_dim, dtype=dtype, device=device)

        return cls([buffer(layer) for layer in layers], [buffer(layer) for layer in layers])

    @property
    def capacity(self) -> int:
        """Number of tokens there is room for."""
        return self.keys[0].shape[1]

    def copy_prefix(self, other: KVCache) -> None:
        """Start with all tokens of another cache, such as the prompt's prefix."""
        length = other.length
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[:, :length] = theirs[:, :length]
        self.length = length
