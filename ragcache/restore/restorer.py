"""KV of chunks, rebuilt from stored states at the positions they have in this prompt.

Layer by layer: decode the states of all chunks, project them with the model's own modules, rotate the keys to their
positions and write both into the request's KV cache, while the next layers are being read (HCache, EuroSys'25,
section 4). A chunk whose states cannot be used is recomputed here, within the same request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ragcache.model.capture import capture_states
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.project import fits, to_kv, to_states
from ragcache.restore.reader import ReadRequest, StateReader
from ragcache.states.form import StateFormat
from ragcache.states.key import state_key
from ragcache.states.miss import Miss, MissReason, UnusableStatesError
from ragcache.states.records import StoredStates

BLOCK_TOKENS = 2048
"""Tokens decoded and projected at once, unless a single chunk has more: enough for a full-speed matrix product, and a
bound on working memory."""

Relocated = Callable[[StoredStates], StoredStates | None]
"""Where states are now that are no longer where they were; `None` when they are gone."""


def _nowhere(states: StoredStates) -> StoredStates | None:
    return None


@dataclass(frozen=True)
class Placement:
    """A chunk and where it goes.

    Attributes:
        chunk_id: for reports.
        token_ids: the chunk's ids.
        start: position of its first token in the prompt.
        states: stored states, if there are any.
        evicted: there are none because the byte budget was short.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    start: int
    states: StoredStates | None
    evicted: bool = False

    @property
    def span(self) -> slice:
        """Slots the chunk takes in the KV cache."""
        return slice(self.start, self.start + len(self.token_ids))


@dataclass
class RestoreReport:
    """What restoring did.

    Attributes:
        restored_chunks: chunks whose KV came from stored states.
        restored_tokens: their tokens.
        recomputed_tokens: tokens of chunks that missed.
        misses: chunks whose stored states were not used, and why.
        read_ms: time spent waiting for reads that were not hidden behind computing.
        restore_ms: decode, projection and rotation.
        recompute_ms: encoding chunks that missed.
    """

    restored_chunks: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    misses: list[Miss] = field(default_factory=list)
    read_ms: float = 0.0
    restore_ms: float = 0.0
    recompute_ms: float = 0.0


