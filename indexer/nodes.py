"""LlamaIndex nodes as documents that come split, and chunks as nodes again.

A node is one chunk. The language model reads what LlamaIndex shows it of a node, with the metadata that are not kept
from it; the embedding model likewise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from ragcache.errors import PassageError, SourceError
from ragcache.indexer.documents import Document, Passage
from ragcache.states.catalog import Catalog
from ragcache.states.records import ChunkRecord

if TYPE_CHECKING:
    from llama_index.core.schema import BaseNode

NODE_KEY = "_node"
"""Among a chunk's own metadata: the node that it was, less text and metadata, and the order of these.

A node's metadata may have that name too; its value is then kept in there.
"""

_KEPT = {"type", "metadata", "content", "value"}


def document_id(node: BaseNode) -> str:
    """The document that a node is of; one of none is its own document."""
    return node.ref_doc_id or node.node_id


def prompt_text(node: BaseNode) -> str:
    """What the language model reads of a node.

    Metadata that JSON has no kind for, such as dates, read as they do in the node that comes back from a store.

    Raises:
        PassageError: its templates cannot be filled in.
    """
    from llama_index.core.schema import MetadataMode

    # Where they are no JSON at all, no store can have the node.
    with suppress(ValueError):
        node = node.model_copy(update={"metadata": _as_json(node.metadata)})
    try:
        return node.get_content(metadata_mode=MetadataMode.LLM).strip()
    except (LookupError, ValueError, AttributeError) as error:
        raise PassageError(f"the templates of node {node.node_id!r} cannot be filled in: {error!r}") from error


def documents_of(nodes: Iterable[BaseNode]) -> list[Document]:
    """Nodes gathered by the document that they are of, in the order they come.

    Nodes without text are left out. A document of such nodes alone has no passages, for it has come to say nothing;
    where all documents are such there are none.

    Raises:
        SourceError: something is no node, or its metadata are no JSON.
    """
    nodes = list(nodes)
    gathered = _by_document(nodes)
    if gathered:
        for node in nodes:
            gathered.setdefault(document_id(node), {})
    return [_document(id, list(of_one.values())) for id, of_one in gathered.items()]


class AmendedDocuments:
    """Documents as the store has them, with some nodes put in and some taken out.

    One that is left without nodes has no passages. May be iterated over again, and is then as the store is by then.
    """

    def __init__(
        self,
        nodes: Iterable[BaseNode],
        removed: Mapping[str, Collection[str]],
        catalog: Callable[[], Catalog | None],
        as_node: Callable[[ChunkRecord], BaseNode],
    ) -> None:
        """Set up.

        Args:
            nodes: put in, or in the place of those of the same ids; one without text only takes the old one out.
            removed: by document the ids of nodes that are taken out.
            catalog: gives that of the store; `None` while there is no store.
            as_node: makes a chunk of the catalog a node, so that the language model reads the same of it.

        Raises:
            SourceError: something is no node.
        """
        nodes = list(nodes)
        self._nodes = _by_document(nodes)
        self._removed = removed
        self._owners = {it.node_id: document_id(it) if _text(it).strip() else None for it in nodes}
        self._catalog = catalog
        self._as_node = as_node

    def __iter__(self) -> Iterator[Document]:
        catalog = self._catalog()
        removed = {document: set(ids) for document, ids in self._removed.items()}
        # One that has come to be of another document, or without text, is no longer one of its old one.
        for node, owner in catalog.documents_of(list(self._owners)).items() if catalog else ():
            if self._owners[node] != owner:
                removed.setdefault(owner, set()).add(node)
        for document in dict.fromkeys([*self._nodes, *removed]):
            chunks = catalog.chunks_by_vector(sorted(catalog.vector_ids([document]))) if catalog else []
            gone = removed.get(document, ())
            nodes = {it.chunk_id: self._as_node(it) for it in chunks if it.chunk_id not in gone}
            nodes |= self._nodes.get(document, {})
            # Where no title was given, the id stands in its place.
            title = chunks[0].title if chunks else document
            yield _document(document, list(nodes.values()), title if title != document else "")


def node_of(chunk: ChunkRecord, title: str) -> BaseNode:
    """A chunk as a node.

    Args:
        chunk: from the catalog.
        title: what stands in front of it for the language model, if it was split from a document here.
    """
    from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

    metadata = metadata_of(chunk)
    if (kept := _kept(chunk)) is not None:
        return _restored(kept["type"], kept["content"] | {"metadata": metadata}, chunk.text)
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


def metadata_of(chunk: ChunkRecord) -> dict[str, Any]:
    """The metadata of a chunk's node, in their order."""
    kept = _kept(chunk)
    if kept is None:
        return chunk.metadata | {"title": chunk.title}
    values = chunk.metadata | {NODE_KEY: kept.get("value")}
    return {name: values[name] for name in kept["metadata"]}


