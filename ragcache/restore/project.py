"""From a layer's hidden states to what is stored of them, and from that to its KV.

`hidden` states are stored as they are and projected when they are restored; `pre_rope_kv` are projected before they are
stored. Either way the projection is the model's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache.model.attention import AttentionLayer
from ragcache.model.language_model import LanguageModel
from ragcache.settings import CodecName, StatesName
from ragcache.states.form import Form, LayerFormat, StateFormat


def state_format(model: LanguageModel, states: StatesName, codec: CodecName) -> StateFormat:
    """How a model's states are stored.

    Args:
        model: the model.
        states: the form; `auto` takes for each layer the one of fewer bytes, and of equals the one that is ready
            without a projection.
        codec: of all layers.

    Returns:
        A format whose first layer is of form `tokens`: its input follows from the token ids.
    """
    dtype = model.fingerprint.dtype
    layers = [LayerFormat(Form.TOKENS, 0, codec)]
    for layer in model.decoder.layers[1:]:
        widths = _widths(layer, model.decoder.hidden_size)
        wanted = widths if states == "auto" else [Form(states.replace("-", "_"))]
        choices = [LayerFormat(form, widths[form], codec) for form in wanted]
        layers.append(min(choices, key=lambda it: StateFormat(dtype, (it,)).bytes_per_token))
    return StateFormat(dtype, tuple(layers))


def fits(format: StateFormat, model: LanguageModel) -> bool:
    """Whether states of a format can be restored by a model."""
    return (
        format.dtype == model.fingerprint.dtype
        and len(format.layers) == len(model.decoder.layers)
        and format.layers[0].form is Form.TOKENS
        and all(
            _widths(layer, model.decoder.hidden_size).get(it.form) == it.width
            for it, layer in zip(format.layers[1:], model.decoder.layers[1:], strict=True)
        )
    )


def _widths(layer: AttentionLayer, hidden_size: int) -> dict[Form, int]:
    """Values per token and part of each form, those that need no projection first."""
    return {Form.PRE_ROPE_KV: layer.kv_heads * layer.head_dim, Form.HIDDEN: hidden_size}


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


def to_kv(
    form: Form, layer: AttentionLayer, states: Tensor, tables: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
) -> None:
    """Write the KV of a layer to their place in a cache.

    Args:
        form: `hidden` or `pre_rope_kv`.
        layer: the layer.
        states: as from `to_states`, `[parts, tokens, width]`.
        tables: cosines and sines of the tokens' positions.
        keys: receives the rotated keys, `[kv_heads, tokens, head_dim]`, any strides.
        values: receives the values, likewise.
    """
    if form is Form.HIDDEN:
        layer.restore(states[0], tables, keys, values)
        return
    shape = (states.shape[1], layer.kv_heads, layer.head_dim)
    layer.place(states[0].view(shape), states[1].view(shape), tables, keys, values)
