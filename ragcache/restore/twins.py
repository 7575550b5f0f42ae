"""Restoring in plain torch: the way on CPUs, and what the kernels of `ragcache.restore.kernels` are compared with.

Both write the same numbers but for the order of sums. Values are decoded to the model's dtype; keys are projected in
it, normalised in float32, rounded to it, and rotated in it as `ragcache.model.attention` does.

All chunks are handled at once: rows between chunks are decoded like any others, since finding them would cost more,
and are left out before anything is projected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.model.attention import KeyNorm, Tables, rotate
from ragcache.restore.rope import RopeShape
from ragcache.restore.workspace import Workspace
from ragcache.states.encoded import Encoded, Moves


class Twins:
    """Restores in plain torch, in memory that is kept."""

    def __init__(self, workspace: Workspace | None = None) -> None:
        self._workspace = workspace or Workspace()

    def restore_pre_rope_kv(
        self,
        keys: Encoded,
        values: Encoded,
        rope: RopeShape | None,
        tables: Tables | None,
        moves: Moves,
        out_keys: Tensor,
        out_values: Tensor,
    ) -> None:
        """Write keys and values that are stored before RoPE to their slots.

        Args:
            keys: before RoPE, after the K norm; width `kv_heads * head_dim`.
            values: likewise.
            rope: None for a layer without RoPE.
            tables: cosines and sines, each `[tokens, rotary_dim // 2]`, in the order of `moves`; None without RoPE.
            moves: from rows to slots.
            out_keys: a layer of a KV cache, `[kv_heads, capacity, head_dim]`, any strides, in the model's dtype. Slots
                that nothing moves to are left as they are.
            out_values: likewise.
        """
        kv_heads, _, head_dim = out_keys.shape
        heads = (moves.tokens, kv_heads, head_dim)
        self._place_keys(self._decoded(keys, moves, out_keys.dtype).view(heads), rope, tables, moves, out_keys)
        _place(self._decoded(values, moves, out_values.dtype).view(heads), moves, out_values)

    def restore_hidden(
        self,
        hidden: Encoded,
        weight: Tensor,
        bias: Tensor | None,
        key_norm: KeyNorm | None,
        rope: RopeShape | None,
        tables: Tables | None,
        moves: Moves,
        out_keys: Tensor,
        out_values: Tensor,
    ) -> None:
        """Project hidden states to keys and values, and write them to their slots (HCache, EuroSys'25, section 3.2).

        Args:
            hidden: the attention's input; width `hidden_size`.
            weight: `[2 * kv_heads * head_dim, hidden_size]`, rows of the keys first, in the model's dtype.
            bias: `[2 * kv_heads * head_dim]`, if the projections have one.
            key_norm: norm of projected keys, if the family has one.
            rope: None for a layer without RoPE.
            tables: cosines and sines, each `[tokens, rotary_dim // 2]`, in the order of `moves`; None without RoPE.
            moves: from rows to slots.
            out_keys: a layer of a KV cache, `[kv_heads, capacity, head_dim]`, any strides, in the model's dtype. Slots
                that nothing moves to are left as they are.
            out_values: likewise.
        """
        kv_heads, _, head_dim = out_keys.shape
        rows = self._decoded(hidden, moves, weight.dtype)
        projected = self._workspace.take("projected", (moves.tokens, len(weight)), weight.dtype, weight.device)
        if bias is None:
            torch.mm(rows, weight.t(), out=projected)
        else:
            torch.addmm(bias, rows, weight.t(), out=projected)
        keys, values = projected.view(moves.tokens, 2, kv_heads, head_dim).unbind(1)
        if key_norm is not None:
            keys = key_norm.normalise(keys)
        self._place_keys(keys, rope, tables, moves, out_keys)
        _place(values, moves, out_values)

    def _decoded(self, encoded: Encoded, moves: Moves, dtype: torch.dtype) -> Tensor:
        """The rows that are moved, `[tokens, width]`, in the order of the tokens."""
        device = encoded.payload.device
        if encoded.scales is None and encoded.payload.dtype == dtype:
            rows = encoded.payload
        else:
            rows = self._workspace.take("decoded", (encoded.rows, encoded.width), dtype, device)
            encoded.decode(rows)
        if moves.row_span is not None:
            return rows[moves.row_span]
        picked = self._workspace.take("picked", (moves.tokens, encoded.width), dtype, device)
        return torch.index_select(rows, 0, moves.rows, out=picked)

    def _place_keys(
        self, keys: Tensor, rope: RopeShape | None, tables: Tables | None, moves: Moves, out: Tensor
    ) -> None:
        """Rotate keys `[tokens, kv_heads, head_dim]` and write them to their slots."""
        if rope is None or tables is None:
            _place(keys, moves, out)
            return
        if moves.slot_span is not None:
            target = out[:, moves.slot_span].transpose(0, 1)
        else:
            target = self._workspace.take("rotated", tuple(keys.shape), keys.dtype, keys.device)
        rotate(keys, tables, target, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved)
        if moves.slot_span is None:
            _place(target, moves, out)


def _place(heads: Tensor, moves: Moves, out: Tensor) -> None:
    """Write `[tokens, kv_heads, head_dim]` to their slots of `[kv_heads, capacity, head_dim]`."""
    if moves.slot_span is not None:
        out[:, moves.slot_span].transpose(0, 1).copy_(heads)
    else:
        out.transpose(0, 1).index_copy_(0, moves.slots.long(), heads)
