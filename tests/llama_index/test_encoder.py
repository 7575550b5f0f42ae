"""Ingestion pipelines that encode nodes: what a document says now is in the store, and nothing else."""

from __future__ import annotations

import asyncio
import pickle
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path

import pytest
from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from ragcache import RagCache
from ragcache.errors import SettingsError, SourceError
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever, RagCacheSynthesizer, StateEncoder

OpenTiny = Callable[..., RagCache]

SPLITTER = SentenceSplitter(chunk_size=32, chunk_overlap=0)


def document(name: str, *words: str) -> Document:
    text = " ".join(f"The {word} of {name} lies in the harbour, and nobody knows since when." for word in words)
    return Document(text=text, id_=name)


A, B = document("A", "anchor", "buoy", "chain"), document("B", "dinghy", "eel", "fender")
CHANGED = document("A", "anchor", "galley", "chain")


@pytest.fixture
def cache(open_tiny: OpenTiny) -> RagCache:
    return open_tiny()


def texts(cache: RagCache) -> dict[str, list[str]]:
    """Texts of a store by document."""
    found: dict[str, list[str]] = {}
    for chunks in cache.store.catalog.all_chunks():
        for chunk in chunks:
            found.setdefault(chunk.document_id, []).append(chunk.text)
    return found


def expected(*documents: Document) -> dict[str, list[str]]:
    return {it.doc_id: [node.get_content() for node in SPLITTER.get_nodes_from_documents([it])] for it in documents}


def retrieved(cache: RagCache, question: str) -> str:
    return RagCacheRetriever(cache, similarity_top_k=1).retrieve(question)[0].text


@pytest.fixture(params=["the store", "another"])
def vector_store(request: pytest.FixtureRequest, cache: RagCache) -> BasePydanticVectorStore:
    """The vector store of a pipeline: the one of the states, or another, which alone is told of deletions."""
    return RagCacheRetriever(cache).as_vector_store() if request.param == "the store" else SimpleVectorStore()


