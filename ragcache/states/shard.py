"""Shard files: immutable Arrow IPC or Parquet files that explain themselves.

One row per chunk, and one record batch (Arrow) or row group (Parquet) per row. Columns say which chunk it is; the
column `layer_NNN` holds a stored layer, encoded, as one binary value. Neither compression nor dictionaries nor
statistics: the value lies in the file as it is, in one run of bytes. So any Arrow tool can open the file, and the
restorer reads just those runs with positioned reads, without Arrow. Schema metadata say which model and which format.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from torch import Tensor

from ragcache.settings import EncodingName
from ragcache.states.durable import DurableFile
from ragcache.states.form import StateFormat
from ragcache.states.records import ByteRange, NewShard, NewStates, pack_token_ids

SHARD_VERSION = 3
SCHEMA_KEY = b"ragcache.shard"

_DESCRIPTION = (
    pa.field("key", pa.string(), nullable=False),
    pa.field("chunk_id", pa.string(), nullable=False),
    pa.field("document_id", pa.string(), nullable=False),
    pa.field("ordinal", pa.int32(), nullable=False),
    pa.field("title", pa.string(), nullable=False),
    pa.field("text", pa.string(), nullable=False),
    pa.field("encoding", pa.string(), nullable=False),
    pa.field("cost", pa.float64(), nullable=False),
    pa.field("xxh3", pa.list_(pa.field("item", pa.uint64(), nullable=False)), nullable=False),
    pa.field("context_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
)


class Container(StrEnum):
    """File format of a shard; also the end of its name."""

    ARROW = "arrow"
    PARQUET = "parquet"


@dataclass(frozen=True)
class ShardEntry:
    """One chunk's states, encoded.

    Attributes:
        key: what the states depend on.
        token_ids: the chunk's ids.
        layers: for each stored layer its bytes, a run of uint8.
        encoding: which of the chunk's encodings they are.
        context_ids: token ids between prefix and chunk when it was encoded; none when it was alone.
        cost: what computing them again would take, in FLOPs.
        chunk_id, document_id, ordinal, title, text: make the shard readable without the catalog.
    """

    key: str
    token_ids: tuple[int, ...]
    layers: Mapping[int, Tensor]
    encoding: EncodingName = "alone"
    context_ids: tuple[int, ...] = ()
    cost: float = 0.0
    chunk_id: str = ""
    document_id: str = ""
    ordinal: int = 0
    title: str = ""
    text: str = ""


def entry_size(format: StateFormat, tokens: int, context_tokens: int = 0) -> int:
    """Bytes that a chunk of so many tokens takes in a shard, rather too many than too few."""
    columns = len(_DESCRIPTION) + len(format.stored_layers)
    states = sum(format.size(layer, tokens) for layer in format.stored_layers)
    # Texts have some four bytes for each token, which has four more for its id; the rest is around each value.
    return states + 12 * tokens + 4 * context_tokens + 256 * columns


@dataclass(frozen=True)
class ShardOrigin:
    """What all states of a shard were made with.

    Attributes:
        store: id of the store they belong to.
        fingerprint: of the model, as JSON.
        digest: of the fingerprint.
        prefix: token ids that the chunks were encoded after.
    """

    store: str
    fingerprint: str
    digest: str
    prefix: tuple[int, ...]


class ShardWriter:
    """Writes one shard; `close` makes it durable and gives it its name, `abort` removes it."""

    def __init__(
        self, folder: Path, sequence: int, format: StateFormat, container: Container, origin: ShardOrigin
    ) -> None:
        """Begin a file.

        Args:
            folder: where it goes.
            sequence: of several shards with the same states the one of the highest number counts.
            format: form and codec of each layer.
            container: file format.
            origin: what all states in it were made with.
        """
        self.format = format
        self._sequence = sequence
        self._origin = origin
        header = {
            "version": SHARD_VERSION,
            "store": origin.store,
            "fingerprint": json.loads(origin.fingerprint),
            "digest": origin.digest,
            "prefix": origin.prefix,
            "sequence": sequence,
            "format": json.loads(format.to_json()),
        }
        layers = [pa.field(f"layer_{layer:03d}", pa.binary(), nullable=False) for layer in format.stored_layers]
        self._schema = pa.schema([*_DESCRIPTION, *layers], metadata={SCHEMA_KEY: json.dumps(header)})
        self._container = container
        self._file = DurableFile(folder / f"{uuid.uuid4().hex}.{container}")
        self._writer = self._open_writer()

    def add(self, entry: ShardEntry) -> None:
        """Append a chunk."""
        payloads = [entry.layers[layer].numpy() for layer in self.format.stored_layers]
        checksums = [xxhash.xxh3_64_intdigest(pack_token_ids(ids)) for ids in (entry.context_ids, entry.token_ids)]
        checksums += [xxhash.xxh3_64_intdigest(payload.data) for payload in payloads]
        values = {**vars(entry), "xxh3": checksums}
        columns = [pa.array([values[field.name]], type=field.type) for field in _DESCRIPTION]
        columns += [_one_binary(payload) for payload in payloads]
        batch = pa.record_batch(columns, schema=self._schema)
        self._writer.write_batch(batch)

    @property
    def bytes(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def close(self) -> NewShard:
        """Finish the file."""
        self._writer.close()
        self._file.flush()
        content = read_shard(self._file.temporary, self._container)
        self._file.commit()
        return NewShard(
            path=self._file.path,
            sequence=self._sequence,
            bytes=self._file.size,
            checksum=self._file.checksum,
            format=self.format.to_json(),
            fingerprint=self._origin.digest,
            states=content.states,
        )

    def abort(self) -> None:
        """Leave nothing behind."""
        self._file.abort()

    def _open_writer(self) -> Any:
        if self._container is Container.ARROW:
            return pa.ipc.new_file(self._file, self._schema)
        return pq.ParquetWriter(
            self._file,
            self._schema,
            compression="NONE",
            use_dictionary=False,
            write_statistics=False,
            data_page_version="1.0",
        )


@dataclass(frozen=True)
class ShardContent:
    """What a shard says about itself.

    Attributes:
        header: the JSON of its schema metadata.
        format: form and codec of each layer.
        states: key, cost and byte ranges of each chunk.
    """

    header: dict[str, Any]
    format: StateFormat
    states: tuple[NewStates, ...]


def read_shard(path: Path, container: Container) -> ShardContent:
    """Where everything lies in a shard, from the file alone.

    Raises:
        ValueError, OSError: it is damaged, or not a shard of this version.
    """
    try:
        schema, rows, ends = _arrow_ends(path) if container is Container.ARROW else _parquet_ends(path)
        header = json.loads((schema.metadata or {})[SCHEMA_KEY])
        if header["version"] != SHARD_VERSION:
            raise ValueError(f"{path} is of shard version {header['version']}, not {SHARD_VERSION}")
        format = StateFormat.from_json(json.dumps(header["format"]))
        states = tuple(_states(row, row_ends, format) for row, row_ends in zip(rows, ends, strict=True))
    except (pa.ArrowException, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return ShardContent(header, format, states)


def _states(row: dict[str, Any], ends: list[int], format: StateFormat) -> NewStates:
    """A row's states; the lengths of what ends there follow from the format."""
    tokens = len(row["token_ids"])
    lengths = [4 * len(row["context_ids"]), 4 * tokens]
    lengths += [format.size(layer, tokens) for layer in format.stored_layers]
    places = zip(ends, lengths, row["xxh3"], strict=True)
    context_ids, *ranges = (ByteRange(end - length, length, checksum) for end, length, checksum in places)
    if not 0 <= row["cost"] < math.inf or any(it.offset < 0 for it in (context_ids, *ranges)):
        raise ValueError(f"the entry {row['key']} makes no sense")
    return NewStates(row["key"], row["cost"], tuple(ranges), context_ids)


