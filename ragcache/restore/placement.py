"""A chunk and where it goes in the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.states.records import StoredStates


@dataclass(frozen=True)
class Placement:
    """A chunk and where it goes.

    Attributes:
        chunk_id: for reports.
        token_ids: the chunk's ids.
        start: position of its first token in the prompt.
        states: stored states, if there are any.
        evicted: there are none because the byte budget was short.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    start: int
    states: StoredStates | None
    evicted: bool = False

    @property
    def span(self) -> slice:
        """Slots the chunk takes in the KV cache."""
        return slice(self.start, self.start + len(self.token_ids))
