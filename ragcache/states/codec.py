"""From states to bytes and back: a layer of a chunk at a time.

What is encoded is one *part* of one layer of one chunk, `[tokens, width]`: hidden states, keys or values. The result is
one run of bytes whose length follows from the shape alone. Planes within it (integers, scales) start at multiples of
64 bytes.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PLANE_ALIGNMENT = 64


class Part(StrEnum):
    """What a run of values is; codecs may treat them differently."""

    HIDDEN = "hidden"
    KEYS = "keys"
    VALUES = "values"


class Codec(Protocol):
    """Encodes one part of one layer of one chunk.

    Attributes:
        exact: decoding gives back exactly what was encoded.
    """

    exact: bool

    def size(self, tokens: int, width: int) -> int:
        """Bytes of `[tokens, width]` values, encoded."""

    def bytes_per_token(self, width: int) -> float:
        """Bytes of one token among many; what choosing a form goes by."""

    def encode(self, values: Tensor) -> Tensor:
        """`[tokens, width]` values to `[size(tokens, width)]` uint8 on the same device."""

    def decode(self, data: Tensor, out: Tensor) -> None:
        """`[size(tokens, width)]` uint8 into `out`, `[tokens, width]`, contiguous, of any floating-point dtype."""


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

    def size(self, tokens: int, width: int) -> int:
        """Bytes of `[tokens, width]` values, encoded."""
        return tokens * width * self.dtype.itemsize

    def bytes_per_token(self, width: int) -> float:
        """Bytes of one token."""
        return float(width * self.dtype.itemsize)

    def encode(self, values: Tensor) -> Tensor:
        """Convert, and lay out as bytes."""
        return _converted(values, self.dtype).contiguous().view(-1).view(torch.uint8)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Convert when `out` has another dtype; bytes of one dtype are never taken for another's."""
        out.copy_(data.view(self.dtype).view(out.shape))


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

    def size(self, tokens: int, width: int) -> int:
        """Bytes of `[tokens, width]` values, encoded."""
        down, across = self._tiles(tokens, width)
        return _aligned(tokens * width) + 2 * down * across

    def bytes_per_token(self, width: int) -> float:
        """Bytes of one token among many."""
        return width + 2 * self._tiles(1, width)[1] / self.tile_tokens

    def encode(self, values: Tensor) -> Tensor:
        """Quantise symmetrically, each tile by its largest magnitude."""
        tiles = self._cut(values)
        largest = tiles.abs().amax((1, 3), keepdim=True)
        scales = (largest / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        integers = (tiles / scales.float()).round().clamp(-127, 127).to(torch.int8)
        return _planes(self._join(integers, *values.shape), scales)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Multiply integers by their scales, in the dtype of `out`, in one pass."""
        tokens, width = out.shape
        down, across = self._tiles(tokens, width)
        integers = data[: tokens * width].view(torch.int8).view(tokens, width)
        scales = data[_aligned(tokens * width) :].view(torch.bfloat16).view(down, across).to(out.dtype)
        whole_down, whole_across = tokens // self.tile_tokens, width // self.tile_width
        end, right = whole_down * self.tile_tokens, whole_across * self.tile_width
        shape = (whole_down, self.tile_tokens, whole_across, self.tile_width)
        whole_scales = scales[:whole_down, None, :whole_across, None]
        torch.mul(integers[:end, :right].view(shape), whole_scales, out=out[:end, :right].view(shape))
        if end < tokens:
            torch.mul(integers[end:], scales[-1:], out=out[end:])
        if right < width:
            torch.mul(integers[:, right:], scales[:, -1:], out=out[:, right:])


class Int4Codec(TiledCodec):
    """4-bit integers with a scale and a minimum for each tile of values.

    Three planes: uint8 `[ceil(tokens / 2), width]`, whose low four bits hold the integers of the tokens 0, 2, 4... and
    whose high four bits those of the tokens 1, 3, 5... (0 behind the last token); bfloat16 scales `[tiles down, tiles
    across]`; bfloat16 minima, likewise. value = minimum + integer * scale, with integers from 0 to 15.
    """

    def size(self, tokens: int, width: int) -> int:
        """Bytes of `[tokens, width]` values, encoded."""
        down, across = self._tiles(tokens, width)
        return _aligned(-(-tokens // 2) * width) + _aligned(2 * down * across) + 2 * down * across

    def bytes_per_token(self, width: int) -> float:
        """Bytes of one token among many."""
        return width / 2 + 4 * self._tiles(1, width)[1] / self.tile_tokens

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

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Scale and shift integers in the dtype of `out`."""
        tokens, width = out.shape
        down, across = self._tiles(tokens, width)
        packed = data[: -(-tokens // 2) * width].view(-1, width)
        integers = torch.empty(tokens, width, dtype=torch.uint8, device=data.device)
        torch.bitwise_and(packed, 15, out=integers[0::2])
        torch.bitwise_right_shift(packed[: tokens // 2], 4, out=integers[1::2])
        out.copy_(integers)

        start = _aligned(packed.numel())
        scales = self._widened(data[start : start + 2 * down * across], out)
        minima = self._widened(data[start + _aligned(2 * down * across) :], out)
        whole_tiles = tokens // self.tile_tokens
        whole = whole_tiles * self.tile_tokens
        tiles = out[:whole].view(whole_tiles, self.tile_tokens, width)
        torch.addcmul(minima[:whole_tiles, None], tiles, scales[:whole_tiles, None], out=tiles)
        if whole < tokens:
            torch.addcmul(minima[-1:], out[whole:], scales[-1:], out=out[whole:])

    def _widened(self, plane: Tensor, out: Tensor) -> Tensor:
        """A number for each tile, bytes of bfloat16, to `[tiles down, width]` in the dtype of `out`."""
        down, across = self._tiles(*out.shape)
        numbers = plane.view(torch.bfloat16).view(down, across).to(out.dtype)
        return numbers.repeat_interleave(self.tile_width, 1)[:, : out.shape[1]] if self.tile_width > 1 else numbers


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


def _aligned(size: int) -> int:
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


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
        runs.append(pad(data, (0, _aligned(len(data)) - len(data))) if index < len(planes) - 1 else data)
    return torch.cat(runs)
