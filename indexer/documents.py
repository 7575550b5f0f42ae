"""Documents to be indexed, as text or already split, and what is wrong with those that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ragcache.errors import SourceError


@dataclass(frozen=True)
class Passage:
    """A part of a document that came split: it becomes one chunk, whatever its length.

    Attributes:
        id: unique in the store.
        text: shown as a source.
        prompt_text: what the language model reads, for instance with metadata in front; the text when empty.
        embedding_text: what the embedding model reads; the text when empty.
        metadata: its own beside the document's, JSON values.
    """

    id: str
    text: str
    prompt_text: str = ""
    embedding_text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """A text to be indexed.

    Attributes:
        id: unique in the store; indexing the same id again replaces the document.
        text: its whole text; empty when it comes split.
        title: shown to the model in front of each chunk; the id when empty. Passages say themselves what is shown.
        metadata: the user's own, JSON values.
        passages: its chunks in order, for a document that comes split; with none at all it is taken out of the store.
    """

    id: str
    text: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    passages: tuple[Passage, ...] | None = None


MOST_NESTING = 50
"""Levels of lists and objects in metadata; Python's own limit depends on who calls."""


def checked(documents: Iterable[Document], source: str) -> Iterator[Document]:
    """The documents as they come, refused where no sense can be made of them.

    Args:
        documents: from anywhere.
        source: name of the source, for messages.

    Raises:
        SourceError: an id is empty or comes twice, a text is no text or no Unicode, metadata are no JSON object, a
            document has a text and passages too, or there are no documents at all.
    """
    seen: set[str] = set()
    passages: set[str] = set()
    for document in documents:
        if not isinstance(document, Document):
            raise SourceError(f"{source}: {type(document).__name__} is no Document; give ragcache.Document objects")
        what = f"document {document.id!r}"
        _check_texts(document, ("id", "text", "title"), what, source)
        _check_metadata(document.metadata, what, source)
        _check_id(document.id, seen, "document", source)
        if document.passages is not None:
            _check_passages(document, passages, source)
        yield document
    if not seen:
        raise SourceError(f"{source} holds no documents; nothing was changed")


def _check_passages(document: Document, seen: set[str], source: str) -> None:
    if document.text:
        raise SourceError(f"{source}: document {document.id!r} has a text and passages; give one of the two")
    for passage in document.passages or ():
        what = f"passage {passage.id!r} of document {document.id!r}"
        _check_texts(passage, ("id", "text", "prompt_text", "embedding_text"), what, source)
        _check_metadata(passage.metadata, what, source)
        _check_id(passage.id, seen, "passage", source)


def _check_texts(thing: Document | Passage, names: Iterable[str], what: str, source: str) -> None:
    for name in names:
        value = getattr(thing, name)
        if not isinstance(value, str):
            raise SourceError(f"{source}: {name!r} of {what} must be text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"{source}: {what} holds half a surrogate pair; remove it") from error


def _check_metadata(metadata: object, what: str, source: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        raise SourceError(f"{source}: metadata of {what} must be an object whose keys are texts")
    if _depth(metadata) > MOST_NESTING:
        raise SourceError(f"{source}: metadata of {what} are nested more than {MOST_NESTING} deep; flatten them")


def _check_id(id: str, seen: set[str], kind: str, source: str) -> None:
    if not id:
        raise SourceError(f"{source}: a {kind} has an empty id; give each one a unique id")
    if id in seen:
        raise SourceError(f"{source}: {kind} id {id!r} comes twice; ids must be unique")
    seen.add(id)


def _depth(value: object) -> int:
    """Levels of lists and objects, counted no further than to one more than allowed."""
    level, depth = [value], 0
    while level and depth <= MOST_NESTING:
        nested = [it for it in level if isinstance(it, dict | list | tuple)]
        level = [
            it for container in nested for it in (container.values() if isinstance(container, dict) else container)
        ]
        depth += bool(nested)
        if not nested:
            break
    return depth
