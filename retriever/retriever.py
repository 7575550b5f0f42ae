"""Questions to scored chunks."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ragcache.errors import VectorsError
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex
from ragcache.states.records import NO_VECTORS, ChunkRecord, VectorsVersion
from ragcache.states.store import StateStore


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk and its cosine similarity to the question."""

    chunk: ChunkRecord
    score: float


class Retriever:
    """Finds the chunks nearest to a question; follows commits of other processes and threads."""

    def __init__(self, store: StateStore, embedder: Embedder) -> None:
        self._store = store
        self._embedder = embedder
        self._lock = threading.Lock()
        # The empty index stands for the version of no vectors.
        self._version = NO_VECTORS
        self._index = VectorIndex.empty(embedder.dimension)

    def retrieve(self, question: str, top_k: int) -> list[RetrievedChunk]:
        """The `top_k` best chunks, best first; fewer when the store holds fewer.

        Raises:
            StoreError: the catalog or the vector index is missing or damaged.
        """
        vector = self._embedder.question(question)
        while True:
            index, version = self._current_index()
            hits = dict(index.search(vector, top_k))
            chunks = self._store.catalog.chunks_by_vector(list(hits))
            if len(chunks) == len(hits):
                return [RetrievedChunk(chunk, hits[chunk.vector_id]) for chunk in chunks]
            # Fewer chunks than hits: a commit came in between search and look-up. Ask the new index.
            if self._store.catalog.vectors() == version:
                raise self._store.catalog.damaged("chunks are missing")

    def _current_index(self) -> tuple[VectorIndex, VectorsVersion]:
        with self._lock:
            while (version := self._store.catalog.vectors()) != self._version:
                try:
                    self._index = VectorIndex.load(self._store.vector_folder, version)
                except VectorsError:
                    if self._store.catalog.vectors() == version:
                        raise
                    continue
                self._version = version
            return self._index, self._version
