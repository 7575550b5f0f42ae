"""From a layout to the logits after its last token: which KV are restored, which are prefilled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from ragcache.generate.pace import Pace
from ragcache.generate.pool import CachePool
from ragcache.generate.repairing import PromptPrefill, pass_flops
from ragcache.generate.sequences import SequenceMemory
from ragcache.model.capture import prefill
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.memory import memory_for
from ragcache.prompt.layout import Layout
from ragcache.prompt.repair import NO_REPAIR, ChunkSpans, RepairOptions
from ragcache.restore.backend import implementation
from ragcache.restore.placement import Placement
from ragcache.restore.proof import prove
from ragcache.restore.restorer import Relocated, Restorer
from ragcache.restore.workspace import Workspace
from ragcache.settings import EncodingName, Reuse, Settings
from ragcache.states.form import StateFormat
from ragcache.states.miss import Miss, MissReason
from ragcache.states.records import Encoding, StoredStates, encoding_named


@dataclass(frozen=True)
class PromptReport:
    """Where the prompt's KV came from, and how long each part took, in milliseconds.

    Attributes:
        prefix_tokens: copied from the prefix kept in memory.
        remembered_chunks: the first ones, copied from what is remembered of prompts that were prefilled in full.
        remembered_tokens: their tokens.
        restored_chunks: chunks rebuilt from stored states.
        restored_tokens: their tokens.
        prefilled_tokens: run through the model in this request, other than to repair.
        repaired_tokens: of chunks, computed again with everything before them in view.
        misses: chunks whose stored states were not used.
        read_ms: waiting for the disk.
        restore_ms: rebuilding KV from states.
        repair_ms: choosing those tokens and running them through the model.
        prefill_ms: running other tokens through it.
    """

    prefix_tokens: int
    restored_chunks: int
    restored_tokens: int
    prefilled_tokens: int
    remembered_chunks: int = 0
    remembered_tokens: int = 0
    repaired_tokens: int = 0
    misses: list[Miss] = field(default_factory=list)
    read_ms: float = 0.0
    restore_ms: float = 0.0
    repair_ms: float = 0.0
    prefill_ms: float = 0.0


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose KV are in memory.

    Attributes:
        cache: its KV, with room for the answer.
        logits: after its last token, `[vocabulary]`.
        layout: what stands where in it.
        exact: all of its KV are as a full prefill gives them.
        reuse: how stored states served it.
        report: how it got there.
    """

    cache: KVCache
    logits: Tensor
    layout: Layout
    exact: bool
    reuse: Reuse
    report: PromptReport


class PromptChunk(Protocol):
    """What must be known of a chunk to restore it.

    Attributes:
        chunk_id: for reports.
        encodings: what is stored of it.
    """

    @property
    def chunk_id(self) -> str: ...  # noqa: D102

    @property
    def encodings(self) -> Sequence[Encoding]: ...  # noqa: D102


