"""Attention of a packed batch: each segment's new tokens to their own sequence's cache and nothing else.

Registered with transformers under the name `ragcache`, which models are loaded with. What a family hands to its
attention and is not done here is refused, never passed over. Called without a packed batch, a model behaves as with
`sdpa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ragcache.errors import UnsupportedModelError
from ragcache.model.attention_mass import AttentionMass
from ragcache.model.masks import CausalMasks, Positions

if TYPE_CHECKING:
    from ragcache.model.forward import PackedBatch

ATTENTION_NAME = "ragcache"

LEAST_QUERIES, QUERY_BLOCK = 128, 512
"""Bounds of how many queries attend at once where a mask is needed: few masks, and little in them that is hidden."""

QUERY_ROWS = 1024
"""Rows that the heads of these make together, within the bounds: what a CPU's kernel divides evenly among threads."""

ARGUMENTS_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""What families hand to their attention that has no bearing on what it gives."""

VALUES_WITHOUT_EFFECT = {"dropout": 0.0, "is_causal": True}
"""What has none at these values."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' `AttentionInterface`.

    Args:
        module: the attention module that calls.
        query: `[1, heads, tokens, head_dim]`, after RoPE.
        key: `[1, kv_heads, tokens, head_dim]`; already in the segments' caches.
        value: as `key`.
        attention_mask: ignored for a packed batch.
        scaling: factor on the scores.
        sliding_window: number of latest positions that a query sees, itself included.
        softcap: bound on the scores (Gemma 2).
        packed: the batch; without one this is transformers' `sdpa`.
        kwargs: what else the family passes.

    Returns:
        `[1, tokens, heads, head_dim]` and no weights.

    Raises:
        UnsupportedModelError: the family wants something from its attention that is not done here.
    """
    if packed is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **kwargs
        )
        return output
    if wanted := sorted(name for name, given in kwargs.items() if _has_effect(name, given)):
        raise UnsupportedModelError(f"attention with {wanted[0]!r} ({type(module).__name__}) is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]  # every transformers attention has one
    if sliding_window is not None and sliding_window != packed.windows[layer]:
        raise UnsupportedModelError(
            f"attention of layer {layer} with a window of {sliding_window} tokens and a mask of another is not done"
        )
    attended = torch.empty_like(query)
    for segment, span in zip(packed.segments, packed.spans, strict=True):
        positions = segment.positions
        end = positions[-1] + 1
        observed = segment.mass is not None and layer >= segment.mass.first_layer
        attended[0, :, span] = _attend(
            query[0, :, span],
            segment.cache.keys[layer][:, :end],
            segment.cache.values[layer][:, :end],
            positions,
            scaling,
            packed.windows[layer],
            softcap,
            packed.masks,
            segment.mass if observed else None,
        )
    return attended.transpose(1, 2), None


def _has_effect(name: str, given: object) -> bool:
    """Whether an argument that is not understood here may change what attention gives."""
    if given is None or name in ARGUMENTS_WITHOUT_EFFECT:
        return False
    return name not in VALUES_WITHOUT_EFFECT or given != VALUES_WITHOUT_EFFECT[name]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Positions,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    masks: CausalMasks,
    mass: AttentionMass | None,
) -> Tensor:
    """Causal attention of some tokens of a sequence to all of it up to the last of them.

    Args:
        query: `[heads, new, head_dim]`.
        keys: `[kv_heads, total, head_dim]`, the tokens' own among them.
        values: as `keys`.
        positions: of the queries; the last is `total - 1`.
        scaling: factor on the scores.
        window: number of latest positions that a query sees.
        softcap: bound on the scores.
        masks: of this forward pass.
        mass: gathers what is attended to.

    Returns:
        `[heads, new, head_dim]`.
    """
    heads, new, head_dim = query.shape
    kv_heads, total, _ = keys.shape
    if new == total and (window is None or window >= total) and softcap is None and mass is None:
        return scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )[0]
    # The query heads that share a KV head become further rows of it, so keys and values are read once and
    # never repeated.
    group = heads // kv_heads
    out = torch.empty_like(query)
    size = max(LEAST_QUERIES, min(QUERY_BLOCK, QUERY_ROWS // group))
    for start in range(0, new, size):
        block = slice(start, start + size)
        at = positions[block]
        low = 0 if window is None else max(0, at[0] - window + 1)
        seen = slice(low, at[-1] + 1)
        mask = None if len(at) == 1 else masks.get(at, low, window, group, query)
        rows = query[:, block].reshape(kv_heads, -1, head_dim)
        if softcap is None and mass is None:
            attended = _plain_attention(rows, keys[:, seen], values[:, seen], mask, scaling)
        else:
            probabilities = _probabilities(rows, keys[:, seen], mask, scaling, softcap)
            if mass is not None:
                mass.add(probabilities, low)
            attended = probabilities.to(query.dtype) @ values[:, seen]
        out[:, block] = attended.view(heads, -1, head_dim)
    return out


def _plain_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scaling)[0]


def _probabilities(
    query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Attention before the values, `[kv_heads, rows, keys]`, float32, where SDPA does not do or does not tell.

    In the order and precision of transformers' own `eager`. With a softcap scores are bent into (-softcap, softcap) by
    a tanh (Gemma 2, arXiv 2408.00118, section 2).
    """
    scores = query @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
