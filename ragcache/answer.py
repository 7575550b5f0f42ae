"""What a query gives back; its JSON is the same over REST, on the command line and from Python."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ragcache.generate.decode import FinishReason
from ragcache.settings import EncodingName, Order, Reuse
from ragcache.states.miss import MissReason


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Source(_Frozen):
    """A chunk that stood in the prompt, in prompt order."""

    chunk_id: str
    document_id: str
    title: str
    score: float = Field(description="Cosine similarity to the question")
    encoding: EncodingName | None = Field(None, description="Chosen for its place; null where nothing stored is used")
    text: str = Field("", exclude=True, description="The chunk's text; not part of the JSON")


class TokenCounts(_Frozen):
    """Where the prompt's tokens came from, and how many were generated."""

    prefix: int = Field(description="Copied from the prefix kept in memory")
    remembered: int = Field(0, description="Copied from prompts that were prefilled in full before")
    restored: int = Field(description="KV rebuilt from stored states")
    repaired: int = Field(0, description="Recomputed to put back attention between chunks")
    prefilled: int = Field(description="Run through the model in this request")
    generated: int = 0

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.prefix + self.remembered + self.restored + self.prefilled


class Timings(_Frozen):
    """Milliseconds."""

    retrieve: float = Field(description="Embedding the question and searching")
    read: float = Field(description="Waiting for the disk")
    restore: float = Field(description="Rebuilding KV from states")
    repair: float = 0.0
    prefill: float = Field(description="Running tokens through the model before the first answer token")
    ttft: float = Field(0.0, description="From the call to the first token, retrieval included")
    total: float = 0.0


class MissedChunk(_Frozen):
    """A chunk whose stored states were not used; it was recomputed instead."""

    chunk_id: str
    reason: MissReason
    detail: str


class Answer(_Frozen):
    """An answer and how it came about."""

    answer: str
    sources: list[Source]
    tokens: TokenCounts
    timings_ms: Timings
    misses: list[MissedChunk] = Field(description="Chunks whose stored states were not used, and why")
    dropped: list[str] = Field(description="Retrieved chunks for which the context window had no room")
    reuse: Reuse
    order: Order
    finish_reason: FinishReason
