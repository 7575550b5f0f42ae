"""Retrieval as LlamaIndex asks for it: filters, vectors, several texts, nodes of texts and of nodes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from ragcache import RagCache
from ragcache.errors import SettingsError, StoreNotFoundError, VectorsError
from ragcache.indexer.nodes import prompt_text
from ragcache.llama_index import RagCacheRetriever
from ragcache.llama_index.filters import matches
from tests.conftest import make_document

QUESTION = "Which ships passed?"


def one(key: str, value: Any, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, value=value, operator=operator)])


@pytest.fixture
def mixed(cache: RagCache) -> RagCache:
    """Three documents of text, and nodes about something else."""
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="tides")}
    cache.index_nodes(
        [
            TextNode(
                id_=f"tide-{i}",
                text=f"High water number {i} came at {i} o'clock.",
                metadata={"hour": i, "kind": "tide", "tags": ["high"] if i % 2 else []},
                relationships=source,
            )
            for i in range(12)
        ]
    )
    return cache


def ids(nodes: list[NodeWithScore]) -> list[str]:
    return [it.node_id for it in nodes]


def scores(nodes: list[NodeWithScore]) -> list[float]:
    return [it.get_score(raise_error=True) for it in nodes]


def test_nodes_of_texts_and_of_nodes(mixed: RagCache) -> None:
    found = RagCacheRetriever(mixed, 99).retrieve(QUESTION)
    hits = mixed.retrieve(QUESTION, 99)
    assert ids(found) == [hit.chunk.chunk_id for hit in hits]
    assert [it.score for it in found] == [hit.score for hit in hits]
    for node, hit in zip(found, hits, strict=True):
        assert mixed.template.passage(prompt_text(node.node)) == hit.chunk.token_ids
        assert node.node.ref_doc_id == hit.chunk.document_id
        assert node.metadata.items() >= hit.chunk.document_metadata.items()
    assert {it.node.ref_doc_id for it in found} == {"doc-0", "doc-1", "doc-2", "tides"}


def test_top_k_is_the_stores_unless_given(mixed: RagCache) -> None:
    assert len(RagCacheRetriever(mixed).retrieve(QUESTION)) == mixed.settings.top_k
    assert len(RagCacheRetriever(mixed, 7).retrieve(QUESTION)) == 7
    with pytest.raises(SettingsError):
        RagCacheRetriever(mixed, 0).retrieve(QUESTION)


EITHER = MetadataFilters(filters=[one("hour", 3), one("hour", 4), one("number", 1)], condition=FilterCondition.OR)
FILTERS = [
    one("kind", "tide"),
    one("kind", "tide", FilterOperator.NE),
    one("hour", 9, FilterOperator.GTE),
    one("hour", [3, 5, 99], FilterOperator.IN),
    one("tags", "high", FilterOperator.CONTAINS),
    one("tags", None, FilterOperator.IS_EMPTY),
    one("title", "Harbour 2"),
    one("title", "harbour", FilterOperator.TEXT_MATCH_INSENSITIVE),
    one("kind", 3, FilterOperator.GT),
    one("_node", None, FilterOperator.IS_EMPTY),
    EITHER,
    MetadataFilters(filters=[EITHER, one("hour", 5, FilterOperator.LT)], condition=FilterCondition.NOT),
    MetadataFilters(filters=[EITHER, one("kind", "tide"), *one("hour", 4, FilterOperator.LT).filters]),
]


def test_filters_choose_before_the_best_are_taken(mixed: RagCache) -> None:
    """However far down the ranking those that match are."""
    everything = RagCacheRetriever(mixed, 99).retrieve(QUESTION)
    for filters in FILTERS:
        expected = [it for it in everything if matches(filters, it.metadata)]
        for top_k in (1, 3, 99):
            found = RagCacheRetriever(mixed, top_k, filters=filters).retrieve(QUESTION)
            assert ids(found) == ids(expected[:top_k]), filters
            assert [it.score for it in found] == [it.score for it in expected[:top_k]]


def test_the_last_of_many_is_found(cache: RagCache) -> None:
    cache.index([make_document(number, sentences=4) for number in range(10, 40)])
    everything = RagCacheRetriever(cache, 999).retrieve(QUESTION)
    last = everything[-1]
    assert len(everything) > 50
    filters = one("number", last.metadata["number"])
    assert ids(RagCacheRetriever(cache, 1, filters=filters).retrieve(QUESTION))
    assert last.node_id in ids(RagCacheRetriever(cache, 99, filters=filters).retrieve(QUESTION))
    assert RagCacheRetriever(cache, 3, filters=one("number", -1)).retrieve(QUESTION) == []


def test_a_question_may_come_embedded(mixed: RagCache) -> None:
    expected = RagCacheRetriever(mixed, 5).retrieve("High water")
    vector = mixed.embedder.question("High water")[0]
    # The text then does not count, and neither does the vector's length.
    for given in (vector, 7 * vector):
        found = RagCacheRetriever(mixed, 5).retrieve(QueryBundle(QUESTION, embedding=given.tolist()))
        assert ids(found) == ids(expected)
        assert scores(found) == pytest.approx(scores(expected), abs=1e-5)


def test_vectors_that_are_none_of_the_model(cache: RagCache) -> None:
    for vector in ([1.0, 2.0], [0.0] * 384, [float("nan")] * 384, [float("inf")] * 384, []):
        with pytest.raises(VectorsError, match="vector"):
            RagCacheRetriever(cache, 5).retrieve(QueryBundle(QUESTION, embedding=vector))


def test_several_texts_may_stand_for_a_question(mixed: RagCache) -> None:
    texts = ["High water came at five.", "Low water"]
    mean = np.concatenate([mixed.embedder.question(text) for text in texts]).mean(axis=0)
    found = RagCacheRetriever(mixed, 5).retrieve(QueryBundle(QUESTION, custom_embedding_strs=texts))
    expected = mixed.retrieve((mean / np.linalg.norm(mean)).tolist(), 5)
    assert ids(found) == [hit.chunk.chunk_id for hit in expected]
    assert scores(found) == pytest.approx([hit.score for hit in expected], abs=1e-6)
    plain = ids(RagCacheRetriever(mixed, 5).retrieve(QUESTION))
    assert ids(found) != plain
    for none in ([], [QUESTION]):
        assert ids(RagCacheRetriever(mixed, 5).retrieve(QueryBundle(QUESTION, custom_embedding_strs=none))) == plain


def test_an_empty_question_is_a_question(mixed: RagCache) -> None:
    assert len(RagCacheRetriever(mixed, 2).retrieve("")) == 2


def test_it_does_not_run_on_the_event_loops_thread(mixed: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    retrieve = mixed.retrieve

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return retrieve(*arguments)

    monkeypatch.setattr(mixed, "retrieve", watched)
    retriever = RagCacheRetriever(mixed, 5, filters=one("kind", "tide"))
    assert ids(asyncio.run(retriever.aretrieve(QUESTION))) == ids(retriever.retrieve(QUESTION))
    assert [it is threading.current_thread() for it in threads] == [False, True]


def test_before_anything_is_indexed(open_tiny: Any) -> None:
    with pytest.raises(StoreNotFoundError):
        RagCacheRetriever(open_tiny()).retrieve(QUESTION)
