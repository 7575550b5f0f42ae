"""Which token comes next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParameters:
    """How an answer is drawn.

    Attributes:
        max_tokens: longest answer, in tokens.
        temperature: 0 takes the most probable token each time.
        top_p: draw from the smallest set of tokens with at least this probability.
        seed: makes drawing repeatable.
        stop: texts that end the answer; they are not part of it.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Sampler:
    """Draws the tokens of one answer."""

    def __init__(self, parameters: SamplingParameters) -> None:
        self._parameters = parameters
        self._generator = torch.Generator()
        if parameters.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(parameters.seed)

    def next_token(self, logits: Tensor) -> int:
        """Choose a token.

        Args:
            logits: `[vocabulary]`, float32.
        """
        if self._parameters.temperature == 0:
            return int(logits.argmax())
        # The largest becomes 0 and the type is double, so that the smallest temperature gives no infinity less itself.
        scores = (logits - logits.max()).cpu().double() / self._parameters.temperature
        probabilities = torch.softmax(scores, dim=-1)
        if self._parameters.top_p < 1:
            ordered, indices = probabilities.sort(descending=True)
            # A token stays when those before it do not reach top_p yet; so the first always stays.
            ordered[ordered.cumsum(0) - ordered >= self._parameters.top_p] = 0
            probabilities = torch.zeros_like(probabilities).scatter_(0, indices, ordered)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
