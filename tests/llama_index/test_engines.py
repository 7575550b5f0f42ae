"""What LlamaIndex builds around an LLM, with ours in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from llama_index.core import Document as LlamaDocument
from llama_index.core import Settings, SummaryIndex, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms.llm import LLM
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode
from llama_index.core.schema import QueryBundle, TransformComponent
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from ragcache import RagCache
from ragcache.llama_index import (
    RagCacheLLM,
    RagCacheRetriever,
    RagCacheSynthesizer,
    RagCacheVectorStore,
    StateEncoder,
)

QUESTION = "Which ships passed?"


@pytest.fixture
def llm(cache: RagCache) -> RagCacheLLM:
    return RagCacheLLM(cache, max_tokens=4)


@pytest.fixture
def index(cache: RagCache) -> VectorStoreIndex:
    """An index a user has already, whose nodes are in the store."""
    model = RagCacheRetriever(cache).as_vector_store().embed_model
    documents = [
        LlamaDocument(text=f"The {ship} passed the lighthouse at {hour}.", id_=ship, metadata={"hour": hour})
        for hour, ship in enumerate(("Aurora", "Beagle", "Calypso"))
    ]
    index = VectorStoreIndex.from_documents(documents, embed_model=model)
    cache.index_nodes(list(index.docstore.docs.values()))
    return index


@pytest.fixture
def global_llm(llm: RagCacheLLM) -> Iterator[RagCacheLLM]:
    """The LLM as LlamaIndex's own default."""
    before = Settings._llm
    Settings.llm = llm
    yield llm
    Settings._llm = before


@pytest.fixture
def counter() -> Iterator[TokenCountingHandler]:
    """LlamaIndex's own counter, where its users put it."""
    before, handler = Settings.callback_manager, TokenCountingHandler()
    Settings.callback_manager = CallbackManager([handler])
    yield handler
    Settings.callback_manager = before


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (RagCacheLLM, LLM),
        (RagCacheLLM, BaseLLM),
        (RagCacheRetriever, BaseRetriever),
        (RagCacheSynthesizer, BaseSynthesizer),
        (RagCacheVectorStore, BasePydanticVectorStore),
        (StateEncoder, TransformComponent),
    ],
)
def test_classes_are_what_llamaindex_takes_them_for(cls: type, base: type) -> None:
    # As the tests of LlamaIndex's own integrations have it.
    assert base.__name__ in [it.__name__ for it in cls.__mro__]


class TestResponseModes:
    """The other synthesizers take the LLM as they take any."""

    @pytest.mark.parametrize("mode", [mode for mode in ResponseMode if mode != ResponseMode.CONTEXT_ONLY])
    @pytest.mark.parametrize("streaming", [False, True])
    def test_each(
        self,
        index: VectorStoreIndex,
        global_llm: RagCacheLLM,
        counter: TokenCountingHandler,
        mode: ResponseMode,
        streaming: bool,
    ) -> None:
        nodes = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
        accumulates = mode in (ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE)
        synthesizer = get_response_synthesizer(response_mode=mode, streaming=streaming and not accumulates)
        if mode == ResponseMode.NO_TEXT:
            assert synthesizer.synthesize(QUESTION, nodes).source_nodes == nodes
            return
        assert str(synthesizer.synthesize(QUESTION, nodes)).strip()
        assert counter.completion_llm_token_count > 0
        assert counter.prompt_llm_token_count > counter.completion_llm_token_count

    @pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.ACCUMULATE])
    def test_async(self, index: VectorStoreIndex, llm: RagCacheLLM, mode: ResponseMode) -> None:
        nodes = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
        synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, use_async=True)
        whole = asyncio.run(synthesizer.asynthesize(QUESTION, nodes))
        assert str(whole) == str(get_response_synthesizer(llm=llm, response_mode=mode).synthesize(QUESTION, nodes))

    def test_compact_says_what_a_plain_chat_says(self, index: VectorStoreIndex, llm: RagCacheLLM) -> None:
        nodes = index.as_retriever(similarity_top_k=1).retrieve(QUESTION)
        synthesizer = get_response_synthesizer(llm=llm, response_mode=ResponseMode.COMPACT)
        template = synthesizer.get_prompts()["text_qa_template"]
        text = nodes[0].get_content(metadata_mode="llm")  # type: ignore[arg-type]
        messages = template.format_messages(llm=llm, context_str=text, query_str=QUESTION)
        assert str(synthesizer.synthesize(QUESTION, nodes)) == llm.chat(messages).message.content


def test_settings_llm(index: VectorStoreIndex, global_llm: RagCacheLLM) -> None:
    plain = index.as_query_engine().query(QUESTION)
    assert str(plain) == str(index.as_query_engine(llm=global_llm).query(QUESTION))
    restored = index.as_query_engine(response_synthesizer=RagCacheSynthesizer(global_llm)).query(QUESTION)
    assert (restored.metadata or {})["ragcache"]["misses"] == []
    assert (restored.metadata or {})["ragcache"]["tokens"]["restored"] > 0


def test_from_args(index: VectorStoreIndex, llm: RagCacheLLM) -> None:
    engine = RetrieverQueryEngine.from_args(
        index.as_retriever(), llm=llm, response_synthesizer=RagCacheSynthesizer(llm, empty_response="None.")
    )
    assert (engine.query(QUESTION).metadata or {})["ragcache"]["misses"] == []
    assert str(engine.synthesize(QueryBundle(QUESTION), [])) == "None."


