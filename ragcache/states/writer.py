"""Writing to a store: states into shards, then one transaction that makes them visible."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

from ragcache.settings import EncodingName
from ragcache.states import changes
from ragcache.states.form import StateFormat
from ragcache.states.journal import write_journal
from ragcache.states.locked import LockedStore, WriteOptions, disk_error
from ragcache.states.records import DocumentChunks, NewEncoding, NewShard, VectorsVersion, as_written
from ragcache.states.shard import ShardEntry
from ragcache.states.store import StateStore


class StoreWriter(LockedStore):
    """The one writer of a store.

    Protocol: `put` states until enough have gathered, then `commit` the documents they belong to; repeat. What was
    put but not committed when the context ends is thrown away.
    """

    def __init__(self, store: StateStore, format: StateFormat, options: WriteOptions | None = None) -> None:
        """Set up; nothing happens before the context is entered.

        Args:
            store: to write to.
            format: of the states that are put.
            options: how it is written to.
        """
        super().__init__(store, options or WriteOptions())
        self.format = format
        self._pending: set[str] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            # What is in these must not count as stored, or it would never be encoded again.
            self._unusable_shards = frozenset(self.store.broken_shards())
            self._shards = self.new_shards(self.format)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shards.abort()
        super().__exit__(kind, error, trace)

    @property
    def pending_bytes(self) -> int:
        """Bytes of states put since the last commit."""
        return self._shards.bytes

    def is_pending(self, key: str) -> bool:
        """Whether states of that key were put and are not yet committed."""
        return key in self._pending

    def has(self, key: str) -> bool:
        """Whether states of that key are stored in this writer's format, or put and not yet committed."""
        return (
            self.is_pending(key) or self.store.catalog.find_states(key, self.format, self._unusable_shards) is not None
        )

    def put(self, entry: ShardEntry) -> None:
        """Append a chunk's states to the current shard; starts a new one when it is full."""
        try:
            self._shards.add(entry)
            self._pending.add(entry.key)
        except OSError as error:
            raise disk_error(self.store.path, error) from error

    def new_vector_ids(self, count: int) -> list[int]:
        """Ids that no chunk of this store ever had."""
        first = self.last_vector_id + 1
        self.last_vector_id += count
        return list(range(first, first + count))

    def commit(
        self,
        documents: Sequence[DocumentChunks],
        removed: Collection[str],
        vectors: VectorsVersion,
        evicted: Collection[str] = (),
    ) -> None:
        """Make documents and their states visible, together with a generation of the vector index.

        Args:
            documents: new or changed documents with all of their chunks; old chunks of the same ids go.
            removed: ids of documents to take out.
            vectors: index file that holds exactly the chunks visible afterwards.
            evicted: keys of encodings that were not made for lack of space.
        """
        keys = [encoding.key for _, chunks in documents for chunk in chunks for encoding in chunk.encodings]
        with self.changing() as dead:
            shards = self._finished_shards()
            write_journal(self.store.shard_folder, self.journal_header(vectors, removed), documents)
            with self.store.catalog.transaction() as connection:
                added = self.add_shards(connection, shards)
                stored = changes.states_of(connection, keys, self.format.to_json(), self._unusable_shards)
                gone = [*removed, *(document.id for document, _ in documents)]
                candidates = changes.remove_documents(connection, gone)
                for document, chunks in documents:
                    changes.add_document(connection, document, chunks, stored | added, evicted)
                dead += changes.drop_unused(connection, candidates | set(added.values()))
                changes.set_vectors(connection, vectors)

    def add_encodings(
        self, encodings: Sequence[tuple[int, NewEncoding]], vectors: VectorsVersion, evicted: Collection[str] = ()
    ) -> None:
        """Commit what was put as encodings that chunks of the catalog had not, or others of the same names.

        Args:
            encodings: each with the chunk's vector id.
            vectors: index file of a new generation, which the journal goes by.
            evicted: keys of encodings that were not made for lack of space.
        """
        keys = [encoding.key for _, encoding in encodings]
        with self.changing() as dead:
            shards = self._finished_shards()
            write_journal(self.store.shard_folder, self.journal_header(vectors), self._with_encodings(encodings))
            with self.store.catalog.transaction() as connection:
                added = self.add_shards(connection, shards)
                stored = changes.states_of(connection, keys, self.format.to_json(), self._unusable_shards)
                before = changes.add_encodings(connection, encodings, stored | added, evicted)
                dead += changes.drop_unused(connection, before | set(added.values()))
                changes.set_vectors(connection, vectors)

    def _with_encodings(self, encodings: Sequence[tuple[int, NewEncoding]]) -> Iterator[DocumentChunks]:
        """All of the documents whose chunks those are, as they are once that is committed."""
        catalog = self.store.catalog
        new: dict[int, list[NewEncoding]] = {}
        for vector_id, encoding in encodings:
            new.setdefault(vector_id, []).append(encoding)
        ids = dict.fromkeys(chunk.document_id for chunk in catalog.chunks_by_vector(list(new)))
        for document in catalog.documents(list(ids)):
            chunks = catalog.chunks_by_vector(catalog.vector_ids([document.id]))
            yield document, [as_written(chunk, new.get(chunk.vector_id, ())) for chunk in chunks]

    def remove_encodings(self, name: EncodingName) -> None:
        """Take all encodings of a name away; nothing may be pending. The journal still has them."""
        with self.changing() as dead, self.store.catalog.transaction() as connection:
            dead += changes.remove_encodings(connection, name)

    def write_recipe(self, recipe: str) -> None:
        """Note how all contexts were chosen."""
        with self.store.catalog.transaction() as connection:
            changes.set_recipe(connection, recipe)

    def assign(self, encodings: Sequence[tuple[int, EncodingName, str | None]]) -> None:
        """Commit what was put as states of encodings that are there already: the chunk's vector id, name and key.

        Without a key the encoding is given up, and the next indexing run makes it anew.
        """
        with self.changing() as dead:
            shards = self._finished_shards()
            with self.store.catalog.transaction() as connection:
                added = self.add_shards(connection, shards)
                dead += changes.assign(
                    connection, [(chunk, name, None if key is None else added[key]) for chunk, name, key in encodings]
                )

    def _finished_shards(self) -> list[NewShard]:
        self._pending = set()
        self._shards.finish()
        return self._shards.take()
