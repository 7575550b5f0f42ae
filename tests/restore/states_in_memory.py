"""Encoded states of ragged chunks, as restoring takes them, made with the codecs of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from ragcache.restore.gpu_check.shapes import Rotation
from ragcache.states.arrangement import Arrangement, decode
from ragcache.states.codec import Part, codec_named
from ragcache.states.encoded import ROW_ALIGNMENT, Encoded, Moves, Run

TOLERANCES = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
"""Largest errors, of a value and of the root mean square of all; a few roundings each."""

CODECS = ["raw", "bf16", "fp16", "int8", "int4"]


def first_rows(chunks: Sequence[int]) -> list[int]:
    """Where chunks of so many tokens start, and the number of rows."""
    starts = [0]
    for tokens in chunks:
        starts.append(starts[-1] + -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    return starts


def encoded(values: Tensor, chunks: Sequence[int], codec: str, dtype: str, part: Part) -> Encoded:
    """Encode values `[tokens, width]` chunk by chunk; what lies between chunks is made of bytes of 0xFF, mostly NaN."""
    coder = codec_named(codec, dtype, part)
    arrangement = Arrangement([coder], values.shape[1], chunks)
    buffer = torch.full((arrangement.size,), 0xFF, dtype=torch.uint8)
    for chunk, places in zip(values.split(list(chunks)), arrangement.places, strict=True):
        data = coder.encode(chunk)
        for place in places:
            size = place.stop - place.start
            buffer[place], data = data[:size], data[size:]
    return arrangement.encoded(buffer)[0]


def decoded(values: Tensor, chunks: Sequence[int], codec: str, dtype: str, part: Part) -> Tensor:
    """What the store's codec makes of values `[tokens, width]`, encoded and decoded chunk by chunk."""
    coder, out = codec_named(codec, dtype, part), torch.empty_like(values)
    for chunk, target in zip(values.split(list(chunks)), out.split(list(chunks)), strict=True):
        decode(coder, coder.encode(chunk), target)
    return out


def moves(chunks: Sequence[int], slots: Sequence[int]) -> Moves:
    """Chunks to where each shall start."""
    starts = first_rows(chunks)
    runs = [Run(row, slot, tokens) for row, slot, tokens in zip(starts, slots, chunks, strict=False)]
    return Moves.of(runs, starts[-1], torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """What is restored where."""

    chunks: tuple[int, ...]
    apart: bool
    kv_heads: int
    head_dim: int
    rotation: Rotation | None
    codec: str
    dtype: str

    @property
    def tokens(self) -> int:
        return sum(self.chunks)

    @property
    def slots(self) -> list[int]:
        """Behind each other from slot 5 on, or with gaps and the last chunk first."""
        starts = [5]
        for tokens in self.chunks[:-1]:
            starts.append(starts[-1] + tokens + (3 if self.apart else 0))
        return [start + self.chunks[-1] for start in starts[:-1]] + [0] if self.apart else starts

    @property
    def moves(self) -> Moves:
        return moves(self.chunks, self.slots)

    def tables(self) -> tuple[Tensor, Tensor] | None:
        if self.rotation is None:
            return None
        angles = torch.randn(self.tokens, self.rotation.rotary_dim // 2)
        return angles.cos().to(self.torch_dtype), angles.sin().to(self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def empty_cache(self) -> Tensor:
        """A layer's keys or values, heads and slots in either order in memory."""
        slots = max(start + tokens for start, tokens in zip(self.slots, self.chunks, strict=True)) + 2
        shape = (slots, self.kv_heads, self.head_dim) if self.apart else (self.kv_heads, slots, self.head_dim)
        cache = torch.full(shape, 7.0, dtype=self.torch_dtype)
        return cache.transpose(0, 1) if self.apart else cache


@st.composite
def cases(draw: st.DrawFn, codec: str | None = None, dtype: str | None = None) -> Case:
    """Any, of a codec and a precision if told so."""
    head_dim = draw(st.sampled_from([8, 20, 32, 64, 80]))
    rotary_dim = draw(st.sampled_from([head_dim, head_dim // 4 * 2]))
    return Case(
        chunks=tuple(draw(st.lists(st.one_of(st.integers(1, 70), st.sampled_from([64, 128])), min_size=1, max_size=3))),
        apart=draw(st.booleans()),
        kv_heads=draw(st.integers(1, 4)),
        head_dim=head_dim,
        rotation=draw(st.sampled_from([None, Rotation(False, rotary_dim), Rotation(True, rotary_dim)])),
        codec=codec or draw(st.sampled_from(CODECS)),
        dtype=dtype or draw(st.sampled_from(list(TOLERANCES))),
    )
