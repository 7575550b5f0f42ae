"""What checks of answers found, in sums that can be added up: over answers, over processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CanaryReport:
    """How answers compare with those that a full prefill would have given.

    Attributes:
        checked: answers compared.
        skipped: answers that were drawn, but not compared because others were still waiting.
        failed: answers that were drawn and could not be compared; the log says why.
        tokens: of the answers compared.
        agreeing_tokens: those that are the most probable one after a full prefill where they are the answer's own.
        kl_sum: divergence of the next-token distribution from that of a full prefill, in nats, summed over tokens.
        worst_kl: the largest of a token.
    """

    checked: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    agreeing_tokens: int = 0
    kl_sum: float = 0.0
    worst_kl: float = 0.0

    @property
    def mean_kl(self) -> float | None:
        """Of a token, in nats; `None` before the first check."""
        return self.kl_sum / self.tokens if self.tokens else None

    @property
    def agreement(self) -> float | None:
        """Share of tokens at which both have the same most probable one; `None` before the first check."""
        return self.agreeing_tokens / self.tokens if self.tokens else None

    def plus(self, other: CanaryReport) -> CanaryReport:
        """Of both."""
        return CanaryReport(
            checked=self.checked + other.checked,
            skipped=self.skipped + other.skipped,
            failed=self.failed + other.failed,
            tokens=self.tokens + other.tokens,
            agreeing_tokens=self.agreeing_tokens + other.agreeing_tokens,
            kl_sum=self.kl_sum + other.kl_sum,
            worst_kl=max(self.worst_kl, other.worst_kl),
        )
