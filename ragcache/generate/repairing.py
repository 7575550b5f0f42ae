"""The prefill of a question behind restored chunks, with some of the chunks' tokens computed again on the way.

Chunks that were encoded apart never attended to each other. The tokens for which that matters most go through all
layers once more, together with the question, and attend to everything before them; their keys and values replace the
restored ones (CacheBlend, arXiv 2405.16444, section 4).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.generate.pace import Pace
from ragcache.model.attention_mass import AttentionMass
from ragcache.model.forward import Segment, forward, run_layers
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.repair import ChunkSpans, RepairOptions, choose_first, choose_highest
from ragcache.restore.restoration import Restoration


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose question was run through the model.

    Attributes:
        logits: after its last token, `[vocabulary]`.
        repaired_tokens: tokens of chunks that were computed again.
        prefill_ms: running the question.
        repair_ms: finding those tokens and running them; with `query` also the question's second run.
    """

    logits: Tensor
    repaired_tokens: int
    prefill_ms: float
    repair_ms: float


class PromptPrefill:
    """One prompt, from what is restored to its logits."""

    def __init__(
        self, model: LanguageModel, pace: Pace, token_ids: list[int], cache: KVCache, restoration: Restoration
    ) -> None:
        """Set up.

        Args:
            model: the model to run.
            pace: how long passes take; learns from those that are run here.
            token_ids: the whole prompt.
            cache: of the prompt, with prefix and chunks in it, or about to be; what follows is prefilled.
            restoration: of the chunks. Its time is not counted here.
        """
        self._model = model
        self._pace = pace
        self._token_ids = token_ids
        self._cache = cache
        self._restoration = restoration
        self._question = tuple(range(cache.length, len(token_ids)))

    def run(self, chunks: ChunkSpans, options: RepairOptions) -> Prefilled:
        """Prefill what follows the chunks, and repair these.

        Args:
            chunks: where they stand; restored in full in all layers if there is to be any repair.
            options: what is to be repaired; `off` where there is nothing to choose from.
        """
        if options.method == "off":
            logits, elapsed = self._pass(self._question)
            return Prefilled(logits, 0, elapsed, 0.0)
        if options.method == "query":
            return self._by_attention(chunks, options)
        clock = _Stopwatch(self._model, self._restoration)
        if options.method == "boundary":
            chosen = choose_first(chunks, self._count(chunks, options, 0.0))
        elif self._is_within(options, chunks):
            scores = deviation(self._model, self._token_ids, self._cache, self._restoration, chunks)
            chosen = choose_highest(chunks, scores, self._count(chunks, options, clock.elapsed_ms))
        else:
            chosen = ()
        choice_ms = clock.elapsed_ms
        logits, elapsed = self._pass(chosen + self._question)
        repair_ms = elapsed * len(chosen) / (len(chosen) + len(self._question))
        return Prefilled(logits, len(chosen), elapsed - repair_ms, choice_ms + repair_ms)

    def _by_attention(self, chunks: ChunkSpans, options: RepairOptions) -> Prefilled:
        """The question is run twice: what it attends to is known after the first time.

        Only the later half of the layers is observed: tokens chosen by these left less divergence in experiments than
        tokens chosen by all (docs/decisions.md), and observing costs half.
        """
        later = len(self._model.decoder.layers) // 2
        mass = AttentionMass(len(self._token_ids), self._model.device, later)
        logits, prefill_ms = self._pass(self._question, mass)
        chosen = choose_highest(chunks, mass.received, self._count(chunks, options, 0.0))
        if not chosen:
            return Prefilled(logits, 0, prefill_ms, 0.0)
        logits, repair_ms = self._pass(chosen + self._question)
        return Prefilled(logits, len(chosen), prefill_ms, repair_ms)

    def _pass(self, slots: tuple[int, ...], mass: AttentionMass | None = None) -> tuple[Tensor, float]:
        """Run the tokens of some slots; logits after the last of them, and milliseconds."""
        clock = _Stopwatch(self._model, self._restoration)
        token_ids = self._model.tensor([self._token_ids[slot] for slot in slots])
        segment = Segment(token_ids, self._cache, self._restoration.complete, slots, mass)
        logits = forward(self._model, [segment])[0]
        elapsed = clock.elapsed_ms
        self._pace.record(pass_flops(self._model, len(slots), sum(slots) / len(slots)), elapsed)
        return logits, elapsed

    def _count(self, chunks: ChunkSpans, options: RepairOptions, spent_ms: float) -> int:
        """How many tokens are repaired: in a time budget the question must be run beside them."""
        if options.budget_ms is None:
            return chunks.share(options.ratio)
        each = pass_flops(self._model, 1, len(self._token_ids))
        own = len(self._question)
        return max(0, self._pace.within(options.budget_ms - spent_ms, each, chunks.most + own) - own)

    def _is_within(self, options: RepairOptions, chunks: ChunkSpans) -> bool:
        """Whether there is time to look for what deviates."""
        if options.budget_ms is None:
            return True
        flops = self._model.layer_flops(0, chunks.most, chunks.spans[-1].stop / 2)
        return self._pace.milliseconds(flops) < options.budget_ms


def pass_flops(model: LanguageModel, tokens: int, attended: float) -> float:
    """Floating-point operations of a pass over some tokens, each attending to so many in the mean."""
    return sum(model.layer_flops(layer.index, tokens, attended) for layer in model.decoder.layers)


def deviation(
    model: LanguageModel, token_ids: list[int], cache: KVCache, restoration: Restoration, chunks: ChunkSpans
) -> Tensor:
    """How much the values of chunks' tokens change at the second layer when they attend to everything before them.

    Costs about one layer of a full prefill (CacheBlend, arXiv 2405.16444, section 4.3).

    Args:
        model: the model to run.
        token_ids: the whole prompt.
        cache: of the prompt.
        restoration: of its chunks.
        chunks: where they stand.

    Returns:
        Squared differences, summed over heads and channels, `[slots]`, float32; 0 for what cannot be repaired.
    """
    layers = model.decoder.layers
    probed = layers[min(1, len(layers) - 1)]
    restoration.complete(probed.index)
    first, end = chunks.repairable[0].start, chunks.repairable[-1].stop
    before = slice(probed.index)
    scratch = KVCache.allocate(layers[before], end, model.dtype, model.device)
    scratch.copy_prefix(KVCache(cache.keys[before], cache.values[before], first))
    changes = torch.zeros(len(token_ids), dtype=torch.float32, device=model.device)

    def receive(layer: int, hidden: Tensor) -> None:
        if layer == probed.index:
            values = probed.project(hidden)[1].transpose(0, 1)
            difference = values.float() - cache.values[layer][:, first:end].float()
            changes[first:end] = difference.square().sum((0, 2))

    run_layers(model, [Segment(model.tensor(token_ids[first:end]), scratch)], receive, probed.index + 1)
    return changes


class _Stopwatch:
    """Time since it was started, less what restoring took of it."""

    def __init__(self, model: LanguageModel, restoration: Restoration) -> None:
        self._device = model.device
        self._report = restoration.report
        self._restored = self._report.total_ms
        self._started = time.perf_counter()

    @property
    def elapsed_ms(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = (time.perf_counter() - self._started) * 1e3
        return elapsed - (self._report.total_ms - self._restored)
