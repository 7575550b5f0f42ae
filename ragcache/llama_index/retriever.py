"""Chunks of a store as LlamaIndex nodes."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

from ragcache.pipeline import RagCache
from ragcache.retriever.retriever import RetrievedChunk


class RagCacheRetriever(BaseRetriever):
    """Retrieves from a store; node ids are chunk ids, so the synthesizer finds their states."""

    def __init__(self, cache: RagCache, top_k: int | None = None, **kwargs: Any) -> None:
        """Wrap an opened store; `top_k` defaults to the store's setting."""
        super().__init__(**kwargs)
        self._cache = cache
        self._top_k = top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [_node(hit) for hit in self._cache.retrieve(query_bundle.query_str, self._top_k)]


def _node(hit: RetrievedChunk) -> NodeWithScore:
    chunk = hit.chunk
    node = TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        metadata={**chunk.metadata, "title": chunk.title},
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.document_id)},
    )
    return NodeWithScore(node=node, score=hit.score)
