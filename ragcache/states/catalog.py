"""The catalog: which documents, chunks, states and shards are visible, in one SQLite file. What readers ask of it.

A shard file is there for readers only once a row here says so, and one transaction switches documents, states and the
generation of the vector index together (`ragcache.states.changes`). WAL mode lets any number of readers go on while
one process writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragcache.errors import StoreError
from ragcache.states.chunk_rows import ORDER_CHUNKS, SELECT_CHUNKS, read_chunks
from ragcache.states.database import Database
from ragcache.states.folders import is_shard_name, is_store_id
from ragcache.states.form import StateFormat
from ragcache.states.records import (
    NO_VECTORS,
    ChunkRecord,
    DocumentRecord,
    StoredStates,
    VectorsVersion,
    unpack_range,
    unpack_ranges,
)
from ragcache.states.schema import CATALOG_VERSION, RECIPE_KEY, SCHEMA, VECTORS_KEY, identity_checksum

_SELECT_DOCUMENTS = """
SELECT DISTINCT chunks.document FROM chunks JOIN encodings ON encodings.chunk = chunks.id
LEFT JOIN states ON states.id = encodings.states LEFT JOIN shards ON shards.id = states.shard
"""

_BATCH = 500


class Catalog:
    """The catalog file; safe to use from several threads."""

    def __init__(self, path: Path, shard_folder: Path) -> None:
        self._database = Database(path)
        self.rows = self._database.rows
        self.shard_folder = shard_folder
        self.transaction = self._database.transaction
        self.damaged = self._database.damaged
        self.close = self._database.close

    def create(self, store_id: str, fingerprint: str, embedding: str, prefix: str) -> None:
        """Make the tables, for a store made with all of this; all of it appears or nothing."""
        self._database.create()
        with self.transaction() as connection:
            for statement in SCHEMA.split(";\n"):
                connection.execute(statement)
            entries = {
                "catalog_version": str(CATALOG_VERSION),
                "store_id": store_id,
                "fingerprint": fingerprint,
                "embedding": embedding,
                "prefix": prefix,
                "checksum": identity_checksum(store_id, fingerprint, embedding, prefix),
                VECTORS_KEY: NO_VECTORS.to_json(),
            }
            connection.executemany("INSERT INTO meta VALUES (?, ?)", entries.items())

    def meta(self) -> dict[str, str]:
        """All entries of the table `meta`; empty when the file is no catalog yet.

        Raises:
            StoreError: the file is not a catalog, or one of a newer version.
        """
        if not self.rows("SELECT name FROM sqlite_master WHERE name = 'meta'"):
            return {}
        entries = dict(self.rows("SELECT key, value FROM meta"))
        version = entries.get("catalog_version", "")
        if not version.isdigit():
            raise self.damaged("no version in meta")
        if int(version) > CATALOG_VERSION:
            raise StoreError(
                f"{self._database.path} was written by a newer ragcache; update with pip install -U ragcache"
            )
        if int(version) < CATALOG_VERSION:
            raise StoreError(
                f"{self._database.path} was written by an older ragcache in another format; index into a new store"
            )
        return entries

    def identity(self) -> tuple[str, str, str, str]:
        """Id of the store, fingerprint, digest of the embedding model and prefix, as they were given to `create`.

        Raises:
            StoreError: they are gone, or not what was written.
        """
        entries = self.meta()
        try:
            values = (entries["store_id"], entries["fingerprint"], entries["embedding"], entries["prefix"])
            if identity_checksum(*values) != entries["checksum"] or not is_store_id(values[0]):
                raise ValueError("what the store was made with is not what was written")
        except (KeyError, ValueError, TypeError) as error:
            raise self.damaged(error) from error
        return values

    def problems(self) -> list[str]:
        """What SQLite finds wrong with the file's structure, or with references between tables."""
        found = [str(row[0]) for row in self.rows("PRAGMA integrity_check") if row[0] != "ok"]
        return found + [f"a row of {row[0]} refers to nothing" for row in self.rows("PRAGMA foreign_key_check")]

    def require_sound(self) -> None:
        """To be called before anything is deleted on the word of the catalog alone.

        Raises:
            StoreError: its structure is damaged. Some such damage shows in no query but as rows that are not there.
        """
        if problems := self.problems():
            raise self.damaged(problems[0])

    def vectors(self) -> VectorsVersion:
        """Which file of the vector index belongs to the chunks now visible.

        Raises:
            StoreError: the entry is gone or makes no sense.
        """
        rows = self.rows("SELECT value FROM meta WHERE key = ?", (VECTORS_KEY,))
        if not rows:
            raise self.damaged(f"no {VECTORS_KEY} in meta")
        try:
            return VectorsVersion.from_json(rows[0][0])
        except (ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def recipe(self) -> str | None:
        """How contexts were chosen in the last indexing run that chose them all; `None` where that is not known."""
        return self.meta().get(RECIPE_KEY)

    def signatures(self, source: str | None = None) -> dict[str, str]:
        """Document id to signature, of one source or of all."""
        query = "SELECT id, signature FROM documents WHERE source = coalesce(?, source)"
        return dict(self.rows(query, (source,)))

    def sources(self) -> dict[str, str]:
        """Document id to where it was read from."""
        return dict(self.rows("SELECT id, source FROM documents"))

    def chunks_by_vector(self, vector_ids: Sequence[int]) -> list[ChunkRecord]:
        """Chunks in the order of the ids asked for; ids that are gone are left out."""
        found = {chunk.vector_id: chunk for chunk in self._chunks("chunks.id", vector_ids)}
        return [found[i] for i in vector_ids if i in found]

    def chunks_by_id(self, chunk_ids: Sequence[str]) -> list[ChunkRecord]:
        """Chunks in the order of the ids asked for; ids that are gone are left out."""
        found = {chunk.chunk_id: chunk for chunk in self._chunks("chunks.chunk_id", chunk_ids)}
        return [found[i] for i in chunk_ids if i in found]

    def chunks_by_content(self, contents: Sequence[str]) -> dict[str, ChunkRecord]:
        """Chunks by what they say (`ChunkRecord.content`), one of several equal ones; what is gone is left out."""
        return {chunk.content: chunk for chunk in self._chunks("chunks.content", contents)}

    def documents_of(self, chunk_ids: Sequence[str]) -> dict[str, str]:
        """Chunk id to document id; ids that are gone are left out."""
        found: dict[str, str] = {}
        for batch in _batches(list(chunk_ids)):
            query = f"SELECT chunk_id, document FROM chunks WHERE chunk_id IN ({_marks(batch)})"  # noqa: S608
            found |= dict(self.rows(query, batch))
        return found

    def token_counts(self, contents: Collection[str]) -> dict[str, int]:
        """Tokens of chunks by what they say; what is gone is left out."""
        counts: dict[str, int] = {}
        for batch in _batches(sorted(contents)):
            query = f"SELECT content, length(token_ids) / 4 FROM chunks WHERE content IN ({_marks(batch)})"  # noqa: S608
            counts |= dict(self.rows(query, batch))
        return counts

    def vector_ids(self, document_ids: Iterable[str]) -> list[int]:
        """Vector ids of all chunks of some documents."""
        ids: list[int] = []
        for batch in _batches(list(document_ids)):
            query = f"SELECT id FROM chunks WHERE document IN ({_marks(batch)})"  # noqa: S608
            ids += [row[0] for row in self.rows(query, batch)]
        return ids

    def last_vector_id(self) -> int:
        """The highest vector id ever given out."""
        rows = self.rows("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'")
        return int(rows[0][0]) if rows else 0

    def last_shard_id(self) -> int:
        """The highest number of any shard; 0 when there are none."""
        return int(self.rows("SELECT coalesce(max(id), 0) FROM shards")[0][0])

    def all_vector_ids(self) -> set[int]:
        """Vector ids of all chunks."""
        return {row[0] for row in self.rows("SELECT id FROM chunks")}

    def find_states(self, key: str, format: StateFormat, unusable_shards: Collection[str] = ()) -> int | None:
        """Id of stored states of that key in that format, in none of those shards."""
        rows = self.rows(
            "SELECT states.id, shards.name FROM states JOIN shards ON shards.id = states.shard"
            " WHERE key = ? AND format = ?",
            (key, format.to_json()),
        )
        return next((int(states) for states, shard in rows if shard not in unusable_shards), None)

    def relocated(self, states: StoredStates) -> StoredStates | None:
        """Where states lie now that are no longer where they were, because a compaction has moved them."""
        query = (
            "SELECT shards.folder, shards.name, states.ranges, states.context_ids FROM states"
            " JOIN shards ON shards.id = states.shard WHERE key = ? AND format = ?"
        )
        for folder, name, ranges, context_ids in self.rows(query, (states.key, states.format)):
            path = self.shard_path(folder, name)
            if path != states.shard:
                return StoredStates(states.key, path, states.format, unpack_ranges(ranges), unpack_range(context_ids))
        return None

    def shards(self) -> dict[Path, int]:
        """All shard files that readers may look into, and their sizes in bytes."""
        rows = self.rows("SELECT folder, name, bytes FROM shards")
        return {self.shard_path(folder, name): size for folder, name, size in rows}

    def shard_path(self, folder: str, name: str) -> Path:
        """Where a shard lies; the store's own folder is not named, so that a store can be moved."""
        try:
            # What is named here may be deleted one day, so it can only be a shard in a folder of shards.
            if not is_shard_name(name) or (folder and not is_store_id(Path(folder).name)):
                raise ValueError(f"{folder}/{name} is no place of a shard")
            return (Path(folder) if folder else self.shard_folder) / name
        except (TypeError, ValueError) as error:
            raise self.damaged(error) from error

    def documents_without_states(self, unusable_shards: Collection[str] = ()) -> set[str]:
        """Ids of documents with an encoding that has lost its states, or has them only in one of those shards."""
        found = {row[0] for row in self.rows(f"{_SELECT_DOCUMENTS} WHERE encodings.states IS NULL AND NOT evicted")}
        for batch in _batches(list(unusable_shards)):
            query = f"{_SELECT_DOCUMENTS} WHERE shards.name IN ({_marks(batch)})"
            found.update(row[0] for row in self.rows(query, batch))
        return found

    def documents_where(self, metadata: Mapping[str, Any]) -> list[str]:
        """Ids of documents whose metadata hold all of those values."""
        wanted = _canonical(metadata)
        rows = self.rows("SELECT id, metadata FROM documents ORDER BY id")
        return [id for id, text in rows if wanted.items() <= _canonical(self._metadata(text)).items()]

    def documents(self, ids: Sequence[str]) -> list[DocumentRecord]:
        """Documents in the order of the ids asked for; ids that are gone are left out."""
        found = {}
        for batch in _batches(list(ids)):
            query = f"SELECT id, source, title, signature, metadata FROM documents WHERE id IN ({_marks(batch)})"  # noqa: S608
            for document, source, title, signature, metadata in self.rows(query, batch):
                found[document] = DocumentRecord(document, source, title, signature, self._metadata(metadata))
        return [found[id] for id in ids if id in found]

    def all_chunks(self) -> Iterator[list[ChunkRecord]]:
        """Every chunk, in batches, in the order of their vector ids."""
        last = 0
        condition = "WHERE chunks.id IN (SELECT id FROM chunks WHERE id > ? ORDER BY id LIMIT ?)"
        while chunks := self._select(condition, (last, _BATCH)):
            yield chunks
            last = chunks[-1].vector_id

    def counts(self) -> dict[str, int]:
        """Numbers of documents and chunks."""
        return {
            table: int(self.rows(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608
            for table in ("documents", "chunks")
        }

    def _chunks(self, column: str, values: Sequence[int] | Sequence[str]) -> Iterator[ChunkRecord]:
        for batch in _batches(list(values)):
            yield from self._select(f"WHERE {column} IN ({_marks(batch)})", batch)

    def _select(self, condition: str, values: Sequence[object]) -> list[ChunkRecord]:
        rows = self.rows(f"{SELECT_CHUNKS} {condition} {ORDER_CHUNKS}", values)
        try:
            return list(read_chunks(rows, self.shard_path))
        except (ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def _metadata(self, text: str) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise self.damaged(error) from error


def _canonical(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Values as JSON, so that 1 and true differ and lists compare."""
    return {key: json.dumps(value, sort_keys=True) for key, value in metadata.items()}


def _batches(values: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(values), _BATCH):
        yield values[start : start + _BATCH]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
