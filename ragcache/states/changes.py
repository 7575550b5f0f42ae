"""Changes to the catalog, each a statement or a few within a transaction that the caller holds."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ragcache.settings import EncodingName
from ragcache.states.records import (
    DocumentRecord,
    NewChunk,
    NewEncoding,
    NewShard,
    VectorsVersion,
    pack_contexts,
    pack_ranges,
    pack_token_ids,
)
from ragcache.states.schema import RECIPE_KEY, VECTORS_KEY, chunk_checksum, encoding_checksum

Connection = sqlite3.Connection
ShardName = tuple[str, str]
"""Folder (`""` for the store's own) and name of a shard file."""

_UNUSED = "NOT EXISTS (SELECT 1 FROM encodings WHERE encodings.states = states.id)"


def add_shard(connection: Connection, shard: NewShard, folder: str, clock: float = 0.0) -> dict[str, int]:
    """Make a shard and its states known.

    Args:
        connection: in a transaction.
        shard: finished and durable.
        folder: of the shard, `""` for the store's own.
        clock: the ageing clock of eviction.

    Returns:
        Key to id of its states.
    """
    connection.execute(
        "INSERT INTO shards VALUES (?, ?, ?, ?, ?, ?, ?)",
        (shard.sequence, shard.path.name, folder, shard.bytes, shard.checksum, shard.format, shard.fingerprint),
    )
    added = {}
    around = shard.bytes - sum(states.bytes for states in shard.states)
    for index, states in enumerate(shard.states):
        share = around // len(shard.states) + (around % len(shard.states) if index == 0 else 0)
        ranges, context_ids = pack_ranges(states.ranges), pack_ranges([states.context_ids])
        values = (states.tokens, states.bytes + share, states.cost, clock, ranges, context_ids)
        inserted = connection.execute(
            "INSERT INTO states (key, shard, tokens, bytes, cost, clock, ranges, context_ids)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (states.key, shard.sequence, *values),
        )
        added[states.key] = int(inserted.lastrowid or 0)
    return added


def add_document(
    connection: Connection,
    document: DocumentRecord,
    chunks: Iterable[NewChunk],
    states: dict[str, int],
    evicted: Collection[str] = (),
) -> None:
    """Make a document visible.

    Args:
        connection: in a transaction.
        document: not there yet.
        chunks: all of its chunks.
        states: key to id of the states that there are.
        evicted: keys that have none for lack of space.
    """
    metadata, chunks = json.dumps(document.metadata), list(chunks)
    connection.execute(
        "INSERT INTO documents VALUES (?, ?, ?, ?, ?)",
        (document.id, document.source, document.title, document.signature, metadata),
    )
    connection.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [_chunk(document, it, metadata) for it in chunks]
    )
    connection.executemany(
        "INSERT INTO encodings VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (*_encoding(chunk.vector_id, it), states.get(it.key), int(it.key in evicted and it.key not in states))
            for chunk in chunks
            for it in chunk.encodings
        ],
    )


def _chunk(document: DocumentRecord, chunk: NewChunk, metadata: str) -> tuple[Any, ...]:
    token_ids = pack_token_ids(chunk.token_ids)
    place = (chunk.vector_id, chunk.chunk_id, document.id, chunk.ordinal)
    more = (json.dumps(chunk.metadata), chunk.embedding_text)
    checksum = chunk_checksum(*place, document.title, chunk.text, metadata, token_ids, chunk.content, *more)
    return (*place, chunk.text, token_ids, chunk.content, *more, checksum)


def _encoding(vector_id: int, encoding: NewEncoding) -> tuple[Any, ...]:
    values = (vector_id, encoding.name, encoding.key, encoding.context, pack_contexts(encoding.contexts))
    return (*values, encoding_checksum(*values))


