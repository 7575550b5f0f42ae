"""Handlers are told of each call once, however it ends."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore

from ragcache import RagCache
from ragcache.errors import SettingsError
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever
from tests.llama_index.conftest import Callbacks, Events, Generations

MESSAGES = [ChatMessage(role="user", content="Hello")]
PROMPT = {"formatted_prompt", "completion"}
CHAT = {"messages", "response"}
FAILED = {"exception"}


@pytest.fixture
def callbacks() -> Callbacks:
    return Callbacks()


@pytest.fixture
def llm(cache: RagCache, callbacks: Callbacks) -> RagCacheLLM:
    return RagCacheLLM(cache, callback_manager=CallbackManager([callbacks]))


@pytest.fixture
def nodes(cache: RagCache) -> list[NodeWithScore]:
    return RagCacheRetriever(cache, similarity_top_k=2).retrieve("Which ships passed?")


def of(kind: str, *ends: str) -> list[str]:
    return [f"{kind}{end}Event" for end in ends]


def calls(llm: RagCacheLLM, nodes: list[NodeWithScore]) -> list[tuple[str, bool, Callable[..., Any]]]:
    """Kind of events, whether it streams, and a call that runs to its end."""

    def drained(stream: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
        return lambda **options: list(stream(*arguments, **options))

    def awaited(method: Callable[..., Awaitable[object]], *arguments: object) -> Callable[..., Any]:
        async def run(**options: Any) -> object:
            return await method(*arguments, **options)

        return lambda **options: asyncio.run(run(**options))

    def adrained(
        method: Callable[..., Awaitable[AsyncGenerator[object, None]]], *arguments: object
    ) -> Callable[..., Any]:
        async def run(**options: Any) -> object:
            return [item async for item in await method(*arguments, **options)]

        return lambda **options: asyncio.run(run(**options))

    return [
        ("LLMCompletion", False, lambda **options: llm.complete("Hello", **options)),
        ("LLMCompletion", True, drained(llm.stream_complete, "Hello")),
        ("LLMCompletion", False, awaited(llm.acomplete, "Hello")),
        ("LLMCompletion", True, adrained(llm.astream_complete, "Hello")),
        ("LLMChat", False, lambda **options: llm.chat(MESSAGES, **options)),
        ("LLMChat", True, drained(llm.stream_chat, MESSAGES)),
        ("LLMChat", False, awaited(llm.achat, MESSAGES)),
        ("LLMChat", True, adrained(llm.astream_chat, MESSAGES)),
        ("LLMCompletion", False, lambda **options: llm.complete_with_nodes("Who?", nodes, **options)),
        ("LLMCompletion", True, drained(llm.stream_complete_with_nodes, "Who?", nodes)),
        ("LLMCompletion", False, awaited(llm.acomplete_with_nodes, "Who?", nodes)),
        ("LLMCompletion", True, adrained(llm.astream_complete_with_nodes, "Who?", nodes)),
    ]


@pytest.mark.parametrize("which", range(12))
class TestEachCall:
    def test_is_told_once(
        self, llm: RagCacheLLM, nodes: list[NodeWithScore], events: Events, callbacks: Callbacks, which: int
    ) -> None:
        kind, streams, call = calls(llm, nodes)[which]
        call()
        assert events.names() == of(kind, "Start", *["InProgress"][: int(streams)], "End")
        assert callbacks.calls() == [CHAT if kind == "LLMChat" else PROMPT]

    def test_that_cannot_start(
        self, llm: RagCacheLLM, nodes: list[NodeWithScore], events: Events, callbacks: Callbacks, which: int
    ) -> None:
        kind, _, call = calls(llm, nodes)[which]
        with pytest.raises(SettingsError):
            call(temprature=1.0)
        assert events.names()[0] == f"{kind}StartEvent"
        assert f"{kind}EndEvent" not in events.names()
        assert callbacks.calls() == [FAILED]

    @pytest.mark.parametrize("step", [1, 4])
    def test_that_fails_midway(
        self,
        llm: RagCacheLLM,
        nodes: list[NodeWithScore],
        events: Events,
        callbacks: Callbacks,
        generations: Generations,
        which: int,
        step: int,
    ) -> None:
        kind, streams, call = calls(llm, nodes)[which]
        generations.fail_at = step
        with pytest.raises(RuntimeError) as caught:
            call()
        assert caught.value is generations.error
        assert f"{kind}EndEvent" not in events.names()
        assert callbacks.calls() == [FAILED]
        if streams and step == 4:
            assert events.names() == [*of(kind, "Start", "InProgress"), "ExceptionEvent"]
        generations.wait_until_over()


class TestStreamsThatAreNotReadToTheEnd:
    @pytest.mark.parametrize("read", [0, 2])
    @pytest.mark.parametrize("end", ["close", "drop", "throw"])
    def test_in_a_thread(
        self, llm: RagCacheLLM, events: Events, callbacks: Callbacks, generations: Generations, read: int, end: str
    ) -> None:
        stream = llm.stream_complete("Hello", max_tokens=400)
        for _ in range(read):
            next(stream)
        assert len(generations.lent) == 1
        if end == "close":
            stream.close()
        elif end == "throw":
            with pytest.raises(KeyError):
                stream.throw(KeyError())
        if end == "drop" or (end, read) == ("throw", 0):
            del stream
            gc.collect()
        assert generations.lent == []
        assert generations.steps <= read + 2
        if (end, read) != ("throw", 0):
            assert callbacks.calls() == [FAILED]
            assert events.names().count("ExceptionEvent") == 1
        assert "LLMCompletionEndEvent" not in events.names()

    @pytest.mark.parametrize("read", [0, 2])
    @pytest.mark.parametrize("end", ["close", "drop"])
    def test_on_a_loop(
        self, llm: RagCacheLLM, events: Events, callbacks: Callbacks, generations: Generations, read: int, end: str
    ) -> None:
        generations.pause = 0.01

        async def ask() -> None:
            stream = await llm.astream_chat(MESSAGES, max_tokens=400)
            for _ in range(read):
                await anext(stream)
            if end == "close":
                await stream.aclose()
                with suppress(StopAsyncIteration):
                    pytest.fail(f"a closed stream gave {await anext(stream)}")
            del stream
            for _ in range(100):
                gc.collect()
                await asyncio.sleep(0.01)
                if not generations.lent:
                    break

        asyncio.run(ask())
        assert generations.lent == []
        assert generations.steps < 50
        assert callbacks.calls() == [FAILED]
        assert events.names().count("ExceptionEvent") == 1
        assert "LLMChatEndEvent" not in events.names()
