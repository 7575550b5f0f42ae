"""What the store knows about documents, chunks, shards and the states of chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_RANGES_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("checksum", "<u8")])


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a shard file.

    Attributes:
        offset: of the first byte, from the start of the file.
        length: in bytes.
        checksum: xxh3, 64 bit, of the bytes.
    """

    offset: int
    length: int
    checksum: int


@dataclass(frozen=True)
class StoredStates:
    """Where a chunk's states lie.

    Attributes:
        key: what they depend on (`ragcache.states.key`).
        shard: file that holds them.
        format: form and codec of each layer, as the JSON of a `StateFormat`. Parsed by whoever reads the states:
            one that cannot be parsed is a miss of these states alone.
        ranges: token ids (int32) first, then each stored layer in order.
    """

    key: str
    shard: Path
    format: str
    ranges: tuple[ByteRange, ...] = field(repr=False)


@dataclass(frozen=True)
class DocumentRecord:
    """A document as far as the store needs it.

    Attributes:
        id: the user's id, or what the source made up.
        source: where it was read from; what is missing there on the next run is removed.
        title: shown to the model in front of each chunk.
        signature: digest of everything its chunks and their states depend on.
        metadata: the user's own, JSON values.
    """

    id: str
    source: str
    title: str
    signature: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class ChunkRecord:
    """A piece of a document that is retrieved and encoded as a whole.

    Attributes:
        vector_id: its id in the vector index; grows, and is never used again.
        chunk_id: `<document id>#<ordinal>`.
        document_id: the document it is part of.
        ordinal: its place in the document, from 0.
        title: the document's title.
        text: what is embedded and shown as a source.
        metadata: the document's.
        token_ids: what the language model sees, header included. The truth: states are checked against them.
        states: stored states; `None` when there are none.
        evicted: there are none because the byte budget was short.
    """

    vector_id: int
    chunk_id: str
    document_id: str
    ordinal: int
    title: str
    text: str
    metadata: dict[str, Any]
    token_ids: tuple[int, ...] = field(repr=False)
    states: StoredStates | None = field(repr=False)
    evicted: bool = False


@dataclass(frozen=True)
class NewChunk:
    """A chunk about to become visible.

    Attributes:
        vector_id: from `StoreWriter.new_vector_ids`.
        chunk_id: `<document id>#<ordinal>`.
        ordinal: place in its document.
        text: what is shown as a source.
        token_ids: what the language model sees.
        key: key of its states, whether there are any or not.
    """

    vector_id: int
    chunk_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    key: str


DocumentChunks = tuple[DocumentRecord, Sequence[NewChunk]]
"""A document with all of its chunks."""


@dataclass(frozen=True)
class NewStates:
    """States in a finished shard that no catalog names yet.

    Attributes:
        key: what they depend on.
        cost: what computing them again would take, in FLOPs.
        ranges: token ids first, then each stored layer.
    """

    key: str
    cost: float
    ranges: tuple[ByteRange, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.ranges[0].length // 4

    @property
    def bytes(self) -> int:
        """Bytes of token ids and layers, without what is around them in the file."""
        return sum(it.length for it in self.ranges)


@dataclass(frozen=True)
class NewShard:
    """A finished shard that no catalog names yet.

    Attributes:
        path: the file.
        sequence: of several shards with the same states the one of the highest number counts.
        bytes: size of the file.
        checksum: xxh3 (64 bit, hexadecimal) of the whole file.
        format: form and codec of each layer, as JSON.
        fingerprint: digest of the model's fingerprint.
        states: what it holds.
    """

    path: Path
    sequence: int
    bytes: int
    checksum: str
    format: str
    fingerprint: str
    states: tuple[NewStates, ...] = field(repr=False)


@dataclass(frozen=True)
class VectorsVersion:
    """Which file of the vector index is visible, and what is in it.

    Attributes:
        generation: number of the file; grows with each commit. 0 before the first: there is no file.
        checksum: xxh3 (64 bit, hexadecimal) of its bytes, so that no other index is ever taken for it.
    """

    generation: int
    checksum: str

    def to_json(self) -> str:
        """As it stands in the catalog."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> VectorsVersion:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


NO_VECTORS = VectorsVersion(0, "")


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as they are stored: int32, little-endian."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_token_ids(blob: bytes) -> tuple[int, ...]:
    """Inverse of `pack_token_ids`."""
    return tuple(np.frombuffer(blob, dtype="<i4").tolist())


def pack_ranges(ranges: Sequence[ByteRange]) -> bytes:
    """Byte ranges as they are stored: three uint64 each, little-endian."""
    return np.array([(r.offset, r.length, r.checksum) for r in ranges], dtype=_RANGES_DTYPE).tobytes()


def unpack_ranges(blob: bytes) -> tuple[ByteRange, ...]:
    """Inverse of `pack_ranges`."""
    return tuple(ByteRange(*row) for row in np.frombuffer(blob, dtype=_RANGES_DTYPE).tolist())
