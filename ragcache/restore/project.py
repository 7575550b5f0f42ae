"""From a layer's hidden states to what is stored of them, and from that to its KV.

`hidden` states are stored as they are and projected when they are restored; `pre_rope_kv` are projected before they are
stored. Either way the projection is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.model.attention import AttentionLayer, Tables
from ragcache.restore.backend import Implementation
from ragcache.states.encoded import Encoded, Moves
from ragcache.states.form import Form


def to_states(form: Form, layer: AttentionLayer, hidden: Tensor) -> Tensor:
    """What is stored of a layer.

    Args:
        form: `hidden` or `pre_rope_kv`.
        layer: the layer.
        hidden: its attention's normed input, `[tokens, hidden_size]`.

    Returns:
        `[parts, tokens, width]`.
    """
    if form is Form.HIDDEN:
        return hidden[None]
    keys, values = layer.project(hidden)
    return torch.stack((keys.flatten(1), values.flatten(1)))


def write_kv(
    form: Form,
    layer: AttentionLayer,
    parts: Sequence[Encoded],
    tables: Tables | None,
    moves: Moves,
    keys: Tensor,
    values: Tensor,
    implementation: Implementation,
) -> None:
    """Write the KV of a layer to their slots in a cache.

    Args:
        form: `hidden` or `pre_rope_kv`.
        layer: the layer.
        parts: its states, one for each part of the form.
        tables: cosines and sines of the tokens' positions, in the order of `moves`; `None` in a layer without RoPE.
        moves: which row goes to which slot.
        keys: receives the rotated keys, `[kv_heads, capacity, head_dim]`.
        values: receives the values, likewise.
        implementation: of the device (`ragcache.restore.backend`).
    """
    if form is Form.HIDDEN:
        (hidden,) = parts
        implementation.restore_hidden(
            hidden, layer.weight, layer.bias, layer.key_norm, layer.rope, tables, moves, keys, values
        )
    else:
        stored_keys, stored_values = parts
        implementation.restore_pre_rope_kv(stored_keys, stored_values, layer.rope, tables, moves, keys, values)
