"""A LlamaIndex query engine whose answers come from stored states."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ragcache import RagCache
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever, RagCacheSynthesizer

QUESTION = "Which ships passed?"


@pytest.fixture
def llm(cache: RagCache) -> RagCacheLLM:
    return RagCacheLLM(cache)


def engine(cache: RagCache, llm: RagCacheLLM, **kwargs: object) -> RetrieverQueryEngine:
    streaming = bool(kwargs.pop("streaming", False))
    return RetrieverQueryEngine(
        retriever=RagCacheRetriever(cache, similarity_top_k=3),
        response_synthesizer=RagCacheSynthesizer(llm, streaming=streaming),
        **kwargs,  # type: ignore[arg-type]
    )


def test_answers_come_from_restored_states(cache: RagCache, llm: RagCacheLLM) -> None:
    response = engine(cache, llm).query(QUESTION)
    expected = cache.query(QUESTION, top_k=3)
    assert str(response) == expected.answer
    assert [node.node_id for node in response.source_nodes] == [s.chunk_id for s in expected.sources]
    assert response.metadata is not None
    assert response.metadata["ragcache"]["tokens"] == expected.tokens.model_dump()
    assert response.metadata["ragcache"]["misses"] == []
    assert response.source_nodes[0].metadata["number"] in (0, 1, 2)


def test_streaming(cache: RagCache, llm: RagCacheLLM) -> None:
    response = engine(cache, llm, streaming=True).query(QUESTION)
    assert isinstance(response, StreamingResponse)
    assert "".join(response.response_gen) == cache.query(QUESTION, top_k=3).answer


def test_async(cache: RagCache, llm: RagCacheLLM) -> None:
    async def ask() -> tuple[str, str]:
        whole = await engine(cache, llm).aquery(QUESTION)
        streamed = await engine(cache, llm, streaming=True).aquery(QUESTION)
        assert isinstance(streamed, AsyncStreamingResponse)
        return str(whole), "".join([piece async for piece in streamed.response_gen])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed == cache.query(QUESTION, top_k=3).answer


def test_postprocessors_may_drop_and_reorder(cache: RagCache, llm: RagCacheLLM) -> None:
    nodes = RagCacheRetriever(cache, similarity_top_k=3).retrieve(QUESTION)
    cutoff = (nodes[0].score or 0) - 1e-6
    query_engine = engine(cache, llm, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=cutoff)])
    assert len(query_engine.query(QUESTION).source_nodes) == 1
    synthesizer = RagCacheSynthesizer(llm)
    backwards = synthesizer.synthesize(QUESTION, list(reversed(nodes)))
    assert backwards.metadata is not None
    assert [s["chunk_id"] for s in backwards.metadata["ragcache"]["sources"]] == [n.node_id for n in reversed(nodes)]
    assert backwards.metadata["ragcache"]["misses"] == []


def test_a_node_from_elsewhere_is_prefilled(cache: RagCache, llm: RagCacheLLM) -> None:
    nodes = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
    stranger = NodeWithScore(node=TextNode(id_="elsewhere", text="The ferry Aurora passed at noon."), score=0.3)
    response = RagCacheSynthesizer(llm).synthesize(QueryBundle(QUESTION), [*nodes, stranger])
    assert response.metadata is not None
    report = response.metadata["ragcache"]
    assert [(m["chunk_id"], m["reason"]) for m in report["misses"]] == [("elsewhere", "not_stored")]
    assert report["tokens"]["restored"] > 0


def test_a_changed_node_of_a_known_id_is_not_served_from_old_states(cache: RagCache, llm: RagCacheLLM) -> None:
    (node,) = RagCacheRetriever(cache, similarity_top_k=1).retrieve(QUESTION)
    edited = NodeWithScore(node=TextNode(id_=node.node_id, text="Not a single ship passed."), score=1.0)
    response = RagCacheSynthesizer(llm).synthesize(QUESTION, [edited])
    assert response.metadata is not None
    assert response.metadata["ragcache"]["tokens"]["restored"] == 0


def test_no_nodes_is_llamaindex_own_empty_response(llm: RagCacheLLM) -> None:
    assert str(RagCacheSynthesizer(llm).synthesize(QUESTION, [])) == "Empty Response"


def test_bare_texts(llm: RagCacheLLM) -> None:
    assert RagCacheSynthesizer(llm).get_response(QUESTION, ["The ferry passed.", "The tug passed."])
