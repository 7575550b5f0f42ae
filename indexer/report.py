"""What an indexing run did, and is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class IndexReport:
    """Outcome of an indexing run.

    Attributes:
        added: documents that were not there before.
        updated: documents whose text, title, metadata or settings changed.
        unchanged: documents left as they were.
        removed: documents that are gone from the source, or have come to be without passages.
        empty: ids of documents without any text; they are in the store and have no chunks.
        chunks: chunks of added and updated documents.
        in_context: chunks encoded after real text, of whatever documents; the others' contexts are still good.
        encoded_tokens: tokens run through the language model, contexts included; states of equal chunks are kept.
        reembedded: chunks embedded again because the vector index was missing or damaged.
        without_states: encodings of chunks whose states were not kept, or were given up, because space is short.
        readmitted: encodings that have states again, because there is space again or they are wanted more than others.
        seconds: wall time of the run.
    """

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    removed: int = 0
    empty: tuple[str, ...] = ()
    chunks: int = 0
    in_context: int = 0
    encoded_tokens: int = 0
    reembedded: int = 0
    without_states: int = 0
    readmitted: int = 0
    seconds: float = 0.0


ENCODING = "encoding"
"""Names the pass that documents come in with, on a progress bar."""


class Progress(Protocol):
    """Told how far an indexing run has come."""

    def start(self, documents: int, words: str = ENCODING) -> None:
        """A pass begins, the first or another; so many documents have chunks to be encoded. The words name it."""

    def advance(self, documents: int, chunks: int, tokens: int) -> None:
        """So many more documents are gone through, chunks encoded and tokens run."""


class Silent:
    """Progress that nobody watches."""

    def start(self, documents: int, words: str = ENCODING) -> None:
        """Say nothing."""

    def advance(self, documents: int, chunks: int, tokens: int) -> None:
        """Say nothing."""
