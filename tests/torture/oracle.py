"""What the model computes anew for a prompt: by plain prefills, without a store, an encoder or a restorer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel

TOLERANCE = 1e-3
"""Of logits. Restored and recomputed states differ by rounding; other states or other tokens by far more."""


@dataclass(frozen=True)
class Passage:
    """A chunk of a prompt.

    Attributes:
        token_ids: its own.
        contexts: token ids of each text that it is computed after, the prefix aside; none when it is computed alone.
    """

    token_ids: tuple[int, ...]
    contexts: tuple[tuple[int, ...], ...] = ()


Expected = dict[tuple[tuple[Passage, ...], tuple[int, ...]], Tensor]
"""Logits after a prompt, by its passages and its question."""


@dataclass(frozen=True)
class Oracle:
    """Knows what a prompt's logits should be.

    Attributes:
        model: computes them.
        prefix: token ids that every prompt starts with.
        expected: what was computed so far.
    """

    model: LanguageModel
    prefix: tuple[int, ...]
    expected: Expected

    def contradicts(self, logits: Tensor, passages: Sequence[Passage], question: tuple[int, ...]) -> str | None:
        """How far the logits after a prompt are from what they should be, unless it is next to nothing."""
        prompt = (tuple(passages), question)
        if prompt not in self.expected:
            self.expected[prompt] = self._logits(*prompt)
        difference = float((logits - self.expected[prompt]).abs().max())
        return None if difference < TOLERANCE else f"logits by {difference}"

    def _logits(self, passages: Sequence[Passage], question: tuple[int, ...]) -> Tensor:
        tokens = len(self.prefix) + sum(len(it.token_ids) for it in passages) + len(question)
        cache = self.model.new_cache(tokens)
        self._append(cache, self.prefix, [()])
        for it in passages:
            self._append(cache, it.token_ids, [self.prefix + context for context in it.contexts or ((),)])
        return forward(self.model, [Segment(self.model.tensor(list(question)), cache)])[0]

    @torch.inference_mode()
    def _append(self, cache: KVCache, token_ids: tuple[int, ...], contexts: Sequence[tuple[int, ...]]) -> None:
        """The mean of the KV of some tokens after each context. All are turned to the same positions already."""
        span = slice(cache.length, cache.length + len(token_ids))
        prefills = [self._prefill(context, token_ids, span.start) for context in contexts]
        for mine, parts in zip(cache.keys + cache.values, zip(*prefills, strict=True), strict=True):
            mine[:, span] = torch.stack(parts).mean(0)
        cache.length = span.stop

    def _prefill(self, context: tuple[int, ...], token_ids: tuple[int, ...], start: int) -> list[Tensor]:
        """Keys of each layer, then values, of some tokens that stand at a position."""
        ids = self.model.tensor([*context, *token_ids])[None]
        # Only distances count, so a context that is longer than what stands before in the prompt may begin below 0.
        positions = torch.arange(start - len(context), start + len(token_ids))[None]
        output = self.model.module(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1)
        layers = output.cache.layers
        own = slice(len(context), None)
        return [it.keys[0][:, own] for it in layers] + [it.values[0][:, own] for it in layers]
