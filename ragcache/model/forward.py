"""The one way the model is run: a forward over packed new tokens.

The new tokens of one or several sequences lie in one row, so the linear layers see a single large matrix and
nothing is padded. Each sequence's keys and values go into its own `KVCache`, and its queries attend to that
alone. Encoding chunks at index time, prefilling a question and decoding are all calls of `forward`.

transformers is told through three of its own doors: a `Cache` whose `update` writes into the sequences' buffers,
an attention function registered under the name `ragcache`, and a 4-dimensional attention mask that makes its mask
code step aside. The packed batch itself travels as a keyword argument, so nothing global changes and several
threads may run the same model. Called without a packed batch, the model behaves as with `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ragcache.errors import UnsupportedModelError
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel

ATTENTION_NAME = "ragcache"

QUERY_BLOCK = 256
"""Queries that attend at once where a mask is needed; bounds the mask and skips most of what it would hide."""

UNSUPPORTED_ATTENTION_ARGUMENTS = ("softcap", "s_aux", "position_bias")

Capture = Callable[[int, Tensor], None]
"""Called with a layer's index and its attention's normed input, `[tokens of all segments, hidden_size]`."""


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence, to be appended to its cache.

    Attributes:
        token_ids: `[tokens]`.
        cache: the sequence's cache; the new tokens take the positions from `cache.length` on.
    """

    token_ids: Tensor
    cache: KVCache


@dataclass(frozen=True)
class PackedBatch:
    """Segments laid in one row."""

    segments: Sequence[Segment]
    capture: Capture | None = None

    @cached_property
    def spans(self) -> list[slice]:
        """Where each segment lies in the row."""
        ends = list(accumulate(len(segment.token_ids) for segment in self.segments))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class PackedCache(Cache):
    """What transformers writes new keys and values to; they go to the segments' own caches."""

    def __init__(self, batch: PackedBatch) -> None:
        super().__init__(layers=[])
        self.batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[1, kv_heads, tokens, head_dim]` of one layer behind each segment's past."""
        for segment, span in zip(self.batch.segments, self.batch.spans, strict=True):
            slots = slice(segment.cache.length, segment.cache.length + span.stop - span.start)
            segment.cache.keys[layer_idx][:, slots] = key_states[0, :, span]
            segment.cache.values[layer_idx][:, slots] = value_states[0, :, span]
        return key_states, value_states


@torch.inference_mode()
def forward(model: LanguageModel, segments: Sequence[Segment], capture: Capture | None = None) -> Tensor:
    """Run new tokens through the model and append them to their sequences' caches.

    Args:
        model: the model to run.
        segments: at least one, none of them empty, each with room left in its cache.
        capture: receives each layer's hidden states as they come by.

    Returns:
        Logits after the last token of each segment, `[segments, vocabulary]`, float32.
    """
    batch = PackedBatch(segments, capture)
    positions = [torch.arange(s.cache.length, s.cache.length + len(s.token_ids), device=model.device) for s in segments]
    last = torch.tensor([span.stop - 1 for span in batch.spans], device=model.device)
    output = model.module(
        input_ids=torch.cat([segment.token_ids for segment in segments])[None],
        position_ids=torch.cat(positions)[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=model.device),
        cache=PackedCache(batch),
        use_cache=True,
        logits_to_keep=last,
        packed=batch,
    )
    for segment in segments:
        segment.cache.length += len(segment.token_ids)
    logits: Tensor = output.logits[0].float()
    return logits


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
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
        packed: the batch; without one this is transformers' `sdpa`.
        kwargs: what else the family passes.

    Returns:
        `[1, tokens, heads, head_dim]` and no weights.

    Raises:
        UnsupportedModelError: the family wants something from its attention that is not done here.
    """
    if packed is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    for name in UNSUPPORTED_ATTENTION_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name!r} ({type(module).__name__}) is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]  # every transformers attention has one
    attended = torch.empty_like(query)
    for segment, span in zip(packed.segments, packed.spans, strict=True):
        end = segment.cache.length + span.stop - span.start
        attended[0, :, span] = _attend(
            query[0, :, span],
            segment.cache.keys[layer][:, :end],
            segment.cache.values[layer][:, :end],
            scaling,
            sliding_window,
        )
    return attended.transpose(1, 2), None


def _attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention of a sequence's newest tokens to all of it.

    Args:
        query: `[heads, new, head_dim]`.
        keys: `[kv_heads, total, head_dim]`, the new tokens' keys last.
        values: as `keys`.
        scaling: factor on the scores.
        window: number of latest positions that a query sees.

    Returns:
        `[heads, new, head_dim]`.
    """
    heads, new, head_dim = query.shape
    kv_heads, total, _ = keys.shape
    if new == total and (window is None or window >= total):
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
        mask = None if first == last else _causal_mask(first, last, low, window, query.device)
        out[:, block : block + QUERY_BLOCK] = scaled_dot_product_attention(
            rows.reshape(1, kv_heads, -1, head_dim),
            keys[None, :, low : last + 1],
            values[None, :, low : last + 1],
            attn_mask=None if mask is None else mask.repeat(group, 1),
            scale=scaling,
        ).view(heads, -1, head_dim)
    return out


def _causal_mask(first: int, last: int, low: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the positions low..last each of the positions first..last may see, `[queries, keys]`."""
    queries = torch.arange(first, last + 1, device=device)[:, None]
    keys = torch.arange(low, last + 1, device=device)[None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return visible


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
