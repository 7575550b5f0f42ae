"""Shard files: immutable Arrow IPC files that explain themselves.

One record batch per chunk, one row per token. The column `token_id` holds the ids, a fixed-size binary column
`layer_NNN` each stored layer. Arrow keeps a column of a batch in one contiguous buffer, so a layer of a chunk is one
byte range: any Arrow tool can open the file, and the restorer reads just those ranges with positioned reads, without
Arrow. Schema metadata say which model and which format, batch metadata which chunk.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from torch import Tensor

from ragcache.states.form import StateFormat
from ragcache.states.records import ByteRange

SHARD_VERSION = 1
SCHEMA_KEY = b"ragcache.shard"
BATCH_KEY = b"ragcache.chunk"
TEMPORARY_PREFIX = ".writing-"


@dataclass(frozen=True)
class ShardEntry:
    """One chunk's states, encoded.

    Attributes:
        key: what the states depend on.
        token_ids: the chunk's ids.
        layers: for each stored layer `[tokens, row_bytes]` uint8.
        description: chunk id, text and the like, as JSON values; it makes the shard readable without the catalog.
    """

    key: str
    token_ids: tuple[int, ...]
    layers: Mapping[int, Tensor]
    description: dict[str, Any]


class ShardWriter:
    """Writes one shard under a temporary name; `close` makes it durable and gives it its final name,
    `abort` removes it."""

    def __init__(self, folder: Path, format: StateFormat, identity: Mapping[str, Any]) -> None:
        self.format = format
        self.name = f"{uuid.uuid4().hex}.arrow"
        self.bytes = 0
        self._folder = folder
        self._temporary = folder / f"{TEMPORARY_PREFIX}{self.name}"
        self._checksums: list[list[int]] = []
        description = {"version": SHARD_VERSION, "format": json.loads(format.to_json()), **identity}
        columns = [
            pa.field(f"layer_{layer:03d}", pa.binary(format.row_bytes(layer)), nullable=False)
            for layer in format.stored_layers
        ]
        self._schema = pa.schema(
            [pa.field("token_id", pa.int32(), nullable=False), *columns],
            metadata={SCHEMA_KEY: json.dumps(description)},
        )
        self._file = self._temporary.open("wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def add(self, entry: ShardEntry) -> None:
        """Append a chunk."""
        rows = len(entry.token_ids)
        token_ids = np.asarray(entry.token_ids, dtype="<i4")
        payloads = [entry.layers[layer].numpy() for layer in self.format.stored_layers]
        columns = [
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(payload.shape[1]), rows, [None, pa.py_buffer(payload)])
            for payload in payloads
        ]
        checksums = [xxhash.xxh3_64_intdigest(buffer.data) for buffer in (token_ids, *payloads)]
        names = self._schema.names
        description = {
            **entry.description,
            "key": entry.key,
            "xxh3": dict(zip(names, checksums, strict=True)),
        }
        batch = pa.record_batch([pa.array(token_ids, type=pa.int32()), *columns], schema=self._schema)
        self._writer.write_batch(batch, custom_metadata={BATCH_KEY: json.dumps(description)})
        self._checksums.append(checksums)
        self.bytes += batch.nbytes

    def close(self) -> list[tuple[ByteRange, ...]]:
        """Finish the file.

        Returns:
            For each chunk in the order added, the byte ranges of its token ids and stored layers.
        """
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.bytes = self._temporary.stat().st_size
        ranges = _byte_ranges(self._temporary, self._checksums)
        self._temporary.rename(self._folder / self.name)
        sync_folder(self._folder)
        return ranges

    def abort(self) -> None:
        """Leave nothing behind."""
        # On a full disk even closing fails, because it flushes.
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _byte_ranges(path: Path, checksums: list[list[int]]) -> list[tuple[ByteRange, ...]]:
    """Where each column's buffer lies in the file: its address in a mapping of the file, less the mapping's own."""
    with pa.memory_map(str(path)) as source:
        base = source.read_buffer(source.size()).address
        reader = pa.ipc.open_file(source)
        result = []
        for index, batch_checksums in enumerate(checksums):
            batch = reader.get_batch(index)
            buffers = [column.buffers()[1] for column in batch.columns]
            lengths = [batch.num_rows * column.type.byte_width for column in batch.columns]
            result.append(
                tuple(
                    ByteRange(buffer.address - base, length, checksum)
                    for buffer, length, checksum in zip(buffers, lengths, batch_checksums, strict=True)
                )
            )
        return result
