"""Documents to chunks, at sentence ends, through LlamaIndex's SentenceSplitter."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.indexer.sources import Document
from ragcache.prompt.template import PromptTemplate

SMALLEST_TEXT = 8
"""Tokens of text that a chunk must have room for beside its header."""


@dataclass(frozen=True)
class Piece:
    """A chunk's text and the ids the language model sees."""

    text: str
    token_ids: tuple[int, ...]


class Splitter:
    """Cuts documents into chunks of at most so many tokens, as the language model counts them."""

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
        title = document.title or document.id
        room = self._chunk_tokens - len(self._template.chunk(title, ""))
        if room < SMALLEST_TEXT:
            # A title as long as a chunk says nothing the text does not.
            title, room = "", self._chunk_tokens - len(self._template.chunk("", ""))
        return [piece for text in self._texts(document.text, room) for piece in self._fit(title, text, room)]

    def _texts(self, text: str, room: int) -> list[str]:
        # Imported here: it takes seconds, and a query does not need it.
        from llama_index.core.node_parser import SentenceSplitter

        splitter = SentenceSplitter(
            chunk_size=room, chunk_overlap=min(self._overlap, room // 2), tokenizer=self._template.encode
        )
        return [piece for piece in splitter.split_text(text) if piece.strip()]

    def _fit(self, title: str, text: str, room: int) -> list[Piece]:
        """SentenceSplitter adds up the tokens of parts, and the whole may have some more: then cut again."""
        token_ids = self._template.chunk(title, text)
        if len(token_ids) <= self._chunk_tokens or room <= SMALLEST_TEXT:
            return [Piece(text, token_ids)]
        smaller = max(SMALLEST_TEXT, room - (len(token_ids) - self._chunk_tokens) - 1)
        return [piece for part in self._texts(text, smaller) for piece in self._fit(title, part, smaller)]
