"""One layer to restore, of random numbers, by whoever is asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ragcache.restore.backend import Implementation
from ragcache.restore.gpu_check.shapes import Attention
from ragcache.states.arrangement import Arrangement
from ragcache.states.codec import Part, codec_named
from ragcache.states.encoded import ROW_ALIGNMENT, Encoded, Moves, Run
from ragcache.states.form import Form

GAP = 5
"""Free slots before each chunk and behind the last, where chunks are apart."""


@dataclass(frozen=True, eq=False)
class Work:
    """What there is to do.

    Attributes:
        restore: has an implementation write keys and values to the caches given.
        cache_shape: of either cache.
        dtype: of the model.
        device: of everything.
        bytes: that are read and written at least.
        products: floating-point operations of the projection.
    """

    restore: Callable[[Implementation, Tensor, Tensor], None]
    cache_shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    bytes: int
    products: int

    def caches(self) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in a KV cache, all 0."""
        keys = torch.zeros(self.cache_shape, dtype=self.dtype, device=self.device)
        return keys, torch.zeros_like(keys)


def make_work(
    form: Form,
    attention: Attention,
    codec: str,
    dtype: torch.dtype,
    chunks: Sequence[int],
    gap: int,
    device: torch.device,
) -> Work:
    """Random weights and states.

    Args:
        form: `hidden` or `pre_rope_kv`.
        attention: shapes of the layer.
        codec: of the states.
        dtype: of the model.
        chunks: tokens of each.
        gap: free slots before each chunk and behind the last.
        device: of everything.
    """

    def random(rows: int, width: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, width, device=device) * scale).to(dtype)

    def states(part: Part, width: int) -> Encoded:
        coder = codec_named(codec, str(dtype).removeprefix("torch."), part)
        return Arrangement([coder], width, [rows]).loaded([coder.encode(random(rows, width))])[0]

    torch.manual_seed(0)
    tokens, rotation = sum(chunks), attention.rotation
    starts = list(accumulate((_aligned(length) for length in chunks), initial=0))
    slots = accumulate((length + gap for length in chunks), initial=gap)
    rows = starts[-1]
    runs = [Run(row, slot, length) for row, slot, length in zip(starts, slots, chunks, strict=False)]
    moves = Moves.of(runs, rows, device)
    tables: tuple[Tensor, Tensor] | None = None
    if rotation is not None:
        angles = torch.randn(tokens, rotation.rotary_dim // 2, device=device)
        tables = angles.cos().to(dtype), angles.sin().to(dtype)

    size = 2 * tokens * attention.width * dtype.itemsize + sum(table.nbytes for table in tables or ())
    products = 0
    restore: Callable[[Implementation, Tensor, Tensor], None]
    if form is Form.HIDDEN:
        hidden = states(Part.HIDDEN, attention.hidden_size)
        weight = random(2 * attention.width, attention.hidden_size, attention.hidden_size**-0.5)
        bias = random(1, 2 * attention.width)[0] if attention.bias else None
        norm = attention.random_key_norm(device)
        size += hidden.nbytes + weight.nbytes
        products = 2 * tokens * weight.numel()

        def restore(implementation: Implementation, keys: Tensor, values: Tensor) -> None:
            implementation.restore_hidden(hidden, weight, bias, norm, rotation, tables, moves, keys, values)
    else:
        keys_before, values_before = (states(part, attention.width) for part in (Part.KEYS, Part.VALUES))
        size += keys_before.nbytes + values_before.nbytes

        def restore(implementation: Implementation, keys: Tensor, values: Tensor) -> None:
            implementation.restore_pre_rope_kv(keys_before, values_before, rotation, tables, moves, keys, values)

    capacity = tokens + gap * (len(chunks) + 1)
    return Work(restore, (attention.kv_heads, capacity, attention.head_dim), dtype, device, size, products)


def _aligned(tokens: int) -> int:
    return -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