class Engine:
    """Prepares prompts for decoding; may be used by several threads at once.

    Attributes:
        prefix: KV of the tokens that every prompt starts with.
        format: how states are stored.
        pool: where a prompt's cache comes from, and goes back to once its answer is complete.
        sequences: remembers prompts that are exact.
    """

    def __init__(
        self,
        model: LanguageModel,
        prefix: tuple[int, ...],
        settings: Settings,
        format: StateFormat,
        relocated: Relocated,
    ) -> None:
        """Prefill the prompt's prefix once and keep its KV.

        Args:
            model: the model to run.
            prefix: token ids that every prompt starts with.
            settings: how states are read.
            format: how chunks without states are encoded.
            relocated: where states are now that are no longer where they were.

        Raises:
            CertificationError: on this device KV are not restored as on a CPU.
        """
        self._model = model
        self._prefix_ids = prefix
        self.pool = CachePool(model)
        self.sequences = SequenceMemory(model, prefix, settings.sequence_megabytes * 2**20)
        # What a repair takes is known from here on, if not well.
        self._pace = Pace()
        clock = time.perf_counter()
        self.prefix = prefill(model, prefix)
        self._pace.record(pass_flops(model, len(prefix), len(prefix) / 2), (time.perf_counter() - clock) * 1e3)
        self.format = format
        self._exact_format = replace(format, layers=tuple(replace(it, codec="raw") for it in format.layers))
        self._relocated = relocated
        if model.device.type != "cpu":
            prove(model, implementation(model.device, Workspace()), settings.codec)
        self._restorer = Restorer(model, self.prefix, prefix, settings.reader_threads, verify=settings.verify_checksums)

    def prepare(
        self,
        layout: Layout,
        chunks: Sequence[PromptChunk],
        reuse: Reuse,
        repair: RepairOptions = NO_REPAIR,
    ) -> PreparedPrompt:
        """Fill a KV cache with the prompt.

        Args:
            layout: the prompt. Where the states of a `context` encoding turn out unusable before they are read, those
                of the `alone` encoding take their place. Where its prefix is not the one that states were encoded
                after, none are used, and every chunk that has some is a miss.
            chunks: what is known of the layout's chunks.
            reuse: see `ragcache.settings.Reuse`.
            repair: which of the chunks' tokens are computed again; only where chunks are composed.

        Raises:
            NotEnoughMemoryError: this prompt does not fit in memory now.
        """
        tokens = len(layout.token_ids) + layout.answer_room
        with memory_for(f"a prompt and answer of {tokens:,} tokens"):
            cache = self.pool.take(tokens)
            try:
                return self._fill(cache, layout, chunks, reuse, repair)
            except BaseException:
                self.pool.give_back(cache)
                raise

    def finish(self, prompt: PreparedPrompt) -> None:
        """Remember a prompt if it is exact, and give its cache back; nobody may use it any more.

        Args:
            prompt: its answer may lie behind it in the cache.
        """
        try:
            if prompt.exact:
                self.sequences.remember(prompt.layout, prompt.cache)
        finally:
            self.pool.give_back(prompt.cache)

    def _fill(
        self, cache: KVCache, layout: Layout, chunks: Sequence[PromptChunk], reuse: Reuse, repair: RepairOptions
    ) -> PreparedPrompt:
        foreign: list[Miss] = []
        if reuse != "none" and layout.prefix != self._prefix_ids:
            reuse, foreign = "none", [_foreign(chunk) for chunk in chunks if chunk.encodings]
        placements = [
            _placement(chunk, token_ids, start, "alone" if reuse == "exact" else name)
            for chunk, token_ids, start, name in zip(
                chunks, layout.chunks, layout.starts, layout.encodings, strict=True
            )
        ]
        format, inexact, remembered = self.format, None, 0
        if reuse == "none":
            placements = []
        else:
            cache.copy_prefix(self.prefix)
            remembered = self.sequences.recall(layout, cache)
            placements = placements[remembered:]
        remembered_tokens = cache.length - len(layout.prefix) if remembered else 0
        if reuse == "exact":
            format = self._exact_format
            placements, inexact = _exact(placements) if not remembered else ([], None)
        alone_first = not remembered and layout.encodings[:1] != ("context",)
        spans = ChunkSpans.laid_out(layout.starts[remembered:], layout.chunks[remembered:], first_exact=alone_first)
        if reuse != "composed" or not spans.most:
            repair = NO_REPAIR
        attending = None if repair.method == "off" else spans.repairable[0].start
        with self._restorer.restoring(placements, format, cache, self._relocated, attending) as restoration:
            restored_tokens = cache.length
            prefill = PromptPrefill(self._model, self._pace, layout.token_ids, cache, restoration)
            prefilled = prefill.run(spans, repair)
        restored = restoration.report
        return PreparedPrompt(
            cache,
            prefilled.logits,
            layout,
            reuse != "composed"
            or (prefilled.repaired_tokens == spans.most and (not spans.first_exact or self._is_exact(placements))),
            reuse,
            PromptReport(
                prefix_tokens=0 if reuse == "none" else len(layout.prefix),
                restored_chunks=restored.restored_chunks,
                restored_tokens=restored.restored_tokens,
                prefilled_tokens=cache.length - restored_tokens + restored.recomputed_tokens,
                remembered_chunks=remembered,
                remembered_tokens=remembered_tokens,
                repaired_tokens=prefilled.repaired_tokens,
                misses=foreign or (restored.misses if inexact is None else [inexact]),
                read_ms=restored.read_ms,
                restore_ms=restored.restore_ms,
                repair_ms=prefilled.repair_ms,
                prefill_ms=prefilled.prefill_ms + restored.recompute_ms,
            ),
        )

    def _is_exact(self, placements: Sequence[Placement]) -> bool:
        """Whether the first chunk, if there is any, equals a full prefill, restored or recomputed."""
        first = [it.states for it in placements[:1]]
        return all(self.format.exact and (states is None or _decodes_exactly(states)) for states in first)


def _placement(chunk: PromptChunk, token_ids: tuple[int, ...], start: int, name: EncodingName | None) -> Placement:
    alone = encoding_named(chunk.encodings, "alone")
    otherwise = alone if name == "context" and alone is not None and alone.states is not None else None
    return Placement(chunk.chunk_id, token_ids, start, encoding_named(chunk.encodings, name), otherwise)


def _foreign(chunk: PromptChunk) -> Miss:
    detail = "the prompt begins otherwise than those that states were encoded for, so all of it was prefilled"
    return Miss(chunk.chunk_id, MissReason.PREFIX, detail)


def _exact(placements: Sequence[Placement]) -> tuple[list[Placement], Miss | None]:
    """What equals a full prefill when it is restored: the first chunk, which was encoded after the prefix alone."""
    if not placements:
        return [], None
    first = placements[0]
    if first.states is not None and not _decodes_exactly(first.states):
        reason = "quantised states are not exact; index with --codec raw to reuse them here"
        return [], Miss(first.chunk_id, MissReason.INEXACT, reason)
    return [first], None


def _decodes_exactly(states: StoredStates) -> bool:
    try:
        return StateFormat.from_json(states.format).exact
    except ValueError:
        return False
