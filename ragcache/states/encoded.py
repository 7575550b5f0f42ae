"""Encoded states in memory, as restoring takes them: many chunks in one tensor, decoded by whoever reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ROW_ALIGNMENT = 64
"""Chunks start at multiples of this many rows, so that no tile of a codec and no pair of int4 rows spans two chunks."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """One part (hidden states, keys or values) of one layer's states of several chunks, still encoded.

    Chunks start at rows that are multiples of `ROW_ALIGNMENT`; rows in between hold nothing of use, not even defined
    numbers. All tensors are contiguous and on one device. Which codec it is follows from the dtype of `payload`; what
    the planes mean is told in `ragcache.states.codec`.

    Attributes:
        payload: `[rows, width]` of a floating-point dtype (raw, bf16, fp16); int8 `[rows, width]` (int8); uint8
            `[rows // 2, width]` (int4: row 2i in the low, row 2i + 1 in the high four bits).
        scales: None for floating-point codecs; else bfloat16 `[rows // tile_tokens, ceil(width / tile_width)]`.
            int8: value = integer * scale.
        minima: bfloat16, shaped as `scales`, for int4 only. int4: value = minimum + integer * scale.
        tile_tokens: rows that share a scale; 1 for floating-point codecs.
        tile_width: neighbouring values of a row that share a scale; 1 for floating-point codecs.
    """

    payload: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None
    tile_tokens: int = 1
    tile_width: int = 1

    @property
    def rows(self) -> int:
        """Rows of the decoded states, those of no use included."""
        return self.payload.shape[0] * (2 if self.minima is not None else 1)

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.payload.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        planes = (self.payload, self.scales, self.minima)
        return sum(plane.numel() * plane.itemsize for plane in planes if plane is not None)

    def decode(self, out: Tensor) -> None:
        """All values into `out`, `[rows, width]`, computed in its dtype; those of rows between chunks are of no use."""
        if self.scales is None:
            out.copy_(self.payload)
            return
        # Integers first, then scaled in place: a product of two dtypes would be made by way of a copy of one of them.
        if self.minima is None:
            out.copy_(self.payload)
        else:
            out[0::2] = self.payload & 15
            out[1::2] = self.payload >> 4
        # The last tile of each row may be narrower than the others.
        whole = self.width // self.tile_width
        self._scale(out, slice(0, whole * self.tile_width), slice(0, whole), self.tile_width)
        if rest := self.width % self.tile_width:
            self._scale(out, slice(-rest, None), slice(whole, None), rest)

    def _scale(self, out: Tensor, columns: slice, tiles: slice, tile_width: int) -> None:
        """Scale integers in place, tile by tile."""
        if tiles.start == tiles.stop:
            return
        shape = (self.rows // self.tile_tokens, self.tile_tokens, -1, tile_width)
        target = out[:, columns].view(shape)
        scales, minima = (
            None if numbers is None else numbers[:, None, tiles, None].to(out.dtype)
            for numbers in (self.scales, self.minima)
        )
        if scales is not None and minima is not None:
            torch.addcmul(minima, target, scales, out=target)
        elif scales is not None:
            target.mul_(scales)


class Run(NamedTuple):
    """Neighbouring tokens: where they are in `Encoded`, and where in the KV cache they go.

    Attributes:
        row: of the first token.
        slot: of the first token.
        tokens: how many.
    """

    row: int
    slot: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Moves:
    """Which row of `Encoded` goes to which slot of the KV cache. Made once for all layers.

    Tokens are numbered in the order of the runs, which is also that of the tables of cosines and sines. The two slices
    are known on the host, so nobody has to wait for a GPU to learn them.

    Attributes:
        rows: int32 `[tokens]`, row of each token.
        slots: int32 `[tokens]`, slot of each token; no slot twice.
        token_of_row: int32 `[rows]`, the token in each row; -1 where a row goes nowhere.
        row_span: where all rows follow one another, these; else None.
        slot_span: where all slots follow one another, these; else None.
    """

    rows: Tensor
    slots: Tensor
    token_of_row: Tensor
    row_span: slice | None
    slot_span: slice | None

    @classmethod
    def of(cls, runs: Sequence[Run], rows: int, device: torch.device) -> Moves:
        """From runs of tokens, at least one.

        Args:
            runs: in the order of the tokens.
            rows: rows of the `Encoded` that is read from.
            device: of the states and of the KV cache.
        """
        row = torch.cat([torch.arange(run.row, run.row + run.tokens, dtype=torch.int32) for run in runs])
        slot = torch.cat([torch.arange(run.slot, run.slot + run.tokens, dtype=torch.int32) for run in runs])
        token_of_row = torch.full((rows,), -1, dtype=torch.int32)
        token_of_row[row] = torch.arange(len(row), dtype=torch.int32)
        # One copy to the device instead of three. What kernels read comes first, at addresses that do not depend on the
        # number of tokens: Triton compiles a kernel anew for arguments that are aligned otherwise.
        on_device = torch.cat((token_of_row, slot, row)).to(device)
        token_of_row, slot, row = on_device.split((rows, len(slot), len(row)))
        return cls(
            row,
            slot,
            token_of_row,
            row_span=_span([(run.row, run.tokens) for run in runs]),
            slot_span=_span([(run.slot, run.tokens) for run in runs]),
        )

    @property
    def tokens(self) -> int:
        """How many tokens are moved."""
        return len(self.rows)


def _span(pieces: Sequence[tuple[int, int]]) -> slice | None:
    """Pieces (start, length) as one slice, if each starts where the one before ends."""
    start = end = pieces[0][0]
    for first, length in pieces:
        if first != end:
            return None
        end += length
    return slice(start, end)
