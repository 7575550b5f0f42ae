"""Tables of the catalog, and how a chunk's row is bound to its content."""

from __future__ import annotations

import json

import xxhash

CATALOG_VERSION = 4
VECTORS_KEY = "vectors"
RECIPE_KEY = "recipe"
"""How contexts were chosen in the last indexing run that chose them all; only where there are any."""
UNFINISHED_RECIPE = ""
"""Stands there while contexts of one recipe are replaced by those of another."""

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
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, cost REAL NOT NULL, clock REAL NOT NULL, ranges BLOB NOT NULL,
    context_ids BLOB NOT NULL
);
CREATE INDEX states_by_key ON states(key);
CREATE INDEX states_by_shard ON states(shard);
-- AUTOINCREMENT: an id is also the chunk's id in the vector index and must never be given out twice.
-- metadata: the chunk's own beside the document's. embedding_text: what is embedded, '' for the text.
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE,
    document TEXT NOT NULL REFERENCES documents(id) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, content TEXT NOT NULL,
    metadata TEXT NOT NULL, embedding_text TEXT NOT NULL, checksum TEXT NOT NULL
);
CREATE INDEX chunks_by_document ON chunks(document);
CREATE INDEX chunks_by_content ON chunks(content);
-- name: alone or context. contexts: the content of their chunks, 32 bytes each. states: NULL for none.
CREATE TABLE encodings (
    chunk INTEGER NOT NULL REFERENCES chunks(id) ON DELETE CASCADE, name TEXT NOT NULL, key TEXT NOT NULL,
    context TEXT NOT NULL, contexts BLOB NOT NULL, checksum TEXT NOT NULL,
    states INTEGER REFERENCES states(id), evicted INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (chunk, name)
) WITHOUT ROWID;
CREATE INDEX encodings_by_states ON encodings(states);
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
    content: str,
    own_metadata: str,
    embedding_text: str,
) -> str:
    """xxh3 (64 bit, hexadecimal) of a chunk and what its document says about it, as they stand in their columns."""
    place = [vector_id, chunk_id, document_id, ordinal, title]
    values = json.dumps([*place, text, metadata, content, own_metadata, embedding_text])
    return xxhash.xxh3_64_hexdigest(values.encode() + token_ids)


def encoding_checksum(vector_id: int, name: str, key: str, context: str, contexts: bytes) -> str:
    """xxh3 (64 bit, hexadecimal) of what an encoding is, as it stands in its columns."""
    return xxhash.xxh3_64_hexdigest(json.dumps([vector_id, name, key, context]).encode() + contexts)
