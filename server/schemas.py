"""What goes over the wire beside `ragcache.answer.Answer`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ragcache.settings import QueryOptions


class QueryRequest(BaseModel):
    """A question; options that are not given take the server's settings."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1)
    stream: bool = Field(False, description="Answer with server-sent events")
    top_k: int | None = None
    reuse: str | None = None
    encodings: list[str] | None = None
    order: str | None = None
    repair: str | None = None
    repair_ratio: float | None = None
    repair_ms: float | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None

    def options(self) -> dict[str, Any]:
        """The options that were given."""
        return self.model_dump(include=set(QueryOptions.model_fields), exclude_none=True)


class Health(BaseModel):
    """The server is up, its model is loaded and its store is open."""

    status: str = "ok"
    model: str
    documents: int
    chunks: int


class Problem(BaseModel):
    """An error: its kind, and one line that says what to do."""

    error: str
    message: str
