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

if TYPE_CHECKING:
    from ragcache.model.forward import PackedBatch

ATTENTION_NAME = "ragcache"

QUERY_BLOCK = 256
"""Queries that attend at once where a mask is needed; bounds the mask and skips most of what it would hide."""

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
        end = segment.cache.length + span.stop - span.start
        attended[0, :, span] = _attend(
            query[0, :, span],
            segment.cache.keys[layer][:, :end],
            segment.cache.values[layer][:, :end],
            scaling,
            packed.windows[layer],
            softcap,
            packed.masks,
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
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    masks: CausalMasks,
) -> Tensor:
    """Causal attention of a sequence's newest tokens to all of it.

    Args:
        query: `[heads, new, head_dim]`.
        keys: `[kv_heads, total, head_dim]`, the new tokens' keys last.
        values: as `keys`.
        scaling: factor on the scores.
        window: number of latest positions that a query sees.
        softcap: bound on the scores.
        masks: of this forward pass.

    Returns:
        `[heads, new, head_dim]`.
    """
    heads, new, head_dim = query.shape
    kv_heads, total, _ = keys.shape
    if new == total and (window is None or window >= total) and softcap is None:
        return scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scaling, enable_gqa=heads != kv_heads
        )[0]
    # The query heads that share a KV head become further rows of it, so keys and values are read once and
    # never repeated.
    group = heads // kv_heads
    out = torch.empty_like(query)
    for block in range(0, new, QUERY_BLOCK):
        rows = query[:, block : block + QUERY_BLOCK]
        first = total - new + block
        last = first + rows.shape[1] - 1
        low = 0 if window is None else max(0, first - window + 1)
        mask = None if first == last else masks.get(first, last, low, window, group, query, keep=new <= QUERY_BLOCK)
        arguments = (
            rows.reshape(kv_heads, -1, head_dim),
            keys[:, low : last + 1],
            values[:, low : last + 1],
            mask,
            scaling,
        )
        attended = _plain_attention(*arguments) if softcap is None else _capped_attention(*arguments, softcap)
        out[:, block : block + QUERY_BLOCK] = attended.view(heads, -1, head_dim)
    return out


def _plain_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scaling)[0]


def _capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores are bent into (-softcap, softcap) by a tanh, which SDPA cannot do.

    In the order and precision of transformers' own `eager` (Gemma 2, arXiv 2408.00118, section 2).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ keys.transpose(1, 2) * scale / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


class CausalMasks:
    """Which positions each query may see: 0 where it may, else minus infinity, to be added to its scores.

    The layers of a forward pass share those of short segments, so these are made once. Those of long ones would
    together take more memory than the KV cache.
    """

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int, int | None, int], Tensor] = {}

    def get(
        self, first: int, last: int, low: int, window: int | None, group: int, query: Tensor, *, keep: bool
    ) -> Tensor:
        """For queries at the positions first..last and keys at low..last.

        Args:
            first: position of the first query.
            last: position of the last query.
            low: position of the first key.
            window: number of latest positions that a query sees.
            group: how many query heads lie one behind the other.
            query: of the dtype and on the device that the mask is needed in.
            keep: for the other layers.

        Returns:
            `[group * queries, keys]`.
        """
        key = (first, last, low, window, group)
        if key in self._masks:
            return self._masks[key]
        queries = torch.arange(first, last + 1, device=query.device)[:, None]
        keys = torch.arange(low, last + 1, device=query.device)[None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        visible = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask = visible.masked_fill_(hidden, -torch.inf).repeat(group, 1)
        if keep:
            self._masks[key] = mask
        return mask


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
