"""From documents to a store, with the models of an opened RagCache."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ragcache.errors import SourceError
from ragcache.generate.engine import Engine
from ragcache.indexer.completion import Completion
from ragcache.indexer.contexts import ContextRecipe
from ragcache.indexer.documents import Document
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.job import IndexJob
from ragcache.indexer.plan import IndexPlan, plan_run
from ragcache.indexer.repair import StateRepair, readmit
from ragcache.indexer.report import IndexReport, Progress
from ragcache.indexer.splitting import Splitter
from ragcache.maintenance import OnBytes, repair_store, write_options
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.template import PromptTemplate
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex
from ragcache.settings import Settings
from ragcache.states.compact import enforce_limits
from ragcache.states.records import NO_VECTORS
from ragcache.states.store import StateStore, StoreIdentity
from ragcache.states.verify import VerifyReport
from ragcache.states.writer import StoreWriter


@dataclass(frozen=True)
class Indexing:
    """Encodes documents into a store.

    Attributes:
        settings: how documents are split, encoded and written.
        model: encodes chunks.
        template: chunks to token ids.
        engine: knows the prefix that chunks are encoded after, and their format.
        embedder: chunks to vectors.
    """

    settings: Settings
    model: LanguageModel
    template: PromptTemplate
    engine: Engine
    embedder: Embedder

    def run(
        self,
        store: StateStore | Path,
        documents: Iterable[Document],
        *,
        source: str,
        remove_missing: bool,
        progress: Progress,
        wait: bool,
    ) -> tuple[StateStore, IndexReport]:
        """Bring documents into a store; see `RagCache.index`.

        Args:
            store: the store, or where one is to be made.
            documents: read twice.
            source: name the documents are recorded under.
            remove_missing: documents of this source that are not given are removed.
            progress: told how it goes.
            wait: until another process that is writing is done.
        """
        if isinstance(documents, Iterator):
            documents = list(documents)

        def plan_with(store: StateStore | None) -> IndexPlan:
            fitting = (self._fitting(document, source) for document in documents)
            return plan_run(fitting, source, self._settings_digest(), store, remove_missing=remove_missing)

        if isinstance(store, Path):
            planned_at, plan = NO_VECTORS, plan_with(None)
            store = StateStore.create(store, self._identity(), self.settings, wait=wait)
            # Another process may have made it, with another model, since this one looked.
            self.check_identity(store)
        else:
            planned_at, plan = store.catalog.vectors(), plan_with(store)
        clock = time.perf_counter()
        with self._open_writer(store, wait=wait) as writer:
            if store.catalog.vectors() != planned_at or writer.moved_shards:
                # Another process has changed it before this one held the lock, or states are not lost but elsewhere.
                plan = plan_with(store)
            job = self._job(writer, progress)
            report = job.run(documents, plan)
            passes = self._completion(writer, job.vectors, progress).run()
            evicted = enforce_limits(writer).evicted
            report = replace(
                report,
                in_context=sum(it.made for it in passes if it.name == "context"),
                encoded_tokens=report.encoded_tokens + sum(it.tokens for it in passes),
                without_states=report.without_states + sum(it.without_states for it in passes) + evicted,
                readmitted=readmit(self._state_repair(writer)),
                seconds=time.perf_counter() - clock,
            )
            store.write_settings(self.settings)
        return store, report

    def repair(self, store: StateStore, progress: OnBytes, *, wait: bool) -> VerifyReport:
        """Verify a store and put right what is damaged; see `RagCache.verify`."""
        with self._open_writer(store, wait=wait) as writer:
            return repair_store(writer, self._state_repair(writer), lambda: self.embedder, progress)

    def check_identity(self, store: StateStore) -> None:
        """Refuse a store that was made with other models or another prompt prefix.

        Raises:
            StoreMismatchError: names what differs.
        """
        store.check_identity(self._identity(), (self.settings.model, self.settings.embedding_model))

    def _fitting(self, document: Document, source: str) -> Document:
        """A document, refused where one of its passages leaves no room in the model's context window."""
        room = self.model.context_window - len(self.template.prefix)
        for passage in (document.passages or ()) if isinstance(document, Document) else ():
            text = passage.prompt_text or passage.text
            # A token is a byte at least, and counting tokens takes longer.
            if isinstance(text, str) and len(text) * 4 >= room and (tokens := len(self.template.passage(text))) >= room:
                raise SourceError(
                    f"{source}: passage {passage.id!r} takes {tokens} tokens, and the model's context window of "
                    f"{self.model.context_window} has room for {room} beside the system prompt; split it smaller"
                )
        return document

    def _identity(self) -> StoreIdentity:
        return StoreIdentity(self.model.fingerprint.to_json(), self.embedder.digest, self.template.prefix)

    def _settings_digest(self) -> str:
        parts = [self.settings.chunk_tokens, self.settings.chunk_overlap, self.engine.format.to_json()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @contextmanager
    def _open_writer(self, store: StateStore, *, wait: bool) -> Iterator[StoreWriter]:
        """Lock a store for writing; when that fails before anything was committed to it, it is taken away again."""
        with StoreWriter(store, self.engine.format, write_options(self.settings, wait=wait)) as writer:
            try:
                yield writer
            except BaseException:
                store.remove_if_empty()
                raise

    def _job(self, writer: StoreWriter, progress: Progress) -> IndexJob:
        return IndexJob(
            store=writer.store,
            writer=writer,
            splitter=Splitter(self.template, self.settings.chunk_tokens, self.settings.chunk_overlap),
            encoder=self._encoder(),
            embedder=self.embedder,
            prefix=self.template.prefix,
            encodings=self.settings.encodings,
            settings_digest=self._settings_digest(),
            batch_tokens=self.settings.batch_tokens,
            progress=progress,
        )

    def _completion(self, writer: StoreWriter, vectors: VectorIndex, progress: Progress) -> Completion:
        settings = self.settings
        window = self.model.context_window - len(self.template.prefix)
        return Completion(
            writer=writer,
            encoder=self._encoder(),
            vectors=vectors,
            encodings=settings.encodings,
            recipe=ContextRecipe(
                settings.context, settings.context_tokens, settings.batch_tokens, window, settings.contexts
            ),
            batch_tokens=settings.batch_tokens,
            progress=progress,
        )

    def _state_repair(self, writer: StoreWriter) -> StateRepair:
        return StateRepair(writer, self._encoder(), self.settings.batch_tokens)

    def _encoder(self) -> StateEncoder:
        return StateEncoder(self.model, self.engine.prefix, self.engine.format)
