"""Heads within a kernel, as pairs of values: RoPE and the store into the KV cache.

A head of `HEAD_DIM` values is handled as two halves of a block, *first* and *second*, so that the two values that
RoPE rotates with each other sit at the same place of the two. Values that pass through are paired too, and rotated by
an angle of 0, which changes no bit of them. That makes whole, partial, interleaved and no RoPE, and values as well as
keys, one and the same code. `PAIRS` is `HEAD_DIM / 2` rounded up to a power of two; the pairs beyond are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_columns(pairs, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where in a head the two values of each pair are; pairs that pass through come after the rotated ones."""
    half: tl.constexpr = ROTARY_DIM // 2
    rest: tl.constexpr = HEAD_DIM // 2 - half
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    elif rest == 0:
        first, second = pairs, pairs + half
    else:
        first = tl.where(pairs < half, pairs, pairs + half)
        second = tl.where(pairs < half, pairs + half, pairs + half + rest)
    return first, second


@triton.jit
def load_angles(cos, sin, tokens, pairs, ROTARY_DIM: tl.constexpr):
    """Cosines and sines, `[tokens, pairs]`, of the tables; 1 and 0 where nothing is rotated."""
    half: tl.constexpr = ROTARY_DIM // 2
    at = tokens[:, None] * half + pairs[None, :]
    mask = (tokens >= 0)[:, None] & (pairs < half)[None, :]
    return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def rotate(first, second, cosines, sines, DTYPE: tl.constexpr):
    """RoPE of pairs in float32; one product is rounded to the model's dtype before the other is added, as in torch."""
    cosines, sines = cosines.to(tl.float32), sines.to(tl.float32)
    rotated_first = (first * cosines).to(DTYPE).to(tl.float32) - second * sines
    rotated_second = (second * cosines).to(DTYPE).to(tl.float32) + first * sines
    return rotated_first, rotated_second


@triton.jit
def store_pairs(
    first,
    second,
    out,
    slots,
    mask,
    heads,
    pairs,
    head_stride,
    slot_stride,
    value_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write pairs `[rows, heads, pairs]` to a layer of a KV cache.

    Args:
        first: the first value of each pair.
        second: the second.
        out: `[kv_heads, capacity, head_dim]`.
        slots: `[rows]` int64.
        mask: `[rows]`, which rows to write.
        heads: `[heads]`.
        pairs: `[pairs]`.
        head_stride: of `out`.
        slot_stride: of `out`.
        value_stride: of `out`.
        HEAD_DIM: values of a head.
        ROTARY_DIM: as for `pair_columns`.
        INTERLEAVED: as for `pair_columns`.
    """
    dtype = out.dtype.element_ty
    lines = slots[:, None, None] * slot_stride + heads.to(tl.int64)[None, :, None] * head_stride
    if INTERLEAVED:
        # Neighbours in memory are written together.
        joined = tl.join(first.to(dtype), second.to(dtype))
        columns = tl.arange(0, 2 * pairs.shape[0])
        joined = tl.reshape(joined, (slots.shape[0], heads.shape[0], 2 * pairs.shape[0]))
        inside = mask[:, None, None] & (columns < HEAD_DIM)[None, None, :]
        tl.store(out + lines + columns[None, None, :] * value_stride, joined, mask=inside)
    else:
        first_columns, second_columns = pair_columns(pairs, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        inside = mask[:, None, None] & (pairs < HEAD_DIM // 2)[None, None, :]
        tl.store(out + lines + first_columns[None, None, :] * value_stride, first.to(dtype), mask=inside)
        tl.store(out + lines + second_columns[None, None, :] * value_stride, second.to(dtype), mask=inside)
