"""One request's restore: the KV of its chunks come into being layer by layer, as the question's prefill asks for them.

While a layer is decoded, projected and attended to, the next ones are being read (HCache, EuroSys'25, section 4.1). A
layer waits for its own bytes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from ragcache.model.attention import Rope, Tables
from ragcache.model.capture import capture_states
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.backend import implementation
from ragcache.restore.placement import Placement
from ragcache.restore.project import to_states, write_kv
from ragcache.restore.reader import StateReader
from ragcache.restore.workspace import Workspace
from ragcache.states.encoded import Encoded, Moves, Run
from ragcache.states.form import Form, StateFormat
from ragcache.states.miss import Miss


@dataclass
class RestoreReport:
    """What restoring did.

    Attributes:
        restored_chunks: chunks whose KV came from stored states.
        restored_tokens: their tokens.
        recomputed_tokens: tokens of chunks that missed.
        read_bytes: states asked of the disk.
        misses: chunks whose stored states were not used, and why.
        read_ms: time spent waiting for reads that were not hidden behind computing.
        restore_ms: decode, projection and rotation.
        recompute_ms: encoding chunks that missed.
    """

    restored_chunks: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    read_bytes: int = 0
    misses: list[Miss] = field(default_factory=list)
    read_ms: float = 0.0
    restore_ms: float = 0.0
    recompute_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """Time taken from whoever asked for the layers."""
        return self.read_ms + self.restore_ms + self.recompute_ms


@dataclass
class ChunkGroup:
    """Chunks whose states are of one format.

    Attributes:
        placements: the chunks.
        format: of their states.
        reader: reads them.
        lost: indexes of those that turned out unusable.
    """

    placements: Sequence[Placement]
    format: StateFormat
    reader: StateReader
    lost: set[int] = field(default_factory=set)

    @property
    def present(self) -> list[Placement]:
        """The chunks that are not lost."""
        return [placement for index, placement in enumerate(self.placements) if index not in self.lost]


@dataclass(frozen=True)
class _Destination:
    """Where tokens go, and the angles they are turned by there."""

    moves: Moves
    tables: dict[Rope, Tables]


class Restoration:
    """Fills a KV cache. A context manager: it holds files open and threads busy.

    Attributes:
        report: what has been done so far; complete once every layer is.
    """

    def __init__(
        self, model: LanguageModel, prefix: KVCache, cache: KVCache, report: RestoreReport, workspace: Workspace
    ) -> None:
        """Set up.

        Args:
            model: the model whose KV are rebuilt.
            prefix: KV cache of the prompt's prefix.
            cache: receives the KV.
            report: with the misses that are known beforehand.
            workspace: memory to work in.
        """
        self.report = report
        self._model = model
        self._prefix = prefix
        self._cache = cache
        self._workspace = workspace
        self._implementation = implementation(model.device, workspace)
        self._groups: list[ChunkGroup] = []
        self._readers = ExitStack()
        self._next_layer = 0
        self._destinations: dict[tuple[tuple[int, int, int], ...], _Destination] = {}

    def __enter__(self) -> Restoration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.close()

    def add(self, placements: Sequence[Placement], format: StateFormat, reader: StateReader) -> ChunkGroup:
        """Take on chunks of one format; from now on their reader is closed with this.

        Returns:
            The group, with the chunks lost whose states cannot be opened.
        """
        group = ChunkGroup(placements, format, self._readers.enter_context(reader))
        reader.open()
        group.lost.update(reader.faults)
        self._groups.append(group)
        return group

    @torch.inference_mode()
    def start(self, missed: Sequence[tuple[Placement, StateFormat]]) -> None:
        """Begin to read, recompute what has to be, and fill the layers that follow from token ids.

        Args:
            missed: chunks to recompute, each with the format it is encoded in.
        """
        for index, group in enumerate(self._groups):
            group.reader.start(self._workspace, f"reader {index}")
            self.report.restored_chunks += len(group.present)
            self.report.restored_tokens += sum(len(it.token_ids) for it in group.present)
        for placement, format in missed:
            self._recompute(placement, format)
        with self._timed("restore_ms"):
            for group in self._groups:
                self._write_first_layers(group)

    @torch.inference_mode()
    def complete(self, layer: int) -> None:
        """Make sure that a layer of the cache holds the KV of every chunk.

        Args:
            layer: the first one that was not asked for yet, or an earlier one.
        """
        while self._next_layer <= layer:
            for group in self._groups:
                if group.format.layers[self._next_layer].form is not Form.TOKENS:
                    self._write_layer(group, self._next_layer)
            self._next_layer += 1
        self.report.read_bytes = sum(group.reader.asked_bytes for group in self._groups)

    def complete_all(self) -> RestoreReport:
        """Fill all layers."""
        self.complete(len(self._model.decoder.layers) - 1)
        return self.report

    def _write_layer(self, group: ChunkGroup, layer: int) -> None:
        with self._timed("read_ms"):
            states = group.reader.take()
        # Threads go on to find faults in later layers; what counts for this layer is what is known now.
        for index in sorted(set(group.reader.faults) - group.lost):
            self._lose(group, index)
        with self._timed("restore_ms"):
            runs = [
                Run(start, group.placements[index].start, len(group.placements[index].token_ids))
                for index, start in zip(states.chunks, states.starts, strict=True)
                if index not in group.lost
            ]
            self._write(group.format.layers[layer].form, layer, states.parts, runs)

    def _lose(self, group: ChunkGroup, index: int) -> None:
        """Recompute a chunk whose states turned out unusable, as those were encoded: from this layer on."""
        placement, fault = group.placements[index], group.reader.faults[index]
        group.lost.add(index)
        self.report.restored_chunks -= 1
        self.report.restored_tokens -= len(placement.token_ids)
        self.report.misses.append(Miss(placement.chunk_id, fault.reason, fault.detail + recomputed(placement)))
        # Earlier layers were restored from states that were sound, and tokens may have been computed again since.
        self._recompute(placement, group.format, self._next_layer)

    def _recompute(self, placement: Placement, format: StateFormat, first_layer: int = 0) -> None:
        """Encode a chunk alone, as the indexer would have, and restore from that.

        For an encoding alone the answer does not depend on the miss.
        """
        tokens = len(placement.token_ids)
        runs = [Run(0, placement.start, tokens)]

        def receive(layer: int, hidden: Tensor) -> None:
            if layer < first_layer:
                return
            form = format.layers[layer].form
            if form is Form.TOKENS:
                self._write(Form.HIDDEN, layer, [Encoded(hidden)], runs)
                return
            states = to_states(form, self._model.decoder.layers[layer], hidden)
            arrangement = format.arrange(layer, [tokens])
            self._write(form, layer, arrangement.loaded([format.encode(layer, states)]), runs)

        with self._timed("recompute_ms"):
            capture_states(self._model, self._prefix, [placement.token_ids], receive)
        self.report.recomputed_tokens += tokens

    def _write_first_layers(self, group: ChunkGroup) -> None:
        """Run the model's first layers, as far as nothing is stored of them."""
        count = len(group.format.layers) - len(group.format.stored_layers)
        if not group.present or count == 0:
            return
        runs, row = [], 0
        for placement in group.present:
            runs.append(Run(row, placement.start, len(placement.token_ids)))
            row += len(placement.token_ids)

        def receive(layer: int, hidden: Tensor) -> None:
            self._write(Form.HIDDEN, layer, [Encoded(hidden)], runs)

        capture_states(self._model, self._prefix, [it.token_ids for it in group.present], receive, layers=count)

    def _write(self, form: Form, layer: int, parts: Sequence[Encoded], runs: Sequence[Run]) -> None:
        if not runs:
            return
        module = self._model.decoder.layers[layer]
        destination = self._destination(parts[0].rows, runs)
        if module.rope is not None and module.rope not in destination.tables:
            destination.tables[module.rope] = module.rope.tables(destination.moves.slots)
        tables = None if module.rope is None else destination.tables[module.rope]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_kv(form, module, parts, tables, destination.moves, keys, values, self._implementation)

    def _destination(self, rows: int, runs: Sequence[Run]) -> _Destination:
        """Made once for all layers that take the same rows to the same slots."""
        key = ((rows, 0, 0), *runs)
        if key not in self._destinations:
            self._destinations[key] = _Destination(Moves.of(runs, rows, self._model.device), {})
        return self._destinations[key]

    @contextmanager
    def _timed(self, clock: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        setattr(self.report, clock, getattr(self.report, clock) + (time.perf_counter() - start) * 1e3)


def recomputed(placement: Placement) -> str:
    """What to add about a chunk that is recomputed: whether it comes to something else than its stored states."""
    return "; recomputed alone" if placement.encoding is not None and placement.encoding.context else ""


NeededChunks = Callable[[int], Sequence[int]]
"""Indexes of the chunks that a layer needs."""


def needed_chunks(model: LanguageModel, placements: Sequence[Placement], attending: int) -> NeededChunks:
    """Which chunks each layer needs: in a layer with a sliding window only those that attending tokens still see.

    Args:
        model: the model.
        placements: the chunks.
        attending: position of the first token that attends; it sees `window` positions, itself included.
    """
    by_window: dict[int | None, tuple[int, ...]] = {}
    for window in {layer.window for layer in model.decoder.layers}:
        first = 0 if window is None else attending - window + 1
        by_window[window] = tuple(index for index, it in enumerate(placements) if it.span.stop > first)
    return lambda layer: by_window[model.decoder.layers[layer].window]
