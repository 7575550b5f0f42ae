"""From passages and a question to an answer, with the models of an opened RagCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragcache.errors import PassageError
from ragcache.fidelity.canary import Canary
from ragcache.generate.engine import Engine, PreparedPrompt
from ragcache.generate.sampling import SamplingParameters
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.layout import Layout, lay_out
from ragcache.prompt.repair import RepairOptions
from ragcache.prompt.template import Frame, PromptTemplate
from ragcache.prompt.validity import check_question, is_unicode
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.settings import EncodingName, Order, QueryOptions, Settings
from ragcache.states.key import state_key
from ragcache.states.records import encoding_named
from ragcache.states.store import StateStore
from ragcache.stream import AnswerStream, ContextChunk, answer_head, context_chunk


@dataclass
class Answering:
    """Answers questions from passages.

    Attributes:
        settings: what is not said otherwise.
        model: answers.
        template: texts to prompt parts.
        engine: prompts to KV.
        canary: compares a share of the answers with those after a full prefill.
        store: with states of passages; `None` before anything was indexed.
    """

    settings: Settings
    model: LanguageModel
    template: PromptTemplate
    engine: Engine
    canary: Canary
    store: StateStore | None = None

    def find_chunk(
        self, chunk_id: str, title: str, text: str, score: float, prompt_text: str | None = None
    ) -> ContextChunk:
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
        if not is_unicode(chunk_id + title + text + (prompt_text or "")):
            raise PassageError(f"passage {chunk_id!r} holds half a surrogate pair; give valid Unicode")
        token_ids = self.template.chunk(title, text) if prompt_text is None else self.template.passage(prompt_text)
        passage = ContextChunk(chunk_id, chunk_id, title, text, score, token_ids)
        if self.store is None:
            return passage
        content = state_key(self.model.fingerprint.digest, self.template.prefix, "", token_ids)
        same = [it for it in self.store.catalog.chunks_by_id([chunk_id]) if it.content == content]
        same += self.store.catalog.chunks_by_content([content]).values() if not same else []
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

    def stream(
        self,
        frame: Frame,
        chunks: Sequence[ContextChunk],
        options: QueryOptions,
        clock: float,
        retrieve_ms: float = 0.0,
    ) -> AnswerStream:
        """Prefill a prompt; what is returned decodes.

        Args:
            frame: what stands around the passages.
            chunks: the passages.
            options: all of them, whatever the settings say.
            clock: when the request came, as of `time.perf_counter`.
            retrieve_ms: how long finding the passages took.
        """
        layout = self.lay_out(frame, chunks, options.max_tokens, options.order, options.encodings)
        return self._start(layout, chunks, options, clock, retrieve_ms)

    def generate(self, token_ids: tuple[int, ...], options: QueryOptions, clock: float) -> AnswerStream:
        """Continue a prompt given as token ids, by a plain prefill.

        Args:
            token_ids: the prompt.
            options: all of them, whatever the settings say.
            clock: when the request came, as of `time.perf_counter`.
        """
        plain = options.model_copy(update={"reuse": "none"})
        layout = lay_out((), [], [], "given", token_ids, self.model.context_window, plain.max_tokens)
        return self._start(layout, [], plain, clock, 0.0)

    def _start(
        self,
        layout: Layout,
        chunks: Sequence[ContextChunk],
        options: QueryOptions,
        clock: float,
        retrieve_ms: float,
    ) -> AnswerStream:
        kept = [chunks[index] for index in layout.kept]
        prompt = self._prepare(layout, chunks, options)
        if options.reuse != "none" and self.store is not None:
            wanted = list(map(encoding_named, (chunk.encodings for chunk in kept), layout.encodings))
            restorable = wanted[prompt.report.remembered_chunks :]
            keys = [it.key for it in restorable if it is not None and (it.states is not None or it.evicted)]
            reasons = [miss.reason for miss in prompt.report.misses]
            self.store.usage.record(keys, prompt.report.restored_chunks, reasons)
        dropped = [chunks[index].chunk_id for index in layout.dropped]
        head = answer_head(kept, layout.encodings, dropped, prompt, options.order, retrieve_ms)
        parameters = SamplingParameters(
            max_tokens=layout.answer_room,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
        )
        return AnswerStream(self.model, self.engine, prompt, head, parameters, clock, self.canary)
