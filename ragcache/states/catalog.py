"""The catalog: which documents, chunks, states and shards are visible, in one SQLite file.

A shard file is there for readers only once a row here says so, and one transaction switches documents, states and the
generation of the vector index together. WAL mode lets any number of readers go on while one process writes.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragcache.errors import StoreError
from ragcache.states.form import StateFormat
from ragcache.states.records import ByteRange, ChunkRecord, StoredStates

CATALOG_VERSION = 1

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
    ordinal INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL,
    states INTEGER REFERENCES states(id)
);
CREATE INDEX chunks_by_document ON chunks(document);
CREATE INDEX chunks_by_states ON chunks(states);
"""

_SELECT_CHUNKS = """
SELECT chunks.id, chunks.chunk_id, chunks.document, chunks.ordinal, documents.title, chunks.text,
       documents.metadata, chunks.token_ids, states.key, shards.name, shards.format, states.ranges
FROM chunks JOIN documents ON documents.id = chunks.document
LEFT JOIN states ON states.id = chunks.states LEFT JOIN shards ON shards.id = states.shard
"""

_RANGES_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8")])
_MAX_VARIABLES = 500
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")


class Catalog:
    """One SQLite file; safe to use from several threads, each of which gets its own connection."""

    def __init__(self, path: Path, shard_folder: Path) -> None:
        self._path = path
        self._shard_folder = shard_folder
        self._local = threading.local()

    def create(self, meta: dict[str, str]) -> None:
        """Make the tables, with the given entries in `meta`; all of it appears or nothing."""
        self._rows("PRAGMA journal_mode = WAL")
        with self.transaction() as connection:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            entries = {**meta, "catalog_version": str(CATALOG_VERSION)}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", entries.items())

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        """What SQLite raises about the file, as an error that says what to do."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            kind = getattr(error, "sqlite_errorname", "SQLITE_CORRUPT")
            if kind.startswith(_DAMAGED):
                raise self._damaged(error) from error
            raise StoreError(f"{self._path} cannot be used: {error}; see to its folder and to the disk") from error

    def _damaged(self, error: Exception) -> StoreError:
        return StoreError(f"{self._path} is damaged ({error}); delete the store and index again")

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._named_faults():
            return self._connection.execute(query, values).fetchall()

    @property
    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._path, timeout=30, isolation_level=None)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            self._local.connection = connection
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.

        Raises:
            StoreError: the file is damaged or cannot be written to.
        """
        with self._named_faults():
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some faults, such as a full disk.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def meta(self) -> dict[str, str]:
        """All entries of the table `meta`; empty when the file is no catalog yet.

        Raises:
            StoreError: the file is not a catalog, or one of a newer version.
        """
        if not self._rows("SELECT name FROM sqlite_master WHERE name = 'meta'"):
            return {}
        entries = dict(self._rows("SELECT key, value FROM meta"))
        if int(entries.get("catalog_version", 0)) > CATALOG_VERSION:
            raise StoreError(f"{self._path} was written by a newer ragcache; update with pip install -U ragcache")
        return entries

    def vectors_generation(self) -> int:
        """Which file of the vector index belongs to the chunks now visible; 0 is none."""
        rows = self._rows("SELECT value FROM meta WHERE key = 'vectors_generation'")
        return int(rows[0][0]) if rows else 0

    def signatures(self, source: str | None = None) -> dict[str, str]:
        """Document id to signature, of one source or of all."""
        query = "SELECT id, signature FROM documents WHERE source = coalesce(?, source)"
        return dict(self._rows(query, (source,)))

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

    def find_states(self, key: str, format: StateFormat) -> int | None:
        """Id of stored states of that key in that format."""
        rows = self._rows(
            "SELECT states.id FROM states JOIN shards ON shards.id = states.shard WHERE key = ? AND format = ?",
            (key, format.to_json()),
        )
        return int(rows[0][0]) if rows else None

    def shard_names(self) -> set[str]:
        """Names of all shard files that readers may look into."""
        return {row[0] for row in self._rows("SELECT name FROM shards")}

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
            rows = self._rows(query, batch)
            try:
                chunks = [self._chunk(row) for row in rows]
            except (ValueError, TypeError) as error:
                raise self._damaged(error) from error
            yield from chunks

    def _chunk(self, row: tuple[Any, ...]) -> ChunkRecord:
        (
            vector_id,
            chunk_id,
            document,
            ordinal,
            title,
            text,
            metadata,
            token_ids,
            key,
            shard,
            format_,
            ranges,
        ) = row
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
    for start in range(0, len(values), _MAX_VARIABLES):
        yield values[start : start + _MAX_VARIABLES]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
