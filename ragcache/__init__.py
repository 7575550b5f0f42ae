"""RAG without prefilling the documents: KV caches rebuilt from stored states."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragcache.answer import Answer
    from ragcache.errors import RagCacheError
    from ragcache.indexer.documents import Document
    from ragcache.pipeline import RagCache

__all__ = ["Answer", "Document", "RagCache", "RagCacheError"]

_HOMES = {
    "Answer": "ragcache.answer",
    "Document": "ragcache.indexer.documents",
    "RagCache": "ragcache.pipeline",
    "RagCacheError": "ragcache.errors",
}


def __getattr__(name: str) -> Any:
    # Importing torch and transformers takes seconds, which `ragcache --help` and a mistyped path need not wait for.
    if name == "__version__":
        return version("ragcache")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ragcache' has no attribute {name!r}")