_Ends = list[list[int]]
"""For each chunk where the ids of its context end in the file, where its own do, then where each layer does."""


def _arrow_ends(path: Path) -> tuple[pa.Schema, list[dict[str, Any]], _Ends]:
    """A buffer's place is its address in a mapping of the file, less the mapping's own."""
    with pa.memory_map(str(path)) as source:
        base = source.read_buffer(source.size()).address
        reader = pa.ipc.open_file(source)
        rows: list[dict[str, Any]] = []
        ends: _Ends = []
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            batch.validate(full=True)
            rows += batch.select([field.name for field in _DESCRIPTION]).to_pylist()
            buffers = []
            for name in ("context_ids", "token_ids"):
                ids = batch.column(name).values
                buffers.append((ids.buffers()[1], 4 * len(ids)))
            for column in batch.columns[len(_DESCRIPTION) :]:
                _, offsets, payload = column.buffers()
                buffers.append((payload, int(np.frombuffer(offsets, dtype=np.int32, count=2)[1])))
            # An empty one may have no place at all.
            ends.append([buffer.address + size - base if size else 0 for buffer, size in buffers])
        return reader.schema, rows, ends


def _parquet_ends(path: Path) -> tuple[pa.Schema, list[dict[str, Any]], _Ends]:
    """A column chunk of one plainly encoded value ends with it."""
    with pq.ParquetFile(path) as file:
        rows: list[dict[str, Any]] = []
        ends: _Ends = []
        for index in range(file.num_row_groups):
            # All columns, although few are wanted: where metadata of one are damaged, reading it is an error, while
            # asking for them ends the process.
            table = file.read_row_group(index)
            rows += table.select([field.name for field in _DESCRIPTION]).to_pylist()
            group = file.metadata.row_group(index)
            columns = [group.column(number) for number in range(len(_DESCRIPTION) - 2, group.num_columns)]
            ends.append([column.data_page_offset + column.total_compressed_size for column in columns])
        return file.schema_arrow, rows, ends


def _one_binary(payload: np.ndarray[Any, np.dtype[np.uint8]]) -> pa.Array:
    offsets = np.array([0, payload.nbytes], dtype=np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(payload)])
