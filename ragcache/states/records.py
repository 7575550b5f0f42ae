"""What the store knows about documents, chunks, shards and the states of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ragcache.settings import EncodingName

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


NOTHING = ByteRange(0, 0, xxhash.xxh3_64_intdigest(b""))
"""No bytes."""


@dataclass(frozen=True)
class StoredStates:
    """Where a chunk's states lie.

    Attributes:
        key: what they depend on (`ragcache.states.key`).
        shard: file that holds them.
        format: form and codec of each layer, as the JSON of a `StateFormat`. Parsed by whoever reads the states:
            one that cannot be parsed is a miss of these states alone.
        ranges: token ids (int32) first, then each stored layer in order.
        context_ids: token ids (int32) that the chunk was encoded after, the prefix aside; of length 0 when alone.
    """

    key: str
    shard: Path
    format: str
    ranges: tuple[ByteRange, ...] = field(repr=False)
    context_ids: ByteRange = field(default=NOTHING, repr=False)


@dataclass(frozen=True)
class NewEncoding:
    """An encoding of a chunk: what its states come after, whether there are any or not.

    Attributes:
        name: which of the chunk's encodings it is.
        key: of its states (`ragcache.states.key`).
        context: digest of the token ids between prefix and chunk; empty when the chunk is encoded alone.
        contexts: for each context the chunks whose token ids make it up, in order, each by its `content`. The states
            are the mean of those in each.
    """

    name: EncodingName
    key: str
    context: str = ""
    contexts: tuple[tuple[str, ...], ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        """The chunks of all its contexts, each by its `content`."""
        return tuple(name for context in self.contexts for name in context)


@dataclass(frozen=True)
class Encoding(NewEncoding):
    """An encoding of a chunk in the catalog.

    Attributes:
        states: stored states; `None` when there are none.
        evicted: there are none because the byte budget was short.
    """

    states: StoredStates | None = field(default=None, repr=False)
    evicted: bool = False


def encoding_named(encodings: Iterable[Encoding], name: EncodingName | None) -> Encoding | None:
    """That one of a chunk's encodings, if there is one."""
    return next((it for it in encodings if it.name == name), None)


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
        chunk_id: `<document id>#<ordinal>`, or what a document that came split calls it.
        document_id: the document it is part of.
        ordinal: its place in the document, from 0.
        title: the document's title.
        text: what is shown as a source, and embedded.
        document_metadata: the document's.
        own_metadata: its own beside these.
        token_ids: what the language model sees, header included. The truth: states are checked against them.
        content: names the chunk by what it says: the key of its encoding alone, whether there is one or not.
        encodings: at most one of each name; states in several contexts.
        embedding_text: what is embedded where that is not the text; else empty.
    """

    vector_id: int
    chunk_id: str
    document_id: str
    ordinal: int
    title: str
    text: str
    document_metadata: dict[str, Any]
    own_metadata: dict[str, Any]
    token_ids: tuple[int, ...] = field(repr=False)
    content: str
    encodings: tuple[Encoding, ...] = field(repr=False)
    embedding_text: str = field(default="", repr=False)

    @property
    def metadata(self) -> dict[str, Any]:
        """The document's metadata and its own."""
        return self.document_metadata | self.own_metadata

    @property
    def embedded(self) -> str:
        """The text that its vectors are of."""
        return self.embedding_text or self.text

    def encoding(self, name: EncodingName) -> Encoding | None:
        """Its encoding of that name, if there is one."""
        return encoding_named(self.encodings, name)


ChunkEncoding = tuple[ChunkRecord, Encoding]
"""A chunk, and one of its encodings."""


@dataclass(frozen=True)
class NewChunk:
    """A chunk about to become visible.

    Attributes:
        vector_id: from `StoreWriter.new_vector_ids`.
        chunk_id: unique in the store.
        ordinal: place in its document.
        text: what is shown as a source.
        token_ids: what the language model sees.
        content: the key of its encoding alone, whether there is one or not.
        encodings: at most one of each name.
        metadata: its own beside the document's, JSON values.
        embedding_text: what is embedded where that is not the text; else empty.
    """

    vector_id: int
    chunk_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    content: str
    encodings: tuple[NewEncoding, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    embedding_text: str = ""

    @property
    def embedded(self) -> str:
        """The text that its vectors are of."""
        return self.embedding_text or self.text


def as_written(chunk: ChunkRecord, changed: Iterable[NewEncoding] = ()) -> NewChunk:
    """A chunk of the catalog as a commit writes it.

    Args:
        chunk: the chunk.
        changed: encodings that take the place of those of the same name, or are added.
    """
    encodings = {it.name: NewEncoding(it.name, it.key, it.context, it.contexts) for it in chunk.encodings}
    encodings |= {it.name: it for it in changed}
    return NewChunk(
        vector_id=chunk.vector_id,
        chunk_id=chunk.chunk_id,
        ordinal=chunk.ordinal,
        text=chunk.text,
        token_ids=chunk.token_ids,
        content=chunk.content,
        encodings=tuple(encodings.values()),
        metadata=chunk.own_metadata,
        embedding_text=chunk.embedding_text,
    )


DocumentChunks = tuple[DocumentRecord, Sequence[NewChunk]]
"""A document with all of its chunks."""


@dataclass(frozen=True)
class NewStates:
    """States in a finished shard that no catalog names yet.

    Attributes:
        key: what they depend on.
        cost: what computing them again would take, in FLOPs.
        ranges: token ids first, then each stored layer.
        context_ids: token ids that the chunk was encoded after, the prefix aside.
    """

    key: str
    cost: float
    ranges: tuple[ByteRange, ...]
    context_ids: ByteRange = NOTHING

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.ranges[0].length // 4

    @property
    def bytes(self) -> int:
        """Bytes of token ids, context and layers, without what is around them in the file."""
        return sum(it.length for it in (*self.ranges, self.context_ids))


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


_CONTEXT_END = "00" * 32


def pack_contexts(contexts: Sequence[Sequence[str]]) -> bytes:
    """Names of the chunks of contexts as they are stored: 32 bytes each, and 32 of zero between two contexts."""
    return bytes.fromhex(_CONTEXT_END.join("".join(context) for context in contexts))


def unpack_contexts(blob: bytes) -> tuple[tuple[str, ...], ...]:
    """Inverse of `pack_contexts`.

    Raises:
        ValueError: it is of a length that no such names have.
    """
    names = blob.hex()
    if len(names) % 64:
        raise ValueError(f"{len(blob)} bytes are no names of chunks")
    contexts: list[list[str]] = [[]] if names else []
    for name in (names[start : start + 64] for start in range(0, len(names), 64)):
        if name == _CONTEXT_END:
            contexts.append([])
        else:
            contexts[-1].append(name)
    return tuple(map(tuple, contexts))


def pack_ranges(ranges: Sequence[ByteRange]) -> bytes:
    """Byte ranges as they are stored: three uint64 each, little-endian."""
    return np.array([(r.offset, r.length, r.checksum) for r in ranges], dtype=_RANGES_DTYPE).tobytes()


def unpack_ranges(blob: bytes) -> tuple[ByteRange, ...]:
    """Inverse of `pack_ranges`."""
    return tuple(ByteRange(*row) for row in np.frombuffer(blob, dtype=_RANGES_DTYPE).tolist())


def unpack_range(blob: bytes) -> ByteRange:
    """Inverse of `pack_ranges` of one.

    Raises:
        ValueError: it is not one.
    """
    (only,) = unpack_ranges(blob)
    return only