@pytest.mark.parametrize("strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.UPSERTS_AND_DELETE])
class TestStrategies:
    @pytest.fixture
    def run(
        self, cache: RagCache, strategy: DocstoreStrategy, vector_store: BasePydanticVectorStore
    ) -> Callable[..., None]:
        encoder = StateEncoder(cache)
        pipeline = IngestionPipeline(
            transformations=[SPLITTER, encoder],
            docstore=SimpleDocumentStore(),
            docstore_strategy=strategy,
            vector_store=vector_store,
        )

        def once(*documents: Document) -> None:
            pipeline.run(documents=list(documents))
            if not isinstance(vector_store, type(RagCacheRetriever(cache).as_vector_store())):
                assert pipeline.docstore is not None
                encoder.prune(pipeline.docstore)

        return once

    def test_a_changed_document_takes_the_place_of_the_old_one(self, cache: RagCache, run: Callable[..., None]) -> None:
        run(A, B)
        assert texts(cache) == expected(A, B)
        run(CHANGED, B)
        assert texts(cache) == expected(CHANGED, B)
        assert "galley" in retrieved(cache, "Where is the galley of A?")
        assert "buoy" not in retrieved(cache, "Where is the buoy of A?")
        run(A, B)
        assert texts(cache) == expected(A, B)

    def test_a_document_that_is_not_given(
        self, cache: RagCache, run: Callable[..., None], strategy: DocstoreStrategy
    ) -> None:
        run(A, B)
        run(B)
        gone = strategy == DocstoreStrategy.UPSERTS_AND_DELETE
        assert texts(cache) == (expected(B) if gone else expected(A, B))
        # The pipeline's cache has its nodes still, and must not take them for encoded.
        run(A, B)
        assert texts(cache) == expected(A, B)


def test_nothing_is_encoded_again_when_the_docstore_is_lost(cache: RagCache) -> None:
    for _ in range(2):
        IngestionPipeline(transformations=[SPLITTER, StateEncoder(cache)]).run(documents=[A, B])
        assert texts(cache) == expected(A, B)
    shards = cache.stats().shards
    # Node ids are others on each run.
    nodes = SPLITTER.get_nodes_from_documents([A, B])
    report = cache.index_nodes(nodes)
    assert (report.encoded_tokens, cache.stats().shards) == (0, shards)
    assert {it.chunk_id for chunks in cache.store.catalog.all_chunks() for it in chunks} == {it.node_id for it in nodes}


def test_unchanged_chunks_of_a_changed_document_keep_their_states(cache: RagCache) -> None:
    encoder = StateEncoder(cache)
    encoder(SPLITTER.get_nodes_from_documents([A]))
    before = texts(cache)["A"]
    report = cache.index_nodes(SPLITTER.get_nodes_from_documents([CHANGED]))
    chunks = [it for batch in cache.store.catalog.all_chunks() for it in batch]
    assert len(chunks) == 2
    assert report.encoded_tokens == sum(len(it.token_ids) for it in chunks if it.text not in before) > 0


def test_answers_come_from_what_was_encoded(cache: RagCache) -> None:
    pipeline = IngestionPipeline(transformations=[SPLITTER, StateEncoder(cache)])
    nodes = pipeline.run(documents=[A, B])
    found = RagCacheRetriever(cache, similarity_top_k=2).retrieve("Where is the eel of B?")
    assert {it.node_id for it in found} <= {it.node_id for it in nodes}
    response = RagCacheSynthesizer(RagCacheLLM(cache)).synthesize("Where is the eel of B?", found)
    assert (response.metadata or {})["ragcache"]["misses"] == []


def test_what_the_cache_of_a_pipeline_has_is_in_the_store(cache: RagCache) -> None:
    pipeline = IngestionPipeline(transformations=[SPLITTER, StateEncoder(cache)])
    pipeline.run(documents=[A])
    cache.delete("A")
    pipeline.run(documents=[A])
    assert texts(cache) == expected(A)


def test_what_it_is_known_by_does_not_depend_on_the_batch(cache: RagCache) -> None:
    encoder = StateEncoder(cache)
    for nodes in ([A], [A, B]):
        encoder(nodes)
    known = encoder.to_dict()
    encoder([A, B])
    assert encoder.to_dict() == known == StateEncoder(cache).to_dict()
    encoder([CHANGED])
    assert encoder.to_dict() != known


class TestItTravelsWithoutModels:
    def test_pickled(self, cache: RagCache, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
        encoder = StateEncoder(cache, amend=True)
        pickled = pickle.dumps(encoder)
        again = pickle.loads(pickled)  # noqa: S301
        assert len(pickled) < 20_000
        assert not caplog.records
        assert (again.path, again.settings, again.amend) == (encoder.path, encoder.settings, True)
        assert deepcopy(encoder).cache is cache

    def test_from_its_dict(self, cache: RagCache) -> None:
        encoder = StateEncoder(cache)
        encoder([A])
        known = encoder.to_dict()
        assert StateEncoder.from_dict(known).to_dict() == known

    def test_by_path(self, cache: RagCache, tmp_path: Path) -> None:
        settings = cache.settings.model_dump(mode="json") | {"system_prompt": "Other."}
        encoder = StateEncoder(path=tmp_path / "by-path", settings=settings)
        assert encoder.to_dict()["store"] == ""
        encoder([A])
        assert texts(encoder.cache) == {"A": [A.text]}
        assert encoder.cache.settings.system_prompt == "Other."

    @pytest.mark.parametrize("arguments", [{}, {"path": "a"}])
    def test_a_store_or_its_path(self, cache: RagCache, arguments: dict[str, str]) -> None:
        with pytest.raises(SettingsError, match="either"):
            StateEncoder(cache if arguments else None, **arguments)  # type: ignore[arg-type]

    def test_by_several_processes(self, cache: RagCache) -> None:
        documents = [document(f"D{number}", f"buoy {number}") for number in range(6)]
        # No SentenceSplitter: in another process it wants to fetch a tokenizer, and without a network LlamaIndex waits
        # for ever.
        pipeline = IngestionPipeline(transformations=[StateEncoder(cache)], disable_cache=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipeline.run(documents=documents, num_workers=2)
        found = cache if cache._store is not None else RagCache(cache.path, cache.settings, cache.model, cache.embedder)
        assert texts(found) == {it.doc_id: [it.text] for it in documents}


def test_async(cache: RagCache) -> None:
    pipeline = IngestionPipeline(transformations=[SPLITTER, StateEncoder(cache)])
    asyncio.run(pipeline.arun(documents=[A, B]))
    assert texts(cache) == expected(A, B)


def test_nodes_may_come_bit_by_bit(cache: RagCache) -> None:
    encoder = StateEncoder(cache, amend=True)
    nodes = SPLITTER.get_nodes_from_documents([A])
    for node in nodes:
        encoder([node])
    assert texts(cache) == expected(A)


@pytest.mark.parametrize("nodes", [[], [TextNode(text="  ")]])
def test_nothing_to_encode(cache: RagCache, nodes: Iterable[BaseNode]) -> None:
    assert StateEncoder(cache)(list(nodes)) == list(nodes)


@pytest.mark.parametrize("others", [(), (B,)])
def test_a_document_that_has_come_to_say_nothing(cache: RagCache, others: tuple[Document, ...]) -> None:
    """Its nodes come without text, from LlamaIndex's splitters; what it said before must not be found any more."""
    encoder = StateEncoder(cache)
    pipeline = IngestionPipeline(transformations=[SPLITTER, encoder], docstore=SimpleDocumentStore())
    pipeline.run(documents=[A, document("C", "chain")])
    pipeline.run(documents=[document("A"), *others])
    assert texts(cache) == expected(*others, document("C", "chain"))
    encoder([TextNode(text=" ", id_="nowhere")])
    assert texts(cache) == expected(*others, document("C", "chain"))


def test_a_node_that_has_come_to_say_nothing(cache: RagCache) -> None:
    encoder = StateEncoder(cache, amend=True)
    nodes = encoder(SPLITTER.get_nodes_from_documents([A]))
    encoder([nodes[0].model_copy(update={"text": " "})])
    assert texts(cache) == {"A": [it.get_content() for it in nodes[1:]]}


def test_what_cannot_be_stored(cache: RagCache) -> None:
    encoder = StateEncoder(cache)
    encoder([B])
    with pytest.raises(SourceError, match="split it smaller"):
        encoder([A, TextNode(text="ships " * cache.model.context_window)])
    assert set(texts(cache)) == {"B"}
