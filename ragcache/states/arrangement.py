"""Where the states of several chunks lie in one buffer, so that they can be decoded in one go.

On disk a layer of a chunk is one run of bytes, plane after plane. In memory the planes of all chunks lie side by side.
A positioned read scatters a chunk's run to its places in the planes of the buffer (`preadv`), so nothing is copied in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.states.codec import PLANE_ALIGNMENT, Codec, Plane, aligned
from ragcache.states.encoded import ROW_ALIGNMENT, Encoded


@dataclass(frozen=True)
class _PlacedPlane:
    """A plane of all chunks.

    Attributes:
        plane: what it holds.
        start: first byte of it in the buffer.
        last: whether it ends its part's run on disk, so that no padding follows.
    """

    plane: Plane
    start: int
    last: bool


class Arrangement:
    """The places of one layer's states in a buffer.

    Attributes:
        starts: row at which each chunk starts.
        places: for each chunk, where consecutive pieces of its run of bytes go in the buffer.
        rows: of all chunks.
        size: bytes of the buffer.
    """

    def __init__(self, codecs: Sequence[Codec], width: int, lengths: Sequence[int]) -> None:
        """Lay out.

        Args:
            codecs: of the layer's parts.
            width: values per token and part.
            lengths: tokens of each chunk.
        """
        self._codecs = codecs
        self._width = width
        self.starts: list[int] = []
        self.rows = 0
        for tokens in lengths:
            self.starts.append(self.rows)
            self.rows += -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self._parts: list[list[_PlacedPlane]] = []
        # What a plane is padded with on disk is read too, since the run's checksum covers it; for each chunk to a place
        # of its own, since chunks are read at the same time.
        self.size = PLANE_ALIGNMENT * len(lengths)
        for codec in codecs:
            planes = codec.planes(width)
            self._parts.append([])
            for index, plane in enumerate(planes):
                self._parts[-1].append(_PlacedPlane(plane, self.size, last=index == len(planes) - 1))
                self.size += aligned(plane.size(self.rows))

        self.places = [self._places(index, tokens) for index, tokens in enumerate(lengths)]

    def _places(self, index: int, tokens: int) -> list[slice]:
        places, row, waste = [], self.starts[index], index * PLANE_ALIGNMENT
        for part in self._parts:
            for it in part:
                start, size = it.start + it.plane.size(row), it.plane.size(tokens)
                places.append(slice(start, start + size))
                if not it.last and (padding := aligned(size) - size):
                    places.append(slice(waste, waste + padding))
        return places

    def encoded(self, buffer: Tensor) -> list[Encoded]:
        """The states in a buffer, one for each part.

        Args:
            buffer: `[at least size]` uint8, aligned to 4 bytes.
        """
        return [
            codec.encoded([self._view(buffer, it) for it in part])
            for codec, part in zip(self._codecs, self._parts, strict=True)
        ]

    def loaded(self, runs: Sequence[Tensor]) -> list[Encoded]:
        """The states of chunks given as one run of uint8 each, as they are on disk."""
        buffer = torch.zeros(self.size, dtype=torch.uint8, device=runs[0].device)
        for run, places in zip(runs, self.places, strict=True):
            start = 0
            for place in places:
                end = start + place.stop - place.start
                buffer[place] = run[start:end]
                start = end
        return self.encoded(buffer)

    def _view(self, buffer: Tensor, it: _PlacedPlane) -> Tensor:
        data = buffer[it.start : it.start + it.plane.size(self.rows)]
        return data.view(it.plane.dtype).view(-1, it.plane.columns)


def decode(codec: Codec, data: Tensor, out: Tensor) -> None:
    """Decode one part of one layer of one chunk.

    Args:
        codec: that encoded it.
        data: `[codec.size(tokens, width)]` uint8.
        out: `[tokens, width]`, of any floating-point dtype; receives the values.
    """
    tokens, width = out.shape
    (encoded,) = Arrangement([codec], width, [tokens]).loaded([data])
    rows = torch.empty(encoded.rows, width, dtype=out.dtype, device=out.device)
    encoded.decode(rows)
    out.copy_(rows[:tokens])
