"""From passages to an answer, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from ragcache.answer import Answer, MissedChunk, Source, Timings, TokenCounts
from ragcache.errors import StreamClosedError
from ragcache.generate.decode import FinishReason, decode
from ragcache.generate.engine import Engine, PreparedPrompt
from ragcache.generate.sampling import SamplingParameters
from ragcache.model.language_model import LanguageModel
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.settings import Reuse
from ragcache.states.records import StoredStates


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
        states: stored states; without them the passage is encoded in this request.
        evicted: there are none because the byte budget was short.
    """

    chunk_id: str
    document_id: str
    title: str
    text: str
    score: float
    token_ids: tuple[int, ...]
    states: StoredStates | None
    evicted: bool = False


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
        chunk.states,
        chunk.evicted,
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
    ) -> None:
        self.sources = head.sources
        self._head = head
        self._clock = clock
        self._answer: Answer | None = None
        self._pieces = self._run(model, engine, prompt, parameters)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation."""
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
        self, model: LanguageModel, engine: Engine, prompt: PreparedPrompt, parameters: SamplingParameters
    ) -> Generator[str, None, None]:
        text, generated, ttft, finish = "", 0, 0.0, FinishReason.LENGTH
        try:
            for step in decode(model, prompt.cache, prompt.logits, parameters):
                if step.token_id is not None:
                    generated += 1
                    ttft = ttft or milliseconds_since(self._clock)
                finish = step.finish or finish
                if step.text:
                    text += step.text
                    yield step.text
        finally:
            engine.pool.give_back(prompt.cache)
        total = milliseconds_since(self._clock)
        self._answer = self._head.model_copy(
            update={
                "answer": text,
                "tokens": self._head.tokens.model_copy(update={"generated": generated}),
                "timings_ms": self._head.timings_ms.model_copy(update={"ttft": ttft, "total": total}),
                "finish_reason": finish,
            }
        )


def answer_head(
    kept: Sequence[ContextChunk], dropped: list[str], prompt: PreparedPrompt, reuse: Reuse, retrieve_ms: float
) -> Answer:
    """The answer before its first token."""
    report = prompt.report
    return Answer(
        answer="",
        sources=[
            Source(chunk_id=c.chunk_id, document_id=c.document_id, title=c.title, score=c.score, text=c.text)
            for c in kept
        ],
        tokens=TokenCounts(
            prefix=report.prefix_tokens, restored=report.restored_tokens, prefilled=report.prefilled_tokens
        ),
        timings_ms=Timings(
            retrieve=retrieve_ms, read=report.read_ms, restore=report.restore_ms, prefill=report.prefill_ms
        ),
        misses=[MissedChunk(chunk_id=m.chunk_id, reason=m.reason, detail=m.detail) for m in report.misses],
        dropped=dropped,
        reuse=reuse,
        finish_reason=FinishReason.LENGTH,
    )


def milliseconds_since(clock: float) -> float:
    """Time since a reading of `time.perf_counter`."""
    return (time.perf_counter() - clock) * 1e3
