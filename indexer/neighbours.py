"""Which chunks are alike: by the vectors that they are retrieved by, so what is alike is retrieved together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from ragcache.retriever.vectors import VectorIndex, Vectors


class Neighbours:
    """The chunks of a corpus by similarity: cosine of the two vectors, one of each chunk, that are nearest.

    A long chunk has several vectors (`ragcache.retriever.embedding`), and is as near as the nearest of them.
    """

    def __init__(self, index: VectorIndex) -> None:
        """Set up.

        Args:
            index: of all chunks of the corpus.
        """
        self._index = index

    def nearest(self, ids: Sequence[int], count: int) -> dict[int, list[tuple[int, float]]]:
        """The chunks most similar to some, each with its similarity, best first; none is its own neighbour.

        Args:
            ids: vector ids of the chunks.
            count: neighbours of each; fewer where the corpus has no more.
        """
        owners, vectors = self._index.of(ids)
        found: dict[int, dict[int, float]] = {owner: {} for owner in ids}
        for owner, row in zip(owners, self._distinct(vectors, count + 1), strict=True):
            for neighbour, similarity in row.items():
                if neighbour != owner:
                    best = found[owner].get(neighbour, -1.0)
                    found[owner][neighbour] = max(best, similarity)
        # Of equally similar ones the oldest: the same corpus gives the same contexts.
        return {
            owner: sorted(row.items(), key=lambda item: (-item[1], item[0]))[:count] for owner, row in found.items()
        }

    def similarities(self, pairs: Mapping[int, Collection[int]]) -> dict[int, dict[int, float]]:
        """How similar some chunks are to some others; those that have no vectors are left out.

        Args:
            pairs: vector ids of the others by that of the one.
        """
        wanted = sorted({*pairs, *(other for others in pairs.values() for other in others)})
        vectors = self._by_owner(*self._index.of(wanted))
        return {
            one: {other: float((vectors[one] @ vectors[other].T).max()) for other in others if other in vectors}
            for one, others in pairs.items()
            if one in vectors
        }

    def _distinct(self, vectors: Vectors, count: int) -> list[dict[int, float]]:
        """For each vector the nearest ids, each by its best vector; `count` of them where there are so many."""
        wanted = 2 * count
        while len(vectors):
            rows = []
            for row in self._index.nearest(vectors, wanted):
                best: dict[int, float] = {}
                for neighbour, similarity in row:
                    best.setdefault(neighbour, similarity)
                rows.append(best)
            # Several of the nearest vectors may be of one chunk.
            if wanted >= len(self._index) or all(len(row) >= count for row in rows):
                return rows
            wanted *= 2
        return []

    def _by_owner(self, owners: list[int], vectors: Vectors) -> dict[int, Vectors]:
        order = np.argsort(owners, kind="stable")
        groups = groupby(((owners[place], place) for place in order.tolist()), key=itemgetter(0))
        return {owner: vectors[[place for _, place in group]] for owner, group in groups}
