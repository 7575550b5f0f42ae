"""Where a family keeps its attention, and what is refused.

A family that is built as Llama is needs no entry. One that departs from it gets one here that says in what. Nothing
rests on the entry being right: `ragcache.model.certify` measures that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs

from ragcache.errors import UnsupportedModelError
from ragcache.model.attention import AttentionLayer, Decoder, KeyNorm, Rope, angles
from ragcache.model.projections import Heads, Projection, by_head, separate, stacked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SUPPORTED_FAMILIES = "decoder-only models with rotary positions, such as Llama, Qwen, Mistral, Gemma and Phi"


SEPARATE = separate()


@dataclass(frozen=True)
class Family:
    """How a family's attention is built; the defaults are Llama's.

    Attributes:
        attention: a layer's attribute for its attention.
        head_dim: the attention's attribute for the width of a head.
        projection: how it keeps the rows for keys and values.
        key_norm: its attribute for the norm of keys, where there is one.
        norm_offset: added to the weight of that norm.
        norm_centred: whether that norm subtracts the mean.
        interleaved: whether RoPE turns neighbouring values together.
        tables_interleaved: whether its cosines and sines come for neighbouring values.
        has_rope: whether an attention rotates its keys at all.
    """

    attention: str = "self_attn"
    head_dim: str = "head_dim"
    projection: Projection = SEPARATE
    key_norm: str = "k_norm"
    norm_offset: float = 0.0
    norm_centred: bool = False
    interleaved: bool = False
    tables_interleaved: bool = False
    has_rope: Callable[[Any], bool] = lambda attention: True


FAMILIES = {
    "cohere": Family(norm_centred=True, interleaved=True, tables_interleaved=True),
    "cohere2": Family(
        interleaved=True, tables_interleaved=True, has_rope=lambda attention: attention.sliding_window is not None
    ),
    "ernie4_5": Family(interleaved=True),
    "ernie4_5_moe": Family(interleaved=True),
    "exaone4": Family(has_rope=lambda attention: attention.sliding_window is None or attention.is_sliding),
    "gemma3_text": Family(norm_offset=1.0),
    "glm": Family(interleaved=True),
    "glm4": Family(interleaved=True),
    "gpt_neox": Family(attention="attention", head_dim="head_size", projection=by_head()),
    "helium": Family(interleaved=True),
    "phi": Family(key_norm="k_layernorm", norm_centred=True),
    "phi3": Family(projection=stacked()),
    "smollm3": Family(has_rope=lambda attention: bool(attention.use_rope)),
}
"""By transformers' `model_type`."""

REFUSED_ROPE_TYPES = frozenset({"dynamic", "longrope"})
"""The angle of a token's key depends on the length of the whole sequence, so a key cannot be placed before the rest is
known, and keys placed earlier go stale."""


def check_config(config: PreTrainedConfig) -> None:
    """See from a model's configuration alone, before it is built, whether it cannot be used.

    Raises:
        UnsupportedModelError: it cannot; says why.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(config, "an encoder's output enters every layer")
    decoder: Any = config.get_text_config(decoder=True)
    for index, layer_type in enumerate(get_layer_types_and_kwargs(decoder)[0]):
        if layer_type == "chunked_attention":
            reason = "attends within chunks of fixed places, so what a token sees depends on its position"
            raise _unsupported(config, f"layer {index} {reason}")
        if layer_type not in ("full_attention", "sliding_attention"):
            raise _unsupported(config, f"layer {index} ({layer_type}) does not keep keys and values of each token")
    if getattr(decoder, "kv_lora_rank", None) is not None:
        raise _unsupported(config, "keys and values are compressed together (multi-head latent attention)")
    if getattr(decoder, "clip_qkv", None) is not None:
        raise _unsupported(config, "keys and values are clipped (clip_qkv)")


def find_decoder(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Take a transformers causal language model apart.

    The model's own matrices for keys and values become views of joint ones (see `ragcache.model.projections`).

    Args:
        model: the model, on its device; on `meta` it is only looked at.
        dtype: precision of weights and KV cache.
        device: where the model is.

    Raises:
        UnsupportedModelError: the model is not built the way this module understands; says in what.
    """
    check_config(model.config)
    config: Any = model.config.get_text_config(decoder=True)
    family = FAMILIES.get(config.model_type, Family())
    base: Any = model.get_decoder()
    _check_base(config, base)
    layer_types, options = get_layer_types_and_kwargs(config)
    ropes: dict[str | None, Rope] = {}
    layers = []
    for index, layer in enumerate(base.layers):
        module = getattr(layer, family.attention, None)
        if reason := _attention_refusal(module, family):
            raise _unsupported(config, f"layer {index} {reason}")
        rope = None
        if family.has_rope(module):
            layer_type = layer_types[index] if _differs_between_layers(base.rotary_emb) else None
            if layer_type not in ropes:
                ropes[layer_type] = _rope(base.rotary_emb, layer_type, family, dtype, device)
            rope = ropes[layer_type]
        window = options[index].get("sliding_window")
        like = torch.empty(0, dtype=dtype, device=device)
        layers.append(_attention_layer(config, family, index, module, rope, window, like))
    embedding: Any = model.get_input_embeddings()
    return Decoder(embedding, tuple(layers), int(config.hidden_size))