def test_tokens_of_a_query_are_counted(cache: RagCache, llm: RagCacheLLM, counter: TokenCountingHandler) -> None:
    response = RetrieverQueryEngine(RagCacheRetriever(cache), RagCacheSynthesizer(llm)).query(QUESTION)
    tokens = (response.metadata or {})["ragcache"]["tokens"]
    assert counter.prompt_llm_token_count == tokens["prefix"] + tokens["restored"] + tokens["prefilled"]
    assert counter.completion_llm_token_count == tokens["generated"]


class TestChat:
    @pytest.mark.parametrize("mode", ["context", "condense_plus_context", "condense_question", "simple"])
    def test_each_mode(self, index: VectorStoreIndex, llm: RagCacheLLM, mode: str) -> None:
        engine: BaseChatEngine = index.as_chat_engine(chat_mode=mode, llm=llm)  # type: ignore[arg-type]
        first = engine.chat(QUESTION)
        assert str(first).strip()
        assert str(engine.chat("And then?")).strip()
        assert len(engine.chat_history) == 4
        engine.reset()
        assert str(engine.chat(QUESTION)) == str(first)
        engine.reset()
        assert "".join(engine.stream_chat(QUESTION).response_gen) == str(first)

    @pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
    def test_async(self, index: VectorStoreIndex, llm: RagCacheLLM, mode: str) -> None:
        async def talk() -> tuple[str, str]:
            engine: BaseChatEngine = index.as_chat_engine(chat_mode=mode, llm=llm)  # type: ignore[arg-type]
            whole = str(await engine.achat(QUESTION))
            await engine.areset() if hasattr(engine, "areset") else engine.reset()
            streamed = await engine.astream_chat(QUESTION)
            return whole, "".join([piece async for piece in streamed.async_response_gen()])

        whole, streamed = asyncio.run(talk())
        assert whole == streamed != ""


class OneQuestionEach(BaseQuestionGenerator):
    """Asks every tool, as a larger model would decide to."""

    def generate(self, tools: object, query: QueryBundle) -> list[SubQuestion]:
        return [SubQuestion(sub_question=query.query_str, tool_name=tool.name) for tool in tools]  # type: ignore[attr-defined]

    async def agenerate(self, tools: object, query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)

    def _get_prompts(self) -> dict[str, object]:  # type: ignore[override]
        return {}

    def _update_prompts(self, prompts: object) -> None: ...


@pytest.fixture
def tools(index: VectorStoreIndex, llm: RagCacheLLM) -> list[QueryEngineTool]:
    """Two engines over the same nodes, one of which restores."""
    summary = SummaryIndex(list(index.docstore.docs.values()))
    restored = index.as_query_engine(llm=llm, response_synthesizer=RagCacheSynthesizer(llm))
    return [
        QueryEngineTool(restored, ToolMetadata("facts about single ships", name="facts")),
        QueryEngineTool(summary.as_query_engine(llm=llm), ToolMetadata("a summary of the whole log", name="summary")),
    ]


def test_sub_questions(tools: list[QueryEngineTool], llm: RagCacheLLM) -> None:
    engine = SubQuestionQueryEngine.from_defaults(
        tools, llm=llm, question_gen=OneQuestionEach(), use_async=False, verbose=False
    )
    response = engine.query(QUESTION)
    assert str(response).strip()
    assert len(response.source_nodes) >= 2
    by_async = SubQuestionQueryEngine.from_defaults(
        tools, llm=llm, question_gen=OneQuestionEach(), use_async=True, verbose=False
    )
    assert str(asyncio.run(by_async.aquery(QUESTION))) == str(response)


def test_a_router(tools: list[QueryEngineTool], llm: RagCacheLLM, cache: RagCache) -> None:
    model = RagCacheRetriever(cache).as_vector_store().embed_model
    engine = RouterQueryEngine(EmbeddingSingleSelector.from_defaults(embed_model=model), tools, llm=llm, verbose=False)
    response = engine.query("facts about single ships")
    assert isinstance(response, Response)
    assert (response.metadata or {})["ragcache"]["tokens"]["restored"] > 0


def test_an_index_over_the_store(cache: RagCache, llm: RagCacheLLM) -> None:
    store = RagCacheRetriever(cache).as_vector_store()
    index = VectorStoreIndex.from_vector_store(store, embed_model=store.embed_model)
    index.insert(LlamaDocument(text="The Dolphin passed at ten.", id_="Dolphin"))
    engine = index.as_query_engine(llm=llm, response_synthesizer=RagCacheSynthesizer(llm), similarity_top_k=1)
    response = engine.query("When did the Dolphin pass?")
    assert "Dolphin" in response.source_nodes[0].text
    assert (response.metadata or {})["ragcache"]["misses"] == []
    index.update_ref_doc(LlamaDocument(text="The Dolphin passed at eleven.", id_="Dolphin"))
    response = engine.query("When did the Dolphin pass?")
    assert response.source_nodes[0].text == "The Dolphin passed at eleven."
    assert (response.metadata or {})["ragcache"]["misses"] == []
    index.delete_ref_doc("Dolphin")
    assert "Dolphin" not in engine.query("When did the Dolphin pass?").source_nodes[0].text
