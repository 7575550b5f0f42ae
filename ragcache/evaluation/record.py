"""What was found for one question and one setting."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from ragcache.evaluation.grid import Setting
from ragcache.fidelity.divergence import Divergence


class Record(BaseModel):
    """One question answered with one setting, beside the full prefill of the very same token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    key: str = Field(description="Digest of all that the figures depend on")
    question: str
    setting: Setting
    chunk_ids: tuple[str, ...] = Field(description="In prompt order")
    dropped: tuple[str, ...] = Field(description="Passages for which the context window had no room")
    prompt_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    repaired_tokens: int
    repair_ms: float
    misses: tuple[str, ...] = Field(description="Why states were not used, once for each chunk")
    retrieve_ms: float = Field(description="Part of both times to the first token")
    ttft_ms: float
    full_ttft_ms: float
    kl: tuple[float, ...] = Field(min_length=1, description="In nats, at each token of the full prefill's answer")
    agrees: tuple[bool, ...] = Field(min_length=1, description="Same most probable token, at each of them")
    answer: str
    full_answer: str

    @property
    def divergence(self) -> Divergence:
        """From the full prefill, along its answer."""
        return Divergence(self.kl, self.agrees)

    @property
    def speedup(self) -> float:
        """How many times sooner than with a full prefill the first token comes."""
        return self.full_ttft_ms / self.ttft_ms
