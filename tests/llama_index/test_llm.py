"""The LLM as LlamaIndex uses any other: answers, options, usage, copies."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.schema import NodeWithScore, TextNode

from ragcache import RagCache
from ragcache.errors import PassageError, QuestionError, RagCacheError, SettingsError
from ragcache.generate.decode import decode
from ragcache.generate.sampling import SamplingParameters
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever
from ragcache.model.forward import Segment, forward

QUESTION = "Which ships passed?"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]

Response = CompletionResponse | ChatResponse


@pytest.fixture
def llm(cache: RagCache) -> RagCacheLLM:
    return RagCacheLLM(cache)


@pytest.fixture
def nodes(cache: RagCache) -> list[NodeWithScore]:
    return RagCacheRetriever(cache, similarity_top_k=3).retrieve(QUESTION)


def raw(response: Response) -> dict[str, Any]:
    assert isinstance(response.raw, dict)
    return response.raw


def text(response: Response) -> str:
    return response.text if isinstance(response, CompletionResponse) else response.message.content or ""


def in_every_way(llm: RagCacheLLM, nodes: list[NodeWithScore]) -> dict[str, list[list[Response]]]:
    """Responses of each of the twelve methods; those that do the same stand together."""

    async def whole(answer: Awaitable[Response]) -> list[Response]:
        return [await answer]

    async def streamed(answer: Awaitable[AsyncGenerator[Response, None]]) -> list[Response]:
        return [response async for response in await answer]

    def ran(answer: Any) -> list[Response]:
        return asyncio.run(answer)

    return {
        "complete": [
            [llm.complete("Hello")],
            list(llm.stream_complete("Hello")),
            ran(whole(llm.acomplete("Hello"))),
            ran(streamed(llm.astream_complete("Hello"))),
        ],
        "chat": [
            [llm.chat(MESSAGES)],
            list(llm.stream_chat(MESSAGES)),
            ran(whole(llm.achat(MESSAGES))),
            ran(streamed(llm.astream_chat(MESSAGES))),
        ],
        "nodes": [
            [llm.complete_with_nodes(QUESTION, nodes)],
            list(llm.stream_complete_with_nodes(QUESTION, nodes)),
            ran(whole(llm.acomplete_with_nodes(QUESTION, nodes))),
            ran(streamed(llm.astream_complete_with_nodes(QUESTION, nodes))),
        ],
    }


def test_all_ways_of_a_call_answer_the_same(cache: RagCache, llm: RagCacheLLM, nodes: list[NodeWithScore]) -> None:
    ways = in_every_way(llm, nodes)
    assert text(ways["nodes"][0][0]) == cache.query(QUESTION, top_k=3).answer
    for whole, *others in ways.values():
        usage = raw(whole[0])["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for responses in others:
            assert text(responses[-1]) == text(whole[0])
            assert raw(responses[-1])["usage"] == usage
            assert raw(responses[-1])["ragcache"]["sources"] == raw(whole[0])["ragcache"]["sources"]
            assert responses[-1].additional_kwargs == {"finish_reason": "length"} == whole[0].additional_kwargs
    for _, streamed, _, astreamed in ways.values():
        assert len(streamed) > 2
        for responses in (streamed, astreamed):
            for before, after in pairwise(responses):
                assert text(after) == text(before) + (after.delta or "")
            assert all(response.raw is None for response in responses[:-1])


def test_stored_states_are_cached_tokens(llm: RagCacheLLM, nodes: list[NodeWithScore]) -> None:
    response = llm.complete_with_nodes(QUESTION, nodes)
    tokens = raw(response)["ragcache"]["tokens"]
    assert tokens["restored"] > 100
    assert raw(response)["usage"]["prompt_tokens_details"] == {"cached_tokens": tokens["prefix"] + tokens["restored"]}
    assert raw(llm.complete("Hello"))["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    json.dumps(raw(response))


def test_tokens_are_counted_once(cache: RagCache, nodes: list[NodeWithScore]) -> None:
    counter = TokenCountingHandler()
    llm = RagCacheLLM(cache, callback_manager=CallbackManager([counter]))
    usages = [raw(responses[-1])["usage"] for ways in in_every_way(llm, nodes).values() for responses in ways]
    assert [count.prompt_token_count for count in counter.llm_token_counts] == [it["prompt_tokens"] for it in usages]
    assert counter.completion_llm_token_count == sum(it["completion_tokens"] for it in usages)


def test_chat_uses_the_template_once(cache: RagCache, llm: RagCacheLLM) -> None:
    ids = cache.template.formatted(
        cache.template.render([{"role": m.role.value, "content": m.content or ""} for m in MESSAGES])
    )
    response = llm.chat(MESSAGES)
    assert raw(response)["usage"]["prompt_tokens"] == len(ids)
    assert response.message.role == MessageRole.ASSISTANT
    assert response.message.content == cache.generate(ids).answer.answer
    assert llm.complete("Hello").text == llm.chat([ChatMessage(role="user", content="Hello")]).message.content


def test_a_formatted_prompt_is_taken_as_it_is(cache: RagCache, llm: RagCacheLLM) -> None:
    assert llm.messages_to_prompt is not None
    prompt = llm.messages_to_prompt(MESSAGES)
    assert llm.complete(prompt, formatted=True).text == llm.chat(MESSAGES).message.content
    assert raw(llm.complete("Hello", formatted=True))["usage"]["prompt_tokens"] == 1
    with pytest.raises(QuestionError, match="empty"):
        llm.complete("", formatted=True)


def test_prompts_of_the_users_own(cache: RagCache) -> None:
    llm = RagCacheLLM(
        cache, completion_to_prompt=lambda prompt: f"Q: {prompt}", messages_to_prompt=lambda messages: "Q: Hello"
    )
    assert (
        llm.complete("Hello").text
        == llm.complete("Q: Hello", formatted=True).text
        == llm.chat(MESSAGES).message.content
    )


def test_predict_adds_the_system_prompt(cache: RagCache, llm: RagCacheLLM) -> None:
    template = PromptTemplate("Say {word}")
    assert llm.predict(template, word="hello") == llm.complete("Say hello").text
    strict = RagCacheLLM(cache, system_prompt="Be brief.")
    answer = strict.chat([MESSAGES[0], ChatMessage(role="user", content="Say hello")]).message.content
    assert strict.predict(template, word="hello") == answer != llm.predict(template, word="hello")
    assert (
        asyncio.run(strict.apredict(template, word="hello")) == answer == "".join(strict.stream(template, word="hello"))
    )
    wrapped = RagCacheLLM(cache, system_prompt="Be brief.", query_wrapper_prompt=PromptTemplate("<<{query_str}>>"))
    assert wrapped._extend_prompt("Hello") == "<<Be brief.\n\nHello>>"


def test_every_token_that_ends_an_answer(cache: RagCache, llm: RagCacheLLM) -> None:
    second = raw(llm.complete("Hello", max_tokens=2))
    assert second["ragcache"]["finish_reason"] == "length"
    ids = cache.template.formatted(cache.template.render([{"role": "user", "content": "Hello"}]))
    generated = list(_tokens(cache, ids))
    cache.answering.model = replace(cache.model, eos_ids=cache.model.eos_ids | {generated[2]})
    response = llm.complete("Hello")
    assert response.additional_kwargs == {"finish_reason": "stop"}
    assert raw(response)["usage"]["completion_tokens"] == generated.index(generated[2]) + 1


def _tokens(cache: RagCache, ids: tuple[int, ...]) -> Iterable[int]:
    kv = cache.model.new_cache(len(ids) + 8)
    logits = forward(cache.model, [Segment(cache.model.tensor(list(ids)), kv)])[0]
    return [
        step.token_id for step in decode(cache.model, kv, logits, SamplingParameters(8)) if step.token_id is not None
    ]


class TestOptions:
    def test_of_one_call(self, llm: RagCacheLLM) -> None:
        assert raw(llm.complete("Hello", max_tokens=2))["usage"]["completion_tokens"] == 2
        drawn = [llm.complete("Hello", temperature=5.0, max_tokens=12, seed=seed).text for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_of_the_llm(self, cache: RagCache, nodes: list[NodeWithScore]) -> None:
        llm = RagCacheLLM(cache, max_tokens=3, temperature=5.0, seed=1, reuse="none")
        assert llm.metadata.num_output == 3
        assert raw(llm.complete("Hello"))["usage"]["completion_tokens"] == 3
        assert (
            llm.complete("Hello").text
            == RagCacheLLM(cache).complete("Hello", max_tokens=3, temperature=5.0, seed=1).text
        )
        assert raw(llm.complete_with_nodes(QUESTION, nodes))["ragcache"]["reuse"] == "none"
        assert raw(llm.complete_with_nodes(QUESTION, nodes, reuse="exact"))["ragcache"]["reuse"] == "exact"
        llm.max_tokens = 2
        assert raw(llm.complete("Hello"))["usage"]["completion_tokens"] == 2

    def test_stop_is_a_text_or_several(self, cache: RagCache, llm: RagCacheLLM) -> None:
        whole = llm.complete("Hello").text
        stop = whole[3:5]
        for given in (stop, [stop], ("nowhere", stop)):
            assert llm.complete("Hello", stop=given).text == whole[: whole.index(stop)]
            assert RagCacheLLM(cache, stop=given).complete("Hello").text == whole[: whole.index(stop)]
        assert llm.complete("Hello", stop=stop).additional_kwargs == {"finish_reason": "stop"}

    def test_order_of_nodes(self, cache: RagCache, llm: RagCacheLLM, nodes: list[NodeWithScore]) -> None:
        def order(of: RagCacheLLM, **options: str) -> list[str]:
            sources = raw(of.complete_with_nodes(QUESTION, nodes[::-1], **options))["ragcache"]["sources"]
            return [source["chunk_id"] for source in sources]

        best_first = [node.node_id for node in nodes]
        assert cache.settings.order == "score"
        assert order(llm) == order(RagCacheLLM(cache, order=None)) == best_first[::-1]
        assert order(llm, order="score") == order(RagCacheLLM(cache, order="score")) == best_first
        assert order(RagCacheLLM(cache, order="score"), order="given") == best_first[::-1]

    @pytest.mark.parametrize("options", [{"temprature": 1.0}, {"model": "other"}, {"top_k": 3}])
    def test_unknown_ones_of_the_llm(self, cache: RagCache, options: dict[str, Any]) -> None:
        with pytest.raises(SettingsError, match=rf"{next(iter(options))}.*known: reuse.*temperature.*system_prompt"):
            RagCacheLLM(cache, **options)

    def test_unknown_ones_of_a_call(self, llm: RagCacheLLM, nodes: list[NodeWithScore]) -> None:
        for call in (lambda: llm.complete("Hello", order="score"), lambda: llm.stream_chat(MESSAGES, top_k=3)):
            with pytest.raises(SettingsError, match="known: max_tokens, temperature, top_p, seed, stop"):
                call()
        with pytest.raises(SettingsError, match=r"'temprature'; known: reuse.*order"):
            llm.complete_with_nodes(QUESTION, nodes, temprature=1.0)
        with pytest.raises(SettingsError, match="known: max_tokens"):
            asyncio.run(llm.acomplete("Hello", tools=[]))

    def test_values_that_cannot_be_used(self, cache: RagCache, llm: RagCacheLLM) -> None:
        for options in ({"temperature": -1.0}, {"max_tokens": 0}, {"order": "random"}, {"stop": 5}):
            with pytest.raises(SettingsError, match=next(iter(options))):
                RagCacheLLM(cache, **options)
        with pytest.raises(SettingsError, match="top_p"):
            llm.complete("Hello", top_p=2.0)


class TestComponent:
    def test_metadata(self, cache: RagCache, llm: RagCacheLLM) -> None:
        assert llm.metadata.context_window == cache.model.context_window
        assert llm.metadata.model_name == cache.model.name
        assert llm.metadata.num_output == cache.settings.max_tokens
        assert llm.metadata.is_chat_model
        assert not llm.metadata.is_function_calling_model

    def test_serialised_without_the_store(self, cache: RagCache) -> None:
        llm = RagCacheLLM(cache, max_tokens=5, encodings="alone", stop="x", system_prompt="Be brief.")
        data = json.loads(json.dumps(llm.to_dict()))
        assert data.pop("pydantic_program_mode") == "default"
        assert data == {
            "class_name": "RagCacheLLM",
            "system_prompt": "Be brief.",
            "context_window": cache.model.context_window,
            "model_name": cache.model.name,
            "max_tokens": 5,
            "defaults": {"encodings": ["alone"], "stop": ["x"]},
        }
        again = RagCacheLLM.from_dict(data, cache=cache)
        assert again.to_dict() == llm.to_dict()
        assert again.complete("Hello").text == llm.complete("Hello").text

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: it.model_copy(deep=True)])
    def test_copies_share_the_store(self, llm: RagCacheLLM, duplicate: Callable[[RagCacheLLM], RagCacheLLM]) -> None:
        twin = duplicate(llm)
        twin.max_tokens = 2
        assert twin.cache is llm.cache
        assert llm.complete("Hello").text.startswith(twin.complete("Hello").text)
        assert raw(llm.complete("Hello"))["usage"]["completion_tokens"] == 8

    def test_pickling_is_refused(self, llm: RagCacheLLM) -> None:
        with pytest.raises(TypeError, match="opened store"):
            pickle.dumps(llm)


def test_no_prompt_can_be_made(llm: RagCacheLLM, nodes: list[NodeWithScore]) -> None:
    long = "word " * 5000
    calls: list[Callable[[], object]] = [
        lambda: llm.complete(long),
        lambda: llm.complete("\ud800"),
        lambda: llm.chat([]),
        lambda: llm.complete_with_nodes(" ", nodes),
        lambda: asyncio.run(llm.acomplete(long)),
        lambda: llm.stream_complete(long),
    ]
    for call in calls:
        with pytest.raises(RagCacheError):
            call()


def test_streams_are_generators(llm: RagCacheLLM) -> None:
    assert isinstance(llm.stream_complete("Hello"), Generator)

    async def stream() -> None:
        assert isinstance(await llm.astream_complete("Hello"), AsyncGenerator)

    asyncio.run(stream())


def test_a_node_whose_templates_cannot_be_filled_in(llm: RagCacheLLM) -> None:
    node = TextNode(id_="odd", text="The ferry passed.", metadata={"a": 1}, text_template="{body}")
    with pytest.raises(PassageError, match="the templates of node 'odd' cannot be filled in"):
        llm.complete_with_nodes("Which ships passed?", [NodeWithScore(node=node)])


def test_retrieving_with_half_a_surrogate_pair(cache: RagCache) -> None:
    with pytest.raises(QuestionError, match="half a surrogate pair"):
        RagCacheRetriever(cache).retrieve("ships \ud800")
