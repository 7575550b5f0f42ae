"""Chunks of an opened store as LlamaIndex nodes."""

from __future__ import annotations

from llama_index.core.schema import BaseNode

from ragcache.indexer.nodes import node_of
from ragcache.indexer.splitting import shown_title
from ragcache.pipeline import RagCache
from ragcache.states.records import ChunkRecord


def as_node(cache: RagCache, chunk: ChunkRecord) -> BaseNode:
    """A chunk as the node that it came as; one that was split from a document as a node whose id is the chunk's.

    In either case what LlamaIndex shows a language model of the node is what the chunk was encoded from.
    """
    return node_of(chunk, shown_title(cache.template, chunk.title, cache.settings.chunk_tokens))
