"""How far one model's next-token distributions are from another's, along the same tokens."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Next-token distributions compared at each token of an answer.

    Attributes:
        kl: Kullback-Leibler divergence of the compared distribution from the reference's, in nats, one for each token.
        agrees: whether both have the same most probable token, one for each token.
    """

    kl: tuple[float, ...]
    agrees: tuple[bool, ...]

    @property
    def mean_kl(self) -> float:
        """Along the answer, in nats."""
        return statistics.fmean(self.kl)

    @property
    def worst_kl(self) -> float:
        """At the token where they differ most, in nats; no number if any is none."""
        return float(np.max(self.kl))

    @property
    def agreement(self) -> float:
        """Share of tokens at which the most probable one is the same."""
        return statistics.fmean(self.agrees)


def divergence(reference: Tensor, compared: Tensor) -> Divergence:
    """KL(reference || compared) and top-1 agreement, token by token.

    Args:
        reference: logits, `[tokens, vocabulary]`, at least one token. A logit of -inf is a probability of 0.
        compared: logits of the same shape.

    Raises:
        ValueError: the shapes differ, or there is no token.
    """
    if reference.shape != compared.shape or not len(reference):
        raise ValueError(f"logits of {tuple(reference.shape)} and {tuple(compared.shape)} cannot be compared")
    mine, theirs = reference.double().log_softmax(-1), compared.double().log_softmax(-1)
    # What the reference gives no probability adds nothing, whatever the other says of it.
    terms = (mine.exp() * (mine - theirs)).masked_fill(mine.isneginf(), 0.0)
    # Rounding may leave the sum of equal distributions a little below 0.
    kl = terms.sum(-1).clamp_min(0.0)
    # Rows that are no distributions agree in nothing, though `argmax` finds the same in both.
    agrees = (reference.argmax(-1) == compared.argmax(-1)) & ~mine.isnan().any(-1) & ~theirs.isnan().any(-1)
    return Divergence(tuple(kl.tolist()), tuple(agrees.tolist()))
