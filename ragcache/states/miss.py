"""Why a chunk's stored states were not used: data, not an exception.

Bad states never become an answer. The chunk is recomputed from its text within the same request, and the response
says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MissReason(StrEnum):
    """What was wrong, or why stored states would not do."""

    NOT_STORED = "not_stored"
    """No states are stored for this text."""
    EVICTED = "evicted"
    """The states were given up, or never kept, because the byte budget was short."""
    MISSING = "missing"
    """The shard file is gone."""
    TRUNCATED = "truncated"
    """The shard file ends before the states do."""
    CHECKSUM = "checksum"
    """The bytes are not those that were written."""
    TOKEN_IDS = "token_ids"  # noqa: S105
    """The states belong to other tokens."""
    FINGERPRINT = "fingerprint"
    """The states were encoded by another model or after another prefix."""
    CODEC = "codec"
    """The states are in a form or codec this version does not know."""
    CONTEXT = "context"
    """What the chunk was encoded after is not in the store any more."""
    IO = "io"
    """The operating system could not read the file."""
    PREFIX = "prefix"
    """The prompt begins otherwise than the one that the states were encoded for."""
    INEXACT = "inexact"
    """`reuse="exact"` was asked for and the states are quantised."""


@dataclass(frozen=True)
class Miss:
    """One chunk whose stored states were not used.

    Attributes:
        chunk_id: the chunk.
        reason: kind of fault; counted by this.
        detail: one line for a person.
    """

    chunk_id: str
    reason: MissReason
    detail: str


class UnusableStatesError(Exception):
    """Stored states that must not be used; whoever reads states turns it into a miss."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
