"""How chunks are read from the catalog: one query, one row for each encoding, each row compared with its checksum."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ragcache.states.records import (
    ChunkRecord,
    Encoding,
    StoredStates,
    unpack_contexts,
    unpack_range,
    unpack_ranges,
    unpack_token_ids,
)
from ragcache.states.schema import chunk_checksum, encoding_checksum

SELECT_CHUNKS = """
SELECT chunks.id, chunks.chunk_id, chunks.document, chunks.ordinal, documents.title, chunks.text,
       documents.metadata, chunks.token_ids, chunks.content, chunks.metadata, chunks.embedding_text, chunks.checksum,
       encodings.name, encodings.key, encodings.context, encodings.contexts, encodings.checksum, encodings.evicted,
       states.key, shards.folder, shards.name, shards.format, states.ranges, states.context_ids
FROM chunks JOIN documents ON documents.id = chunks.document
LEFT JOIN encodings ON encodings.chunk = chunks.id
LEFT JOIN states ON states.id = encodings.states LEFT JOIN shards ON shards.id = states.shard
"""
"""To be followed by a condition and `ORDER_CHUNKS`."""

ORDER_CHUNKS = "ORDER BY chunks.id, encodings.name"

_OF_CHUNK = 12
"""Columns that are a chunk's own."""

ShardPath = Callable[[str, str], Path]
"""Where a shard lies, by its folder and name in the catalog."""


def read_chunks(rows: Iterable[tuple[Any, ...]], shard_path: ShardPath) -> Iterator[ChunkRecord]:
    """Rows of `SELECT_CHUNKS` as records.

    Raises:
        ValueError, TypeError: one is not what was written. Texts and token ids are what answers are recomputed from,
            so no miss can make up for them.
    """
    for _, group in groupby(rows, key=itemgetter(0)):
        yield _chunk(list(group), shard_path)


def _chunk(rows: list[tuple[Any, ...]], shard_path: ShardPath) -> ChunkRecord:
    *written, checksum = rows[0][:_OF_CHUNK]
    vector_id, chunk_id, document, ordinal, title, text, metadata, token_ids, content, own, embedding_text = written
    if chunk_checksum(*written) != checksum:
        raise ValueError(f"chunk {chunk_id} is not what was written")
    return ChunkRecord(
        vector_id=vector_id,
        chunk_id=chunk_id,
        document_id=document,
        ordinal=ordinal,
        title=title,
        text=text,
        document_metadata=json.loads(metadata),
        own_metadata=json.loads(own),
        token_ids=unpack_token_ids(token_ids),
        content=content,
        embedding_text=embedding_text,
        encodings=tuple(
            _encoding(vector_id, row[_OF_CHUNK:], shard_path) for row in rows if row[_OF_CHUNK] is not None
        ),
    )


def _encoding(vector_id: int, row: tuple[Any, ...], shard_path: ShardPath) -> Encoding:
    name, key, context, contexts, checksum, evicted, states_key, folder, shard, format_, ranges, context_ids = row
    if encoding_checksum(vector_id, name, key, context, contexts) != checksum:
        raise ValueError(f"the encoding {name} of chunk {vector_id} is not what was written")
    states = None
    if states_key is not None:
        states = StoredStates(
            states_key, shard_path(folder, shard), format_, unpack_ranges(ranges), unpack_range(context_ids)
        )
    return Encoding(name, key, context, unpack_contexts(contexts), states, bool(evicted))
