"""Where a family projects, normalises and rotates its keys and values.

This is the whole knowledge needed to rebuild KV from hidden states: `AttentionLayer.project` goes from the
attention's normed input to keys and values before RoPE with the model's own modules, `Rotary` puts keys at a
position. Whether what is found here is right for a given model is not decided by a list of names but measured
when the model is loaded (`ragcache.model.certify`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragcache.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUPPORTED_FAMILIES = "decoder-only models with rotary positions, such as Llama, Qwen2, Qwen3, Mistral, Phi and Gemma"

# The angle of a token's key depends on the length of the whole sequence, so a key cannot be placed before the
# rest is known, and keys placed earlier go stale.
REFUSED_ROPE_TYPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer's attention, as far as its keys and values are concerned.

    Attributes:
        index: position of the layer in the model, counted from 0.
        module: the transformers attention module.
        input_norm: the norm in front of it; stored hidden states are its output.
        key_projection: hidden states to keys.
        value_projection: hidden states to values.
        key_norm: norm of each head's keys, in families that have one.
        kv_heads: number of key/value heads.
        head_dim: width of one head.
    """

    index: int
    module: nn.Module
    input_norm: nn.Module
    key_projection: nn.Linear
    value_projection: nn.Linear
    key_norm: nn.Module | None
    kv_heads: int
    head_dim: int

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values before RoPE.

        Args:
            hidden: the attention's normed input, `[tokens, hidden_size]`.

        Returns:
            Keys (after the K norm where the family has one) and values, each `[tokens, kv_heads, head_dim]`.
        """
        shape = (hidden.shape[0], self.kv_heads, self.head_dim)
        keys: Tensor = self.key_projection(hidden).view(shape)
        values: Tensor = self.value_projection(hidden).view(shape)
        if self.key_norm is not None:
            keys = self.key_norm(keys)
        return keys, values

    def restore(self, hidden: Tensor, tables: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Write the KV of hidden states to their place in a cache.

        Args:
            hidden: the attention's normed input, `[tokens, hidden_size]`.
            tables: cosines and sines of the tokens' positions, from `Rotary.tables`.
            keys: receives the rotated keys, `[kv_heads, tokens, head_dim]`, any strides.
            values: receives the values, likewise.
        """
        self.place(*self.project(hidden), tables, keys, values)

    @staticmethod
    def place(
        projected_keys: Tensor,
        projected_values: Tensor,
        tables: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Write keys and values before RoPE, as from `project`, to their place in a cache; see `restore`."""
        Rotary.rotate(projected_keys, tables, out=keys.transpose(0, 1))
        values.transpose(0, 1).copy_(projected_values)


@dataclass(frozen=True)
class Rotary:
    """RoPE with the angles that the model's own rotary module gives, scaling included."""

    module: nn.Module
    dtype: torch.dtype
    device: torch.device

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions `[tokens]`, each `[tokens, rotary_dim]`."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.module(probe, position_ids=positions[None])
        return cos[0], sin[0]

    @staticmethod
    def rotate(keys: Tensor, tables: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Rotate keys to their positions.

        Args:
            keys: before RoPE, `[tokens, heads, head_dim]`.
            tables: from `tables`. With partial rotary embeddings they are narrower than a head, and the rest of
                the head passes through.
            out: where the rotated keys go, `[tokens, heads, head_dim]`, any strides.
        """
        cos, sin = tables
        half = cos.shape[-1] // 2
        cos, sin = cos[:, None, :half], sin[:, None, :half]
        first, second = keys[..., :half], keys[..., half : 2 * half]
        torch.mul(first, cos, out=out[..., :half])
        out[..., :half].addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half : 2 * half])
        out[..., half : 2 * half].addcmul_(first, sin)
        out[..., 2 * half :] = keys[..., 2 * half :]


@dataclass(frozen=True)
class Decoder:
    """The parts of a transformers causal language model that ragcache works with.

    Attributes:
        embedding: token ids to the residual stream.
        layers: attention of each decoder layer, in order.
        rotary: RoPE of the model.
        hidden_size: width of the residual stream.
    """

    embedding: nn.Embedding
    layers: tuple[AttentionLayer, ...]
    rotary: Rotary
    hidden_size: int

    def first_layer_input(self, token_ids: Tensor) -> Tensor:
        """What enters the attention of layer 0, `[tokens, hidden_size]`, from token ids `[tokens]` alone."""
        normed: Tensor = self.layers[0].input_norm(self.embedding(token_ids))
        return normed


def find_decoder(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Take a transformers causal language model apart.

    Raises:
        UnsupportedModelError: the model is not built the way this module understands.
    """
    config = model.config
    base: Any = getattr(model, "model", None)
    layers = getattr(base, "layers", None)
    rotary = getattr(base, "rotary_emb", None)
    embedding = getattr(base, "embed_tokens", None)
    if layers is None or rotary is None or embedding is None:
        raise _unsupported(config, "no decoder layers with rotary positions found")
    rope_type = getattr(rotary, "rope_type", None)
    if not isinstance(rope_type, str):
        raise _unsupported(config, "rotary positions differ between layers")
    if rope_type in REFUSED_ROPE_TYPES:
        raise _unsupported(config, f"rope type {rope_type!r} depends on the length of the whole prompt")
    return Decoder(
        embedding=embedding,
        layers=tuple(_attention_layer(config, index, layer) for index, layer in enumerate(layers)),
        rotary=Rotary(rotary, dtype, device),
        hidden_size=int(config.hidden_size),
    )


def _attention_layer(config: object, index: int, layer: Any) -> AttentionLayer:
    module = getattr(layer, "self_attn", None)
    norm = getattr(layer, "input_layernorm", None)
    keys, values = getattr(module, "k_proj", None), getattr(module, "v_proj", None)
    if module is None or norm is None or not isinstance(keys, nn.Linear) or not isinstance(values, nn.Linear):
        raise _unsupported(config, f"layer {index} has no k_proj and v_proj behind an input norm")
    head_dim = int(module.head_dim)
    key_norm = getattr(module, "k_norm", None)
    if key_norm is not None and key_norm.weight.numel() != head_dim:
        raise _unsupported(config, f"layer {index} normalises keys over all heads at once")
    return AttentionLayer(
        index=index,
        module=module,
        input_norm=norm,
        key_projection=keys,
        value_projection=values,
        key_norm=key_norm,
        kv_heads=keys.out_features // head_dim,
        head_dim=head_dim,
    )


def _unsupported(config: object, reason: str) -> UnsupportedModelError:
    model_type = getattr(config, "model_type", "unknown")
    return UnsupportedModelError(
        f"model type {model_type!r} is not supported: {reason}; supported are {SUPPORTED_FAMILIES}"
    )
