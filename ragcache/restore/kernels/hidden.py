"""Hidden states: decode, project to keys and values, normalise, rotate, store, without anything in between in memory.

A program takes 128 rows and some whole heads, all of them keys or all of them values. Whole heads, because K norm and
RoPE need all of a head; 128 rows and up to 256 columns, because with less the weights would have to come from the L2
cache faster than it gives them: 128 x 256 bfloat16 products per 64 values of depth take 1024 clocks of an H100's
tensor cores and need 32 KiB of weights and 8 KiB of int8 states, 40 bytes a clock. Every column block decodes the
same states again, which also speaks for wide ones: decoding costs the ordinary cores about 200 clocks per 64 values
of depth. Sums are 128 registers a thread with 8 warps, two warpgroups of 64 rows each on Hopper; states are decoded in
registers and go from there into the matrix instruction. Three blocks of weights and states are in flight.

Where that makes fewer programs than there are multiprocessors, and on GPUs of less shared memory, whose matrix
instructions are slower too, column blocks are half as wide. Heads of more than 128 values and float32, which takes
three times the operands, have 64 rows: with more, registers spill. These are sums on paper and what the compiler
says; `make gpu-check` measures.

Programs of the same rows follow one another, so the states come from memory once and the weights (Llama-3.1-8B: 16
MiB a layer) stay in the L2 cache. Rows of the weights are taken pair by pair (`ragcache.restore.kernels.heads`), so
the two values that RoPE rotates with each other are neighbours in the registers of one thread, whatever the family.

A norm over all heads of a token (OLMo-2) cannot be had within a program: there, keys are stored as projected, and a
second kernel normalises and rotates them where they are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ragcache.model.attention import KeyNorm
from ragcache.restore.kernels import key_norm as over_heads
from ragcache.restore.kernels.decode import decode
from ragcache.restore.kernels.heads import load_angles, pair_columns, rotate, store_pairs
from ragcache.restore.kernels.key_norm import norm_weights, normalise
from ragcache.restore.kernels.launch import Gpu, Launch, angle_arguments, head_constants, strides
from ragcache.restore.rope import RopeShape
from ragcache.states.encoded import Encoded, Moves

WIDE_BLOCK = 200 * 1024
"""Shared memory, in bytes, of GPUs that blocks of 256 columns are for: data-centre GPUs since Hopper."""


def restore_hidden(
    hidden: Encoded,
    weight: Tensor,
    bias: Tensor | None,
    key_norm: KeyNorm | None,
    rope: RopeShape | None,
    tables: tuple[Tensor, Tensor] | None,
    moves: Moves,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """Project hidden states to keys and values, and write them to their slots (HCache, EuroSys'25, section 3.2).

    The same as `ragcache.restore.twins.restore_hidden`, on a GPU, without waiting for it.
    """
    gpu = Gpu.of(weight.device)
    for launch in launches(hidden, weight, bias, key_norm, rope, tables, moves, out_keys, out_values, gpu):
        launch.run()


def launches(
    hidden: Encoded,
    weight: Tensor,
    bias: Tensor | None,
    key_norm: KeyNorm | None,
    rope: RopeShape | None,
    tables: tuple[Tensor, Tensor] | None,
    moves: Moves,
    out_keys: Tensor,
    out_values: Tensor,
    gpu: Gpu,
) -> list[Launch]:
    """What `restore_hidden` runs: one kernel, and a second one for a K norm over all heads.

    Raises:
        ValueError: `weight` is not contiguous.
    """
    if not weight.is_contiguous():
        raise ValueError("the weight of keys and values has to be contiguous")
    if key_norm is not None and key_norm.over_heads:
        project = _project(hidden, weight, bias, None, rope, None, moves, out_keys, out_values, gpu)
        return [project, over_heads.launch(key_norm, rope, tables, moves, out_keys)]
    return [_project(hidden, weight, bias, key_norm, rope, tables, moves, out_keys, out_values, gpu)]


def _project(
    hidden: Encoded,
    weight: Tensor,
    bias: Tensor | None,
    key_norm: KeyNorm | None,
    rope: RopeShape | None,
    tables: tuple[Tensor, Tensor] | None,
    moves: Moves,
    out_keys: Tensor,
    out_values: Tensor,
    gpu: Gpu,
) -> Launch:
    kv_heads, _, head_dim = out_keys.shape
    block = _block(hidden.rows, kv_heads, head_dim, weight.dtype, gpu)
    return Launch(
        kernel=restore_hidden_kernel,
        grid=(2 * kv_heads // block["HEADS"], triton.cdiv(hidden.rows, block["ROWS"])),
        arguments={
            "hidden": hidden.payload,
            "scales": hidden.scales,
            "minima": hidden.minima,
            "weight": weight,
            "bias": bias,
            "norm_weight": None if key_norm is None else key_norm.weight,
            "norm_eps": 0.0 if key_norm is None else key_norm.eps,
            **angle_arguments(tables),
            "token_of_row": moves.token_of_row,
            "slots": moves.slots,
            "out_keys": out_keys,
            "out_values": out_values,
            "row_count": hidden.rows,
            **strides("key", out_keys),
            **strides("value", out_values),
        },
        constants={
            "HIDDEN_SIZE": hidden.width,
            "KV_HEADS": kv_heads,
            **head_constants(head_dim, rope),
            **block,
            "TILE_TOKENS": hidden.tile_tokens,
            "TILE_WIDTH": hidden.tile_width,
            "NORM_EACH_HEAD": key_norm is not None and key_norm.weight.numel() > head_dim,
            "NORM_CENTRED": key_norm is not None and key_norm.centred,
            # NumPy, which the interpreter computes with, knows no bfloat16.
            "WIDEN": bool(knobs.runtime.interpret),
        },
        num_warps=8 if head_dim <= 256 else 16,
        num_stages=3 if head_dim <= 256 else 2,
    )


def _block(rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, gpu: Gpu) -> dict[str, Any]:
    """Rows, heads and depth of a program's block; see the beginning of this file."""
    columns = triton.next_power_of_2(head_dim)
    narrow = dtype.itemsize == 2
    rows_of_block = 128 if narrow and columns < 256 else 64
    widest = 256 if narrow and gpu.shared_memory >= WIDE_BLOCK else 128

    def heads(widest: int) -> int:
        count = 1
        while 2 * count * columns <= widest and kv_heads % (2 * count) == 0:
            count *= 2
        return count

    programs = triton.cdiv(rows, rows_of_block) * 2 * kv_heads // heads(widest)
    return {
        "ROWS": rows_of_block,
        "HEADS": heads(widest if programs >= gpu.multiprocessors else 128),
        "DEPTH": 64 if narrow and columns <= 256 else 32,
    }


@triton.jit(do_not_specialize=["row_count"])
def restore_hidden_kernel(
    hidden,
    scales,
    minima,
    weight,
    bias,
    norm_weight,
    norm_eps,
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
    HIDDEN_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    NORM_EACH_HEAD: tl.constexpr,
    NORM_CENTRED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Keys or values of `ROWS` rows and `HEADS` heads, the values' heads numbered behind those of the keys."""
    dtype: tl.constexpr = out_keys.dtype.element_ty
    first_head = tl.program_id(0) * HEADS
    start = tl.program_id(1) * ROWS

    # Column 2i of the products is the first value of pair i, column 2i + 1 the second, head after head.
    columns = tl.arange(0, HEADS * PAIRS * 2)
    pair = columns // 2 % PAIRS
    first_columns, second_columns = pair_columns(pair, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    column = tl.where(columns % 2 == 0, first_columns, second_columns)
    # Columns of no pair take the head's first: some row of the weights that there is, so that no mask is needed.
    column = tl.where(pair < HEAD_DIM // 2, column, 0)
    lines = (first_head + columns // (2 * PAIRS)) * HEAD_DIM + column

    sums = tl.zeros((ROWS, HEADS * PAIRS * 2), tl.float32)
    for depth in range(0, HIDDEN_SIZE, DEPTH):
        inner = depth + tl.arange(0, DEPTH)
        weights_at = weight + lines.to(tl.int64)[:, None] * HIDDEN_SIZE + inner[None, :]
        if HIDDEN_SIZE % DEPTH == 0:
            weights = tl.load(weights_at)
            states = decode(
                hidden, scales, minima, start, row_count, inner, None, HIDDEN_SIZE, ROWS, TILE_TOKENS, TILE_WIDTH
            ).to(dtype)
        else:
            inside = inner < HIDDEN_SIZE
            weights = tl.load(weights_at, mask=inside[None, :], other=0)
            states = decode(
                hidden, scales, minima, start, row_count, inner, inside, HIDDEN_SIZE, ROWS, TILE_TOKENS, TILE_WIDTH
            ).to(dtype)
        if WIDEN:
            states, weights = states.to(tl.float32), weights.to(tl.float32)
        # float32 in three passes of TF32: as exact as float32, and on the tensor cores.
        sums = tl.dot(states, tl.trans(weights), sums, input_precision="tf32x3")
    if bias is not None:
        sums += tl.load(bias + lines)[None, :].to(tl.float32)

    # Rounded as the output of a linear layer is.
    first, second = tl.split(tl.reshape(sums.to(dtype), (ROWS, HEADS, PAIRS, 2)))
    rows = start + tl.arange(0, ROWS)
    tokens = tl.load(token_of_row + rows, mask=rows < row_count, other=-1)
    moved = tokens >= 0
    slot = tl.load(slots + tokens, mask=moved, other=0).to(tl.int64)
    heads = first_head + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    if first_head < KV_HEADS:
        first_keys, second_keys = first.to(tl.float32), second.to(tl.float32)
        if norm_weight is not None:
            first_weights, second_weights = norm_weights(
                norm_weight, heads, pairs, HEAD_DIM, ROTARY_DIM, INTERLEAVED, NORM_EACH_HEAD
            )
            first_keys, second_keys = normalise(
                first_keys, second_keys, first_weights, second_weights, norm_eps, pairs, HEAD_DIM, NORM_CENTRED, dtype
            )
        if cos is not None:
            cosines, sines = load_angles(cos, sin, tokens, pairs, ROTARY_DIM)
            first_keys, second_keys = rotate(first_keys, second_keys, cosines[:, None, :], sines[:, None, :], dtype)
        store_pairs(
            first_keys, second_keys, out_keys, slot, moved, heads, pairs,
            key_head_stride, key_slot_stride, key_value_stride, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
    else:
        store_pairs(
            first, second, out_values, slot, moved, heads - KV_HEADS, pairs,
            value_head_stride, value_slot_stride, value_value_stride, HEAD_DIM, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
