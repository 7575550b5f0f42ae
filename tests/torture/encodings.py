"""What must hold of each encoding in a store, whatever has happened to whoever was making it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from ragcache import RagCache
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.settings import EncodingName
from ragcache.states.catalog import Catalog
from ragcache.states.key import CONTEXT_END, context_digest, state_key
from ragcache.states.reading import ShardFile
from ragcache.states.records import ChunkRecord, Encoding, StoredStates, encoding_named
from ragcache.stream import context_chunk
from tests.torture.oracle import Oracle, Passage

QUESTION = "And?"

Contexts = tuple[tuple[int, ...], ...]
"""Token ids of each context of an encoding."""


class EncodedChunk(Protocol):
    """A chunk as far as a passage is made of it."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def encodings(self) -> tuple[Encoding, ...]: ...


def passage_of(catalog: Catalog, chunk: EncodedChunk, name: EncodingName | None) -> Passage:
    """A chunk as it stands in a prompt by that encoding; alone where nothing else is stored."""
    encoding = encoding_named(chunk.encodings, name)
    if encoding is None or encoding.states is None:
        return Passage(chunk.token_ids)
    recorded = recorded_contexts(catalog, encoding)
    return Passage(chunk.token_ids, stored_contexts(encoding.states) if recorded is None else recorded)


def recorded_contexts(catalog: Catalog, encoding: Encoding) -> Contexts | None:
    """What the chunks say that the catalog names as an encoding's contexts; `None` when one of them is gone."""
    found = catalog.chunks_by_content(encoding.members)
    if found.keys() != set(encoding.members):
        return None
    return tuple(
        tuple(chain.from_iterable(found[content].token_ids for content in context)) for context in encoding.contexts
    )


def stored_contexts(states: StoredStates) -> Contexts:
    """What states were computed after, as their shard says."""
    file = ShardFile(states.shard)
    contexts: list[list[int]] = [[]]
    for token in file.context_ids(states):
        if token == CONTEXT_END:
            contexts.append([])
        else:
            contexts[-1].append(token)
    file.close()
    return tuple(map(tuple, contexts)) if contexts != [[]] else ()


@dataclass(frozen=True)
class EncodingCheck:
    """Looks at every encoding of a store.

    Attributes:
        cache: the store, opened.
        oracle: knows what states should be.
        gone: what chunks said that may not be in the store any more, though contexts still name them.
    """

    cache: RagCache
    oracle: Oracle
    gone: Collection[str]

    def faults(self) -> Iterator[str]:
        """What is wrong with the encodings that there are."""
        recipe = self.cache.store.catalog.recipe()
        count = json.loads(recipe)[2] if recipe else None
        for chunk in self._chunks():
            for it in chunk.encodings:
                where = f"{chunk.chunk_id} {it.name}"
                yield from (f"{where}: {fault}" for fault in self._faults(chunk, it))
                if it.name == "context" and count not in (None, len(it.contexts)):
                    yield f"{where}: there are {len(it.contexts)} contexts, and the recipe is {recipe}"

    def lacking(self) -> Iterator[str]:
        """What is missing for every chunk to have all of its encodings."""
        wanted = set(self.cache.settings.encodings)
        for chunk in self._chunks():
            if {it.name for it in chunk.encodings if it.states is not None} != wanted:
                yield f"{chunk.chunk_id} has states of {[it.name for it in chunk.encodings if it.states is not None]}"

    def _chunks(self) -> Iterator[ChunkRecord]:
        return chain.from_iterable(self.cache.store.catalog.all_chunks())

    def _faults(self, chunk: ChunkRecord, encoding: Encoding) -> Iterator[str]:
        if encoding.states is None:
            yield "there are no states"
            return
        catalog, identity = self.cache.store.catalog, self.cache.store.identity()
        stored, recorded = stored_contexts(encoding.states), recorded_contexts(catalog, encoding)
        if recorded is None:
            present = catalog.chunks_by_content(encoding.members)
            if unknown := set(encoding.members) - present.keys() - set(self.gone):
                yield f"its context holds chunks that are not there: {sorted(unknown)}"
        elif recorded != stored:
            yield "its states are those after something else than the chunks that the catalog names"
        if bool(stored) != (encoding.name == "context") or chunk.content in encoding.members:
            yield f"its contexts are {encoding.contexts}"
        ids = [token for context in stored for token in (*context, CONTEXT_END)][:-1]
        key = state_key(identity.digest, identity.prefix, context_digest(ids), chunk.token_ids)
        if {encoding.key, encoding.states.key} != {key} or encoding.context != context_digest(ids):
            yield "its key is that of something else"
        yield from self._differences(chunk, encoding.name, Passage(chunk.token_ids, stored))

    def _differences(self, chunk: ChunkRecord, name: EncodingName, passage: Passage) -> Iterator[str]:
        """Whether a prompt of that chunk alone is as it should be."""
        given = [context_chunk(RetrievedChunk(chunk, 1.0))]
        layout = self.cache.answering.lay_out(QUESTION, given, max_tokens=1, encodings=[name])
        prompt = self.cache.engine.prepare(layout, given, "composed")
        self.cache.engine.pool.give_back(prompt.cache)
        if layout.encodings != (name,) or prompt.report.misses:
            yield f"it is not what is restored: {layout.encodings}, {prompt.report.misses}"
        if fault := self.oracle.contradicts(prompt.logits, [passage], layout.question):
            yield f"its states are not what the model computes: they differ in {fault}"
