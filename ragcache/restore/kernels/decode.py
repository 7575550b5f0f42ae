"""Decoding within a kernel: a block of rows of `Encoded`, some of their columns.

Which codec it is, Triton knows when it compiles, and so decides each `if` here; but it compiles whatever follows a
`return` on the same level, hence every `else`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(
    payload,
    scales,
    minima,
    start,
    row_count,
    columns,
    mask,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """Values `[ROWS, columns]`, as they are stored if that is floating point, else float32.

    Rows behind the last one repeat it. That spares the loads a mask, and nobody wants those rows.

    Args:
        payload: of `Encoded`.
        scales: of `Encoded`; None for floating-point payloads.
        minima: of `Encoded`; None but for int4.
        start: first row; a multiple of `ROWS`.
        row_count: rows of `Encoded`.
        columns: `[columns]` int32.
        mask: `[columns]`, which of them exist; None for all.
        WIDTH: columns of `Encoded`.
        ROWS: a multiple of `TILE_TOKENS`.
        TILE_TOKENS: of `Encoded`.
        TILE_WIDTH: of `Encoded`.
    """
    rows = tl.minimum(start + tl.arange(0, ROWS), row_count - 1).to(tl.int64)
    # Two int4 rows share their bytes. Each loads them for itself, the second time from a cache: shuffling rows between
    # threads would cost more than the loads.
    lines = rows // 2 if minima is not None else rows
    stored = _load(payload + lines[:, None] * WIDTH + columns[None, :], mask)
    if scales is None:
        return stored
    else:
        scale = _of_tiles(scales, start, row_count, rows, columns, mask, WIDTH, ROWS, TILE_TOKENS, TILE_WIDTH)
        if minima is None:
            return stored.to(tl.float32) * scale
        else:
            integers = (stored.to(tl.int32) >> ((rows & 1) * 4).to(tl.int32)[:, None]) & 15
            minimum = _of_tiles(minima, start, row_count, rows, columns, mask, WIDTH, ROWS, TILE_TOKENS, TILE_WIDTH)
            return minimum + integers.to(tl.float32) * scale


@triton.jit
def _of_tiles(
    plane,
    start,
    row_count,
    rows,
    columns,
    mask,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """A number for each tile, float32, repeated for the tile's values, `[ROWS, columns]`."""
    if TILE_TOKENS == 1:
        across: tl.constexpr = (WIDTH + TILE_WIDTH - 1) // TILE_WIDTH
        return _load(plane + rows[:, None] * across + (columns // TILE_WIDTH)[None, :], mask).to(tl.float32)
    else:
        # Blocks start where tiles do, so one load per tile and column is enough, and repeating happens in registers.
        down: tl.constexpr = ROWS // TILE_TOKENS
        tiles = tl.minimum(start // TILE_TOKENS + tl.arange(0, down), row_count // TILE_TOKENS - 1).to(tl.int64)
        numbers = _load(plane + tiles[:, None] * WIDTH + columns[None, :], mask).to(tl.float32)
        repeated = tl.broadcast_to(numbers[:, None, :], (down, TILE_TOKENS, columns.shape[0]))
        return tl.reshape(repeated, (ROWS, columns.shape[0]))


@triton.jit
def _load(pointers, mask):
    """`[rows, columns]`; 0 in columns that do not exist."""
    if mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask[None, :], other=0)
