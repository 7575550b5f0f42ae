"""The catalog: which documents, chunks, states and shards are visible, in one SQLite file.

A shard file is there for readers only once a row here says so, and one transaction switches documents, states and the
generation of the vector index together. WAL mode lets any number of readers go on while one process writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ragcache.errors import StoreError
from ragcache.states.database import Database
from ragcache.states.form import StateFormat
from ragcache.states.records import NO_VECTORS, ByteRange, ChunkRecord, StoredStates, VectorsVersion

CATALOG_VERSION = 1
VECTORS_KEY = "vectors"

SCHEMA = """\
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (
    id TEXT PRIMARY KEY, source TEXT NOT NULL, title TEXT NOT NULL, signature TEXT NOT NULL, metadata TEXT NOT NULL
);
CREATE INDEX documents_by_source ON documents(source);
CREATE TABLE shards (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, format TEXT NOT NULL
);
CREATE TABLE states (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, shard INTEGER NOT NULL REFERENCES shards(id),
    tokens INTEGER NOT NULL, ranges BLOB NOT NULL
);
CREATE INDEX states_by_key ON states(key);
CREATE INDEX states_by_shard ON states(shard);
-- AUTOINCREMENT: an id is also the chunk's id in the vector index and must never be given out twice.
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE,
    document TEXT NOT NULL REFERENCES documents(id) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, checksum TEXT NOT NULL,
    states INTEGER REFERENCES states(id)
);
CREATE INDEX chunks_by_document ON chunks(document);
CREATE INDEX chunks_by_states ON chunks(states);
"""

_SELECT_CHUNKS = """
SELECT chunks.id, chunks.chunk_id, chunks.document, chunks.ordinal, documents.title, chunks.text,
       documents.metadata, chunks.token_ids, chunks.checksum, states.key, shards.name, shards.format, states.ranges
