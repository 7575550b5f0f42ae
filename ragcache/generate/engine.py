"""From a layout to the logits after its last token: which KV are restored, which are prefilled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from ragcache.generate.pool import CachePool
from ragcache.model.capture import prefill
from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.memory import memory_for
from ragcache.prompt.layout import Layout
from ragcache.restore.backend import implementation
from ragcache.restore.placement import Placement
from ragcache.restore.proof import prove
from ragcache.restore.restorer import Relocated, Restorer
from ragcache.restore.workspace import Workspace
from ragcache.settings import Reuse, Settings
from ragcache.states.form import StateFormat
from ragcache.states.miss import Miss, MissReason
from ragcache.states.records import StoredStates


@dataclass(frozen=True)
class PromptReport:
    """Where the prompt's KV came from, and how long each part took, in milliseconds.

    Attributes:
        prefix_tokens: copied from the prefix kept in memory.
        restored_chunks: chunks rebuilt from stored states.
        restored_tokens: their tokens.
        prefilled_tokens: run through the model in this request.
        misses: chunks whose stored states were not used.
        read_ms: waiting for the disk.
        restore_ms: rebuilding KV from states.
        prefill_ms: running tokens through the model.
    """

    prefix_tokens: int
    restored_chunks: int
    restored_tokens: int
    prefilled_tokens: int
    misses: list[Miss] = field(default_factory=list)
    read_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose KV are in memory.

    Attributes:
        cache: its KV, with room for the answer.
        logits: after its last token, `[vocabulary]`.
        report: how it got there.
    """

    cache: KVCache
    logits: Tensor
    report: PromptReport


class PromptChunk(Protocol):
    """What must be known of a chunk to restore it.

    Attributes:
        chunk_id: for reports.
        states: stored states, if there are any.
        evicted: there are none because the byte budget was short.
    """

    @property
    def chunk_id(self) -> str: ...  # noqa: D102

    @property
    def states(self) -> StoredStates | None: ...  # noqa: D102

    @property
    def evicted(self) -> bool: ...  # noqa: D102


class Engine:
    """Prepares prompts for decoding; may be used by several threads at once.

    Attributes:
        prefix: KV of the tokens that every prompt starts with.
        format: how states are stored.
        pool: where a prompt's cache comes from, and goes back to once its answer is complete.
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
        self.pool = CachePool(model)
        self.prefix = prefill(model, prefix)
        self.format = format
        self._exact_format = replace(format, layers=tuple(replace(it, codec="raw") for it in format.layers))
        self._relocated = relocated
        if model.device.type != "cpu":
            prove(model, implementation(model.device, Workspace()), settings.codec)
        self._restorer = Restorer(model, self.prefix, prefix, settings.reader_threads, verify=settings.verify_checksums)

    def prepare(self, layout: Layout, chunks: Sequence[PromptChunk], reuse: Reuse) -> PreparedPrompt:
        """Fill a KV cache with the prompt.

        Args:
            layout: the prompt.
            chunks: what is known of the layout's chunks.
            reuse: see `ragcache.settings.Reuse`.

        Raises:
            NotEnoughMemoryError: this prompt does not fit in memory now.
        """
        tokens = len(layout.token_ids) + layout.answer_room
        with memory_for(f"a prompt and answer of {tokens:,} tokens"):
            cache = self.pool.take(tokens)
            try:
                return self._fill(cache, layout, chunks, reuse)
            except BaseException:
                self.pool.give_back(cache)
                raise

    def _fill(self, cache: KVCache, layout: Layout, chunks: Sequence[PromptChunk], reuse: Reuse) -> PreparedPrompt:
        placements = [
            Placement(chunk.chunk_id, token_ids, start, chunk.states, chunk.evicted)
            for chunk, token_ids, start in zip(chunks, layout.chunks, layout.starts, strict=True)
        ]
        format, inexact = self.format, None
        if reuse == "none":
            placements = []
        else:
            cache.copy_prefix(self.prefix)
        if reuse == "exact":
            format = self._exact_format
            placements, inexact = _exact(placements)
        with self._restorer.restoring(placements, format, cache, self._relocated) as restoration:
            restored_in_advance = restoration.report.total_ms
            rest = layout.token_ids[cache.length :]
            clock = time.perf_counter()
            logits = forward(self._model, [Segment(self._model.tensor(rest), cache, restoration.complete)])[0]
            elapsed = (time.perf_counter() - clock) * 1e3
        restored = restoration.report
        return PreparedPrompt(
            cache,
            logits,
            PromptReport(
                prefix_tokens=0 if reuse == "none" else len(layout.prefix),
                restored_chunks=restored.restored_chunks,
                restored_tokens=restored.restored_tokens,
                prefilled_tokens=len(rest) + restored.recomputed_tokens,
                misses=restored.misses if inexact is None else [inexact],
                read_ms=restored.read_ms,
                restore_ms=restored.restore_ms,
                # Layers are restored while the rest is prefilled.
                prefill_ms=elapsed - (restored.total_ms - restored_in_advance) + restored.recompute_ms,
            ),
        )


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
