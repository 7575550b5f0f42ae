"""States encoded again, from the token ids of chunks that are in the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ragcache.indexer.encoder import StateEncoder
from ragcache.states.compact import enforce_limits, entry_for
from ragcache.states.eviction import Candidate, priority
from ragcache.states.inventory import Inventory
from ragcache.states.key import state_key
from ragcache.states.records import ChunkRecord
from ragcache.states.usage import NEVER_USED
from ragcache.states.writer import StoreWriter


@dataclass
class StateRepair:
    """Encodes chunks again and gives them the new states instead of what they had.

    Attributes:
        writer: entered, with nothing pending.
        encoder: chunks to states.
        prefix: token ids of the prompt's prefix, part of every key.
        batch_tokens: tokens in one forward pass.
    """

    writer: StoreWriter
    encoder: StateEncoder
    prefix: tuple[int, ...]
    batch_tokens: int
    _batch: dict[str, ChunkRecord] = field(default_factory=dict, init=False)
    _waiting: list[tuple[int, str]] = field(default_factory=list, init=False)

    def run(self, chunks: Iterable[ChunkRecord]) -> int:
        """Encode chunks again, whatever states they have; the number of them. Commits whenever a shard is full."""
        done = 0
        for chunk in chunks:
            self._add(chunk)
            done += 1
            if self.writer.pending_bytes >= self.writer.options.shard_bytes:
                self._commit()
        self._commit()
        return done

    def key(self, chunk: ChunkRecord) -> str:
        """Key of a chunk's states."""
        return state_key(self.encoder.model.fingerprint.digest, self.prefix, (), chunk.token_ids)

    def _add(self, chunk: ChunkRecord) -> None:
        key = self.key(chunk)
        if key not in self._batch and not self.writer.is_pending(key):
            tokens = sum(len(other.token_ids) for other in self._batch.values())
            if tokens + len(chunk.token_ids) > self.batch_tokens:
                self._encode_batch()
            self._batch[key] = chunk
        self._waiting.append((chunk.vector_id, key))

    def _encode_batch(self) -> None:
        if not self._batch:
            return
        encoded = self.encoder.encode([chunk.token_ids for chunk in self._batch.values()])
        for (key, chunk), layers in zip(self._batch.items(), encoded, strict=True):
            self.writer.put(entry_for(chunk, key, layers, self.encoder.cost(len(chunk.token_ids))))
        self._batch = {}

    def _commit(self) -> None:
        self._encode_batch()
        if self._waiting:
            self.writer.assign(self._waiting)
        self._waiting = []


def readmit(repair: StateRepair) -> int:
    """Encode evicted chunks for which there is space again, or that are wanted more than what is there."""
    done = repair.run(_worth_readmitting(repair))
    if done:
        enforce_limits(repair.writer)
    return done


def _worth_readmitting(repair: StateRepair) -> list[ChunkRecord]:
    """The most wanted first."""
    store, budget = repair.writer.store, repair.writer.budget
    budget.refresh()
    usage = store.usage.all()
    candidates: dict[str, Candidate] = {}
    chunks: dict[str, list[ChunkRecord]] = {}
    for chunk in Inventory(store.catalog).evicted():
        key, tokens = repair.key(chunk), len(chunk.token_ids)
        size, cost = repair.encoder.size(tokens), repair.encoder.cost(tokens)
        candidates[key] = Candidate(key, size, cost, usage.get(key, NEVER_USED))
        chunks.setdefault(key, []).append(chunk)
    chosen: list[ChunkRecord] = []
    pending = 0
    for candidate in sorted(candidates.values(), key=priority, reverse=True):
        if budget.admits(candidate, pending):
            pending += candidate.bytes
            chosen += chunks[candidate.key]
    return chosen
