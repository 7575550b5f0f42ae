"""What a model says after a prompt: its own greedy answer, and its distributions along a given one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragcache.model.forward import Segment, all_logits, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel


@dataclass(frozen=True)
class Continuation:
    """Tokens after a prompt, and the distributions they stand for.

    Attributes:
        token_ids: of the answer, the one that ends it included.
        logits: that each of them was or would have been drawn from, `[tokens, vocabulary]`, float32.
    """

    token_ids: tuple[int, ...]
    logits: Tensor = field(repr=False)


def greedy(model: LanguageModel, cache: KVCache, logits: Tensor, max_tokens: int) -> Continuation:
    """The most probable token each time, until one ends the answer.

    The cache is as long afterwards as it was.

    Args:
        model: the model to run.
        cache: the prompt's KV, with room for `max_tokens - 1` more.
        logits: after the prompt's last token, `[vocabulary]`.
        max_tokens: at least 1.
    """
    prompt_tokens = cache.length
    token_ids, rows = [int(logits.argmax())], [logits]
    while token_ids[-1] not in model.eos_ids and len(token_ids) < max_tokens:
        rows.append(forward(model, [Segment(model.tensor(token_ids[-1:]), cache)])[0])
        token_ids.append(int(rows[-1].argmax()))
    cache.length = prompt_tokens
    return Continuation(tuple(token_ids), torch.stack(rows))


def along(model: LanguageModel, cache: KVCache, logits: Tensor, token_ids: tuple[int, ...]) -> Continuation:
    """The model's distributions along an answer that is given to it, in one forward pass (teacher forcing).

    The cache is as long afterwards as it was.

    Args:
        model: the model to run.
        cache: the prompt's KV, with room for all tokens of the answer but the last.
        logits: after the prompt's last token, `[vocabulary]`.
        token_ids: the answer, at least one token.
    """
    prompt_tokens = cache.length
    rows = logits[None]
    if len(token_ids) > 1:
        rows = torch.cat([rows, all_logits(model, Segment(model.tensor(list(token_ids[:-1])), cache))])
    cache.length = prompt_tokens
    return Continuation(token_ids, rows)


def parted(model: LanguageModel, cache: KVCache, given: Continuation, max_tokens: int) -> tuple[int, ...]:
    """The model's own greedy answer, when its distributions along another one are known already.

    Up to where it parts from the given answer the two are the same, so only what comes after is generated. The cache
    is as long afterwards as it was.

    Args:
        model: the model to run.
        cache: as `along` left it: the given answer's KV still lie behind its length.
        given: what `along` returned.
        max_tokens: of the whole answer.
    """
    chosen = given.logits.argmax(-1).tolist()
    differs = (index for index, (own, other) in enumerate(zip(chosen, given.token_ids, strict=True)) if own != other)
    index = next(differs, None)
    if index is None:
        return given.token_ids
    prompt_tokens = cache.length
    cache.length += index
    rest = greedy(model, cache, given.logits[index], max_tokens - index)
    cache.length = prompt_tokens
    return (*given.token_ids[:index], *rest.token_ids)
