"""LlamaIndex nodes as documents that come split, and chunks as nodes again.

A node is one chunk. The language model reads what LlamaIndex shows it of a node, with the metadata that are not kept
from it; the embedding model likewise.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragcache.errors import SourceError
from ragcache.indexer.documents import Document, Passage
from ragcache.states.catalog import Catalog
from ragcache.states.records import ChunkRecord

if TYPE_CHECKING:
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.schema import BaseNode

NODE_KEY = "_node"
"""Among a chunk's own metadata: the node that it was, less text and metadata, and the order of these."""


def document_id(node: BaseNode) -> str:
    """The document that a node is of; one of none is its own document."""
    return node.ref_doc_id or node.node_id


def prompt_text(node: BaseNode) -> str:
    """What the language model reads of a node."""
    from llama_index.core.schema import MetadataMode

    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def documents_of(nodes: Iterable[BaseNode]) -> list[Document]:
    """Nodes gathered by the document that they are of, in the order they come.

    Nodes without text are left out, and so are documents of such nodes alone.

    Raises:
        SourceError: something is no node, or its metadata are no JSON.
    """
    return [_document(id, list(of_one.values())) for id, of_one in _by_document(nodes).items()]


class AmendedDocuments:
    """Documents as the store has them, with some nodes put in and some taken out.

    May be iterated over again, and is then as the store is by then.
    """

    def __init__(self, nodes: Iterable[BaseNode], removed: Mapping[str, Collection[str]], catalog: Catalog) -> None:
        """Set up.

        Args:
            nodes: put in, or in the place of those of the same ids.
            removed: by document the ids of nodes that are taken out.
            catalog: of the store.

        Raises:
            SourceError: something is no node.
        """
        self._nodes = _by_document(nodes)
        self._removed = removed
        self._catalog = catalog

    def __iter__(self) -> Iterator[Document]:
        for document in dict.fromkeys([*self._nodes, *self._removed]):
            chunks = self._catalog.chunks_by_vector(sorted(self._catalog.vector_ids([document])))
            gone = self._removed.get(document, ())
            nodes = {it.chunk_id: node_of(it, it.title) for it in chunks if it.chunk_id not in gone}
            nodes |= self._nodes.get(document, {})
            yield _document(document, list(nodes.values()), chunks[0].title if chunks else "")


def node_of(chunk: ChunkRecord, title: str) -> BaseNode:
    """A chunk as a node.

    Args:
        chunk: from the catalog.
        title: what stands in front of it for the language model, if it was split from a document here.
    """
    from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
    from llama_index.core.vector_stores.utils import metadata_dict_to_node

    if (stored := chunk.own_metadata.get(NODE_KEY)) is not None:
        metadata = {name: chunk.metadata[name] for name in stored["metadata"]}
        content = json.dumps(stored["content"] | {"metadata": metadata})
        return metadata_dict_to_node({"_node_content": content, "_node_type": stored["type"]}, text=chunk.text)
    metadata = chunk.metadata | {"title": chunk.title}
    return TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        metadata=metadata,
        # So that whoever asks the node for its text reads what the chunk was encoded from.
        excluded_llm_metadata_keys=[name for name in metadata if name != "title" or not title],
        excluded_embed_metadata_keys=list(metadata),
        metadata_template="{value}",
        text_template="[{metadata_str}]\n{content}",
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.document_id)},
    )


def nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """The nodes of a LlamaIndex index.

    Raises:
        SourceError: it keeps them where they cannot be listed.
    """
    structure = index.index_struct
    ids = list(getattr(structure, "nodes_dict", {}).values()) or list(getattr(structure, "nodes", []))
    found = index.docstore.get_nodes(ids, raise_error=False) if ids else list(index.docstore.docs.values())
    # Ingestion pipelines keep documents in the same place as the nodes that were made of them.
    if nodes := [node for node in found if ids or not _is_document(node)]:
        return nodes
    try:
        return list(index.vector_store.get_nodes(None))  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError) as error:
        raise SourceError(
            f"the nodes of this {type(index).__name__} cannot be listed: its docstore is empty, and its vector store "
            "does not give them; hand them to RagCache.index_nodes"
        ) from error


def embedding_model_of(index: BaseIndex[Any]) -> str | None:
    """Name or folder of the model that an index embeds with, if that is a HuggingFaceEmbedding."""
    model = getattr(index, "_embed_model", None)
    return str(getattr(model, "model_name", "")) or None if type(model).__name__ == "HuggingFaceEmbedding" else None


def _by_document(nodes: Iterable[BaseNode]) -> dict[str, dict[str, BaseNode]]:
    from llama_index.core.schema import BaseNode

    gathered: dict[str, dict[str, BaseNode]] = {}
    for node in nodes:
        if not isinstance(node, BaseNode):
            raise SourceError(f"{type(node).__name__} is no LlamaIndex node; give nodes, such as a node parser makes")
        if _text(node).strip():
            gathered.setdefault(document_id(node), {})[node.node_id] = node
    return gathered


def _is_document(node: BaseNode) -> bool:
    from llama_index.core.schema import Document as LlamaDocument

    return isinstance(node, LlamaDocument)


def _document(id: str, nodes: Sequence[BaseNode], title: str = "") -> Document:
    """A document of nodes; metadata that are the same in all of them are its own."""
    described = [_described(node) for node in nodes]
    shared = described[0]["metadata"] if described else {}
    for one in described[1:]:
        shared = {name: value for name, value in shared.items() if _has(one["metadata"], name, value)}
    passages = [_passage(node, one, shared) for node, one in zip(nodes, described, strict=True)]
    return Document(id, "", title, shared, tuple(passages))


def _has(metadata: Mapping[str, Any], name: str, value: object) -> bool:
    # As JSON, so that 1, 1.0 and true differ.
    return name in metadata and json.dumps(metadata[name]) == json.dumps(value)


def _passage(node: BaseNode, described: Mapping[str, Any], shared: Mapping[str, Any]) -> Passage:
    from llama_index.core.schema import MetadataMode

    text, embedded = _text(node), node.get_content(metadata_mode=MetadataMode.EMBED)
    metadata = described["metadata"]
    kept = {
        "type": node.class_name(),
        "metadata": list(metadata),
        "content": {name: value for name, value in described.items() if name != "metadata"},
    }
    return Passage(
        node.node_id,
        text,
        prompt_text=prompt_text(node),
        embedding_text=embedded if embedded != text else "",
        metadata={name: value for name, value in metadata.items() if name not in shared} | {NODE_KEY: kept},
    )


def _described(node: BaseNode) -> dict[str, Any]:
    """All of a node but text and embedding, as JSON values."""
    try:
        return node.model_dump(mode="json", exclude={"text", "text_resource", "embedding"})
    except ValueError as error:
        raise SourceError(f"node {node.node_id!r} holds what is no JSON: {error}; change its metadata") from error


def _text(node: BaseNode) -> str:
    from llama_index.core.schema import MetadataMode

    return node.get_content(metadata_mode=MetadataMode.NONE)
