"""Keys and values before RoPE: decode, rotate, store, in one pass over memory.

Nothing is computed here but a few products, so memory bandwidth is the bound: with int8, 1 byte read and 2 written
per value. A program takes 32 rows (the height of a tile of keys) of one head, keys first, then values; with heads of
up to 64 values 64 rows. That makes 4 warps load 16 bytes per thread and half head, and takes so few registers that
seven programs or more share a multiprocessor: their loads overlap, hence no pipelined loop. Both halves of a head are
in the same program and even in the same thread, so RoPE exchanges nothing between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ragcache.restore.kernels.decode import decode
from ragcache.restore.kernels.heads import load_angles, pair_columns, rotate, store_pairs
from ragcache.restore.kernels.launch import Launch, angle_arguments, head_constants, strides
from ragcache.restore.rope import RopeShape
from ragcache.states.encoded import Encoded, Moves


def restore_pre_rope_kv(
    keys: Encoded,
    values: Encoded,
    rope: RopeShape | None,
    tables: tuple[Tensor, Tensor] | None,
    moves: Moves,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Write keys and values that are stored before RoPE to their slots.

    The same as `ragcache.restore.twins.restore_pre_rope_kv`, on a GPU, without waiting for it.
    """
    launch(keys, values, rope, tables, moves, out_keys, out_values).run()


def launch(
    keys: Encoded,
    values: Encoded,
    rope: RopeShape | None,
    tables: tuple[Tensor, Tensor] | None,
    moves: Moves,
    out_keys: Tensor,
    out_values: Tensor,
) -> Launch:
    """What `restore_pre_rope_kv` runs."""
    kv_heads, _, head_dim = out_keys.shape
    rows = 64 if head_dim <= 64 else 32
    return Launch(
        kernel=restore_pre_rope_kv_kernel,
        grid=(triton.cdiv(keys.rows, rows), kv_heads),
        arguments={
            "keys": keys.payload,
            "key_scales": keys.scales,
            "key_minima": keys.minima,
            "values": values.payload,
            "value_scales": values.scales,
            "value_minima": values.minima,
            **angle_arguments(tables),
            "token_of_row": moves.token_of_row,
            "slots": moves.slots,
            "out_keys": out_keys,
            "out_values": out_values,
            "row_count": keys.rows,
            **strides("key", out_keys),
            **strides("value", out_values),
        },
        constants={
            "KV_HEADS": kv_heads,
            **head_constants(head_dim, rope),
            "ROWS": rows,
            "KEY_TILE_TOKENS": keys.tile_tokens,
            "KEY_TILE_WIDTH": keys.tile_width,
            "VALUE_TILE_TOKENS": values.tile_tokens,
            "VALUE_TILE_WIDTH": values.tile_width,
        },
        num_warps=4,
    )


@triton.jit(do_not_specialize=["row_count"])
def restore_pre_rope_kv_kernel(
    keys,
    key_scales,
    key_minima,
    values,
    value_scales,
    value_minima,
    cos,
    sin,
    token_of_row,
    slots,
    out_keys,
    out_values,
    row_count,
    key_head_stride,
    key_slot_stride,
    key_value_stride,
    value_head_stride,
    value_slot_stride,
    value_value_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TILE_TOKENS: tl.constexpr,
    KEY_TILE_WIDTH: tl.constexpr,
    VALUE_TILE_TOKENS: tl.constexpr,
    VALUE_TILE_WIDTH: tl.constexpr,
):
    """Keys and values of `ROWS` rows and one head."""
    dtype: tl.constexpr = out_keys.dtype.element_ty
    width: tl.constexpr = KV_HEADS * HEAD_DIM
    start = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    rows = start + tl.arange(0, ROWS)
    tokens = tl.load(token_of_row + rows, mask=rows < row_count, other=-1)
    moved = tokens >= 0
    slot = tl.load(slots + tokens, mask=moved, other=0).to(tl.int64)
    heads = head + tl.arange(0, 1)
    pairs = tl.arange(0, PAIRS)

    first, second = _decode_pairs(
        keys, key_scales, key_minima, start, row_count, head, pairs,
        width, HEAD_DIM, ROTARY_DIM, INTERLEAVED, ROWS, KEY_TILE_TOKENS, KEY_TILE_WIDTH, dtype,
    )  # fmt: skip
    if cos is not None:
        cosines, sines = load_angles(cos, sin, tokens, pairs, ROTARY_DIM)
        first, second = rotate(first, second, cosines, sines, dtype)
    store_pairs(
        first[:, None, :], second[:, None, :], out_keys, slot, moved, heads, pairs,
        key_head_stride, key_slot_stride, key_value_stride, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip

    first, second = _decode_pairs(
        values, value_scales, value_minima, start, row_count, head, pairs,
        width, HEAD_DIM, ROTARY_DIM, INTERLEAVED, ROWS, VALUE_TILE_TOKENS, VALUE_TILE_WIDTH, dtype,
    )  # fmt: skip
    store_pairs(
        first[:, None, :], second[:, None, :], out_values, slot, moved, heads, pairs,
        value_head_stride, value_slot_stride, value_value_stride, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _decode_pairs(
    payload,
    scales,
    minima,
    start,
    row_count,
    head,
    pairs,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Both values of each pair, `[ROWS, pairs]`, rounded to the model's dtype, in float32."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * pairs.shape[0])
        both = decode(
            payload, scales, minima, start, row_count, head * HEAD_DIM + columns, columns < HEAD_DIM,
            WIDTH, ROWS, TILE_TOKENS, TILE_WIDTH,
        )  # fmt: skip
        first, second = tl.split(tl.reshape(both, (ROWS, pairs.shape[0], 2)))
    else:
        mask = pairs < HEAD_DIM // 2
        first_columns, second_columns = pair_columns(pairs, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
        first = decode(
            payload, scales, minima, start, row_count, head * HEAD_DIM + first_columns, mask,
            WIDTH, ROWS, TILE_TOKENS, TILE_WIDTH,
        )  # fmt: skip
        second = decode(
            payload, scales, minima, start, row_count, head * HEAD_DIM + second_columns, mask,
            WIDTH, ROWS, TILE_TOKENS, TILE_WIDTH,
        )  # fmt: skip
    return first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
