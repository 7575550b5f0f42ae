"""A step of LlamaIndex's ingestion pipelines that encodes nodes into a store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.storage.docstore.types import BaseDocumentStore

from ragcache.errors import DocumentNotFoundError, SettingsError
from ragcache.indexer.nodes import document_id
from ragcache.pipeline import NODE_SOURCE, RagCache
from ragcache.states.store import StateStore


class _Handle:
    """An opened store, or one that is opened when it is wanted.

    A pipeline copies its steps and sends them to other processes; models must not go with them.
    """

    def __init__(self, cache: RagCache | None = None) -> None:
        self._cache = cache
        self._lock = Lock()

    def get(self, path: str, settings: dict[str, Any]) -> RagCache:
        with self._lock:
            if self._cache is None:
                self._cache = RagCache.open(path, **settings)
            return self._cache

    def __deepcopy__(self, memo: dict[int, Any]) -> _Handle:
        return self

    def __reduce__(self) -> tuple[type[_Handle], tuple[()]]:
        return _Handle, ()


class StateEncoder(TransformComponent):
    """Encodes the nodes that come by into a store, and hands them on as they are.

    The nodes of a document take the place of all that the store had of it; what has not changed is not encoded again.
    A document whose nodes have no text is taken out.
    To be put behind the node parser. Deletions reach the store when it is also the pipeline's vector store
    (`RagCacheRetriever.as_vector_store`), or through `prune`.
    """

    path: str = Field(description="Folder of the store")
    settings: dict[str, Any] = Field(default_factory=dict, description="Settings that it is opened with")
    amend: bool = Field(False, description="What else a document has stays; for pipelines that are given nodes")

    _handle: _Handle = PrivateAttr()

    def __init__(
        self,
        cache: RagCache | None = None,
        *,
        path: str | Path | None = None,
        settings: dict[str, Any] | None = None,
        amend: bool = False,
        **more: Any,
    ) -> None:
        """Encode into a store.

        Args:
            cache: the store, opened.
            path: or its folder; it is opened when the first nodes come.
            settings: any of `ragcache.settings.Settings`, to open it with.
            amend: what else a document has in the store stays. For pipelines that are given nodes rather than
                documents, so that not all nodes of a document need to come at once.
            more: settings by their names.

        Raises:
            SettingsError: neither or both of store and folder are given.
        """
        if (cache is None) == (path is None):
            raise SettingsError("give a StateEncoder either an opened store or the path of one")
        if cache is not None:
            path, settings = cache.path, cache.settings.model_dump(mode="json")
        # What `to_dict` says besides.
        for name in ("class_name", "store"):
            more.pop(name, None)
        super().__init__(path=str(Path(path or "").absolute()), settings=(settings or {}) | more, amend=amend)
        self._handle = _Handle(cache)

    @classmethod
    def class_name(cls) -> str:
        """Key of the class in serialised components."""
        return "RagCacheStateEncoder"

    @property
    def cache(self) -> RagCache:
        """The store, opened if this process has not yet."""
        return self._handle.get(self.path, self.settings)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """What an ingestion cache knows this step by.

        It holds the version of the store: the cache takes nodes that came by before for done, which they are only as
        long as nothing was taken out of the store since.
        """
        return super().to_dict(**kwargs) | {"store": self._version()}

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode nodes.

        Raises:
            SourceError: a node cannot be stored; nothing was.
            StoreError: the store cannot be written to. While another process writes, this waits.
        """
        if any(node.get_content(MetadataMode.NONE).strip() for node in nodes):
            self.cache.index_nodes(nodes, amend=self.amend, wait=True)
        elif nodes and StateStore.exists(Path(self.path)):
            self._take_out(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As calling it, in a worker thread."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def prune(self, docstore: BaseDocumentStore) -> list[str]:
        """Take documents out of the store that a pipeline's docstore does not have any more.

        For pipelines with another vector store, which alone is told of deletions.

        Returns:
            Ids of the documents removed.
        """
        if not StateStore.exists(Path(self.path)):
            return []
        # One by one: all of them at once come by their hashes, which equal documents share.
        documents = self.cache.store.catalog.signatures(NODE_SOURCE)
        gone = [it for it in documents if docstore.get_document_hash(it) is None]
        return self.cache.delete(gone, wait=True) if gone else []

    def _take_out(self, nodes: Sequence[BaseNode]) -> None:
        """Documents that have come to say nothing must not answer with what they said."""
        if self.amend:
            self.cache.delete_nodes([node.node_id for node in nodes], wait=True)
            return
        documents = dict.fromkeys(document_id(node) for node in nodes)
        for found in self.cache.store.catalog.documents(list(documents)):
            # One that someone else has just taken out is no fault.
            with suppress(DocumentNotFoundError):
                self.cache.delete(found.id, wait=True)

    def _version(self) -> str:
        path = Path(self.path)
        if not StateStore.exists(path):
            return ""
        store = StateStore.open(path)
        return f"{store.id} {store.catalog.vectors().generation}"