class Restorer:
    """Fills KV caches from stored states; one per model, used by any number of threads."""

    def __init__(
        self, model: LanguageModel, prefix: KVCache, prefix_ids: tuple[int, ...], threads: int, *, verify: bool = True
    ) -> None:
        """Set up.

        Args:
            model: the model whose KV are rebuilt.
            prefix: KV cache of the prompt's prefix.
            prefix_ids: its token ids.
            threads: number of reader threads.
            verify: compare the checksum of everything that is read.
        """
        self._model = model
        self._prefix = prefix
        self._prefix_ids = prefix_ids
        self._verify = verify
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ragcache-read")

    @torch.inference_mode()
    def restore(
        self,
        placements: Sequence[Placement],
        format: StateFormat,
        cache: KVCache,
        relocated: Relocated = _nowhere,
    ) -> RestoreReport:
        """Write the KV of all chunks into a cache whose slots before the first chunk are filled.

        Args:
            placements: chunks without gaps between them, in prompt order, behind what the cache holds.
            format: how a chunk that has no stored states is encoded. One whose states are damaged is encoded as
                those were, so that the answer equals that of an undamaged store.
            cache: receives the KV; its length grows over the chunks.
            relocated: where states are now that are no longer where they were.
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
            missed += self._restore_group(group, StateFormat.from_json(group_format), cache, report, relocated)
        if missed:
            self._recompute(missed, format, cache, report)
        cache.length = max((placement.span.stop for placement in placements), default=cache.length)
        return report

    def _unusable(self, placement: Placement) -> Miss | None:
        """Whether states are to be passed over without reading them."""
        states = placement.states
        if states is None and placement.evicted:
            return Miss(placement.chunk_id, MissReason.EVICTED, "states were given up for lack of space")
        if states is None:
            return Miss(placement.chunk_id, MissReason.NOT_STORED, "no states are stored for this text")
        key = state_key(self._model.fingerprint.digest, self._prefix_ids, (), placement.token_ids)
        if states.key != key:
            return Miss(placement.chunk_id, MissReason.FINGERPRINT, "encoded by another model or after another prefix")
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
        complete = len(placement.states.ranges) == 1 + len(format.stored_layers)
        return format if complete and fits(format, self._model) else None

    def _restore_group(
        self,
        group: list[Placement],
        format: StateFormat,
        cache: KVCache,
        report: RestoreReport,
        relocated: Relocated,
    ) -> list[Placement]:
        """Restore chunks of one format; returns those whose states turned out unusable."""
        faults = self._read_group(group, format, cache, report)
        missed, moved = [], []
        for index, placement in enumerate(group):
            fault = faults.get(index)
            if fault is None:
                report.restored_chunks += 1
                report.restored_tokens += len(placement.token_ids)
                continue
            # A compaction may have moved them since they were looked up.
            again = relocated(placement.states) if fault.reason is MissReason.MISSING and placement.states else None
            if again is not None:
                moved.append(replace(placement, states=again))
                continue
            missed.append(placement)
            report.misses.append(Miss(placement.chunk_id, fault.reason, fault.detail))
        if moved:
            missed += self._restore_group(moved, format, cache, report, _nowhere)
        return missed

    def _read_group(
        self, group: list[Placement], format: StateFormat, cache: KVCache, report: RestoreReport
    ) -> dict[int, UnusableStatesError]:
        """Read chunks of one format and write their KV; faults by index of the chunk."""
        requests = [ReadRequest(p.states, p.token_ids) for p in group if p.states is not None]
        clock = time.perf_counter()
        blocks = self._blocks(group)
        for block in blocks:
            self._write_first_layer(block, cache)
        largest = max(block.tokens for block in blocks)
        buffers: dict[tuple[int, int], Tensor] = {}
        with StateReader(requests, format, self._pool, verify=self._verify) as reader:
            report.restore_ms += _since(clock)
            clock = time.perf_counter()
            for layer, runs in reader.layers():
                report.read_ms += _since(clock)
                clock = time.perf_counter()
                shape = (len(format.layers[layer].form.parts), format.layers[layer].width)
                if shape not in buffers:
                    parts, width = shape
                    buffers[shape] = torch.empty(
                        parts, largest, width, dtype=self._model.dtype, device=self._model.device
                    )
                for block in blocks:
                    self._write_layer(layer, runs, format, block, buffers[shape], cache)
                report.restore_ms += _since(clock)
                clock = time.perf_counter()
            report.read_ms += _since(clock)
            return reader.faults

    def _recompute(self, missed: list[Placement], format: StateFormat, cache: KVCache, report: RestoreReport) -> None:
        """Encode chunks as the indexer would have and restore from that, so the answer does not depend on the miss."""
        clock = time.perf_counter()
        for placement in missed:
            encoding = self._format_of(placement) or format
            block = self._block([(0, placement)])

            def receive(layer: int, hidden: Tensor, encoding: StateFormat = encoding, block: _Block = block) -> None:
                module, form = self._model.decoder.layers[layer], encoding.layers[layer].form
                if layer not in encoding.stored_layers:
                    module.restore(hidden, block.tables, *block.slots_of(cache, layer))
                    return
                states = to_states(form, module, hidden)
                decoded = torch.empty_like(states)
                encoding.decode(layer, encoding.encode(layer, states), decoded)
                to_kv(form, module, decoded, block.tables, *block.slots_of(cache, layer))

            capture_states(self._model, self._prefix, [placement.token_ids], receive)
            report.recomputed_tokens += len(placement.token_ids)
        report.recompute_ms += _since(clock)

    def _write_first_layer(self, block: _Block, cache: KVCache) -> None:
        decoder = self._model.decoder
        hidden = decoder.first_layer_input(self._model.tensor([i for _, it in block.chunks for i in it.token_ids]))
        decoder.layers[0].restore(hidden, block.tables, *block.slots_of(cache, 0))

    def _write_layer(
        self, layer: int, runs: Sequence[Tensor], format: StateFormat, block: _Block, buffer: Tensor, cache: KVCache
    ) -> None:
        """Decode a layer of some chunks and write its KV.

        Args:
            layer: index of the layer.
            runs: its bytes for each chunk of the group.
            format: of the group.
            block: which of the chunks.
            buffer: to decode into, `[parts, at least the block's tokens, width]`.
            cache: receives the KV.
        """
        end = 0
        for index, placement in block.chunks:
            start, end = end, end + len(placement.token_ids)
            format.decode(layer, runs[index].to(self._model.device), buffer[:, start:end])
        form, module = format.layers[layer].form, self._model.decoder.layers[layer]
        to_kv(form, module, buffer[:, :end], block.tables, *block.slots_of(cache, layer))

    def _blocks(self, group: Sequence[Placement]) -> list[_Block]:
        """Join neighbouring chunks: few large matrix products instead of one for each chunk."""
        blocks: list[list[tuple[int, Placement]]] = []
        for index, placement in enumerate(group):
            if blocks and blocks[-1][-1][1].span.stop == placement.start:
                tokens = placement.span.stop - blocks[-1][0][1].start
                if tokens <= BLOCK_TOKENS:
                    blocks[-1].append((index, placement))
                    continue
            blocks.append([(index, placement)])
        return [self._block(chunks) for chunks in blocks]

    def _block(self, chunks: list[tuple[int, Placement]]) -> _Block:
        slots = slice(chunks[0][1].start, chunks[-1][1].span.stop)
        positions = torch.arange(slots.start, slots.stop, device=self._model.device)
        return _Block(chunks, slots, self._model.decoder.rotary.tables(positions))


@dataclass(frozen=True)
class _Block:
    """Neighbouring chunks that are decoded and projected together.

    Attributes:
        chunks: each with its index in the group.
        slots: where they go in the KV cache.
        tables: cosines and sines of their positions.
    """

    chunks: list[tuple[int, Placement]]
    slots: slice
    tables: tuple[Tensor, Tensor]

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(placement.token_ids) for _, placement in self.chunks)

    def slots_of(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Where keys and values of a layer go, each `[kv_heads, tokens, head_dim]`."""
        return cache.keys[layer][:, self.slots], cache.values[layer][:, self.slots]


def _since(clock: float) -> float:
    return (time.perf_counter() - clock) * 1e3
