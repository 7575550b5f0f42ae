"""Chunks of a store as LlamaIndex nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from ragcache.indexer.nodes import metadata_of
from ragcache.llama_index.filters import matches
from ragcache.llama_index.vector_store import RagCacheVectorStore
from ragcache.pipeline import RagCache


class RagCacheRetriever(BaseRetriever):
    """Retrieves from a store.

    A chunk that came as a node is that node again. One that was split from a document here is a node whose id is the
    chunk's.
    """

    def __init__(
        self,
        cache: RagCache,
        similarity_top_k: int | None = None,
        filters: MetadataFilters | None = None,
        **kwargs: Any,
    ) -> None:
        """Wrap an opened store.

        Args:
            cache: the store.
            similarity_top_k: how many nodes; by default the store's `top_k`.
            filters: what their metadata must satisfy.
            kwargs: go to LlamaIndex's `BaseRetriever`.
        """
        super().__init__(**kwargs)
        self._cache = cache
        self._similarity_top_k = similarity_top_k
        self._filters = filters

    def as_vector_store(self) -> RagCacheVectorStore:
        """The store behind this retriever, for LlamaIndex's indexes and ingestion pipelines."""
        return RagCacheVectorStore(self._cache)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        filters = self._filters
        accept = None if filters is None else lambda chunk: matches(filters, metadata_of(chunk))
        hits = self._cache.retrieve(self._asked(query_bundle), self._similarity_top_k, accept)
        return [NodeWithScore(node=self._cache.as_node(hit.chunk), score=hit.score) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _asked(self, query: QueryBundle) -> str | Sequence[float]:
        """The question, or a vector where its maker gave one or has more than one text embedded (as HyDE does)."""
        if query.embedding is not None:
            return query.embedding
        texts = query.embedding_strs
        if not texts or texts == [query.query_str]:
            return query.query_str
        return list(np.concatenate([self._cache.embedder.question(text) for text in texts]).mean(axis=0).tolist())
