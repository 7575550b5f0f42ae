"""KV of chunks, rebuilt from stored states at the positions they have in this prompt.

What is decided here, before anything is read: which chunks have states that can be used, and where those are now. A
chunk whose states cannot be used is recomputed, within the same request. The work itself is `Restoration`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.formats import fits
from ragcache.restore.placement import Placement
from ragcache.restore.reader import ReaderPool, ReadRequest, StateReader
from ragcache.restore.restoration import Restoration, RestoreReport, needed_chunks, recomputed
from ragcache.restore.workspace import WorkspacePool
from ragcache.states.form import StateFormat
from ragcache.states.key import state_key
from ragcache.states.miss import Miss, MissReason
from ragcache.states.records import StoredStates

Relocated = Callable[[StoredStates], StoredStates | None]
"""Where states are now that are no longer where they were; `None` when they are gone."""


def _nowhere(states: StoredStates) -> StoredStates | None:
    return None


@dataclass
class _Unused:
    """What becomes of chunks whose states turn out unusable before they are read.

    Attributes:
        report: is told of them.
        others: are to be restored from another encoding than was tried so far.
        missed: are to be recomputed, each with the format it is encoded in.
    """

    report: RestoreReport
    others: list[Placement] = field(default_factory=list)
    missed: list[tuple[Placement, StateFormat]] = field(default_factory=list)

    def add(self, placement: Placement, format: StateFormat, miss: Miss) -> None:
        """Report a chunk, and see to it that something takes the place of its states."""
        if (otherwise := placement.otherwise) is None:
            consequence = recomputed(placement)
            self.missed.append((placement, format))
        else:
            consequence = f"; its encoding {otherwise.name} takes its place"
            self.others.append(replace(placement, encoding=otherwise, otherwise=None))
        self.report.misses.append(replace(miss, detail=miss.detail + consequence))

    def take_others(self) -> list[Placement]:
        """Those that nothing was tried for yet."""
        taken, self.others = self.others, []
        return taken


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
        attending: int | None = None,
    ) -> Iterator[Restoration]:
        """Have the KV of all chunks written into a cache whose slots before the first chunk are filled.

        Until the block ends, ask for each layer (`Restoration.complete`) before it is attended to.

        Args:
            placements: chunks without gaps between them, in prompt order, behind what the cache holds.
            format: how a chunk that has no stored states is encoded. One whose states are damaged is encoded as
                those were, so that the answer equals that of an undamaged store.
            cache: receives the KV; its length grows over the chunks.
            relocated: where states are now that are no longer where they were.
            attending: position of the first token that is going to attend: layers with a sliding window are restored
                as far as it sees. By default the first behind the chunks.
        """
        report = RestoreReport()
        end = max((placement.span.stop for placement in placements), default=cache.length)
        with (
            self._workspaces.lend() as workspace,
            Restoration(self._model, self._prefix, cache, report, workspace) as restoration,
        ):
            unused = _Unused(report)
            unused.others.extend(placements)
            attending = end if attending is None else attending
            while waiting := unused.take_others():
                usable = [it for it in waiting if not self._passes_over(it, format, unused)]
                moved = self._open(usable, attending, restoration, unused, relocated)
                self._open(moved, attending, restoration, unused, _nowhere)
            cache.length = end
            restoration.start(unused.missed)
            yield restoration

    def restore(
        self, placements: Sequence[Placement], format: StateFormat, cache: KVCache, relocated: Relocated = _nowhere
    ) -> RestoreReport:
        """All layers at once; see `restoring`."""
        with self.restoring(placements, format, cache, relocated) as restoration:
            return restoration.complete_all()

    def _passes_over(self, placement: Placement, format: StateFormat, unused: _Unused) -> bool:
        if (miss := self._unusable(placement)) is None:
            return False
        unused.add(placement, self._format_of(placement) or format, miss)
        return True

    def _unusable(self, placement: Placement) -> Miss | None:
        """Whether states are to be passed over without reading them."""
        encoding = placement.encoding
        if encoding is not None and encoding.states is None and encoding.evicted:
            return Miss(placement.chunk_id, MissReason.EVICTED, "states were given up for lack of space")
        if encoding is None or encoding.states is None:
            return Miss(placement.chunk_id, MissReason.NOT_STORED, "no states are stored for this text")
        key = state_key(self._model.fingerprint.digest, self._prefix_ids, encoding.context, placement.token_ids)
        if encoding.states.key != key:
            return Miss(placement.chunk_id, MissReason.FINGERPRINT, "encoded by another model, prefix or context")
        if (format := self._format_of(placement)) is None:
            return Miss(placement.chunk_id, MissReason.CODEC, "form, codec, precision or shape is not what is needed")
        if encoding.context and len(format.layers) - len(format.stored_layers) > 1:
            # The first layer's input follows from a token, that of the next ones from what stands before it too.
            return Miss(placement.chunk_id, MissReason.CODEC, "layers that are recomputed from tokens know no context")
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
        attending: int,
        restoration: Restoration,
        unused: _Unused,
        relocated: Relocated,
    ) -> list[Placement]:
        """Open the states of chunks; adds to `unused`, and returns those that are elsewhere by now."""
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
                needed_chunks(self._model, chunks, attending),
                self._pool,
                self._model.device,
                verify=self._verify,
            )
            restoration.add(chunks, format, reader)
            for index, fault in reader.faults.items():
                placement, states = members[index]
                # A compaction may have moved them since they were looked up.
                again = relocated(states) if fault.reason is MissReason.MISSING else None
                if again is not None and placement.encoding is not None:
                    moved.append(replace(placement, encoding=replace(placement.encoding, states=again)))
                    continue
                unused.add(placement, format, Miss(placement.chunk_id, fault.reason, fault.detail))
        return moved
