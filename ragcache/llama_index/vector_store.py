"""A store as LlamaIndex's vector store: its indexes and ingestion pipelines put nodes in and take them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from ragcache.errors import DocumentNotFoundError, SettingsError, StoreNotFoundError
from ragcache.indexer.nodes import metadata_of
from ragcache.llama_index.filters import matches
from ragcache.pipeline import RagCache
from ragcache.states.records import ChunkRecord


class RagCacheVectorStore(BasePydanticVectorStore):
    """Nodes with their vectors and states.

    Adding a node whose id is there replaces it. The store embeds nodes and questions itself, long texts in several
    vectors; give indexes its `embed_model`, so that they embed with the same one.
    """

    stores_text: bool = True
    is_embedding_query: bool = False

    _cache: RagCache = PrivateAttr()

    def __init__(self, cache: RagCache) -> None:
        """Wrap an opened store."""
        super().__init__(stores_text=True)
        self._cache = cache

    @classmethod
    def class_name(cls) -> str:
        """Key of the class in serialised components."""
        return "RagCacheVectorStore"

    @property
    def client(self) -> RagCache:
        """The store."""
        return self._cache

    @property
    def embed_model(self) -> BaseEmbedding:
        """The embedding model of the store."""
        return self._cache.embedder.llama_index

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode and store nodes; those that are there and have not changed are left as they are.

        A node without text only takes the one of its id out.

        Raises:
            VectorsError: nodes come with vectors of another embedding model.
            SourceError: a node cannot be stored; nothing was.
        """
        embedded = next((node for node in nodes if node.embedding is not None), None)
        if embedded is not None:
            self._cache.embedder.check_same(embedded.get_content(MetadataMode.EMBED), embedded.get_embedding())
        if any(node.get_content(MetadataMode.NONE).strip() for node in nodes):
            self._cache.index_nodes(nodes, amend=True, wait=True)
        else:
            self.delete_nodes([node.node_id for node in nodes])
        return [node.node_id for node in nodes]

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As `add`, in a worker thread."""
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Take all nodes of a document out; none when there are none."""
        self._delete([ref_doc_id])

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As `delete`, in a worker thread."""
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Take nodes out: those of the ids, those that satisfy filters, or those of both when both are given.

        Raises:
            SettingsError: neither is given; `clear` takes all of them out.
        """
        if node_ids is None and filters is None:
            raise SettingsError("give delete_nodes node_ids or filters; clear takes all nodes out")
        if chosen := [chunk.chunk_id for chunk in self._chunks(node_ids, filters)]:
            self._cache.delete_nodes(chosen, wait=True)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """As `delete_nodes`, in a worker thread."""
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Take all documents out."""
        self._delete(None)

    async def aclear(self) -> None:
        """As `clear`, in a worker thread."""
        await asyncio.to_thread(self.clear)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes of some ids, or all of them, that satisfy filters."""
        return [self._cache.as_node(chunk) for chunk in self._chunks(node_ids, filters)]

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """As `get_nodes`, in a worker thread."""
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to a question, with their cosine similarities, best first.

        Empty lists of `node_ids` or `doc_ids` stand for none: LlamaIndex's own retriever gives one.

        Raises:
            SettingsError: the query is of another mode than `default`, or holds neither a text nor a vector.
            VectorsError: the vector is none of the store's embedding model.
        """
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise SettingsError(f"a query mode of {query.mode.value!r} is not supported; use 'default'")
        asked = query.query_str if query.query_embedding is None else query.query_embedding
        if asked is None:
            raise SettingsError("the query holds neither query_str nor query_embedding; give one")

        # An index over a store that holds texts gives no ids, as an empty list.
        nodes, documents = set(query.node_ids or ()), set(query.doc_ids or ())

        def accept(chunk: ChunkRecord) -> bool:
            return (
                (not nodes or chunk.chunk_id in nodes)
                and (not documents or chunk.document_id in documents)
                and matches(query.filters, metadata_of(chunk))
            )

        try:
            hits = self._cache.retrieve(asked, query.similarity_top_k, accept)
        except StoreNotFoundError:
            hits = []
        return VectorStoreQueryResult(
            nodes=[self._cache.as_node(hit.chunk) for hit in hits],
            similarities=[hit.score for hit in hits],
            ids=[hit.chunk.chunk_id for hit in hits],
        )

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """As `query`, in a worker thread."""
        return await asyncio.to_thread(self.query, query, **kwargs)

    def _delete(self, ids: list[str] | None) -> None:
        """Take some documents out, or all of them, as far as they are there."""
        while documents := self._documents(ids):
            # One that someone else has just taken out is no fault; the others are still to go.
            with suppress(DocumentNotFoundError):
                self._cache.delete(documents, wait=True)
                return

    def _documents(self, ids: list[str] | None = None) -> list[str]:
        """Ids of the documents in the store, of all or of some."""
        try:
            catalog = self._cache.store.catalog
        except StoreNotFoundError:
            return []
        return list(catalog.signatures()) if ids is None else [it.id for it in catalog.documents(ids)]

    def _chunks(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> Iterator[ChunkRecord]:
        try:
            catalog = self._cache.store.catalog
        except StoreNotFoundError:
            return
        for chunks in catalog.all_chunks() if node_ids is None else [catalog.chunks_by_id(node_ids)]:
            yield from (chunk for chunk in chunks if matches(filters, metadata_of(chunk)))
