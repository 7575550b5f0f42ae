"""The vector index of a store, kept in step: documents taken out, vectors made anew."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ragcache.errors import VectorsError
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex, remove_other_generations
from ragcache.states.records import NO_VECTORS
from ragcache.states.store import StateStore
from ragcache.states.writer import StoreWriter

EmbedderSource = Callable[[], Embedder]
"""Gives the embedding model; called only when texts must be embedded."""


def load_vectors(
    store: StateStore, embedder: EmbedderSource, on_progress: Callable[[], None] = lambda: None
) -> tuple[VectorIndex, int | None]:
    """The vector index of a locked store, made anew from the chunks' texts when it is missing or damaged.

    Returns:
        The index, and how many chunks were embedded again; `None` when it was as it should be.
    """
    version = store.catalog.vectors()
    remove_other_generations(store.vector_folder, version.generation)
    if version == NO_VECTORS:
        return VectorIndex.empty(embedder().dimension), None
    try:
        return VectorIndex.load(store.vector_folder, version), None
    except VectorsError:
        model = embedder()
        index, count = VectorIndex.empty(model.dimension), 0
        for chunks in store.catalog.all_chunks():
            owners, vectors = model.passages([chunk.embedded for chunk in chunks])
            index.add([chunks[owner].vector_id for owner in owners], vectors)
            count += len(chunks)
            on_progress()
        return index, count


def delete_documents(writer: StoreWriter, ids: Collection[str], embedder: EmbedderSource) -> None:
    """Take documents out of a store.

    Args:
        writer: entered, with nothing pending.
        ids: of documents that are there.
        embedder: for the case that vectors must be made anew.

    Raises:
        StoreError: the store cannot be written to.
    """
    index, _ = load_vectors(writer.store, embedder)
    index.remove(writer.store.catalog.vector_ids(ids))
    _commit_vectors(writer, index, ids)


def restore_vectors(writer: StoreWriter, embedder: EmbedderSource) -> int:
    """Bring the vector index in line with the chunks, should it be missing or damaged or hold others.

    Returns:
        The number of chunks embedded again.
    """
    catalog = writer.store.catalog
    index, count = load_vectors(writer.store, embedder)
    wanted, present = catalog.all_vector_ids(), index.ids
    if count is None and wanted == present:
        return 0
    index.remove(sorted(present - wanted))
    if missing := catalog.chunks_by_vector(sorted(wanted - present)):
        owners, vectors = embedder().passages([chunk.embedded for chunk in missing])
        index.add([missing[owner].vector_id for owner in owners], vectors)
    _commit_vectors(writer, index, [])
    return (count or 0) + len(missing)


def _commit_vectors(writer: StoreWriter, index: VectorIndex, removed: Collection[str]) -> None:
    version = index.save(writer.store.vector_folder, writer.store.catalog.vectors().generation + 1)
    writer.commit([], removed, version)
    remove_other_generations(writer.store.vector_folder, version.generation)
