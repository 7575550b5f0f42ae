"""RagCache: an opened store with its models. The command line, the server and LlamaIndex all go through it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ragcache.answer import Answer
from ragcache.errors import PassageError, RagCacheError, StoreError, StoreNotFoundError
from ragcache.fidelity.canary import Canary
from ragcache.generate.engine import Engine, PreparedPrompt
from ragcache.generate.sampling import SamplingParameters
from ragcache.generate.sequences import SequenceReport
from ragcache.indexer.documents import Document
from ragcache.indexer.report import IndexReport, Progress, Silent
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
from ragcache.prompt.layout import Layout, lay_out
from ragcache.prompt.repair import RepairOptions
from ragcache.prompt.template import Frame, PromptTemplate
from ragcache.prompt.validity import check_question, check_room, is_unicode
from ragcache.restore.choice import choose_format
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.retriever import RetrievedChunk, Retriever
from ragcache.settings import EncodingName, Order, QueryOptions, Settings, load_settings, query_options
from ragcache.states.canary_report import CanaryReport
from ragcache.states.compact import CompactReport
from ragcache.states.key import state_key
from ragcache.states.miss import Miss, MissReason
from ragcache.states.records import StoredStates, encoding_named
from ragcache.states.store import StateStore
from ragcache.states.verify import VerifyReport
from ragcache.stream import AnswerStream, ContextChunk, answer_head, context_chunk, milliseconds_since

PYTHON_SOURCE = "python"


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

    def retrieve(self, question: str, top_k: int | None = None) -> list[RetrievedChunk]:
        """The chunks nearest to a question, best first."""
        options = query_options(self.settings, top_k=top_k)
        if self._retriever is None:
            raise StoreNotFoundError(f"no store at {self.path}; index documents into it first")
        return self._retriever.retrieve(question, options.top_k)

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
        return self._answer(self.template.frame(question), chunks, chosen, clock, milliseconds_since(clock))

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
        return self._answer(frame or self.template.frame(question), chunks, chosen, clock, 0.0)

    def generate(self, token_ids: tuple[int, ...], **options: Any) -> AnswerStream:
        """Continue a prompt given as token ids, by a plain prefill; see `stream`."""
        clock = time.perf_counter()
        chosen = query_options(self.settings, **options | {"reuse": "none"})
        layout = lay_out((), [], [], "given", token_ids, self.model.context_window, chosen.max_tokens)
        return self._start(layout, [], chosen, clock, 0.0)

    def find_chunk(self, chunk_id: str, title: str, text: str, score: float, prompt_text: str = "") -> ContextChunk:
        """A passage from elsewhere, with stored states when the store has a chunk that reads just the same.

        Args:
            chunk_id: of several such chunks that of this id is taken.
            title: shown to the model in front of it.
            text: the passage.
            score: its relevance.
            prompt_text: what the model reads, where that is not the text below its title.

        Raises:
            PassageError: it is no Unicode.
        """
        if not is_unicode(chunk_id + title + text + prompt_text):
            raise PassageError(f"passage {chunk_id!r} holds half a surrogate pair; give valid Unicode")
        token_ids = self.template.passage(prompt_text) if prompt_text else self.template.chunk(title, text)
        passage = ContextChunk(chunk_id, chunk_id, title, text, score, token_ids)
        if self._store is None:
            return passage
        content = state_key(self.model.fingerprint.digest, self.template.prefix, "", token_ids)
        same = [it for it in self._store.catalog.chunks_by_id([chunk_id]) if it.content == content]
        same += self._store.catalog.chunks_by_content([content]).values() if not same else []
        return replace(context_chunk(RetrievedChunk(same[0], score)), chunk_id=chunk_id) if same else passage

    def lay_out(
        self,
        question: str | Frame,
        chunks: Sequence[ContextChunk],
        max_tokens: int,
        order: Order = "given",
        encodings: Sequence[EncodingName] | None = None,
    ) -> Layout:
        """The prompt for a question and some passages, as token ids.

        Args:
            question: what is asked, or what stands around the passages.
            chunks: the passages.
            max_tokens: room wanted for the answer.
            order: how those that fit are arranged.
            encodings: which of a chunk's encodings may be restored, if it has one of these; by default the settings'.
        """
        wanted = self.settings.encodings if encodings is None else encodings
        frame = self.template.frame(question) if isinstance(question, str) else question
        return lay_out(
            frame.prefix,
            [chunk.token_ids for chunk in chunks],
            [chunk.candidate(wanted) for chunk in chunks],
            order,
            frame.question,
            self.model.context_window,
            max_tokens,
        )

    def prepare(
        self, question: str, chunks: Sequence[ContextChunk], options: QueryOptions
    ) -> tuple[Layout, PreparedPrompt]:
        """The prompt that an answer from chosen passages starts from; no use of states is counted.

        Its cache is to be given back to `engine.pool` by whoever calls this.

        Args:
            question: what is asked.
            chunks: passages; `kept` of the layout says which of them stand where.
            options: all of them, whatever the settings say.

        Raises:
            QuestionError: the question is empty, or too long for the context window.
        """
        check_question(question)
        layout = self.lay_out(question, chunks, options.max_tokens, options.order, options.encodings)
        return layout, self._prepare(layout, chunks, options)

    def _prepare(self, layout: Layout, chunks: Sequence[ContextChunk], options: QueryOptions) -> PreparedPrompt:
        kept = [chunks[index] for index in layout.kept]
        return self.engine.prepare(layout, kept, options.reuse, RepairOptions.of(options))

    def _answer(
        self,
        frame: Frame,
        chunks: Sequence[ContextChunk],
        options: QueryOptions,
        clock: float,
        retrieve_ms: float,
    ) -> AnswerStream:
        layout = self.lay_out(frame, chunks, options.max_tokens, options.order, options.encodings)
        return self._start(layout, chunks, options, clock, retrieve_ms)

    def _start(
        self,
        layout: Layout,
        chunks: Sequence[ContextChunk],
        options: QueryOptions,
        clock: float,
        retrieve_ms: float,
    ) -> AnswerStream:
        """Prefill a prompt; what is returned decodes."""
        kept = [chunks[index] for index in layout.kept]
        foreign: list[Miss] = []
        if options.reuse != "none" and chunks and layout.prefix != self.template.prefix:
            options = options.model_copy(update={"reuse": "none"})
            detail = "the prompt begins otherwise than those that states were encoded for, so all of it was prefilled"
            foreign = [Miss(chunk.chunk_id, MissReason.PREFIX, detail) for chunk in kept if chunk.encodings]
        prompt = self._prepare(layout, chunks, options)
        if self._store is not None and foreign:
            self._store.usage.record([], 0, [miss.reason for miss in foreign])
        if options.reuse != "none" and self._store is not None:
            wanted = list(map(encoding_named, (chunk.encodings for chunk in kept), layout.encodings))
            restorable = wanted[prompt.report.remembered_chunks :]
            keys = [it.key for it in restorable if it is not None and (it.states is not None or it.evicted)]
            reasons = [miss.reason for miss in prompt.report.misses]
            self._store.usage.record(keys, prompt.report.restored_chunks, reasons)
        dropped = [chunks[index].chunk_id for index in layout.dropped]
        misses = [*foreign, *prompt.report.misses]
        head = answer_head(kept, layout.encodings, dropped, prompt, misses, options, retrieve_ms)
        parameters = SamplingParameters(
            max_tokens=layout.answer_room,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
        )
        return AnswerStream(self.model, self.engine, prompt, head, parameters, clock, self._canary)

    def _relocated(self, states: StoredStates) -> StoredStates | None:
        return self.store.catalog.relocated(states)

    def _attach(self, store: StateStore) -> None:
        self._indexing.check_identity(store)
        self._store, self._retriever = store, Retriever(store, self.embedder)
        self._canary.on_finding = store.usage.record_canary
        # For those who do not call `close`: at the latest when the process ends.
        weakref.finalize(self, store.usage.flush)
