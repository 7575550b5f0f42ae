"""Changes to the catalog, each a statement or a few within a transaction that the caller holds."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ragcache.states.records import DocumentRecord, NewChunk, NewShard, VectorsVersion, pack_ranges, pack_token_ids
from ragcache.states.schema import VECTORS_KEY, chunk_checksum

Connection = sqlite3.Connection
ShardName = tuple[str, str]
"""Folder (`""` for the store's own) and name of a shard file."""


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
        ranges = pack_ranges(states.ranges)
        inserted = connection.execute(
            "INSERT INTO states (key, shard, tokens, bytes, cost, clock, ranges) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (states.key, shard.sequence, states.tokens, states.bytes + share, states.cost, clock, ranges),
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
    metadata = json.dumps(document.metadata)
    connection.execute(
        "INSERT INTO documents VALUES (?, ?, ?, ?, ?)",
        (document.id, document.source, document.title, document.signature, metadata),
    )
    connection.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *_content(document, chunk, metadata),
                states.get(chunk.key),
                int(chunk.key in evicted and chunk.key not in states),
            )
            for chunk in chunks
        ],
    )


def _content(document: DocumentRecord, chunk: NewChunk, metadata: str) -> tuple[Any, ...]:
    token_ids = pack_token_ids(chunk.token_ids)
    place = (chunk.vector_id, chunk.chunk_id, document.id, chunk.ordinal)
    checksum = chunk_checksum(*place, document.title, chunk.text, metadata, token_ids)
    return (*place, chunk.text, token_ids, checksum)


def remove_documents(connection: Connection, ids: Collection[str]) -> set[int]:
    """Take documents out; ids of the states that their chunks had, for `drop_unused` to look at."""
    used: set[int] = set()
    for document in ids:
        query = "SELECT DISTINCT states FROM chunks WHERE document = ? AND states IS NOT NULL"
        used.update(row[0] for row in connection.execute(query, (document,)))
        connection.execute("DELETE FROM documents WHERE id = ?", (document,))
    return used


def drop_unused(connection: Connection, candidates: Iterable[int]) -> list[ShardName]:
    """Drop those states that no chunk uses, and the shards of which nothing is left.

    Returns:
        Shards to be deleted once this is committed.
    """
    shards: set[int] = set()
    for states in candidates:
        rows = connection.execute(
            "DELETE FROM states WHERE id = ? AND NOT EXISTS (SELECT 1 FROM chunks WHERE chunks.states = states.id)"
            " RETURNING shard",
            (states,),
        )
        shards.update(row[0] for row in rows.fetchall())
    return _drop_empty(connection, shards)


def give_up(connection: Connection, states: Iterable[int], *, evicted: bool) -> list[ShardName]:
    """Let chunks go without some states; their texts and vectors stay.

    Args:
        connection: in a transaction.
        states: ids.
        evicted: for lack of space, so the next indexing run does not bring them back unless there is room.

    Returns:
        Shards to be deleted once this is committed.
    """
    states = list(states)
    connection.executemany(
        "UPDATE chunks SET states = NULL, evicted = ? WHERE states = ?", [(int(evicted), it) for it in states]
    )
    return drop_unused(connection, states)


def use_instead(connection: Connection, replacements: Iterable[tuple[int, int]]) -> list[ShardName]:
    """Let chunks use copies of their states, given as pairs of ids, old and new.

    Returns:
        Shards to be deleted once this is committed.
    """
    replacements = list(replacements)
    for old, new in replacements:
        connection.execute("UPDATE chunks SET states = ? WHERE states = ?", (new, old))
        connection.execute("UPDATE states SET clock = (SELECT clock FROM states WHERE id = ?) WHERE id = ?", (old, new))
    return drop_unused(connection, [old for old, _ in replacements])


def assign(connection: Connection, assignments: Iterable[tuple[int, int]]) -> list[ShardName]:
    """Give chunks states that they had not, or other ones: pairs of a chunk's vector id and an id of states.

    Returns:
        Shards to be deleted once this is committed.
    """
    old: set[int] = set()
    for vector_id, states in assignments:
        rows = connection.execute("SELECT states FROM chunks WHERE id = ? AND states IS NOT NULL", (vector_id,))
        old.update(row[0] for row in rows.fetchall())
        connection.execute("UPDATE chunks SET states = ?, evicted = 0 WHERE id = ?", (states, vector_id))
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
    """Ids of states that no chunk uses; a rebuilt catalog may have such."""
    query = "SELECT id FROM states WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE chunks.states = states.id)"
    return [row[0] for row in connection.execute(query)]


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