FROM chunks JOIN documents ON documents.id = chunks.document
LEFT JOIN states ON states.id = chunks.states LEFT JOIN shards ON shards.id = states.shard
"""

_SELECT_DOCUMENTS = """
SELECT DISTINCT chunks.document FROM chunks JOIN states ON states.id = chunks.states
JOIN shards ON shards.id = states.shard
"""

_RANGES_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8")])
_BATCH = 500


class Catalog:
    """The catalog file; safe to use from several threads."""

    def __init__(self, path: Path, shard_folder: Path) -> None:
        self._database = Database(path)
        self._rows = self._database.rows
        self._shard_folder = shard_folder
        self.transaction = self._database.transaction
        self.damaged = self._database.damaged

    def create(self, meta: dict[str, str]) -> None:
        """Make the tables, with the given entries in `meta`; all of it appears or nothing."""
        self._database.create()
        with self.transaction() as connection:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            entries = {**meta, "catalog_version": str(CATALOG_VERSION), VECTORS_KEY: NO_VECTORS.to_json()}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", entries.items())

    def meta(self) -> dict[str, str]:
        """All entries of the table `meta`; empty when the file is no catalog yet.

        Raises:
            StoreError: the file is not a catalog, or one of a newer version.
        """
        if not self._rows("SELECT name FROM sqlite_master WHERE name = 'meta'"):
            return {}
        entries = dict(self._rows("SELECT key, value FROM meta"))
        version = entries.get("catalog_version", "")
        if not version.isdigit():
            raise self.damaged("no version in meta")
        if int(version) > CATALOG_VERSION:
            raise StoreError(
                f"{self._database.path} was written by a newer ragcache; update with pip install -U ragcache"
            )
        return entries

    def vectors(self) -> VectorsVersion:
        """Which file of the vector index belongs to the chunks now visible.

        Raises:
            StoreError: the entry is gone or makes no sense.
        """
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (VECTORS_KEY,))
        if not rows:
            raise self.damaged(f"no {VECTORS_KEY} in meta")
        try:
            return VectorsVersion.from_json(rows[0][0])
        except (ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def signatures(self, source: str | None = None) -> dict[str, str]:
        """Document id to signature, of one source or of all."""
        query = "SELECT id, signature FROM documents WHERE source = coalesce(?, source)"
        return dict(self._rows(query, (source,)))

    def sources(self) -> dict[str, str]:
        """Document id to where it was read from."""
        return dict(self._rows("SELECT id, source FROM documents"))

    def chunks_by_vector(self, vector_ids: Sequence[int]) -> list[ChunkRecord]:
        """Chunks in the order of the ids asked for; ids that are gone are left out."""
        found = {chunk.vector_id: chunk for chunk in self._chunks("chunks.id", vector_ids)}
        return [found[i] for i in vector_ids if i in found]

    def chunks_by_id(self, chunk_ids: Sequence[str]) -> list[ChunkRecord]:
        """Chunks in the order of the ids asked for; ids that are gone are left out."""
        found = {chunk.chunk_id: chunk for chunk in self._chunks("chunks.chunk_id", chunk_ids)}
        return [found[i] for i in chunk_ids if i in found]

    def vector_ids(self, document_ids: Iterable[str]) -> list[int]:
        """Vector ids of all chunks of some documents."""
        ids: list[int] = []
        for batch in _batches(list(document_ids)):
            query = f"SELECT id FROM chunks WHERE document IN ({_marks(batch)})"  # noqa: S608
            ids += [row[0] for row in self._rows(query, batch)]
        return ids

    def last_vector_id(self) -> int:
        """The highest vector id ever given out."""
        rows = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'")
        return int(rows[0][0]) if rows else 0

    def find_states(self, key: str, format: StateFormat, unusable_shards: Collection[str] = ()) -> int | None:
        """Id of stored states of that key in that format, in none of those shards."""
        rows = self._rows(
            "SELECT states.id, shards.name FROM states JOIN shards ON shards.id = states.shard"
            " WHERE key = ? AND format = ?",
            (key, format.to_json()),
        )
        return next((int(states) for states, shard in rows if shard not in unusable_shards), None)

    def shards(self) -> dict[str, int]:
        """Names of all shard files that readers may look into, and their sizes in bytes."""
        return dict(self._rows("SELECT name, bytes FROM shards"))

    def documents_without_states(self, unusable_shards: Collection[str] = ()) -> set[str]:
        """Ids of documents with a chunk that has no stored states, or only in one of those shards."""
        found = {row[0] for row in self._rows("SELECT DISTINCT document FROM chunks WHERE states IS NULL")}
        for batch in _batches(list(unusable_shards)):
            query = f"{_SELECT_DOCUMENTS} WHERE shards.name IN ({_marks(batch)})"
            found.update(row[0] for row in self._rows(query, batch))
        return found

    def all_chunks(self) -> Iterator[list[ChunkRecord]]:
        """Every chunk, in batches, in the order of their vector ids."""
        last = 0
        while rows := self._rows(f"{_SELECT_CHUNKS} WHERE chunks.id > ? ORDER BY chunks.id LIMIT ?", (last, _BATCH)):
            yield [self._chunk(row) for row in rows]
            last = rows[-1][0]

    def counts(self) -> dict[str, int]:
        """Numbers of documents and chunks."""
        return {
            table: int(self._rows(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608
            for table in ("documents", "chunks")
        }

    def sizes(self) -> dict[str, int]:
        """Tokens of all chunks, shards, their bytes on disk and the bytes of states in them that are in use."""
        [(tokens, shards, shard_bytes)] = self._rows(
            "SELECT (SELECT coalesce(sum(length(token_ids)), 0) / 4 FROM chunks), count(*), coalesce(sum(bytes), 0)"
            " FROM shards"
        )
        ranges = self._rows("SELECT ranges FROM states")
        used = sum(wanted.length for row in ranges for wanted in unpack_ranges(row[0]))
        return {"tokens": tokens, "shards": shards, "shard_bytes": shard_bytes, "state_bytes": used}

    def _chunks(self, column: str, values: Sequence[int] | Sequence[str]) -> Iterator[ChunkRecord]:
        for batch in _batches(list(values)):
            query = f"{_SELECT_CHUNKS} WHERE {column} IN ({_marks(batch)})"
            for row in self._rows(query, batch):
                yield self._chunk(row)

    def _chunk(self, row: tuple[Any, ...]) -> ChunkRecord:
        """A row of `_SELECT_CHUNKS` as a record.

        Raises:
            StoreError: it is not what was written. Texts and token ids are what answers are recomputed from, so no
                miss can make up for them.
        """
        *content, checksum, key, shard, format_, ranges = row
        vector_id, chunk_id, document, ordinal, title, text, metadata, token_ids = content
        try:
            if chunk_checksum(*content) != checksum:
                raise ValueError(f"chunk {chunk_id} is not what was written")
            states = None
            if key is not None:
                states = StoredStates(key, self._shard_folder / shard, format_, unpack_ranges(ranges))
            return ChunkRecord(
                vector_id=vector_id,
                chunk_id=chunk_id,
                document_id=document,
                ordinal=ordinal,
                title=title,
                text=text,
                metadata=json.loads(metadata),
                token_ids=unpack_token_ids(token_ids),
                states=states,
            )
        except (ValueError, TypeError) as error:
            raise self.damaged(error) from error


def chunk_checksum(
    vector_id: int,
    chunk_id: str,
    document_id: str,
    ordinal: int,
    title: str,
    text: str,
    metadata: str,
    token_ids: bytes,
) -> str:
    """xxh3 (64 bit, hexadecimal) of a chunk and what its document says about it, as they stand in their columns."""
    values = json.dumps([vector_id, chunk_id, document_id, ordinal, title, text, metadata])
    return xxhash.xxh3_64_hexdigest(values.encode() + token_ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as they stand in the column `token_ids`: int32, little-endian."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(blob: bytes) -> tuple[int, ...]:
    """Inverse of `pack_token_ids`."""
    return tuple(np.frombuffer(blob, dtype="<i4").tolist())


def pack_ranges(ranges: Sequence[ByteRange]) -> bytes:
    """Byte ranges as they stand in the column `ranges`: three uint64 each, little-endian."""
    return np.array([(r.offset, r.length, r.checksum) for r in ranges], dtype=_RANGES_DTYPE).tobytes()


def unpack_ranges(blob: bytes) -> tuple[ByteRange, ...]:
    """Inverse of `pack_ranges`."""
    return tuple(ByteRange(*row) for row in np.frombuffer(blob, dtype=_RANGES_DTYPE).tolist())


def _batches(values: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(values), _BATCH):
        yield values[start : start + _BATCH]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
