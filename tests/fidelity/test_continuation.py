"""Greedy answers and teacher forcing, against the decoder that users get and against one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ragcache.fidelity.continuation import Continuation, along, greedy, parted
from ragcache.generate.decode import decode
from ragcache.generate.sampling import SamplingParameters
from ragcache.model.forward import Segment, all_logits, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel

FAMILIES = ("llama", "qwen3", "gemma3")
ANSWER = (17, 255, 1031, 17, 2, 903)


def prompt(model: LanguageModel, token_ids: list[int], room: int = 32) -> tuple[KVCache, torch.Tensor]:
    cache = model.new_cache(len(token_ids) + room)
    return cache, forward(model, [Segment(model.tensor(token_ids), cache)])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_logits_are_those_of_one_token_at_a_time(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    model = tiny_model(family)
    cache, first = prompt(model, list(range(40, 90)))
    given = along(model, cache, first, ANSWER)
    assert cache.length == 50

    rows = [first]
    for token_id in ANSWER[:-1]:
        rows.append(forward(model, [Segment(model.tensor([token_id]), cache)])[0])
    assert given.logits.shape == (len(ANSWER), len(first))
    torch.testing.assert_close(given.logits, torch.stack(rows), atol=1e-4, rtol=1e-4)

    cache.length = 50
    every = all_logits(model, Segment(model.tensor(list(ANSWER)), cache))
    assert cache.length == 50 + len(ANSWER)
    torch.testing.assert_close(every[:-1], given.logits[1:], atol=1e-4, rtol=1e-4)


def test_one_token_needs_no_forward(tiny_model: Callable[[str], LanguageModel]) -> None:
    model = tiny_model("llama")
    cache, first = prompt(model, [5, 6, 7], room=0)
    assert torch.equal(along(model, cache, first, (3,)).logits, first[None])


def test_greedy_is_what_users_get(smollm: LanguageModel) -> None:
    cache, first = prompt(smollm, smollm.tokenizer("The capital of France is")["input_ids"])
    answer = greedy(smollm, cache, first, 12)
    steps = decode(smollm, cache, first, SamplingParameters(max_tokens=12))
    assert list(answer.token_ids) == [step.token_id for step in steps if step.token_id is not None]
    assert tuple(answer.logits.argmax(-1).tolist()) == answer.token_ids


def test_greedy_ends_with_the_token_that_ends_it(smollm: LanguageModel) -> None:
    cache, first = prompt(smollm, smollm.tokenizer("The capital of France is")["input_ids"])
    whole = greedy(smollm, cache, first, 12)
    ends_at_third = replace(smollm, eos_ids=frozenset({whole.token_ids[2]}))
    assert greedy(ends_at_third, cache, first, 12).token_ids == whole.token_ids[:3]


@pytest.mark.parametrize("changed", [None, 0, 2, 5])
def test_an_answer_that_parts_from_another(smollm: LanguageModel, changed: int | None) -> None:
    cache, first = prompt(smollm, smollm.tokenizer("The three best things about a lighthouse are")["input_ids"])
    own = greedy(smollm, cache, first, 12).token_ids
    other = list(own[:6])
    if changed is not None:
        other[changed] = 1000
    given = along(smollm, cache, first, tuple(other))
    found = parted(smollm, cache, given, 12)
    assert found == (tuple(other) if changed is None else own)
    assert cache.length == len(smollm.tokenizer("The three best things about a lighthouse are")["input_ids"])


def test_a_continuation_shows_no_logits() -> None:
    assert "logits" not in repr(Continuation((1,), torch.zeros(1, 9)))
