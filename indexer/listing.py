"""The nodes of LlamaIndex indexes, wherever an index keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ragcache.errors import SourceError

if TYPE_CHECKING:
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.schema import BaseNode
    from llama_index.core.vector_stores.types import BasePydanticVectorStore


def nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """The nodes of a LlamaIndex index.

    Raises:
        SourceError: it keeps them where they cannot be listed.
    """
    from llama_index.core import VectorStoreIndex
    from llama_index.core.vector_stores import SimpleVectorStore

    if isinstance(index, VectorStoreIndex):
        vectors = index.vector_store
        if vectors.stores_text and not index._store_nodes_override:
            return _nodes_in(vectors, index)
        ids = index.index_struct.nodes_dict
        if isinstance(vectors, SimpleVectorStore):
            # Nodes that an index deletes go from there, and not always from where it keeps their texts.
            ids = {vector: node for vector, node in ids.items() if vector in vectors.data.embedding_dict}
        return _nodes_named(index, ids.values())
    # A list, a tree, a table of summaries, one of keywords.
    for name in ("nodes", "all_nodes", "node_id_to_summary_id", "node_ids"):
        found: Any = getattr(index.index_struct, name, None)
        if found is not None:
            if name == "all_nodes":
                found = found.values()
            # Sets of texts have another order in each process.
            return _nodes_named(index, sorted(found) if isinstance(found, set) else found)
    raise _cannot_be_listed(index)


def embedding_model_of(index: BaseIndex[Any]) -> str | None:
    """Name or folder of the model that an index embeds with, if that is a HuggingFaceEmbedding."""
    model = getattr(index, "_embed_model", None)
    return str(getattr(model, "model_name", "")) or None if type(model).__name__ == "HuggingFaceEmbedding" else None


def _nodes_in(vectors: BasePydanticVectorStore, index: BaseIndex[Any]) -> list[BaseNode]:
    try:
        return list(vectors.get_nodes(None))
    # Some stores have no such call, and some take it only with ids or filters.
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise _cannot_be_listed(index) from error


def _nodes_named(index: BaseIndex[Any], ids: Iterable[str]) -> list[BaseNode]:
    ids = list(dict.fromkeys(ids))
    nodes = index.docstore.get_nodes(ids, raise_error=False)
    if len(nodes) < len(ids):
        raise _cannot_be_listed(index)
    return nodes


def _cannot_be_listed(index: BaseIndex[Any]) -> SourceError:
    return SourceError(
        f"the nodes of this {type(index).__name__} cannot be listed: neither its docstore nor its vector store gives "
        "all of them; hand them to RagCache.index_nodes"
    )