def add_encodings(
    connection: Connection,
    encodings: Iterable[tuple[int, NewEncoding]],
    states: dict[str, int],
    evicted: Collection[str] = (),
) -> set[int]:
    """Give chunks encodings that they had not, or others of the same names.

    Args:
        connection: in a transaction.
        encodings: each with the chunk's vector id.
        states: key to id of the states that there are.
        evicted: keys that have none for lack of space.

    Returns:
        Ids of the states that the chunks had, for `drop_unused` to look at.
    """
    used: set[int] = set()
    for vector_id, it in encodings:
        query = "SELECT states FROM encodings WHERE chunk = ? AND name = ? AND states IS NOT NULL"
        used.update(row[0] for row in connection.execute(query, (vector_id, it.name)))
        values = (*_encoding(vector_id, it), states.get(it.key), int(it.key in evicted and it.key not in states))
        connection.execute("INSERT OR REPLACE INTO encodings VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    return used


def remove_encodings(connection: Connection, name: EncodingName) -> list[ShardName]:
    """Take all encodings of a name away.

    Returns:
        Shards to be deleted once this is committed.
    """
    query = "SELECT DISTINCT states FROM encodings WHERE name = ? AND states IS NOT NULL"
    used = [row[0] for row in connection.execute(query, (name,))]
    connection.execute("DELETE FROM encodings WHERE name = ?", (name,))
    return drop_unused(connection, used)


def remove_documents(connection: Connection, ids: Collection[str]) -> set[int]:
    """Take documents out; ids of the states that their chunks had, for `drop_unused` to look at."""
    used: set[int] = set()
    for document in ids:
        query = (
            "SELECT DISTINCT states FROM encodings JOIN chunks ON chunks.id = encodings.chunk"
            " WHERE document = ? AND states IS NOT NULL"
        )
        used.update(row[0] for row in connection.execute(query, (document,)))
        connection.execute("DELETE FROM documents WHERE id = ?", (document,))
    return used


def drop_unused(connection: Connection, candidates: Iterable[int]) -> list[ShardName]:
    """Drop those states that no encoding uses, and the shards of which nothing is left.

    Returns:
        Shards to be deleted once this is committed.
    """
    shards: set[int] = set()
    for states in candidates:
        rows = connection.execute(
            f"DELETE FROM states WHERE id = ? AND {_UNUSED} RETURNING shard",  # noqa: S608
            (states,),
        )
        shards.update(row[0] for row in rows.fetchall())
    return _drop_empty(connection, shards)


def give_up(connection: Connection, states: Iterable[int], *, evicted: bool) -> list[ShardName]:
    """Let encodings go without some states; the chunks' texts and vectors stay.

    Args:
        connection: in a transaction.
        states: ids.
        evicted: for lack of space, so the next indexing run does not bring them back unless there is room.

    Returns:
        Shards to be deleted once this is committed.
    """
    states = list(states)
    connection.executemany(
        "UPDATE encodings SET states = NULL, evicted = ? WHERE states = ?", [(int(evicted), it) for it in states]
    )
    return drop_unused(connection, states)


def use_instead(connection: Connection, replacements: Iterable[tuple[int, int]]) -> list[ShardName]:
    """Let encodings use copies of their states, given as pairs of ids, old and new.

    Returns:
        Shards to be deleted once this is committed.
    """
    replacements = list(replacements)
    for old, new in replacements:
        connection.execute("UPDATE encodings SET states = ? WHERE states = ?", (new, old))
        connection.execute("UPDATE states SET clock = (SELECT clock FROM states WHERE id = ?) WHERE id = ?", (old, new))
    return drop_unused(connection, [old for old, _ in replacements])


def assign(connection: Connection, assignments: Iterable[tuple[int, EncodingName, int | None]]) -> list[ShardName]:
    """Give encodings states that they had not, or other ones: the chunk's vector id, the name, an id of states.

    Without such an id the encoding has none from now on, and the next indexing run makes it anew.

    Returns:
        Shards to be deleted once this is committed.
    """
    old: set[int] = set()
    for vector_id, name, states in assignments:
        query = "SELECT states FROM encodings WHERE chunk = ? AND name = ? AND states IS NOT NULL"
        old.update(row[0] for row in connection.execute(query, (vector_id, name)).fetchall())
        query = "UPDATE encodings SET states = ?, evicted = 0 WHERE chunk = ? AND name = ?"
        connection.execute(query, (states, vector_id, name))
    return drop_unused(connection, old)


def _drop_empty(connection: Connection, shards: Iterable[int]) -> list[ShardName]:
    dropped: list[ShardName] = []
    for shard in shards:
        rows = connection.execute(
            "DELETE FROM shards WHERE id = ? AND NOT EXISTS (SELECT 1 FROM states WHERE states.shard = shards.id)"
            " RETURNING folder, name",
            (shard,),
        )
        dropped += rows.fetchall()
    return dropped


def set_vectors(connection: Connection, vectors: VectorsVersion) -> None:
    """Switch to another file of the vector index."""
    connection.execute("UPDATE meta SET value = ? WHERE key = ?", (vectors.to_json(), VECTORS_KEY))


def set_recipe(connection: Connection, recipe: str) -> None:
    """Note how all contexts were chosen."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (RECIPE_KEY, recipe))


def set_last_vector_id(connection: Connection, vector_id: int) -> None:
    """Give out no vector id up to this one again."""
    connection.execute(
        "INSERT INTO sqlite_sequence SELECT 'chunks', 0 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence)"
    )
    connection.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'chunks'", (vector_id,))


def states_of_model(connection: Connection, fingerprint: str) -> list[int]:
    """Ids of all states of a model, given the digest of its fingerprint."""
    query = "SELECT states.id FROM states JOIN shards ON shards.id = states.shard WHERE fingerprint = ?"
    return [row[0] for row in connection.execute(query, (fingerprint,))]


def all_unused(connection: Connection) -> list[int]:
    """Ids of states that no encoding uses; a rebuilt catalog may have such."""
    return [row[0] for row in connection.execute(f"SELECT id FROM states WHERE {_UNUSED}")]  # noqa: S608


def states_of(connection: Connection, keys: Sequence[str], format: str, unusable: Collection[str]) -> dict[str, int]:
    """Key to id of states in a format, in none of those shards."""
    found = {}
    for key in set(keys):
        rows = connection.execute(
            "SELECT states.id, shards.name FROM states JOIN shards ON shards.id = states.shard"
            " WHERE key = ? AND format = ? ORDER BY states.id DESC",
            (key, format),
        )
        usable = next((row[0] for row in rows if row[1] not in unusable), None)
        if usable is not None:
            found[key] = usable
    return found
