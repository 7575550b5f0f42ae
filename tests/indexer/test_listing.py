"""A store made from a LlamaIndex index holds what the index holds, and follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    DocumentSummaryIndex,
    MockEmbedding,
    SimpleKeywordTableIndex,
    StorageContext,
    SummaryIndex,
    TreeIndex,
    VectorStoreIndex,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, IndexNode, TextNode
from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from ragcache import RagCache
from ragcache.errors import SourceError
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.listing import embedding_model_of, nodes_of
from ragcache.indexer.report import Silent
from ragcache.llama_index.vector_store import RagCacheVectorStore
from ragcache.model.resolve import resolve
from ragcache.retriever.embedding import Embedder

OpenTiny = Callable[..., RagCache]

SENTENCES = [f"Sentence {i} tells how ship number {i} came into the harbour." for i in range(12)]
SPLITTER = SentenceSplitter(chunk_size=32, chunk_overlap=0, include_prev_next_rel=False)


def document(number: int, sentences: int = 6) -> LlamaDocument:
    text = " ".join(f"{it} Document {number}." for it in SENTENCES[:sentences])
    return LlamaDocument(id_=f"doc-{number}", text=text, metadata={"number": number, "file_name": f"{number}.txt"})


DOCUMENTS = [document(number) for number in range(3)]


class OneWayStore(BasePydanticVectorStore):
    """A vector store that keeps texts, as FaissVectorStore does not, and cannot list them."""

    stores_text: bool = True
    kept: dict[str, Any] = Field(default_factory=dict)

    @property
    def client(self) -> None:
        return None

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.kept |= {it.node_id: it for it in nodes}
        return [it.node_id for it in nodes]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        raise NotImplementedError

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        raise NotImplementedError


class OnlyById(OneWayStore):
    def get_nodes(self, node_ids: list[str] | None = None, filters: Any = None) -> list[BaseNode]:
        if node_ids is None:
            raise ValueError("give node_ids or filters")
        return [self.kept[id] for id in node_ids]


@pytest.fixture
def from_index(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RagCache]:
    """`RagCache.from_index`, with models that are loaded already."""

    def opened(cls: type[RagCache], /, path: Path, on_stage: object = None, **settings: Any) -> RagCache:
        return open_tiny(path, **{name: it for name, it in settings.items() if it is not None})

    monkeypatch.setattr(RagCache, "open", classmethod(opened))
    return RagCache.from_index


def vector_index(embedder: Embedder, documents: Sequence[LlamaDocument] = (), **more: Any) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        list(documents), transformations=[SPLITTER], embed_model=embedder.llama_index, **more
    )


def hashes(nodes: Sequence[BaseNode]) -> dict[str, str]:
    return {it.node_id: it.hash for it in nodes}


def holds(cache: RagCache) -> dict[str, str]:
    return hashes(RagCacheVectorStore(cache).get_nodes())


def assert_mirrors(cache: RagCache, index: VectorStoreIndex) -> None:
    found = index.as_retriever(similarity_top_k=99).retrieve("Which ship?")
    assert holds(cache) == hashes([it.node for it in found])
    best = [(it.node_id, it.score) for it in found[:4]]
    mine = [(hit.chunk.chunk_id, hit.score) for hit in cache.retrieve("Which ship?", 4)]
    assert [id for id, _ in mine] == [id for id, _ in best]
    assert [score for _, score in mine] == pytest.approx([score for _, score in best], abs=1e-5)


def test_a_vector_store_index_and_what_becomes_of_it(
    from_index: Callable[..., RagCache], embedder: Embedder, tmp_path: Path
) -> None:
    index = vector_index(embedder, DOCUMENTS)
    tokens: list[int] = []

    class Counted(Silent):
        def advance(self, documents: int, chunks: int, of_them: int) -> None:
            tokens.append(of_them)

    cache = from_index(index, tmp_path / "store", progress=Counted())
    assert_mirrors(cache, index)
    assert len(holds(cache)) > 9
    everything = sum(tokens)
    assert everything > 0

    def again() -> int:
        """Open anew, and say how many tokens that took."""
        encoded: list[int] = []
        encode = StateEncoder.encode

        def watched(self: StateEncoder, sequences: Any) -> Any:
            encoded.extend(len(it.chunk.token_ids) if hasattr(it, "chunk") else 1 for it in sequences)
            return encode(self, sequences)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateEncoder, "encode", watched)
            assert_mirrors(from_index(index, tmp_path / "store"), index)
        return len(encoded)

    assert again() == 0
    index.insert(document(9, 1))
    assert again() == 1
    index.update_ref_doc(document(1, 5))
    assert again() == 0  # what it has by now, it had before
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    index.delete_ref_doc("doc-2")
    assert again() == 0
    gone = next(iter(index.index_struct.nodes_dict))
    index.delete_nodes([gone])
    assert gone in index.docstore.docs
    assert again() == 0
    assert gone not in holds(cache)
    cut = next(it for it in index.docstore.docs.values() if it.node_id != gone and it.ref_doc_id == "doc-1")
    edited = TextNode(id_=cut.node_id, text="Edited by hand.", relationships=cut.relationships)
    index.insert_nodes([edited])
    assert again() == 1
    assert holds(cache)[edited.node_id] == edited.hash


def test_an_index_that_has_become_empty_is_refused(
    from_index: Callable[..., RagCache], embedder: Embedder, tmp_path: Path
) -> None:
    """And what else is in its docstore does not take its place."""
    storage = StorageContext.from_defaults(docstore=SimpleDocumentStore())
    index, other = vector_index(embedder, DOCUMENTS[:1], storage_context=storage), None
    other = SummaryIndex.from_documents(DOCUMENTS[1:], storage_context=storage, transformations=[SPLITTER])
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert nodes_of(index) == []
    assert nodes_of(other)
    with pytest.raises(SourceError, match="no documents"):
        from_index(index, tmp_path / "store")


def test_indexes_that_share_a_docstore(from_index: Callable[..., RagCache], embedder: Embedder, tmp_path: Path) -> None:
    docstore = SimpleDocumentStore()
    pipeline = IngestionPipeline(transformations=[SPLITTER], docstore=docstore, disable_cache=True)
    nodes = list(pipeline.run(documents=DOCUMENTS))
    mine, others = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    indexes: list[BaseIndex[Any]] = [
        VectorStoreIndex(
            mine, storage_context=StorageContext.from_defaults(docstore=docstore), embed_model=embedder.llama_index
        ),
        SummaryIndex(others, storage_context=StorageContext.from_defaults(docstore=docstore)),
    ]
    assert len(docstore.docs) > len(nodes)
    assert hashes(nodes_of(indexes[0])) == hashes(mine)
    assert hashes(nodes_of(indexes[1])) == hashes(others)
    assert holds(from_index(indexes[1], tmp_path / "summary")) == hashes(others)


def test_indexes_of_other_kinds(embedder: Embedder) -> None:
    nodes = [TextNode(id_=f"n-{i}", text=text) for i, text in enumerate(SENTENCES)]
    named = {it.node_id for it in nodes}
    llm = MockLLM(max_tokens=4)
    assert [it.node_id for it in nodes_of(SummaryIndex(nodes))] == [it.node_id for it in nodes]
    keywords: BaseIndex[Any] = SimpleKeywordTableIndex(nodes, llm=llm)
    assert [it.node_id for it in nodes_of(keywords)] == sorted(named)
    assert {it.node_id for it in nodes_of(TreeIndex(nodes, llm=llm, num_children=4))} >= named
    summaries = DocumentSummaryIndex.from_documents(
        DOCUMENTS, transformations=[SPLITTER], llm=llm, embed_model=embedder.llama_index, embed_summaries=False
    )
    assert {it.ref_doc_id for it in nodes_of(summaries)} == {"doc-0", "doc-1", "doc-2"}
    assert len(nodes_of(summaries)) > 9


def test_an_index_over_a_store(
    from_index: Callable[..., RagCache], open_tiny: OpenTiny, embedder: Embedder, tmp_path: Path
) -> None:
    first = RagCacheVectorStore(open_tiny(tmp_path / "first"))
    index = vector_index(embedder, DOCUMENTS, storage_context=StorageContext.from_defaults(vector_store=first))
    # An index keeps such nodes, and only such, beside a store that has them too.
    index.insert_nodes([IndexNode(id_="pointer", text="Points somewhere.", index_id="other")])
    assert list(index.index_struct.nodes_dict) == ["pointer"]
    cache = from_index(index, tmp_path / "second")
    assert holds(cache) == holds(first.client)
    assert "pointer" in holds(cache)
    first.delete("doc-1")
    assert holds(from_index(index, tmp_path / "second")) == holds(first.client)
    # Of its own store nothing has to be done.
    version = first.client.store.catalog.vectors()
    from_index(index, tmp_path / "first")
    assert first.client.store.catalog.vectors() == version


@pytest.mark.parametrize("kind", [OneWayStore, OnlyById])
def test_a_store_that_cannot_list_its_nodes(
    from_index: Callable[..., RagCache], embedder: Embedder, tmp_path: Path, kind: type[OneWayStore]
) -> None:
    storage = StorageContext.from_defaults(vector_store=kind())
    index = vector_index(embedder, DOCUMENTS, storage_context=storage)
    # One node of many that it would give.
    index.insert_nodes([IndexNode(id_="pointer", text="Points somewhere.", index_id="other")])
    with pytest.raises(SourceError, match=r"VectorStoreIndex cannot be listed.*index_nodes"):
        from_index(index, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    storage = StorageContext.from_defaults(vector_store=kind())
    kept = vector_index(embedder, DOCUMENTS, storage_context=storage, store_nodes_override=True)
    assert hashes(nodes_of(kept)) == hashes(list(kept.docstore.docs.values()))


def test_an_index_whose_texts_are_elsewhere_is_refused(embedder: Embedder) -> None:
    index = vector_index(embedder, DOCUMENTS)
    index.docstore.delete_document(next(iter(index.docstore.docs)))
    with pytest.raises(SourceError, match="cannot be listed"):
        nodes_of(index)


def test_the_embedding_model_is_the_indexs(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Nothing stands in for anything here."""
    folder = tmp_path / "my-embedder"
    folder.symlink_to(resolve("all-minilm-l6-v2"))
    model = HuggingFaceEmbedding(model_name=str(folder), device="cpu", normalize=True)
    index = VectorStoreIndex.from_documents(DOCUMENTS[:1], transformations=[SPLITTER], embed_model=model)
    arguments: dict[str, Any] = {"model": str(tiny_folder("llama")), "dtype": "float32", "max_tokens": 4}
    cache = RagCache.from_index(index, tmp_path / "store", **arguments)
    assert cache.settings.embedding_model == str(folder)
    assert_mirrors(cache, index)
    assert not cache.query("Which ship?").misses
    assert RagCache.open(tmp_path / "store").settings.embedding_model == str(folder)
    other = VectorStoreIndex.from_documents(DOCUMENTS[:1], embed_model=MockEmbedding(embed_dim=8))
    assert embedding_model_of(other) is None
    assert embedding_model_of(SummaryIndex([])) is None
