"""States encoded again, from the token ids of chunks that are in the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from ragcache.indexer.contexts import Block, context_ids
from ragcache.indexer.encoder import StateEncoder
from ragcache.settings import EncodingName
from ragcache.states.compact import enforce_limits, entry_for
from ragcache.states.eviction import Candidate, priority
from ragcache.states.inventory import Inventory
from ragcache.states.key import context_digest
from ragcache.states.miss import Miss, MissReason
from ragcache.states.reading import ReadStates
from ragcache.states.records import ChunkEncoding, ChunkRecord, NewEncoding
from ragcache.states.usage import NEVER_USED
from ragcache.states.writer import StoreWriter

_BATCH = 500


@dataclass
class StateRepair:
    """Makes encodings of chunks again and gives the chunks the new states instead of what they had.

    Attributes:
        writer: entered, with nothing pending.
        encoder: chunks to states.
        batch_tokens: tokens in one forward pass.
        given_up: encodings whose context is not in the store any more. They have no states now, and the next indexing
            run makes others.
    """

    writer: StoreWriter
    encoder: StateEncoder
    batch_tokens: int
    given_up: list[Miss] = field(default_factory=list, init=False)
    _batch: dict[str, tuple[EncodingName, Block[ChunkRecord]]] = field(default_factory=dict, init=False)
    _waiting: list[tuple[int, EncodingName, str | None]] = field(default_factory=list, init=False)

    def run(self, encodings: Iterable[ChunkEncoding]) -> int:
        """Make encodings again, whatever states they have. Commits whenever a shard is full.

        Returns:
            How many have states now.
        """
        before, count = len(self.given_up), 0
        for chunk, encoding in encodings:
            self._add(chunk, encoding)
            count += 1
            if self.writer.pending_bytes >= self.writer.options.shard_bytes:
                self._commit()
        self._commit()
        return count - (len(self.given_up) - before)

    def contexts(self, encoding: NewEncoding) -> tuple[tuple[ChunkRecord, ...], ...] | None:
        """Chunks that make up the contexts of an encoding; `None` if they are not what they were."""
        found = self.writer.store.catalog.chunks_by_content(encoding.members)
        if found.keys() != set(encoding.members):
            return None
        contexts = tuple(tuple(found[content] for content in context) for context in encoding.contexts)
        return contexts if context_digest(context_ids(contexts)) == encoding.context else None

    def _add(self, chunk: ChunkRecord, encoding: NewEncoding) -> None:
        contexts = self.contexts(encoding)
        if contexts is None:
            detail = f"what its encoding {encoding.name} came after is not in the store any more"
            self.given_up.append(Miss(chunk.chunk_id, MissReason.CONTEXT, detail))
            self._waiting.append((chunk.vector_id, encoding.name, None))
            return
        if encoding.key not in self._batch and not self.writer.is_pending(encoding.key):
            block = Block(contexts[0] if contexts else (), (chunk,), (contexts[1:],))
            if sum(other.tokens for _, other in self._batch.values()) + block.tokens > self.batch_tokens:
                self._encode_batch()
            self._batch[encoding.key] = (encoding.name, block)
        self._waiting.append((chunk.vector_id, encoding.name, encoding.key))

    def _encode_batch(self) -> None:
        if not self._batch:
            return
        encoded = self.encoder.encode([block for _, block in self._batch.values()], self.batch_tokens)
        for (key, (name, block)), layers in zip(self._batch.items(), encoded, strict=True):
            (chunk,), before = block.chunks, context_ids(block.contexts(0))
            cost = self.encoder.cost(len(chunk.token_ids), len(before))
            self.writer.put(entry_for(chunk, name, key, ReadStates(before, layers), cost))
        self._batch = {}

    def _commit(self) -> None:
        self._encode_batch()
        if self._waiting:
            self.writer.assign(self._waiting)
        self._waiting = []


def readmit(repair: StateRepair) -> int:
    """Make evicted encodings again for which there is space, or that are wanted more than what is there."""
    done = repair.run(_worth_readmitting(repair))
    if done:
        enforce_limits(repair.writer)
    return done


def _worth_readmitting(repair: StateRepair) -> list[ChunkEncoding]:
    """The most wanted first."""
    store, budget = repair.writer.store, repair.writer.budget
    budget.refresh()
    usage = store.usage.all()
    candidates: dict[str, Candidate] = {}
    encodings: dict[str, list[ChunkEncoding]] = {}
    evicted = Inventory(store.catalog).evicted()
    # Of all that was evicted little may come back, so contexts are not read for this, only how long they are.
    while batch := list(islice(evicted, _BATCH)):
        counts = store.catalog.token_counts({content for _, encoding in batch for content in encoding.members})
        for chunk, encoding in batch:
            key, tokens = encoding.key, len(chunk.token_ids)
            context_tokens = sum(counts.get(content, 0) for content in encoding.members)
            size, cost = repair.encoder.size(tokens, context_tokens), repair.encoder.cost(tokens, context_tokens)
            candidates[key] = Candidate(key, size, cost, usage.get(key, NEVER_USED))
            encodings.setdefault(key, []).append((chunk, encoding))
    chosen: list[ChunkEncoding] = []
    pending = 0
    for candidate in sorted(candidates.values(), key=priority, reverse=True):
        if budget.admits(candidate, pending):
            pending += candidate.bytes
            chosen += encodings[candidate.key]
    return chosen
