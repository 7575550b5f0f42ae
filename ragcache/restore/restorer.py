"""KV of chunks, rebuilt from stored states at the positions they have in this prompt.

Layer by layer: decode the states of all chunks, project them with the model's own modules, rotate the keys to their
positions and write both into the request's KV cache, while the next layers are being read (HCache, EuroSys'25,
section 4). A chunk whose states cannot be used is recomputed here, within the same request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragcache.model.capture import capture_states
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.reader import ReadRequest, StateReader
from ragcache.states.form import Form, StateFormat
from ragcache.states.key import state_key
from ragcache.states.miss import Miss, MissReason
from ragcache.states.records import StoredStates

BLOCK_TOKENS = 2048
"""Tokens decoded and projected at once: enough for a full-speed matrix product, and a bound on working memory."""


@dataclass(frozen=True)
class Placement:
    """A chunk and where it goes.

    Attributes:
        chunk_id: for reports.
        token_ids: the chunk's ids.
        start: position of its first token in the prompt.
        states: stored states, if there are any.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    start: int
    states: StoredStates | None

    @property
    def span(self) -> slice:
        """Slots the chunk takes in the KV cache."""
        return slice(self.start, self.start + len(self.token_ids))


@dataclass
class RestoreReport:
    """What restoring did.

    Attributes:
        restored_tokens: tokens whose KV came from stored states.
        recomputed_tokens: tokens of chunks that missed.
        misses: chunks whose stored states were not used, and why.
        read_ms: time spent waiting for reads that were not hidden behind computing.
        restore_ms: decode, projection and rotation.
        recompute_ms: encoding chunks that missed.
    """

    restored_tokens: int = 0
    recomputed_tokens: int = 0
    misses: list[Miss] = field(default_factory=list)
    read_ms: float = 0.0
    restore_ms: float = 0.0
    recompute_ms: float = 0.0


