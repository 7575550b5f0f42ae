"""Documents to chunks, at sentence ends, through LlamaIndex's SentenceSplitter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ragcache.indexer.documents import Document, Passage
from ragcache.prompt.template import PromptTemplate

SMALLEST_TEXT = 8
"""Tokens of text that a chunk must have room for beside its header."""


@dataclass(frozen=True)
class Piece:
    """A chunk to be.

    Attributes:
        chunk_id: unique in the store.
        text: shown as a source.
        token_ids: what the language model sees.
        metadata: its own beside the document's.
        embedding_text: what is embedded where that is not the text; else empty.
    """

    chunk_id: str
    text: str
    token_ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    embedding_text: str = ""


class Splitter:
    """Cuts documents into chunks of at most so many tokens, as the language model counts them.

    A document that came split keeps its passages.
    """

    def __init__(self, template: PromptTemplate, chunk_tokens: int, overlap: int) -> None:
        """Set up.

        Args:
            template: counts tokens and puts headers in front of chunks.
            chunk_tokens: most tokens of a chunk, header included.
            overlap: tokens that neighbouring chunks share.
        """
        self._template = template
        self._chunk_tokens = chunk_tokens
        self._overlap = overlap

    def split(self, document: Document) -> list[Piece]:
        """The document's chunks in order; none for a document without text."""
        if document.passages is not None:
            return [self._whole(passage) for passage in document.passages if passage.text.strip()]
        title = shown_title(self._template, document.title or document.id, self._chunk_tokens)
        room = self._chunk_tokens - len(self._template.chunk(title, ""))
        texts = [fitting for text in self._texts(document.text, room) for fitting in self._fit(title, text, room)]
        return [Piece(f"{document.id}#{ordinal}", text, token_ids) for ordinal, (text, token_ids) in enumerate(texts)]

    def _whole(self, passage: Passage) -> Piece:
        token_ids = self._template.passage(passage.prompt_text or passage.text)
        return Piece(passage.id, passage.text, token_ids, passage.metadata, passage.embedding_text)

    def _texts(self, text: str, room: int) -> list[str]:
        # Imported here: it takes seconds, and a query does not need it.
        from llama_index.core.node_parser import SentenceSplitter

        splitter = SentenceSplitter(
            chunk_size=room, chunk_overlap=min(self._overlap, room // 2), tokenizer=self._template.encode
        )
        return [piece for piece in splitter.split_text(text) if piece.strip()]

    def _fit(self, title: str, text: str, room: int) -> list[tuple[str, tuple[int, ...]]]:
        """SentenceSplitter adds up the tokens of parts, and the whole may have some more: then cut again."""
        token_ids = self._template.chunk(title, text)
        if len(token_ids) <= self._chunk_tokens or room <= SMALLEST_TEXT:
            return [(text, token_ids)]
        smaller = max(SMALLEST_TEXT, room - (len(token_ids) - self._chunk_tokens) - 1)
        return [fitting for part in self._texts(text, smaller) for fitting in self._fit(title, part, smaller)]


def shown_title(template: PromptTemplate, title: str, chunk_tokens: int) -> str:
    """The title that stands in front of a document's chunks.

    Returns:
        It, or nothing when it is as long as a chunk and says nothing the text does not.
    """
    return title if chunk_tokens - len(template.chunk(title, "")) >= SMALLEST_TEXT else ""
