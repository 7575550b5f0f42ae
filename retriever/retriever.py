"""Questions to scored chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache.errors import VectorsError
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex, Vectors
from ragcache.states.records import NO_VECTORS, ChunkRecord, VectorsVersion
from ragcache.states.store import StateStore

Accept = Callable[[ChunkRecord], bool]


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

    def retrieve(
        self, question: str | Sequence[float], top_k: int, accept: Accept | None = None
    ) -> list[RetrievedChunk]:
        """The `top_k` best chunks, best first; fewer when the store holds fewer.

        Args:
            question: what is asked, or its vector.
            top_k: how many.
            accept: says whether a chunk may be among them.

        Raises:
            VectorsError: the vector is of another length than the store's, or points nowhere.
            StoreError: the catalog or the vector index is missing or damaged.
        """
        vector = self._vector(question)
        wanted = top_k
        while True:
            found, all_of_them = self._nearest(vector, wanted)
            accepted = [it for it in found if accept is None or accept(it.chunk)]
            if len(accepted) >= top_k or all_of_them:
                return accepted[:top_k]
            wanted *= 4

    def _vector(self, question: str | Sequence[float]) -> Vectors:
        if isinstance(question, str):
            return self._embedder.question(question)
        if len(question) != self._embedder.dimension:
            raise VectorsError(
                f"the question's vector has {len(question)} numbers, and those of {self._embedder.name} have "
                f"{self._embedder.dimension}; embed questions with that model"
            )
        vector = np.asarray([question], dtype=np.float64)
        length = np.linalg.norm(vector)
        if not 0 < length < np.inf:
            raise VectorsError("the question's vector is zero or holds what is no number; embed the question again")
        # Scores are cosines, whatever length it came in.
        return (vector / length).astype(np.float32)

    def _nearest(self, vector: Vectors, count: int) -> tuple[list[RetrievedChunk], bool]:
        """The nearest chunks, and whether these are all that there are."""
        while True:
            index, version = self._current_index()
            hits = dict(index.search(vector, count))
            chunks = self._store.catalog.chunks_by_vector(list(hits))
            if len(chunks) == len(hits):
                return [RetrievedChunk(chunk, hits[chunk.vector_id]) for chunk in chunks], len(hits) < count
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
