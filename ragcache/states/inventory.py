"""What the catalog tells those who look after a store: sizes, dead bytes, everything there is, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragcache.states.catalog import Catalog
from ragcache.states.records import ChunkEncoding, ChunkRecord, DocumentRecord, Encoding, StoredStates

_BATCH = 500


@dataclass(frozen=True)
class ShardInventory:
    """A shard and how much of it is still of use.

    Attributes:
        id: in the catalog.
        path: the file.
        bytes: its size.
        live_bytes: bytes of states that are in use.
        checksum: xxh3 (64 bit, hexadecimal) of the whole file.
        format: form and codec of each layer, as JSON.
        fingerprint: digest of the model's fingerprint.
    """

    id: int
    path: Path
    bytes: int
    live_bytes: int
    checksum: str
    format: str
    fingerprint: str

    @property
    def dead_bytes(self) -> int:
        """Bytes of states that nothing uses any more."""
        return self.bytes - self.live_bytes


@dataclass(frozen=True)
class StatesInUse:
    """States and one of the encodings that use them.

    Attributes:
        id: of the states in the catalog.
        cost: what computing them again would take, in FLOPs.
        chunk: one of their chunks.
        encoding: that one of the chunk's that uses them.
        states: where they lie.
    """

    id: int
    cost: float
    chunk: ChunkRecord
    encoding: Encoding
    states: StoredStates


@dataclass(frozen=True)
class ResidentStates:
    """What eviction goes by.

    Attributes:
        id: in the catalog.
        key: what they depend on.
        bytes: that they take.
        cost: what computing them again would take, in FLOPs.
        clock: the ageing clock of eviction when they were stored.
        shard: the file that they are in.
    """

    id: int
    key: str
    bytes: int
    cost: float
    clock: float
    shard: Path


class Inventory:
    """Queries that go through a whole catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._rows = catalog.rows

    def shards(self) -> list[ShardInventory]:
        """All shards, oldest first."""
        rows = self._rows(
            "SELECT shards.id, folder, name, shards.bytes,"
            " (SELECT coalesce(sum(states.bytes), 0) FROM states WHERE states.shard = shards.id),"
            " checksum, format, fingerprint FROM shards ORDER BY shards.id"
        )
        return [
            ShardInventory(shard, self._catalog.shard_path(folder, name), *others)
            for shard, folder, name, *others in rows
        ]

    def formats(self, fingerprint: str) -> list[str]:
        """Formats of the shards of a model as JSON, the latest first.

        Args:
            fingerprint: digest of the model's fingerprint.
        """
        query = "SELECT format FROM shards WHERE fingerprint = ? GROUP BY format ORDER BY max(id) DESC"
        return [format for (format,) in self._rows(query, (fingerprint,))]

    def states(self, shard: int | None = None) -> Iterator[StatesInUse]:
        """All states in use, of one shard or of all, in the order they lie on disk.

        Raises:
            StoreError: the catalog is damaged.
        """
        query = (
            # The name is that of the row with the lowest chunk: SQLite's rule for min().
            "SELECT shard, id, cost, min(chunk), name FROM states JOIN encodings ON encodings.states = states.id"
            " WHERE (shard, id) > (?, ?) AND shard = coalesce(?, shard) GROUP BY shard, id ORDER BY shard, id LIMIT ?"
        )
        last = (0, 0)
        while rows := self._rows(query, (*last, shard, _BATCH)):
            chunks = {it.vector_id: it for it in self._catalog.chunks_by_vector([row[3] for row in rows])}
            for _, states, cost, vector_id, name in rows:
                chunk = chunks.get(vector_id)
                encoding = chunk.encoding(name) if chunk is not None else None
                if chunk is not None and encoding is not None and encoding.states is not None:
                    yield StatesInUse(states, cost, chunk, encoding, encoding.states)
            last = rows[-1][:2]

    def encodings_of(self, states: int) -> list[ChunkEncoding]:
        """All encodings that use some states."""
        return self._encodings("SELECT chunk, name FROM encodings WHERE states = ? ORDER BY chunk, name", (states,))

    def residents(self) -> list[ResidentStates]:
        """All stored states, oldest first."""
        rows = self._rows(
            "SELECT states.id, key, states.bytes, cost, clock, folder, name FROM states"
            " JOIN shards ON shards.id = states.shard ORDER BY states.id"
        )
        return [
            ResidentStates(states, key, size, cost, clock, self._catalog.shard_path(folder, name))
            for states, key, size, cost, clock, folder, name in rows
        ]

    def evicted(self) -> Iterator[ChunkEncoding]:
        """Encodings that have no states because the byte budget was short."""
        query = (
            "SELECT chunk, name FROM encodings WHERE evicted AND (chunk, name) > (?, ?) ORDER BY chunk, name LIMIT ?"
        )
        last = (0, "")
        while found := self._encodings(query, (*last, _BATCH)):
            yield from found
            last = (found[-1][0].vector_id, found[-1][1].name)

    def evicted_keys(self) -> set[str]:
        """Keys of these."""
        return {row[0] for row in self._rows("SELECT key FROM encodings WHERE evicted")}

    def documents(self) -> Iterator[tuple[DocumentRecord, list[ChunkRecord]]]:
        """All documents with their chunks."""
        last = ""
        query = "SELECT id FROM documents WHERE id > ? ORDER BY id LIMIT ?"
        while rows := self._rows(query, (last, _BATCH)):
            for document in self._catalog.documents([row[0] for row in rows]):
                yield document, self._catalog.chunks_by_vector(self._catalog.vector_ids([document.id]))
            last = rows[-1][0]

    def sizes(self) -> dict[str, int]:
        """Tokens of all chunks, shards, their bytes on disk, and the bytes of states in use and out of use."""
        [(tokens, evicted)] = self._rows(
            "SELECT coalesce(sum(length(token_ids)), 0) / 4,"
            " (SELECT count(DISTINCT chunk) FROM encodings WHERE evicted) FROM chunks"
        )
        [(shards, shard_bytes)] = self._rows("SELECT count(*), coalesce(sum(bytes), 0) FROM shards")
        [(live,)] = self._rows("SELECT coalesce(sum(bytes), 0) FROM states")
        return {
            "tokens": tokens,
            "evicted_chunks": evicted,
            "shards": shards,
            "shard_bytes": shard_bytes,
            "state_bytes": live,
            "dead_bytes": shard_bytes - live,
        }

    def bytes_by_format(self) -> list[tuple[str, str, int, int]]:
        """Digest of the model's fingerprint, format as JSON, chunks' states in use and their bytes."""
        return self._rows(
            "SELECT fingerprint, format, count(*), sum(states.bytes) FROM states"
            " JOIN shards ON shards.id = states.shard GROUP BY fingerprint, format ORDER BY sum(states.bytes) DESC"
        )

    def bytes_by_encoding(self) -> list[tuple[str, int, int, int]]:
        """Name, chunks with such states, chunks without for lack of space, and bytes of the states."""
        return self._rows(
            "SELECT name, count(states), sum(evicted), (SELECT coalesce(sum(bytes), 0) FROM states WHERE id IN"
            " (SELECT states FROM encodings WHERE encodings.name = named.name)) FROM encodings AS named GROUP BY name"
        )

    def bytes_by_document(self, count: int) -> list[tuple[str, int, int]]:
        """Id, chunks and bytes of states of the documents that take most space."""
        return self._rows(
            "SELECT document, count(DISTINCT chunks.id), coalesce(sum(states.bytes), 0) AS size FROM chunks"
            " LEFT JOIN encodings ON encodings.chunk = chunks.id LEFT JOIN states ON states.id = encodings.states"
            " GROUP BY document ORDER BY size DESC, document LIMIT ?",
            (count,),
        )

    def _encodings(self, query: str, values: tuple[object, ...]) -> list[ChunkEncoding]:
        """Encodings by a query for chunk and name."""
        rows = self._rows(query, values)
        chunks = {it.vector_id: it for it in self._catalog.chunks_by_vector(list(dict.fromkeys(it[0] for it in rows)))}
        found = [
            (chunks[vector_id], chunks[vector_id].encoding(name)) for vector_id, name in rows if vector_id in chunks
        ]
        return [(chunk, encoding) for chunk, encoding in found if encoding is not None]
