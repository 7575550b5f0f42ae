"""Tables of the catalog, and how a chunk's row is bound to its content."""

from __future__ import annotations

import json

import xxhash

CATALOG_VERSION = 2
VECTORS_KEY = "vectors"

SCHEMA = """\
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (
    id TEXT PRIMARY KEY, source TEXT NOT NULL, title TEXT NOT NULL, signature TEXT NOT NULL, metadata TEXT NOT NULL
);
CREATE INDEX documents_by_source ON documents(source);
-- id: grows, so that of two shards with the same states the younger is known. folder: '' is the store's own.
CREATE TABLE shards (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, folder TEXT NOT NULL, bytes INTEGER NOT NULL,
    checksum TEXT NOT NULL, format TEXT NOT NULL, fingerprint TEXT NOT NULL
);
-- bytes: with their share of what else is in the file, so that those of a shard's states add up to its size.
-- cost: FLOPs that computing them takes. clock: the ageing clock of eviction when they were stored.
CREATE TABLE states (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, shard INTEGER NOT NULL REFERENCES shards(id),
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, cost REAL NOT NULL, clock REAL NOT NULL, ranges BLOB NOT NULL
);
CREATE INDEX states_by_key ON states(key);
CREATE INDEX states_by_shard ON states(shard);
-- AUTOINCREMENT: an id is also the chunk's id in the vector index and must never be given out twice.
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE,
    document TEXT NOT NULL REFERENCES documents(id) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, checksum TEXT NOT NULL,
    states INTEGER REFERENCES states(id), evicted INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX chunks_by_document ON chunks(document);
CREATE INDEX chunks_by_states ON chunks(states);
"""


def identity_checksum(store_id: str, fingerprint: str, embedding: str, prefix: str) -> str:
    """xxh3 (64 bit, hexadecimal) of what a store was made with, as it stands in `meta`."""
    return xxhash.xxh3_64_hexdigest(json.dumps([store_id, fingerprint, embedding, prefix]).encode())


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
