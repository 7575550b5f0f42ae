"""RagCache: an opened store with its models. The command line, the server and LlamaIndex all go through it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ragcache.answer import Answer
from ragcache.answering import Answering
from ragcache.errors import QuestionError, RagCacheError, StoreError, StoreNotFoundError
from ragcache.fidelity.canary import Canary
from ragcache.generate.engine import Engine
from ragcache.generate.sequences import SequenceReport
from ragcache.indexer.documents import Document
from ragcache.indexer.listing import embedding_model_of, nodes_of
from ragcache.indexer.nodes import AmendedDocuments, documents_of, node_of
from ragcache.indexer.report import IndexReport, Progress, Silent
from ragcache.indexer.splitting import shown_title
from ragcache.indexing import Indexing
from ragcache.maintenance import (
    COMPACT_THRESHOLD,
    OnBytes,
    StoreStats,
    compact_store,
    delete_documents,
    store_stats,
    verify_store,
    write_options,
)
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import OnStage, load_language_model
from ragcache.prompt.template import Frame, PromptTemplate
from ragcache.prompt.validity import check_question, check_room, is_unicode
from ragcache.restore.choice import choose_format
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.retriever import Accept, RetrievedChunk, Retriever
from ragcache.settings import Settings, load_settings, query_options
from ragcache.states.canary_report import CanaryReport
from ragcache.states.catalog import Catalog
from ragcache.states.compact import CompactReport
from ragcache.states.records import ChunkRecord, StoredStates
from ragcache.states.store import StateStore
from ragcache.states.verify import VerifyReport
from ragcache.stream import AnswerStream, ContextChunk, context_chunk, milliseconds_since

if TYPE_CHECKING:
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.schema import BaseNode

PYTHON_SOURCE = "python"
NODE_SOURCE = "llama-index"
"""Names that documents are recorded under: those given as documents, and those given as nodes."""


class RagCache:
    """A store, the language model whose states it holds, and the embedding model that finds chunks in it.

    Queries may come from several threads at once, while one thread or another process indexes.

    Attributes:
        path: folder of the store.
        settings: its settings.
        model: the language model.
        template: texts to prompt parts.
        engine: prompts to KV.
        embedder: texts to vectors.
        answering: passages and a question to an answer.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings,
        model: LanguageModel,
        embedder: Embedder,
        on_stage: OnStage = lambda _: None,
    ) -> None:
        """Use `open` instead, which loads the models."""
        self.path = path.absolute()
        self.settings = settings
        self.model = model
        self.embedder = embedder
        self.template = PromptTemplate(model.tokenizer, settings.system_prompt, settings.user_prompt)
        check_room(len(self.template.prefix), settings.chunk_tokens, model.context_window)
        store = StateStore.open(path) if StateStore.exists(path) else None
        format = choose_format(model, settings, path, store, on_stage)
        self.engine = Engine(model, self.template.prefix, settings, format, self._relocated)
        self._canary = Canary(model, self.engine.pool, settings.canary_rate)
        self.answering = Answering(settings, model, self.template, self.engine, self._canary)
        # For those who do not call `close`: its thread must end before the interpreter does.
        weakref.finalize(self, self._canary.close)
        self._indexing = Indexing(settings, model, self.template, self.engine, embedder)
        self._store: StateStore | None = None
        self._retriever: Retriever | None = None
        if store is not None:
            self._attach(store)

    @classmethod
    def open(cls, path: str | Path, *, on_stage: OnStage = lambda _: None, **settings: Any) -> RagCache:
        """Open a store, or prepare to make one with the first call of `index`.

        Args:
            path: folder of the store.
            on_stage: told what is being loaded.
            settings: any of `ragcache.settings.Settings`.

        Raises:
            SettingsError, ModelError: a setting or a model cannot be used.
            StoreError: the path is something else than a store.
            StoreMismatchError: the store was made with other models or another prompt prefix.
        """
        path = Path(path)
        StateStore.exists(path)
        loaded = load_settings(path, **settings)
        model = load_language_model(
            loaded.model,
            dtype=loaded.dtype,
            device=loaded.device,
            cache_folder=loaded.cache_folder,
            adapter=loaded.adapter,
            trust_remote_code=loaded.trust_remote_code,
            on_stage=on_stage,
        )
        on_stage(f"loading {loaded.embedding_model}")
        embedder = Embedder(loaded.embedding_model, str(model.device), loaded.cache_folder)
        return cls(path, loaded, model, embedder, on_stage)

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        path: str | Path,
        *,
        progress: Progress | None = None,
        on_stage: OnStage = lambda _: None,
        **settings: Any,
    ) -> RagCache:
        """Open a store and make it hold the nodes of a LlamaIndex index; what it holds already is not encoded again.

        Args:
            index: such as `VectorStoreIndex.from_documents` makes.
            path: folder of the store.
            progress: told how encoding goes.
            on_stage: told what is being loaded.
            settings: any of `ragcache.settings.Settings`. Without `embedding_model` a new store embeds with the
                index's model, if that is a HuggingFaceEmbedding.

        Raises:
            SourceError: the index has no nodes, or they cannot be listed.
            Others: those of `open` and `index_nodes`.
        """
        nodes = nodes_of(index)
        if not StateStore.exists(Path(path)) and settings.get("embedding_model") is None:
            settings["embedding_model"] = embedding_model_of(index)
        cache = cls.open(path, on_stage=on_stage, **settings)
        cache.index_nodes(nodes, remove_missing=True, progress=progress)
        return cache

    @property
    def store(self) -> StateStore:
        """The store.

        Raises:
            StoreNotFoundError: nothing was indexed yet.
        """
        if self._store is None:
            raise StoreNotFoundError(f"no store at {self.path}; index documents into it first")
        return self._store

    def index(
        self,
        documents: Iterable[Document],
        *,
        source: str = PYTHON_SOURCE,
        remove_missing: bool = False,
        progress: Progress | None = None,
        wait: bool = False,
    ) -> IndexReport:
        """Bring documents into the store: new and changed ones are encoded, others left as they are.

        Args:
            documents: read twice, so give a collection or an object that can be iterated over again.
            source: name the documents are recorded under.
            remove_missing: documents of this source that are not given are removed.
            progress: told how it goes.
            wait: until another process that is writing is done.

        Raises:
            SourceError: a document cannot be read, an id comes twice, or there are none.
            StoreError: the store cannot be written to, or another process is writing.
        """
        try:
            store, report = self._indexing.run(
                self._store or self.path,
                documents,
                source=source,
                remove_missing=remove_missing,
                progress=progress or Silent(),
                wait=wait,
            )
        except BaseException:
            # What a first run had committed before it was stopped can be asked about.
            with suppress(RagCacheError):
                if self._store is None and StateStore.exists(self.path):
                    self._attach(StateStore.open(self.path))
            raise
        if self._store is None:
            self._attach(store)
        return report

    def index_nodes(
        self,
        nodes: Iterable[BaseNode],
        *,
        amend: bool = False,
        remove_missing: bool = False,
        progress: Progress | None = None,
        wait: bool = False,
    ) -> IndexReport:
        """Bring LlamaIndex nodes into the store, each as one chunk; those that were there are left as they are.

        Args:
            nodes: with `ref_doc_id` they are of one document, and all that it has. One of nodes without text alone is
                taken out.
            amend: what else a document has stays; a node without text takes the one of its id out.
            remove_missing: documents that came as nodes, and of which none are given, are removed.
            progress: told how it goes.
            wait: until another process that is writing is done.

        Raises:
            SourceError: a node is too long for the model's context window, its metadata are no JSON, or there are no
                nodes with text.
            StoreError: the store cannot be written to, or another process is writing.
        """
        documents = self._amended(nodes, {}) if amend else documents_of(nodes)
        return self.index(documents, source=NODE_SOURCE, remove_missing=remove_missing, progress=progress, wait=wait)

    def node_documents(self, node_ids: Collection[str]) -> dict[str, str]:
        """Of those nodes or chunks that are in the store, the documents that they are of."""
        return {} if self._store is None else self._store.catalog.documents_of(list(node_ids))

    def as_node(self, chunk: ChunkRecord) -> BaseNode:
        """A chunk as the LlamaIndex node that it came as; one that was split from a document here as one of its id.

        In either case what LlamaIndex shows a language model of the node is what the chunk was encoded from.
        """
        return node_of(chunk, shown_title(self.template, chunk.title, self.settings.chunk_tokens))

    def delete_nodes(self, node_ids: Collection[str], *, wait: bool = False) -> None:
        """Take chunks out of the store by their ids; ids that are not there are ignored.

        Args:
            node_ids: of LlamaIndex nodes, or `<document id>#<ordinal>`.
            wait: until another process that is writing is done.
        """
        removed: dict[str, list[str]] = {}
        for node, document in self.store.catalog.documents_of(list(node_ids)).items():
            removed.setdefault(document, []).append(node)
        if removed:
            self.index(self._amended([], removed), source=NODE_SOURCE, wait=wait)

    def delete(
        self,
        document_ids: str | Sequence[str] = (),
        *,
        where: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> list[str]:
        """Take documents out of the store.

        Args:
            document_ids: one id or several.
            where: or all documents whose metadata hold these values.
            wait: until another process that is writing is done.

        Returns:
            Ids of the documents removed.

        Raises:
            DocumentNotFoundError: there is no document of an id, or none with such metadata; nothing was removed.
        """
        options = write_options(self.settings, wait=wait)
        return delete_documents(self.store, document_ids, where, options, lambda: self.embedder)

    def compact(self, threshold: float = COMPACT_THRESHOLD, *, wait: bool = False) -> CompactReport:
        """Give back the space of states that nothing uses, and of the least valuable ones if a limit is exceeded.

        Args:
            threshold: share of dead bytes above which a shard is copied.
            wait: until another process that is writing is done.
        """
        return compact_store(self.store, threshold, write_options(self.settings, wait=wait))

    def verify(
        self, *, repair: bool = False, wait: bool = False, progress: OnBytes = lambda done, total: None
    ) -> VerifyReport:
        """Read everything the store holds and name what is not what was written.

        Args:
            repair: encode damaged states again, embed again if the vector index is damaged, write the journal anew.
            wait: until another process that is writing is done; only when repairing.
            progress: told how many bytes are read, and how many there are.

        Raises:
            StoreError: the catalog is damaged; `ragcache rebuild` makes it anew.
        """
        if not repair:
            return verify_store(self.store, progress)
        return self._indexing.repair(self.store, progress, wait=wait)

    def stats(self) -> StoreStats:
        """What the store holds, and how often its states were used."""
        return store_stats(self.store)

    def canary_report(self) -> CanaryReport:
        """How a share of the answers, `canary_rate`, compares with those after a full prefill; of this object only.

        `stats` has those of all processes since the store was made.
        """
        return self._canary.report

    def sequence_report(self) -> SequenceReport:
        """What is remembered of prompts that were prefilled in full, within `sequence_megabytes`."""
        return self.engine.sequences.report

    def close(self) -> None:
        """End the check of answers, and write down how often states were used.

        Both also happen when the process ends by itself, the latter now and then too.
        """
        self._canary.close()
        if self._store is not None:
            self._store.usage.flush()

    def __enter__(self) -> RagCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def retrieve(
        self, question: str | Sequence[float], top_k: int | None = None, accept: Accept | None = None
    ) -> list[RetrievedChunk]:
        """The chunks nearest to a question, best first.

        Args:
            question: what is asked, or its vector.
            top_k: how many; by default the settings'.
            accept: says whether a chunk may be among them.

        Raises:
            SettingsError: `top_k` cannot be used.
            QuestionError: the question is no Unicode.
            VectorsError: the vector is none of the store's embedding model.
            StoreError: nothing was indexed yet, or the vector index is missing.
        """
        options = query_options(self.settings, top_k=top_k)
        if isinstance(question, str) and not is_unicode(question):
            raise QuestionError("the question holds half a surrogate pair; send valid Unicode")
        if self._retriever is None:
            raise StoreNotFoundError(f"no store at {self.path}; index documents into it first")
        return self._retriever.retrieve(question, options.top_k, accept)

    def query(self, question: str, **options: Any) -> Answer:
        """Answer a question from the store; see `stream`."""
        return self.stream(question, **options).answer

    def stream(self, question: str, **options: Any) -> AnswerStream:
        """Answer a question from the store, piece by piece.

        Retrieval, restoring and the question's prefill are done when this returns.

        Args:
            question: what is asked.
            options: any of `ragcache.settings.QueryOptions`.

        Raises:
            SettingsError: an option cannot be used.
            QuestionError: the question is empty, or too long for the context window.
            StoreError: the store holds no passages, or its vector index is missing.
        """
        clock = time.perf_counter()
        chosen = query_options(self.settings, **options)
        check_question(question)
        chunks = [context_chunk(hit) for hit in self.retrieve(question, chosen.top_k)]
        if not chunks:
            raise StoreError(f"{self.path} holds no passages to answer from; index documents into it first")
        return self.answering.stream(self.template.frame(question), chunks, chosen, clock, milliseconds_since(clock))

    def stream_from(
        self, question: str, chunks: Sequence[ContextChunk], frame: Frame | None = None, **options: Any
    ) -> AnswerStream:
        """Answer a question from chosen passages, in the order given unless another is asked for; see `stream`.

        Args:
            question: what is asked.
            chunks: the passages.
            frame: what stands around them. Where it begins otherwise than the prompts that states were encoded for
                (`system_prompt`, `user_prompt`), the whole prompt is prefilled, and every chunk that has states is a
                miss.
            options: any of `ragcache.settings.QueryOptions`.
        """
        clock = time.perf_counter()
        check_question(question)
        chosen = query_options(self.settings, **options | {"order": options.get("order") or "given"})
        return self.answering.stream(frame or self.template.frame(question), chunks, chosen, clock)

    def generate(self, token_ids: tuple[int, ...], **options: Any) -> AnswerStream:
        """Continue a prompt given as token ids, by a plain prefill; see `stream`."""
        clock = time.perf_counter()
        return self.answering.generate(token_ids, query_options(self.settings, **options), clock)

    def _amended(self, nodes: Iterable[BaseNode], removed: Mapping[str, Collection[str]]) -> AmendedDocuments:
        def catalog() -> Catalog | None:
            # Another process or thread may have made the store, since this one looked.
            if self._store is None and StateStore.exists(self.path):
                self._attach(StateStore.open(self.path))
            return self._store.catalog if self._store is not None else None

        return AmendedDocuments(nodes, removed, catalog, self.as_node)

    def _relocated(self, states: StoredStates) -> StoredStates | None:
        return self.store.catalog.relocated(states)

    def _attach(self, store: StateStore) -> None:
        self._indexing.check_identity(store)
        self._store, self._retriever = store, Retriever(store, self.embedder)
        self.answering.store = store
        self._canary.on_finding = store.usage.record_canary
        # For those who do not call `close`: at the latest when the process ends.
        weakref.finalize(self, store.usage.flush)
