"""Tokens amid a sequence computed again by transformers' plainest attention: slow, and no code of ragcache's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.packed_attention import ATTENTION_NAME


@contextmanager
def eager_attention(model: LanguageModel) -> Iterator[None]:
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            yield
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)


class ReplacingCache(Cache):
    """Puts new keys and values in the place of old ones, and hands out all of them."""

    def __init__(self, kept: KVCache, slots: Sequence[int], total: int) -> None:
        super().__init__(layers=[])
        self.kept, self.slots, self.total = kept, list(slots), total

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.kept.keys[layer_idx], self.kept.values[layer_idx]
        for row, slot in enumerate(self.slots):
            keys[:, slot], values[:, slot] = key_states[0, :, row], value_states[0, :, row]
        return keys[None, :, : self.total], values[None, :, : self.total]


def recompute(model: LanguageModel, kept: KVCache, token_ids: Sequence[int], slots: Sequence[int]) -> Any:
    """Compute the tokens of some slots, in place.

    Returns:
        What transformers' model gives, logits and attentions of each layer included.
    """

    def mask(window: int | None) -> Tensor:
        hidden = torch.full((len(slots), len(token_ids)), -torch.inf)
        for row, slot in enumerate(slots):
            hidden[row, 0 if window is None else max(0, slot - window + 1) : slot + 1] = 0
        return hidden[None, None]

    masks = {layer.window: mask(layer.window) for layer in model.decoder.layers}
    types = getattr(model.module.config, "layer_types", None)
    by_type = {kind: masks[layer.window] for kind, layer in zip(types or [], model.decoder.layers, strict=bool(types))}
    with eager_attention(model):
        return model.module(
            input_ids=torch.tensor([[token_ids[slot] for slot in slots]]),
            position_ids=torch.tensor([list(slots)]),
            attention_mask=by_type if len(masks) > 1 else next(iter(masks.values())),
            cache=ReplacingCache(kept, slots, len(token_ids)),
            use_cache=True,
            output_attentions=True,
        )


def attention_mass(attentions: Sequence[Tensor]) -> Tensor:
    """What each slot receives, `[slots]`, of attentions `[1, heads, queries, slots]` of each layer."""
    return torch.stack([layer.sum((0, 1, 2)) for layer in attentions]).sum(0)
