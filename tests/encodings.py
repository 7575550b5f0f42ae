"""The states of a chunk's encodings, as tests look at them and spoil them."""

from __future__ import annotations

from dataclasses import replace

from ragcache import RagCache
from ragcache.indexer.contexts import Block
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.upkeep import load_vectors
from ragcache.restore.placement import Placement
from ragcache.retriever.vectors import remove_other_generations
from ragcache.settings import EncodingName
from ragcache.states.inventory import Inventory
from ragcache.states.key import context_digest, state_key
from ragcache.states.records import ChunkRecord, DocumentRecord, NewChunk, NewEncoding, StoredStates
from ragcache.states.shard import ShardEntry
from ragcache.states.writer import StoreWriter


def states_of(chunk: ChunkRecord, name: EncodingName = "alone") -> StoredStates | None:
    """Stored states of one of a chunk's encodings, if there are any."""
    encoding = chunk.encoding(name)
    return encoding.states if encoding is not None else None


def with_states(placement: Placement, states: StoredStates | None) -> Placement:
    """A chunk that is to be restored from other states."""
    assert placement.encoding is not None
    return replace(placement, encoding=replace(placement.encoding, states=states))


def add_contexts(cache: RagCache) -> None:
    """Give every chunk of a store an encoding after the chunk before it, in whatever document; the first the last."""
    store, fingerprint = cache.store, cache.model.fingerprint.digest
    encoder = StateEncoder(cache.model, cache.engine.prefix, cache.engine.format)
    chunks = [chunk for batch in store.catalog.all_chunks() for chunk in batch]
    before = dict(zip((it.chunk_id for it in chunks), [chunks[-1], *chunks], strict=False))
    documents: list[tuple[DocumentRecord, list[NewChunk]]] = []
    with StoreWriter(store, cache.engine.format) as writer:
        for document, own in Inventory(store.catalog).documents():
            documents.append((document, []))
            for chunk in own:
                context = before[chunk.chunk_id]
                digest = context_digest(context.token_ids)
                key = state_key(fingerprint, cache.template.prefix, digest, chunk.token_ids)
                (layers,) = encoder.encode([Block((context,), (chunk,))])
                writer.put(ShardEntry(key, chunk.token_ids, layers, "context", context.token_ids, cost=1.0))
                alone = NewEncoding("alone", chunk.content)
                encodings = (alone, NewEncoding("context", key, digest, ((context.content,),)))
                new = NewChunk(
                    chunk.vector_id,
                    chunk.chunk_id,
                    chunk.ordinal,
                    chunk.text,
                    chunk.token_ids,
                    chunk.content,
                    encodings,
                )
                documents[-1][1].append(new)
        index, _ = load_vectors(store, lambda: cache.embedder)
        version = index.save(store.vector_folder, store.catalog.vectors().generation + 1)
        writer.commit(documents, [], version)
        remove_other_generations(store.vector_folder, version.generation)
