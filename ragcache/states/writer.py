"""Writing to a store: states into shards, then one transaction that makes them visible."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ragcache.errors import StoreError
from ragcache.states.catalog import VECTORS_KEY, chunk_checksum, pack_ranges, pack_token_ids
from ragcache.states.form import StateFormat
from ragcache.states.records import ByteRange, DocumentRecord, VectorsVersion
from ragcache.states.shard import ShardEntry, ShardWriter
from ragcache.states.store import StateStore, hold_lock


@dataclass(frozen=True)
class NewChunk:
    """A chunk about to become visible.

    Attributes:
        vector_id: from `StoreWriter.new_vector_ids`.
        chunk_id: `<document id>#<ordinal>`.
        ordinal: place in its document.
        text: what is shown as a source.
        token_ids: what the language model sees.
        key: key of its states, which were there before or were given to `StoreWriter.put`.
    """

    vector_id: int
    chunk_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    key: str


@dataclass
class _Shard:
    name: str
    bytes: int
    keys: list[str]
    ranges: list[tuple[ByteRange, ...]]


@dataclass
class StoreWriter:
    """The one writer of a store; a context manager that holds the store's lock.

    Protocol: `put` states until enough have gathered, then `commit` the documents they belong to; repeat. What was
    put but not committed when the context ends is thrown away.

    Raises:
        StoreLockedError: on entering, when another process holds the lock.
        StoreError: the disk is full or cannot be written to.
    """

    store: StateStore
    format: StateFormat
    shard_bytes: int
    _shard: ShardWriter | None = field(default=None, init=False)
    _keys: list[str] = field(default_factory=list, init=False)
    _pending: set[str] = field(default_factory=set, init=False)
    _finished: list[_Shard] = field(default_factory=list, init=False)
    _last_vector_id: int = field(default=0, init=False)
    _unusable_shards: frozenset[str] = field(default=frozenset(), init=False)
    _lock: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> StoreWriter:
        self._lock.enter_context(hold_lock(self.store.path))
        try:
            self._last_vector_id = self.store.catalog.last_vector_id()
            # The lock is ours, so whatever is unfinished or unknown was left by a writer that died.
            self.store.clean()
            # What is in these must not count as stored, or it would never be encoded again.
            self._unusable_shards = frozenset(self.store.broken_shards())
        except OSError as error:
            self._lock.close()
            raise _disk_error(self.store.path, error) from error
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shard is not None:
            self._shard.abort()
            self._shard = None
        if self._finished:
            # A commit may have gone through although an interrupt kept it from returning, so the catalog is asked. What
            # cannot be removed now is left to the next writer.
            with suppress(StoreError, OSError):
                for orphan in self.store.orphans():
                    orphan.unlink(missing_ok=True)
        self._lock.close()

    @property
    def pending_bytes(self) -> int:
        """Bytes of states put since the last commit."""
        return sum(shard.bytes for shard in self._finished) + (self._shard.bytes if self._shard else 0)

    def has(self, key: str) -> bool:
        """Whether states of that key are stored in this writer's format, or put and not yet committed."""
        return key in self._pending or self._find_states(key) is not None

    def put(self, entry: ShardEntry) -> None:
        """Append a chunk's states to the current shard; starts a new one when it is full."""
        try:
            if self._shard is None:
                identity = self.store.identity()
                self._shard = ShardWriter(
                    self.store.shard_folder,
                    self.format,
                    {"fingerprint": json.loads(identity.fingerprint), "prefix": identity.prefix},
                )
            self._shard.add(entry)
            self._keys.append(entry.key)
            self._pending.add(entry.key)
            if self._shard.bytes >= self.shard_bytes:
                self._finish_shard()
        except OSError as error:
            raise _disk_error(self.store.path, error) from error

    def new_vector_ids(self, count: int) -> list[int]:
        """Ids that no chunk of this store ever had."""
        first = self._last_vector_id + 1
        self._last_vector_id += count
        return list(range(first, first + count))

    def commit(
        self,
        documents: Sequence[tuple[DocumentRecord, Sequence[NewChunk]]],
        removed: Collection[str],
        vectors: VectorsVersion,
    ) -> None:
        """Make documents and their states visible, together with a generation of the vector index.

        Args:
            documents: new or changed documents with all of their chunks; old chunks of the same ids go.
            removed: ids of documents to take out.
            vectors: index file that holds exactly the chunks visible afterwards.
        """
        try:
            self._finish_shard()
            with self.store.catalog.transaction() as connection:
                for shard in self._finished:
                    cursor = connection.execute(
                        "INSERT INTO shards (name, bytes, format) VALUES (?, ?, ?)",
                        (shard.name, shard.bytes, self.format.to_json()),
                    )
                    connection.executemany(
                        "INSERT INTO states (key, shard, tokens, ranges) VALUES (?, ?, ?, ?)",
                        [
                            (key, cursor.lastrowid, ranges[0].length // 4, pack_ranges(ranges))
                            for key, ranges in zip(shard.keys, shard.ranges, strict=True)
                        ],
                    )
                gone = [*removed, *(document.id for document, _ in documents)]
                connection.executemany("DELETE FROM documents WHERE id = ?", [(i,) for i in gone])
                for document, chunks in documents:
                    connection.execute(
                        "INSERT INTO documents VALUES (?, ?, ?, ?, ?)",
                        (
                            document.id,
                            document.source,
                            document.title,
                            document.signature,
                            json.dumps(document.metadata),
                        ),
                    )
                    connection.executemany(
                        "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        [self._chunk_row(document, chunk) for chunk in chunks],
                    )
                unused = "SELECT states FROM chunks WHERE states IS NOT NULL"
                connection.execute(f"DELETE FROM states WHERE id NOT IN ({unused})")  # noqa: S608
                dead = connection.execute(
                    "SELECT name FROM shards WHERE id NOT IN (SELECT shard FROM states)"
                ).fetchall()
                connection.execute("DELETE FROM shards WHERE id NOT IN (SELECT shard FROM states)")
                connection.execute("UPDATE meta SET value = ? WHERE key = ?", (vectors.to_json(), VECTORS_KEY))
        except OSError as error:
            raise _disk_error(self.store.path, error) from error
        self._finished, self._pending = [], set()
        for (name,) in dead:
            # A reader that still has the old catalog in view finds the file missing and recomputes. One that cannot be
            # removed is an orphan now, which the next writer removes or names.
            with suppress(OSError):
                (self.store.shard_folder / name).unlink()

    def _chunk_row(self, document: DocumentRecord, chunk: NewChunk) -> tuple[Any, ...]:
        states = self._find_states(chunk.key)
        token_ids = pack_token_ids(chunk.token_ids)
        checksum = chunk_checksum(
            chunk.vector_id,
            chunk.chunk_id,
            document.id,
            chunk.ordinal,
            document.title,
            chunk.text,
            json.dumps(document.metadata),
            token_ids,
        )
        place = (chunk.vector_id, chunk.chunk_id, document.id, chunk.ordinal)
        return (*place, chunk.text, token_ids, checksum, states)

    def _find_states(self, key: str) -> int | None:
        return self.store.catalog.find_states(key, self.format, self._unusable_shards)

    def _finish_shard(self) -> None:
        if self._shard is None:
            return
        ranges = self._shard.close()
        self._finished.append(_Shard(self._shard.name, self._shard.bytes, self._keys, ranges))
        self._shard, self._keys = None, []


def _disk_error(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write to {path}: {error.strerror or error}; what was committed before is intact")