def _kept(chunk: ChunkRecord) -> dict[str, Any] | None:
    """What is kept of the node that a chunk was; `None` where it was none."""
    kept = chunk.own_metadata.get(NODE_KEY)
    return kept if isinstance(kept, dict) and kept.keys() | {"value"} == _KEPT else None


def _by_document(nodes: Iterable[BaseNode]) -> dict[str, dict[str, BaseNode]]:
    from llama_index.core.schema import BaseNode

    gathered: dict[str, dict[str, BaseNode]] = {}
    for node in nodes:
        if not isinstance(node, BaseNode):
            raise SourceError(f"{type(node).__name__} is no LlamaIndex node; give nodes, such as a node parser makes")
        if _text(node).strip():
            gathered.setdefault(document_id(node), {})[node.node_id] = node
    return gathered


def _document(id: str, nodes: Sequence[BaseNode], title: str = "") -> Document:
    """A document of nodes; metadata that are the same in all of them are its own."""
    described = [_described(node) for node in nodes]
    shared = described[0]["metadata"] if described else {}
    for one in described[1:]:
        shared = {name: value for name, value in shared.items() if _has(one["metadata"], name, value)}
    shared = {name: value for name, value in shared.items() if name != NODE_KEY}
    passages = [_passage(node, one, shared) for node, one in zip(nodes, described, strict=True)]
    return Document(id, "", title, shared, tuple(passages))


def _has(metadata: Mapping[str, Any], name: str, value: object) -> bool:
    # As JSON, so that 1, 1.0 and true differ.
    return name in metadata and json.dumps(metadata[name]) == json.dumps(value)


def _passage(node: BaseNode, described: Mapping[str, Any], shared: Mapping[str, Any]) -> Passage:
    from llama_index.core.schema import MetadataMode

    text, metadata = _text(node), described["metadata"]
    # What it reads like once it comes back is what counts.
    stored = _restored(kind := _kind(node), described, text)
    try:
        shown, embedded = prompt_text(stored), stored.get_content(metadata_mode=MetadataMode.EMBED)
    except PassageError as error:
        raise SourceError(str(error)) from error
    except (LookupError, ValueError, AttributeError) as error:
        raise SourceError(f"the templates of node {node.node_id!r} cannot be filled in: {error!r}") from error
    kept = {
        "type": kind,
        "metadata": list(metadata),
        "content": {name: value for name, value in described.items() if name != "metadata"},
    }
    if NODE_KEY in metadata:
        kept["value"] = metadata[NODE_KEY]
    return Passage(
        node.node_id,
        text,
        prompt_text=shown,
        embedding_text=embedded if embedded != text else "",
        metadata={name: value for name, value in metadata.items() if name not in shared} | {NODE_KEY: kept},
    )


def _described(node: BaseNode) -> dict[str, Any]:
    """All of a node but text and embedding, as JSON gives it back."""
    try:
        left_out: dict[str, Any] = {"text": True, "text_resource": {"text"}, "embedding": True, "metadata": True}
        described = node.model_dump(mode="json", exclude=left_out) | {"metadata": node.metadata}
        return dict(_as_json(described))
    except ValueError as error:
        raise SourceError(f"node {node.node_id!r} holds what is no JSON: {error}; change its metadata") from error


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON gives back of a value.

    Raises:
        ValueError: it cannot be written as JSON.
    """
    try:
        return dict(json.loads(json.dumps(to_jsonable_python(value))))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _classes() -> dict[str, type[BaseNode]]:
    from llama_index.core import schema

    known = (schema.TextNode, schema.ImageNode, schema.IndexNode, schema.Node, schema.Document, schema.ImageDocument)
    return {it.class_name(): it for it in known}


def _kind(node: BaseNode) -> str:
    """Name of LlamaIndex's own class that a node is of; others cannot be made again here."""
    known = _classes()
    return next((name for it in type(node).__mro__ for name, own in known.items() if own is it), "TextNode")


def _restored(kind: str, described: Mapping[str, Any], text: str) -> BaseNode:
    """Inverse of `_kind`, `_described` and `_text`."""
    from llama_index.core.schema import Node

    own = _classes()[kind]
    if issubclass(own, Node):
        resource = (described.get("text_resource") or {}) | {"text": text}
        return own.from_dict(dict(described) | {"text_resource": resource})
    return own.from_dict(dict(described) | {"text": text})


def _text(node: BaseNode) -> str:
    from llama_index.core.schema import MetadataMode

    return node.get_content(metadata_mode=MetadataMode.NONE)
