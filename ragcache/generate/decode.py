"""The decoding loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from ragcache.generate.detokenize import TextStream
from ragcache.generate.sampling import Sampler, SamplingParameters
from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop string came."""
    LENGTH = "length"
    """It reached the most tokens allowed, or the end of the context window."""


@dataclass(frozen=True)
class Step:
    """What one token added.

    Attributes:
        token_id: the token; `None` when this only flushes text.
        text: text that became certain.
        finish: set on the last step.
    """

    token_id: int | None
    text: str
    finish: FinishReason | None = None


def decode(model: LanguageModel, cache: KVCache, logits: Tensor, parameters: SamplingParameters) -> Iterator[Step]:
    """Generate after a prompt whose KV are in the cache.

    Args:
        model: the model to run.
        cache: the prompt's KV, with room for the answer. The answer ends where the room does.
        logits: after the prompt's last token, `[vocabulary]`.
        parameters: how to draw.

    Yields:
        One step per token, the token that ends the answer included, then one that flushes. Closing the iterator
        ends the generation; nothing runs in between steps.
    """
    sampler = Sampler(parameters)
    stream = TextStream(model.tokenizer, parameters.stop)
    finish = FinishReason.LENGTH
    for count in range(1, parameters.max_tokens + 1):
        token_id = sampler.next_token(logits)
        if token_id in model.eos_ids:
            yield Step(token_id, "")
            finish = FinishReason.STOP
            break
        yield Step(token_id, stream.push(token_id))
        if stream.stopped:
            finish = FinishReason.STOP
            break
        if count == parameters.max_tokens or cache.length == cache.capacity:
            break
        logits = forward(model, [Segment(model.tensor([token_id]), cache)])[0]
    yield Step(None, stream.finish(), finish)
