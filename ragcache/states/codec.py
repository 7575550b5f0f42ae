"""From rows of values to rows of bytes and back."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Codec(Protocol):
    """One token's states of one layer are one row; each row is encoded by itself.

    Attributes:
        exact: decoding gives back exactly what was encoded.
    """

    exact: bool

    def row_bytes(self, width: int) -> int:
        """Bytes of an encoded row of `width` values."""

    def encode(self, values: Tensor) -> Tensor:
        """`[rows, width]` values to `[rows, row_bytes(width)]` uint8, contiguous."""

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """`[rows, row_bytes(width)]` uint8 into `out`, `[rows, width]`, contiguous."""


class RawCodec:
    """Values as they are, little-endian, in the dtype they were computed in."""

    exact = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def row_bytes(self, width: int) -> int:
        """Bytes of an encoded row."""
        return width * self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        """Reinterpret values as bytes."""
        if values.dtype != self.dtype:
            raise TypeError(f"raw {self.dtype} states expected, not {values.dtype}")
        return values.contiguous().view(torch.uint8)

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """Reinterpret bytes as values; converts when `out` has another dtype, never reinterprets."""
        out.copy_(rows.view(self.dtype))


class Int8Codec:
    """8-bit integers with one scale for each group of 64 neighbouring values of a row.

    A row is `width` int8 values, then one bfloat16 scale per group; value = integer * scale. Scales are rounded to
    bfloat16 before the values are divided by them, so decoding in bfloat16 needs no wider arithmetic. The last group
    may be shorter.
    """

    exact = False
    group = 64

    def row_bytes(self, width: int) -> int:
        """Bytes of an encoded row."""
        return width + 2 * self._groups(width)

    def encode(self, values: Tensor) -> Tensor:
        """Quantise symmetrically, each group by its largest magnitude."""
        rows, width = values.shape
        groups = self._groups(width)
        padded = pad(values.float(), (0, groups * self.group - width)).view(rows, groups, self.group)
        scales = (padded.abs().amax(-1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        integers = (padded / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return torch.cat(
            (integers.view(rows, -1)[:, :width].view(torch.uint8), scales.view(torch.uint8).view(rows, -1)),
            dim=1,
        )

    def decode(self, rows: Tensor, out: Tensor) -> None:
        """Multiply integers by their scales, in the dtype of `out`."""
        width = out.shape[1]
        out.copy_(rows[:, :width].view(torch.int8))
        # A copy: behind an odd number of integers the scales are not aligned.
        scales = rows[:, width:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(out.dtype)
        whole_groups = width // self.group
        whole = whole_groups * self.group
        out[:, :whole].view(len(out), whole_groups, self.group).mul_(scales[:, :whole_groups, None])
        if whole < width:
            out[:, whole:].mul_(scales[:, -1:])

    def _groups(self, width: int) -> int:
        return -(-width // self.group)


def codec_named(name: str, dtype: str) -> Codec:
    """The codec of that name for states of a dtype.

    Raises:
        ValueError: no such codec or dtype; the states were written by a newer version.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if name == "raw":
        return RawCodec(DTYPES[dtype])
    if name == "int8":
        return Int8Codec()
    raise ValueError(f"unknown codec {name!r}")
