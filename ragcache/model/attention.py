"""A decoder's attention as data: all that its keys and values are made of.

This is the whole knowledge needed to rebuild KV from hidden states: one matrix that projects the attention's input to
keys and values, a norm of the keys, and a rotation to a position. Where a family keeps these is the concern of
`ragcache.model.families`; whether what was found there is right for a given model is measured when it is loaded
(`ragcache.model.certify`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of some positions, each `[tokens, rotary_dim // 2]`."""


@dataclass(frozen=True, eq=False)
class KeyNorm:
    """A norm of the keys between projection and rotation, computed in float32.

    Attributes:
        weight: what the normalised key is multiplied with, float32; `[head_dim]`, or `[kv_heads * head_dim]` where it
            differs between heads.
        eps: added to the variance.
        over_heads: all heads of a token are normalised together (OLMo 2), else each alone.
        centred: the mean is subtracted first (LayerNorm), else not (RMSNorm).
    """

    weight: Tensor
    eps: float
    over_heads: bool
    centred: bool

    def normalise(self, keys: Tensor) -> Tensor:
        """Normalise keys `[tokens, kv_heads, head_dim]`."""
        normed = keys.float().flatten(1) if self.over_heads else keys.float()
        if self.centred:
            normed = normed - normed.mean(-1, keepdim=True)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight if self.weight.numel() == keys.shape[-1] else self.weight.view(normed.shape[1:])
        return (normed * weight).view(keys.shape).to(keys.dtype)


@dataclass(frozen=True, eq=False)
class Rope:
    """RoPE (Su et al., arXiv 2104.09864, section 3.4) with the angles of the model's own module, scaling included.

    Attributes:
        interleaved: values `2i` and `2i + 1` of a key are turned together, else `i` and `i + rotary_dim / 2`.
        rotary_dim: leading values of a key that are turned; the others pass through.
        module: the transformers module that gives cosines and sines, each twice, once for either value of a pair.
        tables_interleaved: the two lie side by side in what it gives, else half of the width apart.
        layer_type: which of the module's angles, where they differ between layers.
        dtype: of the tables.
        device: of the tables.
    """

    interleaved: bool
    rotary_dim: int
    module: nn.Module
    tables_interleaved: bool
    layer_type: str | None
    dtype: torch.dtype
    device: torch.device

    def tables(self, positions: Tensor) -> Tables:
        """Cosines and sines of positions `[tokens]`, each `[tokens, rotary_dim // 2]`."""
        return angles(self.module, self.layer_type, positions, self.tables_interleaved, self.dtype, self.device)

    def rotate(self, keys: Tensor, tables: Tables, out: Tensor) -> None:
        """Rotate keys to their positions.

        Args:
            keys: before RoPE, `[tokens, heads, head_dim]`.
            tables: from `tables`.
            out: where the rotated keys go, `[tokens, heads, head_dim]`, any strides.
        """
        rotate(keys, tables, out, rotary_dim=self.rotary_dim, interleaved=self.interleaved)


def rotate(keys: Tensor, tables: Tables, out: Tensor, *, rotary_dim: int, interleaved: bool) -> None:
    """Rotate keys to their positions, in their own dtype, as transformers does.

    Args:
        keys: before RoPE, `[tokens, heads, head_dim]`.
        tables: cosines and sines of the tokens' positions.
        out: where the rotated keys go, `[tokens, heads, head_dim]`, any strides; not where they come from.
        rotary_dim: see `Rope`.
        interleaved: see `Rope`.
    """
    cos, sin = (table[:, None] for table in tables)
    half = rotary_dim // 2
    if interleaved:
        pair = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    else:
        pair = slice(0, half), slice(half, rotary_dim)
    first, second = (keys[..., member] for member in pair)
    out_first, out_second = (out[..., member] for member in pair)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    out[..., rotary_dim:] = keys[..., rotary_dim:]


def angles(
    module: nn.Module,
    layer_type: str | None,
    positions: Tensor,
    tables_interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tables:
    """What a transformers rotary module gives, each angle once; see `Rope`."""
    probe = torch.empty(0, dtype=dtype, device=device)
    which = {} if layer_type is None else {"layer_type": layer_type}
    cos, sin = (table[0] for table in module(probe, position_ids=positions[None], **which))
    once = slice(None, None, 2) if tables_interleaved else slice(cos.shape[-1] // 2)
    return cos[:, once].contiguous(), sin[:, once].contiguous()


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One decoder layer's attention, as far as its keys and values are concerned.

    Attributes:
        index: position of the layer in the model, counted from 0.
        module: the transformers attention module.
        weight: `[2 * kv_heads * head_dim, hidden_size]`, the rows that give keys before those that give values.
        bias: `[2 * kv_heads * head_dim]`, likewise.
        key_norm: norm of the keys, in families that have one.
        rope: rotation of the keys; `None` in a layer without positions. Layers of equal rotation share it.
        window: number of latest positions that a query sees, itself included; `None` for all.
        kv_heads: number of key/value heads.
        head_dim: width of one head.
    """

    index: int
    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    key_norm: KeyNorm | None
    rope: Rope | None
    window: int | None
    kv_heads: int
    head_dim: int

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values before RoPE.

        Args:
            hidden: the attention's input, `[tokens, hidden_size]`.

        Returns:
            Keys (after the K norm where the family has one) and values, each `[tokens, kv_heads, head_dim]`.
        """
        shape = (hidden.shape[0], 2, self.kv_heads, self.head_dim)
        keys, values = linear(hidden, self.weight, self.bias).view(shape).unbind(1)
        if self.key_norm is not None:
            keys = self.key_norm.normalise(keys)
        return keys, values

    def place(self, keys: Tensor, values: Tensor, tables: Tables | None, out_keys: Tensor, out_values: Tensor) -> None:
        """Write keys and values before RoPE, as from `project`, to their place in a cache.

        Args:
            keys: `[tokens, kv_heads, head_dim]`.
            values: likewise.
            tables: cosines and sines of the tokens' positions, from the layer's `rope`; `None` where it has none.
            out_keys: receives the rotated keys, `[kv_heads, tokens, head_dim]`, any strides.
            out_values: receives the values, likewise.
        """
        if self.rope is None or tables is None:
            out_keys.transpose(0, 1).copy_(keys)
        else:
            self.rope.rotate(keys, tables, out=out_keys.transpose(0, 1))
        out_values.transpose(0, 1).copy_(values)

    def restore(self, hidden: Tensor, tables: Tables | None, out_keys: Tensor, out_values: Tensor) -> None:
        """Write the KV of hidden states `[tokens, hidden_size]` to their place in a cache; see `place`."""
        self.place(*self.project(hidden), tables, out_keys, out_values)


@dataclass(frozen=True, eq=False)
class Decoder:
    """The parts of a transformers causal language model that ragcache works with.

    Attributes:
        embedding: token ids to the residual stream.
        layers: attention of each decoder layer, in order.
        hidden_size: width of the residual stream.
    """

    embedding: nn.Embedding
    layers: tuple[AttentionLayer, ...]
    hidden_size: int

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotations that its layers use, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    def tables(self, positions: Tensor) -> tuple[Tables | None, ...]:
        """Cosines and sines of positions `[tokens]` for each layer; computed once for each rotation."""
        tables = {rope: rope.tables(positions) for rope in self.ropes}
        return tuple(None if layer.rope is None else tables[layer.rope] for layer in self.layers)
