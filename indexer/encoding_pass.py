"""Encodings of chunks that are in the store, made and committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ragcache.indexer.contexts import Block, context_ids, pack
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.report import Progress
from ragcache.retriever.vectors import VectorIndex, carry_over, remove_other_generations
from ragcache.settings import EncodingName
from ragcache.states.compact import enforce_limits, entry_for
from ragcache.states.key import context_digest, state_key
from ragcache.states.reading import ReadStates
from ragcache.states.records import ChunkRecord, NewEncoding
from ragcache.states.writer import StoreWriter


@dataclass(frozen=True)
class _Work:
    """A block to run, and what its chunks are encoded as."""

    block: Block[ChunkRecord]
    encodings: tuple[NewEncoding, ...]

    @property
    def tokens(self) -> int:
        return self.block.tokens


@dataclass
class EncodingPass:
    """Makes encodings of one name, and commits whenever a shard is full.

    What is stored already under the same key is not encoded again, and what there is no room for is not encoded at all.

    Attributes:
        name: of the encodings.
        writer: entered, with nothing pending.
        encoder: chunks to states.
        vectors: of all chunks, as they are stored; a commit gives them another generation.
        batch_tokens: most tokens in one forward pass.
        progress: told how it goes.
        made: encodings that were made.
        tokens: that were run through the model for them.
        without_states: encodings that there was no room for, or that made room for others.
    """

    name: EncodingName
    writer: StoreWriter
    encoder: StateEncoder
    vectors: VectorIndex
    batch_tokens: int
    progress: Progress
    made: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    without_states: int = field(default=0, init=False)
    _uncommitted: list[tuple[int, NewEncoding]] = field(default_factory=list, init=False)
    _admitted: dict[str, int] = field(default_factory=dict, init=False)
    _evicted: set[str] = field(default_factory=set, init=False)

    def run(self, blocks: Iterable[Block[ChunkRecord]]) -> None:
        """Make the encodings of the chunks of some blocks.

        Args:
            blocks: read a few ahead of what is encoded.

        Raises:
            EncodingError: the model gave NaN or infinity.
            StoreError: the store cannot be written to. What was committed before is intact.
        """
        for together in pack(self._work(blocks), self.batch_tokens):
            self._encode(together)
            if self.writer.pending_bytes >= self.writer.options.shard_bytes:
                self._commit([it for it in self._uncommitted if self._is_settled(it[1].key)])
        # Of equal states those that were put first may have made room for others by now.
        self._evicted.update(it.key for _, it in self._uncommitted if not self._is_settled(it.key))
        self._commit(self._uncommitted)

    def _work(self, blocks: Iterable[Block[ChunkRecord]]) -> Iterator[_Work]:
        """Of each block the part that is to be run."""
        identity = self.writer.store.identity()
        for block in blocks:
            encodings = []
            for index, chunk in enumerate(block.chunks):
                contexts = block.contexts(index)
                context = context_digest(context_ids(contexts))
                key = state_key(identity.digest, identity.prefix, context, chunk.token_ids)
                names = tuple(tuple(it.content for it in one) for one in contexts)
                encodings.append(NewEncoding(self.name, key, context, names if context else ()))
            needed = [
                index
                for index, (chunk, encoding) in enumerate(zip(block.chunks, encodings, strict=True))
                if self._is_to_be_made(chunk, encoding, len(context_ids(block.contexts(index))))
            ]
            if needed:
                start, stop = needed[0], needed[-1] + 1
                yield _Work(block.part(start, stop), tuple(encodings[start:stop]))

    def _is_to_be_made(self, chunk: ChunkRecord, encoding: NewEncoding, context_tokens: int) -> bool:
        """Whether a chunk must be run for that; otherwise it is as it should be, or is put in line for the commit."""
        old, there = chunk.encoding(self.name), self.writer.has(encoding.key)
        if there and old is not None and old.key == encoding.key and old.states is not None:
            return False
        self._uncommitted.append((chunk.vector_id, encoding))
        if there or encoding.key in self._admitted:
            self.progress.advance(0, 1, 0)
            return False
        tokens = len(chunk.token_ids)
        size, cost = self.encoder.size(tokens, context_tokens), self.encoder.cost(tokens, context_tokens)
        pending = self.writer.pending_bytes + sum(self._admitted.values())
        if not self.writer.budget.admits(self.writer.budget.newcomer(encoding.key, size, cost), pending):
            self._evicted.add(encoding.key)
            self.without_states += 1
            self.progress.advance(0, 1, 0)
            return False
        self._admitted[encoding.key] = size
        return True

    def _encode(self, together: list[_Work]) -> None:
        encoded = iter(self.encoder.encode([work.block for work in together], self.batch_tokens))
        for work in together:
            for index, (chunk, encoding) in enumerate(zip(work.block.chunks, work.encodings, strict=True)):
                layers, before = next(encoded), context_ids(work.block.contexts(index))
                # One that is stored already may stand between two that are not.
                if self._admitted.pop(encoding.key, None) is not None:
                    cost = self.encoder.cost(len(chunk.token_ids), len(before))
                    self.writer.put(entry_for(chunk, self.name, encoding.key, ReadStates(before, layers), cost))
                    self.made += 1
                    self.progress.advance(0, 1, 0)
            self.tokens += work.tokens
            self.progress.advance(0, 0, work.tokens)

    def _is_settled(self, key: str) -> bool:
        """Whether it is known what becomes of an encoding: its states are there, or are not going to be."""
        return key in self._evicted or self.writer.has(key)

    def _commit(self, encodings: list[tuple[int, NewEncoding]]) -> None:
        if not encodings:
            return
        store = self.writer.store
        current = store.catalog.vectors()
        version = carry_over(store.vector_folder, current) or self.vectors.save(
            store.vector_folder, current.generation + 1
        )
        self.writer.add_encodings(encodings, version, self._evicted)
        remove_other_generations(store.vector_folder, version.generation)
        done = set(encodings)
        self._uncommitted = [it for it in self._uncommitted if it not in done]
        self.without_states += enforce_limits(self.writer).evicted
