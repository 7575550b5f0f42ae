"""Questions to scored chunks."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ragcache.errors import StoreError
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex
from ragcache.states.records import ChunkRecord
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
        self._generation = 0
        self._index: VectorIndex | None = None

    def retrieve(self, question: str, top_k: int) -> list[RetrievedChunk]:
        """The `top_k` best chunks, best first; fewer when the store holds fewer.

        Raises:
            StoreError: the vector index is missing or damaged.
        """
        vector = self._embedder.question(question)
        while True:
            index, generation = self._current_index()
            if index is None:
                return []
            hits = dict(index.search(vector, top_k))
            chunks = self._store.catalog.chunks_by_vector(list(hits))
            # Fewer chunks than hits: a commit came in between search and look-up. Ask the new index.
            if len(chunks) == len(hits) or self._store.catalog.vectors_generation() == generation:
                return [RetrievedChunk(chunk, hits[chunk.vector_id]) for chunk in chunks]

    def _current_index(self) -> tuple[VectorIndex | None, int]:
        with self._lock:
            while (generation := self._store.catalog.vectors_generation()) != self._generation:
                try:
                    self._index = VectorIndex.load(self._store.vector_folder, generation)
                except FileNotFoundError as error:
                    if self._store.catalog.vectors_generation() == generation:
                        raise StoreError(f"{error} is missing; delete the store and index again") from error
                    continue
                self._generation = generation
            return self._index, self._generation