class Restorer:
    """Fills KV caches from stored states; one per model, used by any number of threads."""

    def __init__(self, model: LanguageModel, prefix: KVCache, prefix_ids: tuple[int, ...], threads: int) -> None:
        """Set up.

        Args:
            model: the model whose KV are rebuilt.
            prefix: KV cache of the prompt's prefix.
            prefix_ids: its token ids.
            threads: number of reader threads.
        """
        self._model = model
        self._prefix = prefix
        self._prefix_ids = prefix_ids
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ragcache-read")

    @torch.inference_mode()
    def restore(self, placements: Sequence[Placement], format: StateFormat, cache: KVCache) -> RestoreReport:
        """Write the KV of all chunks into a cache whose slots before the first chunk are filled.

        Args:
            placements: chunks without gaps between them, in prompt order, behind what the cache holds.
            format: how a chunk that has no stored states is encoded. One whose states are damaged is encoded as
                those were, so that the answer equals that of an undamaged store.
            cache: receives the KV; its length grows over the chunks.
        """
        report = RestoreReport()
        missed: list[Placement] = []
        groups: dict[str, list[Placement]] = {}
        for placement in placements:
            if (miss := self._unusable(placement)) is not None:
                report.misses.append(miss)
                missed.append(placement)
            elif placement.states is not None:
                groups.setdefault(placement.states.format, []).append(placement)
        for group_format, group in groups.items():
            missed += self._restore_group(group, StateFormat.from_json(group_format), cache, report)
        if missed:
            self._recompute(missed, format, cache, report)
        cache.length = max((placement.span.stop for placement in placements), default=cache.length)
        return report

    def _unusable(self, placement: Placement) -> Miss | None:
        """Whether states are to be passed over without reading them."""
        states = placement.states
        if states is None:
            return Miss(placement.chunk_id, MissReason.NOT_STORED, "no states are stored for this text")
        key = state_key(self._model.fingerprint.digest, self._prefix_ids, (), placement.token_ids)
        if states.key != key:
            return Miss(placement.chunk_id, MissReason.STALE_KEY, "encoded by another model or after another prefix")
        if self._format_of(placement) is None:
            return Miss(placement.chunk_id, MissReason.CODEC, "form, codec, precision or shape is not what is needed")
        return None

    def _format_of(self, placement: Placement) -> StateFormat | None:
        """The format of stored states, if this version and this model can use it."""
        if placement.states is None:
            return None
        try:
            format = StateFormat.from_json(placement.states.format)
        except ValueError:
            return None
        fits = (
            format.dtype == self._model.fingerprint.dtype
            and len(format.layers) == len(self._model.decoder.layers)
            and format.layers[0].form is Form.TOKENS
            and all(it.form is Form.HIDDEN for it in format.layers[1:])
            and all(it.width == self._model.decoder.hidden_size for it in format.layers[1:])
            and len(placement.states.ranges) == 1 + len(format.stored_layers)
        )
        return format if fits else None

    def _restore_group(
        self, group: list[Placement], format: StateFormat, cache: KVCache, report: RestoreReport
    ) -> list[Placement]:
        """Restore chunks of one format; returns those whose states turned out unusable."""
        requests = [ReadRequest(p.states, p.token_ids) for p in group if p.states is not None]
        token_ids = self._model.tensor([i for placement in group for i in placement.token_ids])
        blocks = self._blocks(group)
        width = self._model.decoder.hidden_size
        hidden = torch.empty(BLOCK_TOKENS, width, dtype=self._model.dtype, device=self._model.device)
        clock = time.perf_counter()
        for block in blocks:
            self._write(0, self._model.decoder.first_layer_input(token_ids[block.tokens]), block, cache)
        with StateReader(requests, format, self._pool) as reader:
            report.restore_ms += _since(clock)
            clock = time.perf_counter()
            for layer, rows in reader.layers():
                report.read_ms += _since(clock)
                clock = time.perf_counter()
                codec = format.codec(layer)
                for block in blocks:
                    decoded = hidden[: block.tokens.stop - block.tokens.start]
                    codec.decode(rows[block.tokens].to(self._model.device), decoded)
                    self._write(layer, decoded, block, cache)
                report.restore_ms += _since(clock)
                clock = time.perf_counter()
            report.read_ms += _since(clock)
        for index, fault in sorted(reader.faults.items()):
            report.misses.append(Miss(group[index].chunk_id, fault.reason, fault.detail))
        report.restored_tokens += sum(len(p.token_ids) for index, p in enumerate(group) if index not in reader.faults)
        return [group[index] for index in sorted(reader.faults)]

    def _recompute(self, missed: list[Placement], format: StateFormat, cache: KVCache, report: RestoreReport) -> None:
        """Encode chunks as the indexer would have and restore from that, so the answer does not depend on the miss."""
        clock = time.perf_counter()
        for placement in missed:
            encoding = self._format_of(placement) or format
            blocks = self._blocks([placement])

            def receive(
                layer: int, hidden: Tensor, encoding: StateFormat = encoding, blocks: list[_Block] = blocks
            ) -> None:
                if layer in encoding.stored_layers:
                    codec = encoding.codec(layer)
                    rows, hidden = codec.encode(hidden), torch.empty_like(hidden)
                    codec.decode(rows, hidden)
                for block in blocks:
                    self._write(layer, hidden[block.tokens], block, cache)

            capture_states(self._model, self._prefix, [placement.token_ids], receive)
            report.recomputed_tokens += len(placement.token_ids)
        report.recompute_ms += _since(clock)

    def _write(self, layer: int, hidden: Tensor, block: _Block, cache: KVCache) -> None:
        """Project and rotate one layer of some tokens, `[tokens, hidden_size]`, into their slots."""
        self._model.decoder.layers[layer].restore(
            hidden, block.tables, cache.keys[layer][:, block.slots], cache.values[layer][:, block.slots]
        )

    def _blocks(self, group: Sequence[Placement]) -> list[_Block]:
        """Cut the tokens of chunks into blocks; neighbouring chunks share one."""
        blocks: list[_Block] = []
        token = 0
        for run in _runs(group):
            for start in range(run.start, run.stop, BLOCK_TOKENS):
                slots = slice(start, min(start + BLOCK_TOKENS, run.stop))
                tokens = slice(token, token + slots.stop - slots.start)
                positions = torch.arange(slots.start, slots.stop, device=self._model.device)
                blocks.append(_Block(tokens, slots, self._model.decoder.rotary.tables(positions)))
                token = tokens.stop
        return blocks


@dataclass(frozen=True)
class _Block:
    """Tokens that are decoded and projected together.

    Attributes:
        tokens: where they lie among the tokens of all chunks.
        slots: where they go in the KV cache.
        tables: cosines and sines of their positions.
    """

    tokens: slice
    slots: slice
    tables: tuple[Tensor, Tensor]


def _runs(group: Sequence[Placement]) -> list[slice]:
    """Slots of chunks, neighbours joined: few large matrix products instead of one for each chunk."""
    runs: list[slice] = []
    for placement in group:
        if runs and runs[-1].stop == placement.start:
            runs[-1] = slice(runs[-1].start, placement.span.stop)
        else:
            runs.append(placement.span)
    return runs


def _since(clock: float) -> float:
    return (time.perf_counter() - clock) * 1e3
