"""KV of chunks, rebuilt from stored states at the positions they have in this prompt.

What is decided here, before anything is read: which chunks have states that can be used, and where those are now. A
chunk whose states cannot be used is recomputed, within the same request. The work itself is `Restoration`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.formats import fits
from ragcache.restore.placement import Placement
from ragcache.restore.reader import ReaderPool, ReadRequest, StateReader
from ragcache.restore.restoration import Restoration, RestoreReport, needed_chunks
from ragcache.restore.workspace import WorkspacePool
from ragcache.states.form import StateFormat
from ragcache.states.key import state_key
from ragcache.states.miss import Miss, MissReason
from ragcache.states.records import StoredStates

Relocated = Callable[[StoredStates], StoredStates | None]
"""Where states are now that are no longer where they were; `None` when they are gone."""


def _nowhere(states: StoredStates) -> StoredStates | None:
    return None


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
        self._pool = ReaderPool(threads)
        self._workspaces = WorkspacePool()

    @contextmanager
    def restoring(
        self,
        placements: Sequence[Placement],
        format: StateFormat,
        cache: KVCache,
        relocated: Relocated = _nowhere,
    ) -> Iterator[Restoration]:
        """Have the KV of all chunks written into a cache whose slots before the first chunk are filled.

        Until the block ends, ask for each layer (`Restoration.complete`) before it is attended to.

        Args:
            placements: chunks without gaps between them, in prompt order, behind what the cache holds.
            format: how a chunk that has no stored states is encoded. One whose states are damaged is encoded as
                those were, so that the answer equals that of an undamaged store.
            cache: receives the KV; its length grows over the chunks.
            relocated: where states are now that are no longer where they were.
        """
        report = RestoreReport()
        end = max((placement.span.stop for placement in placements), default=cache.length)
        with (
            self._workspaces.lend() as workspace,
            Restoration(self._model, self._prefix, cache, report, workspace) as restoration,
        ):
            missed: list[tuple[Placement, StateFormat]] = []
            usable = []
            for placement in placements:
                if (miss := self._unusable(placement)) is not None:
                    report.misses.append(miss)
                    missed.append((placement, self._format_of(placement) or format))
                else:
                    usable.append(placement)
            moved = self._open(usable, end, restoration, missed, relocated)
            self._open(moved, end, restoration, missed, _nowhere)
            cache.length = end
            restoration.start(missed)
            yield restoration

    def restore(
        self, placements: Sequence[Placement], format: StateFormat, cache: KVCache, relocated: Relocated = _nowhere
    ) -> RestoreReport:
        """All layers at once; see `restoring`."""
        with self.restoring(placements, format, cache, relocated) as restoration:
            return restoration.complete_all()

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

    def _open(
        self,
        placements: Sequence[Placement],
        end: int,
        restoration: Restoration,
        missed: list[tuple[Placement, StateFormat]],
        relocated: Relocated,
    ) -> list[Placement]:
        """Open the states of chunks; adds to `missed`, and returns those that are elsewhere by now."""
        by_format: dict[str, list[tuple[Placement, StoredStates]]] = {}
        for placement in placements:
            if placement.states is not None:
                by_format.setdefault(placement.states.format, []).append((placement, placement.states))
        moved = []
        for text, members in by_format.items():
            format, chunks = StateFormat.from_json(text), [placement for placement, _ in members]
            reader = StateReader(
                [ReadRequest(states, placement.token_ids) for placement, states in members],
                format,
                needed_chunks(self._model, chunks, end),
                self._pool,
                self._model.device,
                verify=self._verify,
            )
            restoration.add(chunks, format, reader)
            for index, fault in reader.faults.items():
                placement, states = members[index]
                # A compaction may have moved them since they were looked up.
                again = relocated(states) if fault.reason is MissReason.MISSING else None
                if again is not None:
                    moved.append(replace(placement, states=again))
                    continue
                missed.append((placement, format))
                restoration.report.misses.append(Miss(placement.chunk_id, fault.reason, fault.detail))
        return moved
