"""Which chunks of a growing corpus are worth another context, because a much better neighbour has come.

A context stays as it was chosen until one of its members is deleted. If it were chosen anew whenever something is
added, each new chunk would set off the encoding of all that it is near to, over and over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from ragcache.indexer.contexts import ContextRecipe
from ragcache.indexer.neighbours import Neighbours
from ragcache.states.catalog import Catalog
from ragcache.states.records import ChunkRecord, NewEncoding

AFFECTED = 8
"""Chunks near to a new one that are looked at, so a new chunk sets off the encoding of at most so many others."""

MARGIN = 0.1
"""By so much must a new neighbour be more similar than the least similar one that a chunk has.

Among 300 passages of MuSiQue the second neighbour is 0.06 more similar than the third, in the median: within that, one
is as good as the other. When they grow by a ninth, 12 of 100 old ones get a better second neighbour by this margin, and
20 without one.
"""

_BATCH = 500


def worth_renewing(new: Sequence[int], catalog: Catalog, neighbours: Neighbours, recipe: ContextRecipe) -> set[int]:
    """Chunks with a context that lacks a new chunk which is much more similar than what it has, or with too few.

    Args:
        new: vector ids of the new chunks.
        catalog: of old and new ones.
        neighbours: of all of them.
        recipe: how contexts are chosen.

    Returns:
        Vector ids of old chunks.
    """
    found: set[int] = set()
    for start in range(0, len(new), _BATCH):
        batch = new[start : start + _BATCH]
        near = neighbours.nearest(batch, AFFECTED)
        ids = {*batch, *(old for row in near.values() for old, _ in row)}
        chunks = {chunk.vector_id: chunk for chunk in catalog.chunks_by_vector(sorted(ids))}
        coming: dict[int, float] = {}
        for one, row in near.items():
            for old, similarity in row:
                if one in chunks and old in chunks and _could_join(chunks[one], chunks[old], recipe):
                    coming[old] = max(coming.get(old, similarity), similarity)
        found.update(_improved(coming, chunks, catalog, neighbours, recipe))
    return found


def _could_join(new: ChunkRecord, old: ChunkRecord, recipe: ContextRecipe) -> bool:
    """Whether a new chunk would be something else in the context of an old one."""
    encoding = old.encoding("context")
    return (
        encoding is not None
        and new.content != old.content
        and new.content not in encoding.members
        and (
            bool(_of_neighbours(encoding, recipe))
            or _lacks_contexts(encoding, recipe)
            or (old.ordinal == 0 and new.document_id != old.document_id)
        )
    )


def _lacks_contexts(encoding: NewEncoding, recipe: ContextRecipe) -> bool:
    """Whether a chunk has fewer contexts than it should, as in a corpus that was too small for more."""
    return len(encoding.contexts) < recipe.count


def _of_neighbours(encoding: NewEncoding, recipe: ContextRecipe) -> tuple[tuple[str, ...], ...]:
    """Those contexts of a chunk for which the most similar chunks were chosen, whatever stands before it.

    A first context with text of its own document has neighbours, if any, that were chosen for an earlier chunk.
    """
    return encoding.contexts if recipe.text == "neighbours" else encoding.contexts[1:]


def _improved(
    coming: dict[int, float],
    chunks: dict[int, ChunkRecord],
    catalog: Catalog,
    neighbours: Neighbours,
    recipe: ContextRecipe,
) -> Iterator[int]:
    """Those old chunks that lack contexts, or whose worst member the best of the new ones beats by the margin."""
    members: dict[int, tuple[str, ...]] = {}
    for old in coming:
        if (encoding := chunks[old].encoding("context")) is not None:
            if _lacks_contexts(encoding, recipe):
                yield old
                continue
            chosen = _of_neighbours(encoding, recipe)
            members[old] = tuple(chain.from_iterable(chosen)) if chosen else encoding.members
    texts = catalog.chunks_by_content(sorted({content for contents in members.values() for content in contents}))
    similarities = neighbours.similarities(
        {old: [texts[it].vector_id for it in contents if it in texts] for old, contents in members.items()}
    )
    for old in members:
        worst = min(similarities.get(old, {}).values(), default=None)
        if coming[old] > worst + MARGIN if worst is not None else not members[old]:
            yield old
