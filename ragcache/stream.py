"""From passages to an answer, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import GEN_CREATED, getgeneratorstate

from ragcache.answer import Answer, MissedChunk, Source, Timings, TokenCounts
from ragcache.errors import StreamClosedError
from ragcache.fidelity.canary import Canary
from ragcache.generate.decode import FinishReason, decode
from ragcache.generate.engine import Engine, PreparedPrompt
from ragcache.generate.sampling import SamplingParameters
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.order import Candidate
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.settings import EncodingName, Order
from ragcache.states.records import Encoding, encoding_named


@dataclass(frozen=True)
class ContextChunk:
    """A passage to answer from.

    Attributes:
        chunk_id: for reports.
        document_id: the document it is part of.
        title: shown to the model.
        text: the passage.
        score: higher is better; when not all fit, chunks of low scores are dropped.
        token_ids: what the model sees.
        ordinal: its place in the document.
        content: names it by what it says, as in `ragcache.states.records.ChunkRecord`; empty when it is not stored.
        encodings: what is stored of it; without states the passage is encoded in this request.
    """

    chunk_id: str
    document_id: str
    title: str
    text: str
    score: float
    token_ids: tuple[int, ...]
    ordinal: int = 0
    content: str = ""
    encodings: tuple[Encoding, ...] = ()

    def candidate(self, wanted: Sequence[EncodingName]) -> Candidate:
        """What its place in the prompt depends on, and the choice of an encoding with it.

        Args:
            wanted: encodings to choose from. Others are used only where the chunk has none of these, and those whose
                states were evicted only where all were.
        """
        usable = [it for it in self.encodings if it.states is not None] or self.encodings
        usable = [it for it in usable if it.name in wanted] or usable
        alone, context = encoding_named(usable, "alone"), encoding_named(usable, "context")
        return Candidate(
            self.content,
            context.members if context is not None else (),
            has_alone=alone is not None,
            has_context=context is not None,
            document_id=self.document_id,
            ordinal=self.ordinal,
            score=self.score,
        )


def context_chunk(hit: RetrievedChunk) -> ContextChunk:
    """A retrieved chunk as a passage to answer from."""
    chunk = hit.chunk
    return ContextChunk(
        chunk.chunk_id,
        chunk.document_id,
        chunk.title,
        chunk.text,
        hit.score,
        chunk.token_ids,
        chunk.ordinal,
        chunk.content,
        chunk.encodings,
    )


class AnswerStream:
    """An answer as it comes: an iterator over pieces of text.

    `sources` is there from the start, `answer` after the last piece. `close` ends the generation early; so does
    dropping the stream.
    """

    def __init__(
        self,
        model: LanguageModel,
        engine: Engine,
        prompt: PreparedPrompt,
        head: Answer,
        parameters: SamplingParameters,
        clock: float,
        canary: Canary,
    ) -> None:
        self.sources = head.sources
        self._head = head
        self._clock = clock
        self._answer: Answer | None = None
        self._finish = partial(engine.finish, prompt)
        self._pieces = self._run(model, engine, prompt, parameters, canary)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation."""
        if getgeneratorstate(self._pieces) == GEN_CREATED:
            # One that was never started does not run its `finally`.
            self._finish()
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The whole answer; what has not come yet is generated first.

        Raises:
            StreamClosedError: the stream was closed before its end.
        """
        for _ in self:
            pass
        if self._answer is None:
            raise StreamClosedError("the stream was closed before the answer was complete; ask again")
        return self._answer

    def _run(
        self,
        model: LanguageModel,
        engine: Engine,
        prompt: PreparedPrompt,
        parameters: SamplingParameters,
        canary: Canary,
    ) -> Generator[str, None, None]:
        text, ttft, finish = "", 0.0, FinishReason.LENGTH
        token_ids: list[int] = []
        taken_over = False
        try:
            for step in decode(model, prompt.cache, prompt.logits, parameters):
                if step.token_id is not None:
                    token_ids.append(step.token_id)
                    ttft = ttft or milliseconds_since(self._clock)
                finish = step.finish or finish
                if step.text:
                    text += step.text
                    yield step.text
            total = milliseconds_since(self._clock)
            taken_over = not prompt.exact and canary.offer(prompt, token_ids)
        finally:
            if not taken_over:
                engine.finish(prompt)
        self._answer = self._head.model_copy(
            update={
                "answer": text,
                "tokens": self._head.tokens.model_copy(update={"generated": len(token_ids)}),
                "timings_ms": self._head.timings_ms.model_copy(update={"ttft": ttft, "total": total}),
                "finish_reason": finish,
            }
        )


def answer_head(
    kept: Sequence[ContextChunk],
    encodings: Sequence[EncodingName | None],
    dropped: list[str],
    prompt: PreparedPrompt,
    order: Order,
    retrieve_ms: float,
) -> Answer:
    """The answer before its first token."""
    report = prompt.report
    if prompt.reuse != "composed":
        # Only what is exact is restored: the first chunk alone, if any.
        encodings = [None if index >= report.restored_chunks else "alone" for index in range(len(kept))]
    encodings = [None if index < report.remembered_chunks else name for index, name in enumerate(encodings)]
    return Answer(
        answer="",
        sources=[
            Source(
                chunk_id=c.chunk_id, document_id=c.document_id, title=c.title, score=c.score, encoding=name, text=c.text
            )
            for c, name in zip(kept, encodings, strict=True)
        ],
        tokens=TokenCounts(
            prefix=report.prefix_tokens,
            remembered=report.remembered_tokens,
            restored=report.restored_tokens,
            repaired=report.repaired_tokens,
            prefilled=report.prefilled_tokens,
        ),
        timings_ms=Timings(
            retrieve=retrieve_ms,
            read=report.read_ms,
            restore=report.restore_ms,
            repair=report.repair_ms,
            prefill=report.prefill_ms,
        ),
        misses=[MissedChunk(chunk_id=m.chunk_id, reason=m.reason, detail=m.detail) for m in report.misses],
        dropped=dropped,
        reuse=prompt.reuse,
        order=order,
        finish_reason=FinishReason.LENGTH,
    )


def milliseconds_since(clock: float) -> float:
    """Time since a reading of `time.perf_counter`."""
    return (time.perf_counter() - clock) * 1e3
