"""Formats of states without a model."""

from __future__ import annotations

from ragcache.states.form import Form, LayerFormat, StateFormat


def hidden_format(layers: int, width: int, codec: str, dtype: str) -> StateFormat:
    """Hidden states for every layer but the first."""
    return StateFormat(
        dtype, (LayerFormat(Form.TOKENS, 0, codec), *[LayerFormat(Form.HIDDEN, width, codec)] * (layers - 1))
    )


def mixed_format(codec: str, dtype: str) -> StateFormat:
    """A layer of each form, of odd widths."""
    kv = LayerFormat(Form.PRE_ROPE_KV, 33, codec)
    return StateFormat(dtype, (LayerFormat(Form.TOKENS, 0, codec), LayerFormat(Form.HIDDEN, 70, codec), kv))
