"""Calls of an LLM, told to LlamaIndex's handlers: each starts once and ends once, however it ends.

LlamaIndex's own decorators do the telling. They wrap a stream in a generator that never closes what it reads from, and
that tells no end of a stream which is closed before its first item; `ToldStream` and `ToldAsyncStream` put that right.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from ragcache.llama_index.background import BackgroundStream

R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    """One call of an LLM.

    Attributes:
        llm: what is called.
        subject: the prompt or the messages, as handlers see them.
        options: the other arguments, as handlers see them.
        decorate: LlamaIndex's decorator of such methods.
    """

    llm: BaseLLM
    subject: str | Sequence[ChatMessage]
    options: dict[str, Any]
    decorate: Callable[..., Callable[..., Any]]

    @classmethod
    def completion(cls, llm: BaseLLM, prompt: str, options: dict[str, Any]) -> Call:
        """A call that handlers are told of as a completion."""
        return cls(llm, prompt, options, llm_completion_callback())

    @classmethod
    def chat(cls, llm: BaseLLM, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Call:
        """A call that handlers are told of as a chat."""
        return cls(llm, messages, options, llm_chat_callback())

    def run(self, answer: Callable[[], R]) -> R:
        """Tell of the call; what `answer` returns or raises is its end."""

        def method(*_: object, **__: object) -> R:
            return answer()

        response: R = self.decorate(method)(self.llm, self.subject, **self.options)
        return response

    async def arun(self, answer: Callable[[], Awaitable[R]]) -> R:
        """Tell of the call; what `answer` returns or raises is its end."""

        async def method(*_: object, **__: object) -> R:
            return await answer()

        response: R = await self.decorate(method)(self.llm, self.subject, **self.options)
        return response

    def stream(self, start: Callable[[], OpenStream[R]]) -> Generator[R, None, None]:
        """Tell of the call and of each item of its stream."""
        opened: list[OpenStream[R]] = []

        def method(*_: object, **__: object) -> OpenStream[R]:
            opened.append(start())
            return opened[0]

        told = self.decorate(method)(self.llm, self.subject, **self.options)
        return ToldStream(told, opened[0])

    async def astream(self, start: Callable[[], Awaitable[BackgroundStream[R]]]) -> AsyncGenerator[R, None]:
        """Tell of the call and of each item of its stream."""
        opened: list[BackgroundStream[R]] = []

        async def method(*_: object, **__: object) -> BackgroundStream[R]:
            opened.append(await start())
            return opened[0]

        told = await self.decorate(method)(self.llm, self.subject, **self.options)
        return ToldAsyncStream(told, opened[0])


class OpenStream(Generator[R, None, None]):
    """A stream with something to close, even if nothing was ever read from it."""

    def __init__(self, items: Iterator[R], close: Callable[[], None]) -> None:
        self._items = items
        self._close = close
        self._closed = False

    def send(self, value: None) -> R:
        """The next item; `GeneratorExit` tells one that iterates over a closed stream from its end."""
        if self._closed:
            raise GeneratorExit
        return next(self._items)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> R:
        """Close, and raise."""
        self.close()
        raise typ

    def close(self) -> None:
        """Close what it reads from."""
        if not self._closed:
            self._closed = True
            self._close()


class ToldStream(Generator[R, None, None]):
    """A stream that handlers are told of; closing or dropping it closes what it reads from, and tells."""

    def __init__(self, told: Generator[R, None, None], source: OpenStream[R]) -> None:
        self._told = told
        self._source = source
        self._begun = False

    def send(self, value: None) -> R:
        """The next item."""
        self._begun = True
        return next(self._told)

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> R:
        """Raise where the stream stands, and close it."""
        try:
            self._begun = True
            return self._told.throw(typ if isinstance(typ, BaseException) else typ())
        finally:
            self._source.close()

    def close(self) -> None:
        """End the generation."""
        self._source.close()
        if not self._begun:
            # Its source raises, which is told as the end.
            self._begun = True
            with suppress(GeneratorExit):
                next(self._told)
        self._told.close()

    def __del__(self) -> None:
        self.close()


class ToldAsyncStream(AsyncGenerator[R, None]):
    """A stream that handlers are told of; closing or dropping it ends the work for it, and tells."""

    def __init__(self, told: AsyncGenerator[R, None], source: BackgroundStream[R]) -> None:
        self._told = told
        self._source = source
        self._begun = False

    async def asend(self, value: None) -> R:
        """The next item."""
        self._begun = True
        return await anext(self._told)

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> R:
        """Raise where the stream stands, and close it."""
        self._source.cancel()
        self._begun = True
        return await self._told.athrow(typ if isinstance(typ, BaseException) else typ())

    async def aclose(self) -> None:
        """End the generation."""
        self._source.cancel()
        self._tell_unread()
        await self._told.aclose()

    def __del__(self) -> None:
        # The generator within is closed by the loop, as all that are dropped.
        self._source.cancel()
        self._tell_unread()

    def _tell_unread(self) -> None:
        if not self._begun:
            # Its source raises at once, which is told as the end; so no loop is needed.
            self._begun = True
            with suppress(GeneratorExit):
                self._told.__anext__().__await__().send(None)
