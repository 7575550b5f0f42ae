"""From states to bytes and back: a layer of a chunk at a time.

What is encoded is one *part* of one layer of one chunk, `[tokens, width]`: hidden states, keys or values. The result is
one run of bytes whose length follows from the shape alone. Planes within it (integers, scales) start at multiples of
64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragcache.states.encoded import Encoded

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PLANE_ALIGNMENT = 64


class Part(StrEnum):
    """What a run of values is; codecs may treat them differently."""

    HIDDEN = "hidden"
    KEYS = "keys"
    VALUES = "values"


@dataclass(frozen=True)
class Plane:
    """A matrix that is a part of what a codec makes: one row for some tokens.

    Attributes:
        dtype: of its numbers.
        tokens: tokens that share a row; `ROW_ALIGNMENT` is a multiple of it.
        columns: numbers in a row.
    """

    dtype: torch.dtype
    tokens: int
    columns: int

    def size(self, tokens: int) -> int:
        """Bytes for some tokens."""
        return -(-tokens // self.tokens) * self.columns * self.dtype.itemsize


class Codec(Protocol):
    """Encodes one part of one layer of one chunk.

    Attributes:
        exact: decoding gives back exactly what was encoded.
    """

    exact: bool

    def planes(self, width: int) -> tuple[Plane, ...]:
        """What encoded values of a width consist of, in order."""

    def encode(self, values: Tensor) -> Tensor:
        """`[tokens, width]` values to one run of uint8 on the same device, `encoded_size` long."""

    def encoded(self, planes: Sequence[Tensor]) -> Encoded:
        """The planes of some rows, `[rows of the plane, columns]`, as what can be decoded."""


def aligned(size: int) -> int:
    """The next multiple of `PLANE_ALIGNMENT`."""
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def encoded_size(codec: Codec, tokens: int, width: int) -> int:
    """Bytes of `[tokens, width]` values, encoded."""
    *padded, last = codec.planes(width)
    return sum(aligned(plane.size(tokens)) for plane in padded) + last.size(tokens)


def bytes_per_token(codec: Codec, width: int) -> float:
    """Bytes of one token among many; what choosing a form goes by."""
    return sum(plane.size(plane.tokens) / plane.tokens for plane in codec.planes(width))


class FloatCodec:
    """Values as floating-point numbers, little-endian, row after row.

    Values beyond the range of a narrower dtype are cut to its largest.
    """

    def __init__(self, dtype: torch.dtype, states: torch.dtype) -> None:
        """Set up.

        Args:
            dtype: precision on disk.
            states: precision that the states are computed in.
        """
        self.dtype = dtype
        self.exact = dtype == states

    def planes(self, width: int) -> tuple[Plane, ...]:
        """The numbers."""
        return (Plane(self.dtype, 1, width),)

    def encode(self, values: Tensor) -> Tensor:
        """Convert, and lay out as bytes."""
        return _converted(values, self.dtype).contiguous().view(-1).view(torch.uint8)

    def encoded(self, planes: Sequence[Tensor]) -> Encoded:
        """Numbers without scales."""
        return Encoded(planes[0])


class TiledCodec:
    """Integers that share a scale with the other values of their tile: some tokens of one channel, or some neighbouring
    values of one token. Tiles at the edges may be smaller."""

    exact = False

    def __init__(self, tile_tokens: int, tile_width: int) -> None:
        """Set up.

        Args:
            tile_tokens: tokens of a tile.
            tile_width: neighbouring values of each of these tokens; one of the two is 1.
        """
        if tile_tokens > 1 and tile_width > 1:
            raise ValueError("a tile is one token or one channel wide")
        self.tile_tokens = tile_tokens
        self.tile_width = tile_width

    def _tiles(self, tokens: int, width: int) -> tuple[int, int]:
        """Number of tiles down and across."""
        return -(-tokens // self.tile_tokens), -(-width // self.tile_width)

    def _numbers_of_tiles(self, width: int) -> Plane:
        """One number for each tile."""
        return Plane(torch.bfloat16, self.tile_tokens, self._tiles(1, width)[1])

    def _cut(self, values: Tensor) -> Tensor:
        """`[tokens, width]` to `[tiles down, tile_tokens, tiles across, tile_width]`, in float32."""
        tokens, width = values.shape
        down, across = self._tiles(tokens, width)
        # Repeating the last row and column fills the tiles at the edges and leaves their extremes as they are.
        rows = torch.arange(down * self.tile_tokens, device=values.device).clamp_max(tokens - 1)
        columns = torch.arange(across * self.tile_width, device=values.device).clamp_max(width - 1)
        return values.float()[rows][:, columns].view(down, self.tile_tokens, across, self.tile_width)

    def _join(self, tiles: Tensor, tokens: int, width: int) -> Tensor:
        """Inverse of `_cut`, whatever the dtype."""
        down, _, across, _ = tiles.shape
        return tiles.view(down * self.tile_tokens, across * self.tile_width)[:tokens, :width]


class Int8Codec(TiledCodec):
    """8-bit integers with one scale for each tile of values.

    Two planes: int8 `[tokens, width]`; bfloat16 scales `[tiles down, tiles across]`. value = integer * scale, with
    integers from -127 to 127. Scales are rounded to bfloat16 before the values are divided by them, so decoding in
    bfloat16 needs no wider arithmetic.
    """

    def planes(self, width: int) -> tuple[Plane, ...]:
        """Integers and scales."""
        return Plane(torch.int8, 1, width), self._numbers_of_tiles(width)

    def encode(self, values: Tensor) -> Tensor:
        """Quantise symmetrically, each tile by its largest magnitude."""
        tiles = self._cut(values)
        largest = tiles.abs().amax((1, 3), keepdim=True)
        scales = (largest / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        integers = (tiles / scales.float()).round().clamp(-127, 127).to(torch.int8)
        return _planes(self._join(integers, *values.shape), scales)

    def encoded(self, planes: Sequence[Tensor]) -> Encoded:
        """Integers and scales."""
        integers, scales = planes
        return Encoded(integers, scales, None, self.tile_tokens, self.tile_width)


class Int4Codec(TiledCodec):
    """4-bit integers with a scale and a minimum for each tile of values.

    Three planes: uint8 `[ceil(tokens / 2), width]`, whose low four bits hold the integers of the tokens 0, 2, 4... and
    whose high four bits those of the tokens 1, 3, 5... (0 behind the last token); bfloat16 scales `[tiles down, tiles
    across]`; bfloat16 minima, likewise. value = minimum + integer * scale, with integers from 0 to 15.
    """

    def planes(self, width: int) -> tuple[Plane, ...]:
        """Integers, scales and minima."""
        numbers = self._numbers_of_tiles(width)
        return Plane(torch.uint8, 2, width), numbers, numbers

    def encode(self, values: Tensor) -> Tensor:
        """Quantise each tile between its least and its largest value."""
        tokens, width = values.shape
        tiles = self._cut(values)
        minima = _converted(tiles.amin((1, 3), keepdim=True), torch.bfloat16)
        # Divided one by one, since the difference of very large values is infinite.
        steps = tiles.amax((1, 3), keepdim=True) / 15 - minima.float() / 15
        scales = steps.clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        integers = ((tiles - minima.float()) / scales.float()).round().clamp(0, 15).to(torch.uint8)
        integers = pad(self._join(integers, tokens, width), (0, 0, 0, tokens % 2))
        return _planes(integers[0::2] | integers[1::2] << 4, scales, minima)

    def encoded(self, planes: Sequence[Tensor]) -> Encoded:
        """Integers, scales and minima."""
        integers, scales, minima = planes
        return Encoded(integers, scales, minima, self.tile_tokens, self.tile_width)


# Tokens and width. Some channels of hidden states and keys are large for every token and would set the scale of their
# neighbours; across tokens a channel varies little. Values have no such channels. Figures: docs/decisions.md.
_INT8_TILES = {Part.HIDDEN: (64, 1), Part.KEYS: (32, 1), Part.VALUES: (1, 64)}
_INT4_TILES = {Part.HIDDEN: (32, 1), Part.KEYS: (32, 1), Part.VALUES: (1, 32)}


@lru_cache
def codec_named(name: str, dtype: str, part: Part) -> Codec:
    """The codec of that name for one part of states of a dtype.

    Raises:
        ValueError: no such codec or dtype; the states were written by a newer version.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    match name:
        case "raw":
            return FloatCodec(DTYPES[dtype], DTYPES[dtype])
        case "bf16":
            return FloatCodec(torch.bfloat16, DTYPES[dtype])
        case "fp16":
            return FloatCodec(torch.float16, DTYPES[dtype])
        case "int8":
            return Int8Codec(*_INT8_TILES[part])
        case "int4":
            return Int4Codec(*_INT4_TILES[part])
    raise ValueError(f"unknown codec {name!r}")


def _converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype; what is beyond its range becomes its largest number."""
    if values.dtype == dtype:
        return values
    # Cut after converting: the old dtype need not hold the new one's limits.
    limits = torch.finfo(dtype)
    return values.to(dtype).clamp(limits.min, limits.max)


def _planes(*planes: Tensor) -> Tensor:
    """Lay tensors out one after the other as bytes, each at a multiple of `PLANE_ALIGNMENT`."""
    runs: list[Tensor] = []
    for index, plane in enumerate(planes):
        data = plane.contiguous().view(-1).view(torch.uint8)
        runs.append(pad(data, (0, aligned(len(data)) - len(data))) if index < len(planes) - 1 else data)
    return torch.cat(runs)
