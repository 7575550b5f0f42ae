"""One indexing run: encode what changed, and make it visible a shard at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ragcache.errors import SourceError
from ragcache.indexer.contexts import alone
from ragcache.indexer.documents import Document, checked
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.plan import IndexPlan, owners_of_ids, signature
from ragcache.indexer.report import IndexReport, Progress
from ragcache.indexer.splitting import Splitter
from ragcache.indexer.upkeep import load_vectors
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex, remove_other_generations
from ragcache.settings import EncodingName
from ragcache.states.compact import enforce_limits
from ragcache.states.key import state_key
from ragcache.states.records import DocumentRecord, NewChunk, NewEncoding
from ragcache.states.shard import ShardEntry
from ragcache.states.store import StateStore
from ragcache.states.writer import StoreWriter

EMBEDDING_BATCH = 256
"""Chunks embedded at once: few enough to see progress, enough to fill the embedding model's own batches."""

COMMIT_CHUNKS = 20_000
"""Chunks that are held in memory at most: after so many there is a commit although no shard is full."""


@dataclass
class IndexJob:
    """Carries out a plan against a store that this process has locked.

    Attributes:
        store: the store.
        writer: writes to it; entered.
        splitter: documents to chunks.
        encoder: chunks to states.
        embedder: chunks to vectors.
        prefix: token ids of the prompt's prefix, part of every key.
        encodings: what every chunk is to have; those in context are made later (`ragcache.indexer.completion`).
        settings_digest: settings that chunks depend on, part of every signature.
        batch_tokens: tokens in one forward pass.
        progress: told how it goes.
        vectors: of all chunks; there once it runs.
    """

    store: StateStore
    writer: StoreWriter
    splitter: Splitter
    encoder: StateEncoder
    embedder: Embedder
    prefix: tuple[int, ...]
    encodings: tuple[EncodingName, ...]
    settings_digest: str
    batch_tokens: int
    progress: Progress
    vectors: VectorIndex = field(init=False)
    _documents: list[tuple[DocumentRecord, list[NewChunk]]] = field(default_factory=list, init=False)
    _batch: list[tuple[NewChunk, DocumentRecord]] = field(default_factory=list, init=False)
    _batched_keys: set[str] = field(default_factory=set, init=False)
    _evicted: set[str] = field(default_factory=set, init=False)
    _chunk_ids: set[str] = field(default_factory=set, init=False)
    _displaced: set[str] = field(default_factory=set, init=False)
    _unembedded: list[tuple[int, str]] = field(default_factory=list, init=False)
    _encoded_tokens: int = field(default=0, init=False)
    _without_states: int = field(default=0, init=False)
    _unsaved_vectors: bool = field(default=False, init=False)

    def run(self, documents: Iterable[Document], plan: IndexPlan) -> IndexReport:
        """Encode what the plan names and commit whenever a shard is full.

        Args:
            documents: the same as were planned; those that the plan does not name are passed over.
            plan: what to do.

        Raises:
            SourceError: a document vanished since the plan was made, or two of its chunks would have the same id.
            StoreError: the store cannot be written to. What was committed before is intact.
        """
        self.progress.start(len(plan.changed))
        self.vectors, reembedded = load_vectors(
            self.store, lambda: self.embedder, lambda: self.progress.advance(0, 0, 0)
        )
        self._unsaved_vectors = reembedded is not None
        chunks, empty = 0, []
        waiting = set(plan.changed)
        for document in checked(documents, plan.source) if waiting else ():
            if document.id not in waiting:
                continue
            waiting.remove(document.id)
            added = self._add(document, plan)
            chunks += added
            if added == 0:
                empty.append(document.id)
            self.progress.advance(1, 0, 0)
            waiting_chunks = sum(len(it) for _, it in self._documents)
            full = self.writer.pending_bytes >= self.writer.options.shard_bytes or waiting_chunks >= COMMIT_CHUNKS
            # A document whose chunks have gone over to others is committed with these, or what it keeps were lost.
            if full and not self._displaced & waiting:
                self._commit([])
        if waiting:
            raise SourceError(f"{plan.source}: document {min(waiting)!r} vanished while indexing; run it again")
        self._commit(plan.removed)
        return IndexReport(
            added=plan.added,
            updated=len(plan.changed) - plan.added,
            unchanged=plan.unchanged,
            removed=len(plan.removed),
            empty=tuple(empty),
            chunks=chunks,
            encoded_tokens=self._encoded_tokens,
            reembedded=reembedded or 0,
            without_states=self._without_states,
        )

    def _embed_batch(self) -> None:
        """Put the chunks in line into the vector index."""
        if not self._unembedded:
            return
        ids, texts = zip(*self._unembedded, strict=True)
        owners, vectors = self.embedder.passages(texts)
        self.vectors.add([ids[owner] for owner in owners], vectors)
        self._unembedded = []

    def _add(self, document: Document, plan: IndexPlan) -> int:
        """Split a document and put its chunks in line; returns how many there are."""
        source, title = plan.source, document.title or document.id
        # Signed as it is now: it may have changed since it was planned.
        signed = signature(document, source, self.settings_digest)
        record = DocumentRecord(document.id, source, title, signed, document.metadata)
        pieces = self.splitter.split(document)
        self._take_ids([piece.chunk_id for piece in pieces], document.id, plan)
        fingerprint = self.encoder.model.fingerprint.digest
        contents = [state_key(fingerprint, self.prefix, "", piece.token_ids) for piece in pieces]
        contexts = self._contexts_kept(document.id, contents)
        ids = self.writer.new_vector_ids(len(pieces))
        chunks = [
            NewChunk(
                vector_id=vector_id,
                chunk_id=piece.chunk_id,
                ordinal=ordinal,
                text=piece.text,
                token_ids=piece.token_ids,
                content=content,
                encodings=(*self._alone(content), *contexts.get(content, ())),
                metadata=piece.metadata,
                embedding_text=piece.embedding_text,
            )
            for ordinal, (vector_id, piece, content) in enumerate(zip(ids, pieces, contents, strict=True))
        ]
        for chunk in chunks if "alone" in self.encodings else ():
            if chunk.content in self._batched_keys or self.writer.has(chunk.content):
                self.progress.advance(0, 1, len(chunk.token_ids))
                continue
            tokens = len(chunk.token_ids)
            pending = self.writer.pending_bytes + sum(
                self.encoder.size(len(other.token_ids)) for other, _ in self._batch
            )
            newcomer = self.writer.budget.newcomer(chunk.content, self.encoder.size(tokens), self.encoder.cost(tokens))
            if not self.writer.budget.admits(newcomer, pending):
                # It answers all the same: its states are computed when they are wanted.
                self._evicted.add(chunk.content)
                self._without_states += 1
                self.progress.advance(0, 1, tokens)
                continue
            if sum(len(other.token_ids) for other, _ in self._batch) + tokens > self.batch_tokens:
                self._encode_batch()
            self._batch.append((chunk, record))
            self._batched_keys.add(chunk.content)
        self._documents.append((record, chunks))
        self._unembedded += [(chunk.vector_id, chunk.embedded) for chunk in chunks]
        if len(self._unembedded) >= EMBEDDING_BATCH:
            self._embed_batch()
        return len(chunks)

    def _take_ids(self, ids: Sequence[str], document: str, plan: IndexPlan) -> None:
        """Make sure that chunks of a document do not have ids of others'."""
        if taken := self._chunk_ids.intersection(ids):
            raise SourceError(
                f"{plan.source}: chunk id {min(taken)!r} of document {document!r} comes twice; ids must be unique"
            )
        self._chunk_ids.update(ids)
        self._displaced |= owners_of_ids(ids, document, self.store, plan)

    def _alone(self, content: str) -> tuple[NewEncoding, ...]:
        return (NewEncoding("alone", content),) if "alone" in self.encodings else ()

    def _contexts_kept(self, document: str, contents: Sequence[str]) -> dict[str, tuple[NewEncoding, ...]]:
        """By content the contexts from before a document changed, where they still are what they were."""
        catalog = self.store.catalog
        kept: dict[str, tuple[NewEncoding, ...]] = {}
        if "context" not in self.encodings:
            return kept
        for chunk in catalog.chunks_by_vector(catalog.vector_ids([document])):
            it = chunk.encoding("context")
            if it is None or chunk.content not in contents or not (it.evicted or self.writer.has(it.key)):
                continue
            members = catalog.chunks_by_content(it.members)
            gone = {content for content, member in members.items() if member.document_id == document} - set(contents)
            if members.keys() == set(it.members) and not gone:
                kept[chunk.content] = (NewEncoding(it.name, it.key, it.context, it.contexts),)
                if it.evicted:
                    self._evicted.add(it.key)
        return kept

    def _encode_batch(self) -> None:
        if not self._batch:
            return
        encoded = self.encoder.encode([alone(chunk) for chunk, _ in self._batch])
        for (chunk, record), layers in zip(self._batch, encoded, strict=True):
            self.writer.put(
                ShardEntry(
                    key=chunk.content,
                    token_ids=chunk.token_ids,
                    layers=layers,
                    cost=self.encoder.cost(len(chunk.token_ids)),
                    chunk_id=chunk.chunk_id,
                    document_id=record.id,
                    ordinal=chunk.ordinal,
                    title=record.title,
                    text=chunk.text,
                )
            )
            self._encoded_tokens += len(chunk.token_ids)
            self.progress.advance(0, 1, len(chunk.token_ids))
        self._batch, self._batched_keys = [], set()

    def _commit(self, removed: list[str]) -> None:
        """Vectors to a file of a new generation, then everything visible at once."""
        self._encode_batch()
        self._embed_batch()
        if not self._documents and not removed and not self._unsaved_vectors:
            return
        removed = [*removed, *self._displaced.difference(removed)]
        replaced = [record.id for record, _ in self._documents]
        self.vectors.remove(self.store.catalog.vector_ids([*removed, *replaced]))
        version = self.vectors.save(self.store.vector_folder, self.store.catalog.vectors().generation + 1)
        self.writer.commit(self._documents, removed, version, self._evicted)
        remove_other_generations(self.store.vector_folder, version.generation)
        self._documents, self._evicted, self._displaced, self._unsaved_vectors = [], set(), set(), False
        self._without_states += enforce_limits(self.writer).evicted