def _check_base(config: Any, base: Any) -> None:
    """Refuse a model whose positions are not those of a rotation that holds for each token by itself."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is None:
        raise _unsupported(
            config, "no rotary positions, so states of a chunk would hold for one place in a prompt only"
        )
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise _unsupported(config, "its layers are not found where they are looked for")
    rope_type = getattr(rotary, "rope_type", None)
    for name in rope_type.values() if isinstance(rope_type, dict) else (rope_type,):
        if name in REFUSED_ROPE_TYPES:
            raise _unsupported(config, f"the angles of rope type {name!r} depend on the length of the whole prompt")


def _attention_refusal(module: Any, family: Family) -> str | None:
    """What about one attention cannot be done, if anything."""
    if module is None:
        return f"has no attention where it is looked for ({family.attention})"
    if getattr(module, "sinks", None) is not None:
        return "has attention sinks"
    if getattr(module, "is_causal", True) is not True:
        return "attends to later tokens"
    return None


def _attention_layer(
    config: Any, family: Family, index: int, module: Any, rope: Rope | None, window: int | None, like: Tensor
) -> AttentionLayer:
    try:
        head_dim = int(getattr(module, family.head_dim))
        weight, bias = family.projection(module, Heads(int(config.num_attention_heads), head_dim), like)
    except AttributeError as error:
        raise _unsupported(config, f"layer {index} has no projections where they are looked for ({error})") from error
    kv_heads = len(weight) // (2 * head_dim)
    norm = getattr(module, family.key_norm, None)
    return AttentionLayer(
        index=index,
        module=module,
        weight=weight,
        bias=bias,
        key_norm=None if norm is None else _key_norm(config, family, index, norm, kv_heads, head_dim),
        rope=rope,
        window=window,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _key_norm(config: Any, family: Family, index: int, norm: Any, kv_heads: int, head_dim: int) -> KeyNorm:
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    all_heads = (kv_heads * head_dim,)
    if (
        bias is not None
        or eps is None
        or weight is None
        or weight.shape not in (all_heads, (head_dim,), (kv_heads, head_dim))
    ):
        raise _unsupported(config, f"layer {index} normalises its keys in a way of its own ({type(norm).__name__})")
    return KeyNorm(
        weight=weight.detach().float().flatten() + family.norm_offset,
        eps=float(eps),
        over_heads=weight.shape == all_heads,
        centred=family.norm_centred,
    )


def _rope(rotary: nn.Module, layer_type: str | None, family: Family, dtype: torch.dtype, device: torch.device) -> Rope:
    first = torch.zeros(1, dtype=torch.long, device=device)
    cos, _ = angles(rotary, layer_type, first, family.tables_interleaved, dtype, device)
    return Rope(
        interleaved=family.interleaved,
        rotary_dim=2 * cos.shape[-1],
        module=rotary,
        tables_interleaved=family.tables_interleaved,
        layer_type=layer_type,
        dtype=dtype,
        device=device,
    )


def _differs_between_layers(rotary: nn.Module) -> bool:
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _unsupported(config: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {config.model_type!r} is not supported: {reason}; supported are {SUPPORTED_FAMILIES}"
    )
