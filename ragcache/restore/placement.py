"""A chunk and where it goes in the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.states.records import Encoding, StoredStates


@dataclass(frozen=True)
class Placement:
    """A chunk and where it goes.

    Attributes:
        chunk_id: for reports.
        token_ids: the chunk's ids.
        start: position of its first token in the prompt.
        encoding: which of its encodings is restored; `None` when there is none.
        otherwise: the one that takes its place when its states turn out unusable before they are read.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    start: int
    encoding: Encoding | None
    otherwise: Encoding | None = None

    @property
    def states(self) -> StoredStates | None:
        """Stored states, if there are any."""
        return self.encoding.states if self.encoding is not None else None

    @property
    def span(self) -> slice:
        """Slots the chunk takes in the KV cache."""
        return slice(self.start, self.start + len(self.token_ids))
