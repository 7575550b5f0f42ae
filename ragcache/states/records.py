"""What the store knows about documents, chunks and the states of chunks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
