"""Answers as LlamaIndex's responses: whole or in pieces, here or on a worker thread."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from ragcache.answer import Answer
from ragcache.llama_index.background import BackgroundStream, in_background
from ragcache.llama_index.events import OpenStream
from ragcache.stream import AnswerStream

R = TypeVar("R")

Start = Callable[[], AnswerStream]
"""Makes a prompt and prefills it."""

Convert = Callable[[CompletionResponse], R]
"""The kind of response that is wanted."""


def whole(start: Start, convert: Convert[R]) -> R:
    """A response, made here."""
    with closing(start()) as pieces:
        return convert(_response(pieces.answer))


def opened(start: Start, convert: Convert[R]) -> OpenStream[R]:
    """Responses as they come, made here; the prompt is prefilled when this returns."""
    pieces = start()
    return OpenStream(map(convert, _responses(pieces)), pieces.close)


async def awhole(start: Start, convert: Convert[R]) -> R:
    """A response, made by a worker."""

    def work() -> Generator[R | None, None, None]:
        with closing(start()) as pieces:
            for _ in pieces:
                yield None
            yield convert(_response(pieces.answer))

    return await in_background(work)


async def aopened(start: Start, convert: Convert[R]) -> BackgroundStream[R]:
    """Responses as they come, made by a worker; the first is there when this returns."""

    def work() -> Generator[R, None, None]:
        with closing(start()) as pieces:
            yield from map(convert, _responses(pieces))

    stream = BackgroundStream(work)
    await stream.ready()
    return stream


def _responses(pieces: AnswerStream) -> Generator[CompletionResponse, None, None]:
    text = ""
    for piece in pieces:
        text += piece
        yield CompletionResponse(text=text, delta=piece)
    last = _response(pieces.answer)
    last.delta = ""
    yield last


def _response(answer: Answer) -> CompletionResponse:
    prompt_tokens = answer.tokens.prompt
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer.tokens.generated,
        "total_tokens": prompt_tokens + answer.tokens.generated,
        "prompt_tokens_details": {"cached_tokens": prompt_tokens - answer.tokens.prefilled},
    }
    return CompletionResponse(
        text=answer.answer,
        raw={"usage": usage, "ragcache": answer.model_dump(mode="json")},
        additional_kwargs={"finish_reason": answer.finish_reason.value},
    )


def as_completion(response: CompletionResponse) -> CompletionResponse:
    """A response as it is."""
    return response


def as_chat(response: CompletionResponse) -> ChatResponse:
    """A response as a message of the assistant."""
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )
