"""A loaded causal language model, with what the other rooms need to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ragcache.model.kv_cache import KVCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ragcache.model.attention import Decoder
    from ragcache.model.fingerprint import Fingerprint


@dataclass(frozen=True)
class LanguageModel:
    """A model, its tokenizer and its identity.

    Attributes:
        name: what the user called it.
        module: the transformers model, in inference mode, with ragcache's attention function.
        tokenizer: its tokenizer.
        decoder: where its keys and values come from.
        fingerprint: which states belong to it.
        dtype: precision of weights and KV cache.
        device: where it runs.
        context_window: largest number of tokens in a sequence.
        eos_ids: every token id that ends an answer.
    """

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    fingerprint: Fingerprint
    dtype: torch.dtype
    device: torch.device
    context_window: int
    eos_ids: frozenset[int]

    def new_cache(self, capacity: int) -> KVCache:
        """An empty KV cache with room for `capacity` tokens."""
        return KVCache.allocate(self.decoder.layers, capacity, self.dtype, self.device)

    def prefill_flops(self, past: int, tokens: int) -> float:
        """About how many floating-point operations a prefill of some tokens after `past` others takes.

        Two for each weight and token; four for each token, token that it attends to and channel of the queries.
        """
        weights = sum(it.numel() for it in self.module.parameters()) - self.decoder.embedding.weight.numel()
        heads = int(self.module.config.get_text_config(decoder=True).num_attention_heads)
        channels = sum(heads * layer.head_dim for layer in self.decoder.layers)
        return float(2 * weights * tokens + 4 * channels * tokens * (past + tokens / 2))

    def layer_flops(self, layer: int, tokens: int, attended: float) -> float:
        """About how many floating-point operations a prefill takes in one decoder layer, counted as in `prefill_flops`.

        Args:
            layer: index of the layer.
            tokens: that are prefilled.
            attended: tokens that each of them attends to, in the mean.
        """
        heads = int(self.module.config.get_text_config(decoder=True).num_attention_heads)
        channels = heads * self.decoder.layers[layer].head_dim
        return float(2 * self._layer_weights[layer] * tokens + 4 * channels * tokens * attended)

    @cached_property
    def _layer_weights(self) -> list[int]:
        """Number of weights of each decoder layer."""
        layers: Any = self.module.get_decoder().layers
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]

    def tensor(self, token_ids: list[int]) -> torch.Tensor:
        """Token ids on the model's device, `[tokens]`."""
        return torch.tensor(token_ids, dtype=torch.long, device=self.device)
