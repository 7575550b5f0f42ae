"""K norms: of each head within the projection, and of all heads of a token in a kernel of its own.

The latter (OLMo-2) reads projected keys from their slots in the KV cache, and writes them back normalised and
rotated. A program takes 4 tokens with all their heads, first for the sums, then again, from the L1 cache, for the
rest; a few hundred programs per thousand tokens hide each other's latency.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ragcache.model.attention import KeyNorm
from ragcache.restore.kernels.heads import load_angles, pair_columns, rotate, store_pairs
from ragcache.restore.kernels.launch import Launch, angle_arguments, head_constants, strides
from ragcache.restore.rope import RopeShape
from ragcache.states.encoded import Moves

TOKENS = 4


def launch(
    key_norm: KeyNorm, rope: RopeShape | None, tables: tuple[Tensor, Tensor] | None, moves: Moves, out_keys: Tensor
) -> Launch:
    """Normalise over all heads, and rotate, keys that are in their slots already."""
    kv_heads, _, head_dim = out_keys.shape
    return Launch(
        kernel=normalise_over_heads_kernel,
        grid=(triton.cdiv(moves.tokens, TOKENS),),
        arguments={
            "norm_weight": key_norm.weight,
            "norm_eps": key_norm.eps,
            **angle_arguments(tables),
            "slots": moves.slots,
            "out_keys": out_keys,
            "token_count": moves.tokens,
            **strides("key", out_keys),
        },
        constants={
            "KV_HEADS": kv_heads,
            **head_constants(head_dim, rope),
            "TOKENS": TOKENS,
            "NORM_CENTRED": key_norm.centred,
        },
        num_warps=4,
    )


@triton.jit
def norm_weights(
    weight,
    heads,
    pairs,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EACH_HEAD: tl.constexpr,
):
    """Weights of a norm for both values of each pair, `[1, heads, pairs]`; `EACH_HEAD` may have weights of its own."""
    first_columns, second_columns = pair_columns(pairs, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    at = weight + heads[None, :, None] * (HEAD_DIM if EACH_HEAD else 0)
    mask = (pairs < HEAD_DIM // 2)[None, None, :]
    first = tl.load(at + first_columns[None, None, :], mask=mask, other=0)
    second = tl.load(at + second_columns[None, None, :], mask=mask, other=0)
    return first, second


@triton.jit
def normalise(
    first,
    second,
    first_weights,
    second_weights,
    eps,
    pairs,
    HEAD_DIM: tl.constexpr,
    CENTRED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Norm of each head in float32, `[rows, heads, pairs]` of both values, rounded to the model's dtype."""
    inside = (pairs < HEAD_DIM // 2)[None, None, :]
    first, second = tl.where(inside, first, 0.0), tl.where(inside, second, 0.0)
    if CENTRED:
        mean = tl.sum(first + second, 2, keep_dims=True) / HEAD_DIM
        first, second = tl.where(inside, first - mean, 0.0), tl.where(inside, second - mean, 0.0)
    variance = tl.sum(first * first + second * second, 2, keep_dims=True) / HEAD_DIM
    factor = tl.rsqrt(variance + eps)
    first, second = first * factor * first_weights, second * factor * second_weights
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["token_count"])
def normalise_over_heads_kernel(
    norm_weight,
    norm_eps,
    cos,
    sin,
    slots,
    out_keys,
    token_count,
    key_head_stride,
    key_slot_stride,
    key_value_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM_CENTRED: tl.constexpr,
):
    """All heads of `TOKENS` tokens."""
    dtype: tl.constexpr = out_keys.dtype.element_ty
    width: tl.constexpr = KV_HEADS * HEAD_DIM
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    moved = tokens < token_count
    tokens = tl.where(moved, tokens, -1)
    slot = tl.load(slots + tokens, mask=moved, other=0).to(tl.int64)
    pairs = tl.arange(0, PAIRS)
    first_columns, second_columns = pair_columns(pairs, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    lines = out_keys + slot[:, None] * key_slot_stride
    first_at = lines + first_columns[None, :] * key_value_stride
    second_at = lines + second_columns[None, :] * key_value_stride
    mask = moved[:, None] & (pairs < HEAD_DIM // 2)[None, :]

    # Deviations are summed in a pass of their own: a difference of large sums would lose what matters.
    mean = tl.zeros((TOKENS, 1), tl.float32)
    if NORM_CENTRED:
        for head in range(KV_HEADS):
            offset = tl.cast(head, tl.int64) * key_head_stride
            first = tl.load(first_at + offset, mask=mask, other=0).to(tl.float32)
            second = tl.load(second_at + offset, mask=mask, other=0).to(tl.float32)
            mean += tl.sum(first + second, 1, keep_dims=True)
        mean /= width
    variance = tl.zeros((TOKENS, 1), tl.float32)
    for head in range(KV_HEADS):
        offset = tl.cast(head, tl.int64) * key_head_stride
        first = tl.where(mask, tl.load(first_at + offset, mask=mask, other=0).to(tl.float32) - mean, 0.0)
        second = tl.where(mask, tl.load(second_at + offset, mask=mask, other=0).to(tl.float32) - mean, 0.0)
        variance += tl.sum(first * first + second * second, 1, keep_dims=True)
    factor = tl.rsqrt(variance / width + norm_eps)
    # Threads that compute the same sum for themselves must have read everything before anything is overwritten.
    tl.debug_barrier()

    if cos is not None:
        cosines, sines = load_angles(cos, sin, tokens, pairs, ROTARY_DIM)
    for head in range(KV_HEADS):
        offset = tl.cast(head, tl.int64) * key_head_stride
        heads = head + tl.arange(0, 1)
        first_weights, second_weights = norm_weights(norm_weight, heads, pairs, HEAD_DIM, ROTARY_DIM, INTERLEAVED, True)
        first = tl.load(first_at + offset, mask=mask, other=0).to(tl.float32) - mean
        second = tl.load(second_at + offset, mask=mask, other=0).to(tl.float32) - mean
        first = (first * factor)[:, None, :] * first_weights
        second = (second * factor)[:, None, :] * second_weights
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        if cos is not None:
            first, second = rotate(first, second, cosines[:, None, :], sines[:, None, :], dtype)
        store_pairs(
            first, second, out_keys, slot, moved, heads, pairs,
            key_head_stride, key_slot_stride, key_value_stride, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
