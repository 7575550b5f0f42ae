"""The chunks most similar to a chunk, as the store has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from ragcache.indexer.contexts import ContextRecipe
from ragcache.indexer.neighbours import Neighbours
from ragcache.states.catalog import Catalog
from ragcache.states.records import ChunkRecord

FEW = 16
"""Neighbours that are looked up at first at least: contexts of whole chunks hold some 6 of them, but some are of the
same document or text. Of short chunks they hold more, and a search of its own for each chunk would take ten times as
long as one for many."""

MANY = 256
"""Neighbours of which one that is none of these is looked for. Where there are more of the same it has no context."""


class SimilarChunks:
    """Looks neighbours up for many chunks at once, and reads them from the catalog."""

    def __init__(self, catalog: Catalog, neighbours: Neighbours, recipe: ContextRecipe) -> None:
        self._catalog = catalog
        self._neighbours = neighbours
        self._recipe = recipe
        self._few: dict[int, list[ChunkRecord]] = {}
        self._count = FEW

    def prepare(self, documents: Iterable[tuple[Sequence[ChunkRecord], Collection[int]]]) -> None:
        """Look the neighbours up that contexts will be filled up with, and forget those of other chunks.

        Args:
            documents: chunks of each in their order, and vector ids of those that are encoded.
        """
        needing = [chunk for chunks, ids in documents for chunk in self._in_need(chunks, ids)]
        tokens = sum(len(chunk.token_ids) for chunk in needing)
        # Neighbours are about as long as they are, and about half of them go into contexts.
        held = self._recipe.count * self._recipe.tokens * len(needing) // max(tokens, 1)
        self._count = min(max(FEW, 2 * held), MANY // 2)
        nearest = self._neighbours.nearest([chunk.vector_id for chunk in needing], self._count)
        records = self._records({one for row in nearest.values() for one, _ in row})
        self._few = {one: [records[it] for it, _ in row if it in records] for one, row in nearest.items()}

    def to(self, chunk: ChunkRecord) -> Iterator[ChunkRecord]:
        """The chunks most similar to one, best first."""
        few = self._few.get(chunk.vector_id)
        if few is None:
            few = self._look_up(chunk, self._count)
        yield from few
        if len(few) == self._count:
            yield from self._look_up(chunk, MANY)[len(few) :]

    def _in_need(self, chunks: Sequence[ChunkRecord], ids: Collection[int]) -> Iterator[ChunkRecord]:
        """Those to be encoded whose contexts take more than what their document has before them."""
        others = self._recipe.text == "neighbours" or self._recipe.count > 1
        tokens = 0
        for chunk in chunks:
            if chunk.vector_id in ids and (others or tokens < self._recipe.tokens):
                yield chunk
            tokens += len(chunk.token_ids)

    def _look_up(self, chunk: ChunkRecord, count: int) -> list[ChunkRecord]:
        nearest = self._neighbours.nearest([chunk.vector_id], count)[chunk.vector_id]
        records = self._records({one for one, _ in nearest})
        return [records[one] for one, _ in nearest if one in records]

    def _records(self, ids: Collection[int]) -> dict[int, ChunkRecord]:
        return {chunk.vector_id: chunk for chunk in self._catalog.chunks_by_vector(sorted(ids))}
