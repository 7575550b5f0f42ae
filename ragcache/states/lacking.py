"""Which chunks lack an encoding, or have one that came after text which is no longer in the store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter

from ragcache.settings import EncodingName
from ragcache.states.catalog import Catalog
from ragcache.states.records import unpack_contexts

_BATCH = 500


class Lacking:
    """Queries that go through all encodings of a catalog; chunks are named by their vector ids."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._rows = catalog.rows

    def any(self, name: EncodingName) -> bool:
        """Whether any chunk has an encoding of that name."""
        return bool(self._rows("SELECT 1 FROM encodings WHERE name = ? LIMIT 1", (name,)))

    def never_made(self, name: EncodingName) -> list[int]:
        """Chunks that have no encoding of that name, neither stored nor evicted, in ascending order."""
        query = (
            "SELECT id FROM chunks WHERE NOT EXISTS"
            " (SELECT 1 FROM encodings WHERE chunk = chunks.id AND name = ?) ORDER BY id"
        )
        return [row[0] for row in self._rows(query, (name,))]

    def lost(self, name: EncodingName, unusable_shards: Collection[str] = ()) -> list[int]:
        """Chunks whose encoding of that name has lost its states, or has them only in one of those shards."""
        query = "SELECT chunk FROM encodings WHERE name = ? AND states IS NULL AND NOT evicted"
        found = [row[0] for row in self._rows(query, (name,))]
        query = (
            "SELECT chunk FROM encodings JOIN states ON states.id = encodings.states"
            " JOIN shards ON shards.id = states.shard WHERE encodings.name = ? AND shards.name = ?"
        )
        return found + [row[0] for shard in unusable_shards for row in self._rows(query, (name, shard))]

    def orphaned(self) -> list[int]:
        """Chunks with a context of which a member is not in the store any more."""
        found: list[int] = []
        query = "SELECT chunk, contexts FROM encodings WHERE name = 'context' AND chunk > ? ORDER BY chunk LIMIT ?"
        last = 0
        while rows := self._rows(query, (last, _BATCH)):
            try:
                members = {chunk: set(chain.from_iterable(unpack_contexts(blob))) for chunk, blob in rows}
            except (ValueError, TypeError) as error:
                raise self._catalog.damaged(error) from error
            there = self._present({content for contents in members.values() for content in contents})
            found += [chunk for chunk, contents in members.items() if not there.issuperset(contents)]
            last = rows[-1][0]
        return found

    def documents_of(self, chunks: Sequence[int]) -> Iterator[tuple[str, set[int]]]:
        """Documents of some chunks, each with those of its chunks that are meant.

        Args:
            chunks: in ascending order, which keeps a document's together: they were given their ids at once.
        """
        query = "SELECT document, id FROM chunks WHERE id IN ({}) ORDER BY id"
        rows = (
            row
            for start in range(0, len(chunks), _BATCH)
            for row in self._rows(query.format(_marks(chunks[start : start + _BATCH])), chunks[start : start + _BATCH])
        )
        for document, group in groupby(rows, key=itemgetter(0)):
            yield document, {chunk for _, chunk in group}

    def _present(self, contents: Collection[str]) -> set[str]:
        """Those that any chunk says."""
        names = sorted(contents)
        batches = (names[start : start + _BATCH] for start in range(0, len(names), _BATCH))
        queries = (
            self._rows(f"SELECT DISTINCT content FROM chunks WHERE content IN ({_marks(batch)})", batch)  # noqa: S608
            for batch in batches
        )
        return {row[0] for row in chain.from_iterable(queries)}


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
