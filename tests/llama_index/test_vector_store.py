"""The vector store holds what was added and not deleted, and finds what brute force finds."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.indices.vector_store import VectorIndexRetriever
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, IndexNode, MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from ragcache import RagCache
from ragcache.errors import SettingsError, SourceError, VectorsError
from ragcache.llama_index.filters import matches
from ragcache.llama_index.retriever import RagCacheRetriever
from ragcache.llama_index.vector_store import RagCacheVectorStore
from ragcache.retriever.embedding import Embedder
from tests.conftest import make_document

OpenTiny = Callable[..., RagCache]

TEXTS = [
    "The ferry leaves at seven.",
    "Children learn to row.",
    "The lighthouse keeper wrote down every ship.",
    "Granite walls stand in storms.",
    "Bread is baked at night.",
    "Cats sleep on warm stones.",
    "The ice came in December.",
    "A violin needs new strings.",
]
QUESTION = "When does the boat go?"


def node(id: str, text: str, document: str | None = None, **metadata: Any) -> TextNode:
    source = {} if document is None else {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    return TextNode(id_=id, text=text, metadata=metadata, relationships=source)


def page(value: int, operator: FilterOperator = FilterOperator.EQ) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key="page", value=value, operator=operator)])


def some(count: int = len(TEXTS)) -> list[TextNode]:
    return [node(f"n-{i}", TEXTS[i], f"d-{i % 3}", page=i) for i in range(count)]


def ids(nodes: list[BaseNode]) -> set[str]:
    return {it.node_id for it in nodes}


@pytest.fixture
def store(open_tiny: OpenTiny) -> RagCacheVectorStore:
    return RagCacheVectorStore(open_tiny())


def found(store: RagCacheVectorStore, top_k: int = 99, **query: Any) -> list[str]:
    result = store.query(VectorStoreQuery(query_str=QUESTION, similarity_top_k=top_k, **query))
    assert result.nodes is not None
    assert [it.node_id for it in result.nodes] == result.ids
    assert result.similarities == sorted(result.similarities or [], reverse=True)
    return list(result.ids or [])


class VectorStoreMachine(RuleBasedStateMachine):
    """A store, and the nodes that must be in it."""

    open_store: Callable[[Path], RagCache]
    embedder: Embedder

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ragcache-vector-store-"))
        self.store = RagCacheVectorStore(self.open_store(self.folder / "store"))
        self.nodes: dict[str, TextNode] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(
        added=st.lists(
            st.tuples(
                st.integers(0, 5), st.sampled_from([*TEXTS, " "]), st.integers(0, 2), st.sampled_from(["a", "b", None])
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda it: it[0],
        )
    )
    def add(self, added: list[tuple[int, str, int, str | None]]) -> None:
        nodes = [node(f"n-{id}", text, document, page=page) for id, text, page, document in added]
        assert self.store.add(nodes) == [it.node_id for it in nodes]
        for it in nodes:
            self.nodes.pop(it.node_id, None)
            if it.text.strip():
                self.nodes[it.node_id] = it

    @rule(document=st.sampled_from(["a", "b", "n-1", "nobody"]))
    def delete(self, document: str) -> None:
        self.store.delete(document)
        self.keep(lambda it: (it.ref_doc_id or it.node_id) != document)

    @rule(chosen=st.sets(st.integers(0, 5), max_size=3), number=st.none() | st.integers(0, 2))
    def delete_nodes(self, chosen: set[int], number: int | None) -> None:
        named = [f"n-{i}" for i in chosen]
        self.store.delete_nodes(named, None if number is None else page(number))
        self.keep(lambda it: it.node_id not in named or number not in (None, it.metadata["page"]))

    @rule(number=st.integers(0, 2))
    def delete_by_filter(self, number: int) -> None:
        self.store.delete_nodes(filters=page(number))
        self.keep(lambda it: it.metadata["page"] != number)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.nodes = {}

    @rule(compact=st.booleans())
    def open_again(self, compact: bool) -> None:
        if compact and self.nodes:
            self.store.client.compact(0.0)
        self.store = RagCacheVectorStore(self.open_store(self.folder / "store"))

    @rule(
        question=st.sampled_from(TEXTS),
        embedded=st.booleans(),
        top_k=st.integers(1, 7),
        number=st.none() | st.integers(0, 2),
        documents=st.lists(st.sampled_from(["a", "b", "n-1"]), max_size=2),
        chosen=st.lists(st.integers(0, 5).map("n-{}".format), max_size=4),
    )
    def query(
        self, question: str, embedded: bool, top_k: int, number: int | None, documents: list[str], chosen: list[str]
    ) -> None:
        vector = self.question(question)
        query = VectorStoreQuery(
            query_str=None if embedded else question,
            query_embedding=vector.tolist() if embedded else None,
            similarity_top_k=top_k,
            filters=None if number is None else page(number),
            doc_ids=documents or None,
            node_ids=chosen or None,
        )
        expected = {
            it.node_id: float(vector @ self.vector(it.get_content(MetadataMode.EMBED)))
            for it in self.nodes.values()
            if number in (None, it.metadata["page"])
            and (not documents or (it.ref_doc_id or it.node_id) in documents)
            and (not chosen or it.node_id in chosen)
        }
        result = self.store.query(query)
        best = sorted(expected.values(), reverse=True)[:top_k]
        np.testing.assert_allclose(result.similarities or [], best, atol=1e-5)
        for it, score in zip(result.nodes or [], result.similarities or [], strict=True):
            # Of equally good ones any may be there, each with its own text.
            assert score == pytest.approx(expected[it.node_id], abs=1e-5)
            assert it.model_dump() == self.nodes[it.node_id].model_dump()

    @invariant()
    def holds_just_these(self) -> None:
        assert {it.node_id: it.hash for it in self.store.get_nodes()} == {id: it.hash for id, it in self.nodes.items()}

    def keep(self, stays: Callable[[TextNode], bool]) -> None:
        self.nodes = {id: it for id, it in self.nodes.items() if stays(it)}

    @functools.lru_cache  # noqa: B019  # texts are few
    def vector(self, text: str) -> Any:
        return self.embedder.passages([text])[1][0]

    @functools.lru_cache  # noqa: B019
    def question(self, text: str) -> Any:
        return self.embedder.question(text)[0]


def test_any_sequence_of_calls(open_tiny: OpenTiny, embedder: Embedder) -> None:
    machine = type(
        "Machine",
        (VectorStoreMachine,),
        {"open_store": staticmethod(lambda path: open_tiny(path)), "embedder": embedder},
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=16,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_it_finds_what_llamaindexs_own_store_finds(store: RagCacheVectorStore) -> None:
    nodes = some()
    model = store.embed_model
    for it in nodes:
        it.embedding = model.get_text_embedding(it.get_content(MetadataMode.EMBED))
    simple = SimpleVectorStore()
    simple.add(nodes)
    store.add(nodes)
    for question in (QUESTION, *TEXTS):
        for filters in (None, page(3, FilterOperator.GT), page(4)):
            for chosen in (None, ["n-1", "n-6", "nobody"]):
                query = VectorStoreQuery(model.get_query_embedding(question), 4, None, chosen, filters=filters)
                mine, own = store.query(query), simple.query(query)
                assert mine.ids == own.ids
                np.testing.assert_allclose(mine.similarities or [], own.similarities or [], atol=1e-5)
    simple.delete("d-1")
    store.delete("d-1")
    assert store.query(query).ids == simple.query(query).ids


def test_an_empty_store(store: RagCacheVectorStore) -> None:
    for _ in range(2):
        assert found(store) == []
        assert store.get_nodes() == store.get_nodes(["n-0"]) == []
        store.delete("nobody")
        store.delete_nodes(["n-0"])
        store.delete_nodes(filters=page(0))
        store.clear()
        assert store.add([node("blank", " ")]) == ["blank"]
        # Then one that was made, and emptied.
        store.add(some(2))
        store.clear()
    with pytest.raises(SettingsError, match="node_ids or filters"):
        store.delete_nodes()


def test_what_a_query_may_ask_for(store: RagCacheVectorStore) -> None:
    store.add(some())
    assert set(found(store, doc_ids=["d-0"])) == {"n-0", "n-3", "n-6"}
    assert set(found(store, node_ids=["n-1", "n-2", "nobody"])) == {"n-1", "n-2"}
    assert set(found(store, doc_ids=["d-0"], node_ids=["n-3", "n-4"])) == {"n-3"}
    assert set(found(store, node_ids=[], doc_ids=[])) == ids(store.get_nodes())
    assert found(store, top_k=1, filters=page(7)) == ["n-7"]
    vector = np.asarray(store.embed_model.get_query_embedding(QUESTION))
    embedded = store.query(VectorStoreQuery(query_embedding=(3 * vector).tolist(), similarity_top_k=3))
    assert embedded.ids == found(store, 3)
    assert max(embedded.similarities or []) <= 1
    assert store.query(VectorStoreQuery(query_embedding=vector, similarity_top_k=3)).ids == embedded.ids  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="'hybrid' is not supported"):
        found(store, mode=VectorStoreQueryMode.HYBRID)
    with pytest.raises(SettingsError, match="query_str nor query_embedding"):
        store.query(VectorStoreQuery(similarity_top_k=1))
    with pytest.raises(VectorsError, match="2 numbers"):
        store.query(VectorStoreQuery(query_embedding=[0.0, 1.0]))


def test_get_nodes(store: RagCacheVectorStore) -> None:
    store.add(some())
    assert [it.node_id for it in store.get_nodes(["n-5", "nobody", "n-2"])] == ["n-5", "n-2"]
    assert store.get_nodes([]) == []
    assert ids(store.get_nodes(filters=page(6, FilterOperator.GTE))) == {"n-6", "n-7"}
    assert ids(store.get_nodes(["n-6", "n-0"], page(6, FilterOperator.GTE))) == {"n-6"}
    store.client.index([make_document(1)])
    text = [it for it in store.get_nodes() if it.ref_doc_id == "doc-1"]
    filters = MetadataFilters(filters=[MetadataFilter(key="title", value="Harbour 1")])
    assert ids(store.get_nodes(filters=filters)) == ids(text) == set(found(store, filters=filters))
    assert all(matches(filters, it.metadata) for it in text)


@pytest.mark.parametrize(
    "spoil", [lambda it: it[::-1], lambda it: [0.0] * len(it), lambda it: it[:100], lambda it: [*it, 0.0]]
)
@pytest.mark.parametrize("before", [0, 2])
def test_vectors_of_another_model_are_refused(
    store: RagCacheVectorStore, spoil: Callable[[list[float]], list[float]], before: int
) -> None:  # fmt: skip
    store.add(some(before))
    nodes = some(4)
    for it in nodes[1:]:
        it.embedding = spoil(store.embed_model.get_text_embedding(it.get_content(MetadataMode.EMBED)))
    with pytest.raises(VectorsError, match="all-minilm-l6-v2"):
        store.add(nodes)
    assert len(store.get_nodes()) == before
    assert before or not store.client.path.exists()


def test_what_cannot_be_stored_stores_nothing(store: RagCacheVectorStore) -> None:
    store.add(some(2))
    for bad in (node("long", "word " * 5000, "d-0"), node("n", "Text", what=object()), node("", "Text")):
        with pytest.raises(SourceError):
            store.add([node("n-0", "Edited.", "d-0"), bad])
    assert {it.get_content() for it in store.get_nodes()} == set(TEXTS[:2])


def test_async_calls_do_not_run_on_the_event_loops_thread(
    store: RagCacheVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[Any, ...], bool]] = []

    def watched(name: str) -> Callable[..., str]:
        def call(self: RagCacheVectorStore, *arguments: Any, **options: Any) -> str:
            calls.append((name, (*arguments, *options.values()), threading.current_thread() is threading.main_thread()))
            return name

        return call

    twins: dict[str, tuple[str, tuple[Any, ...]]] = {
        "async_add": ("add", (["nodes"],)),
        "adelete": ("delete", ("d",)),
        "adelete_nodes": ("delete_nodes", (["n"], page(1))),
        "aclear": ("clear", ()),
        "aget_nodes": ("get_nodes", (["n"], page(1))),
        "aquery": ("query", (VectorStoreQuery(),)),
    }
    for name, _ in twins.values():
        monkeypatch.setattr(RagCacheVectorStore, name, watched(name))
    for twin, (name, arguments) in twins.items():
        result = asyncio.run(getattr(store, twin)(*arguments))
        assert calls.pop() == (name, arguments, False)
        assert result in (name, None)
        assert (result == name) == (twin in ("async_add", "aget_nodes", "aquery"))


def test_async_calls_work(store: RagCacheVectorStore) -> None:
    async def use() -> tuple[list[str], set[str], set[str]]:
        await store.async_add(some(5))
        await store.adelete("d-0")
        await store.adelete_nodes(["n-1"])
        left = await store.aget_nodes()
        result = await store.aquery(VectorStoreQuery(query_str=QUESTION, similarity_top_k=9))
        await store.aclear()
        return result.ids or [], ids(left), ids(await store.aget_nodes())

    result, left, nothing = asyncio.run(use())
    assert set(result) == left == {"n-2", "n-4"}
    assert nothing == set()


def test_threads_that_delete_the_same(store: RagCacheVectorStore) -> None:
    store.add(some())
    calls = [lambda: store.delete("d-0"), store.clear, lambda: store.delete_nodes(["n-1"])]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda call: call(), calls * 2))
    assert store.get_nodes() == []
    assert store.client.store.catalog.signatures() == {}


def test_what_another_deletes_meanwhile_does_not_save_the_rest(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RagCacheVectorStore(open_tiny())
    store.add(some())
    other = RagCacheVectorStore(open_tiny())
    delete = store.client.delete

    def late(*arguments: Any, **options: Any) -> list[str]:
        monkeypatch.undo()
        other.delete("d-0")
        return delete(*arguments, **options)

    monkeypatch.setattr(store.client, "delete", late)
    store.clear()
    assert store.get_nodes() == []


# What LlamaIndex does with it.


@pytest.fixture
def index(store: RagCacheVectorStore) -> VectorStoreIndex:
    storage = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(some(), storage_context=storage, embed_model=store.embed_model)


def retrieved(index: VectorStoreIndex, top_k: int = 99, **options: Any) -> set[str]:
    return ids([it.node for it in index.as_retriever(similarity_top_k=top_k, **options).retrieve(QUESTION)])


def test_an_index_over_a_store(index: VectorStoreIndex, store: RagCacheVectorStore) -> None:
    assert retrieved(index) == ids(store.get_nodes()) == {f"n-{i}" for i in range(len(TEXTS))}
    assert [it.node_id for it in index.as_retriever(similarity_top_k=3).retrieve(QUESTION)] == found(store, 3)
    opened = VectorStoreIndex.from_vector_store(store, embed_model=store.embed_model)
    assert retrieved(opened) == retrieved(index)
    assert retrieved(opened, filters=page(5, FilterOperator.GTE)) == {"n-5", "n-6", "n-7"}
    assert retrieved(opened, doc_ids=["d-2"]) == {"n-2", "n-5"}
    chosen = VectorIndexRetriever(opened, similarity_top_k=9, node_ids=["n-2"])
    assert [it.node_id for it in chosen.retrieve(QUESTION)] == ["n-2"]
    asked = asyncio.run(opened.as_retriever(similarity_top_k=2).aretrieve(QUESTION))
    assert [it.node_id for it in asked] == found(store, 2)


def test_inserting_updating_and_deleting(store: RagCacheVectorStore) -> None:
    index = VectorStoreIndex.from_vector_store(
        store, embed_model=store.embed_model, transformations=[SentenceSplitter(chunk_size=40, chunk_overlap=0)]
    )
    document = LlamaDocument(id_="doc", text=" ".join(TEXTS * 3), metadata={"file": "a.txt"})
    index.insert(document)
    first = store.get_nodes()
    assert len(first) > 2
    assert {it.ref_doc_id for it in first} == {"doc"}
    assert all(it.metadata == {"file": "a.txt"} for it in first)
    index.insert_nodes(some(3))
    assert retrieved(index) == ids(first) | {"n-0", "n-1", "n-2"}
    index.insert_nodes([node("n-0", "Edited.", "d-0")])
    assert store.get_nodes(["n-0"])[0].get_content() == "Edited."
    index.update_ref_doc(LlamaDocument(id_="doc", text="Short by now.", metadata={"file": "b.txt"}))
    (updated,) = (it for it in store.get_nodes() if it.ref_doc_id == "doc")
    assert (updated.get_content(), updated.metadata) == ("Short by now.", {"file": "b.txt"})
    assert retrieved(index) == {updated.node_id, "n-0", "n-1", "n-2"}
    index.delete_nodes(["n-1"])
    assert retrieved(index) == {updated.node_id, "n-0", "n-2"}
    index.delete_ref_doc("doc", delete_from_docstore=True)
    index.delete_ref_doc("nobody")
    assert retrieved(index) == {"n-0", "n-2"}


def test_refreshing(store: RagCacheVectorStore) -> None:
    index = VectorStoreIndex.from_vector_store(store, embed_model=store.embed_model)
    documents = [LlamaDocument(id_=f"doc-{i}", text=TEXTS[i]) for i in range(3)]
    assert index.refresh_ref_docs(documents) == [True, True, True]
    version = store.client.store.catalog.vectors()
    assert index.refresh_ref_docs(documents) == [False, False, False]
    assert store.client.store.catalog.vectors() == version
    documents[1] = LlamaDocument(id_="doc-1", text="Edited.")
    assert index.refresh_ref_docs(documents) == [False, True, False]
    assert {it.ref_doc_id: it.get_content() for it in store.get_nodes()} == {
        "doc-0": TEXTS[0],
        "doc-1": "Edited.",
        "doc-2": TEXTS[2],
    }


def test_an_ingestion_pipeline(store: RagCacheVectorStore) -> None:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=40, chunk_overlap=0), store.embed_model],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        vector_store=store,
        disable_cache=True,
    )
    documents = [LlamaDocument(id_=f"doc-{i}", text=" ".join(TEXTS[i:])) for i in range(3)]
    pipeline.run(documents=documents)
    before = {it.node_id for it in store.get_nodes() if it.ref_doc_id == "doc-2"}
    pipeline.run(documents=[LlamaDocument(id_="doc-0", text="Edited."), documents[2]])
    assert {it.ref_doc_id for it in store.get_nodes()} == {"doc-0", "doc-2"}
    assert {it.node_id for it in store.get_nodes() if it.ref_doc_id == "doc-2"} == before
    assert [it.get_content() for it in store.get_nodes() if it.ref_doc_id == "doc-0"] == ["Edited."]


def test_index_nodes_lead_where_they_point(store: RagCacheVectorStore) -> None:
    leaf = TextNode(id_="leaf", text="What is behind the index node.")
    pointer = IndexNode(id_="pointer", text=TEXTS[0], index_id="leaf", obj=leaf)
    storage = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(objects=[pointer], storage_context=storage, embed_model=store.embed_model)
    assert [it.node_id for it in index.as_retriever(similarity_top_k=1).retrieve(QUESTION)] == ["leaf"]


def test_the_retrievers_own_store(cache: RagCache) -> None:
    store = RagCacheRetriever(cache).as_vector_store()
    assert store.client is cache
    assert {it.ref_doc_id for it in store.get_nodes()} == {"doc-0", "doc-1", "doc-2"}
    assert "RagCacheVectorStore" in store.to_json()
