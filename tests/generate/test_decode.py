"""The decoding loop against transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ragcache.generate.decode import FinishReason, Step, decode
from ragcache.generate.pool import KEPT, CachePool
from ragcache.generate.sampling import SamplingParameters
from ragcache.model.forward import Segment, forward

if TYPE_CHECKING:
    from ragcache.model.language_model import LanguageModel

PROMPT = "<|im_start|>user\nList three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n"


def run(model: LanguageModel, prompt: torch.Tensor, room: int | None = None, **parameters: object) -> list[Step]:
    chosen = SamplingParameters(**parameters)  # type: ignore[arg-type]
    cache = model.new_cache(len(prompt) + (room if room is not None else chosen.max_tokens))
    logits = forward(model, [Segment(prompt, cache)])[0]
    return list(decode(model, cache, logits, chosen))


def tokens(steps: list[Step]) -> list[int]:
    return [step.token_id for step in steps if step.token_id is not None]


@pytest.fixture(scope="module")
def prompt(smollm: LanguageModel) -> torch.Tensor:
    return torch.tensor(smollm.tokenizer(PROMPT, add_special_tokens=False)["input_ids"])


def test_greedy_equals_transformers_generate(smollm: LanguageModel, prompt: torch.Tensor) -> None:
    generate: Any = smollm.module.generate
    with torch.inference_mode():
        expected = generate(
            prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=60, do_sample=False
        )[0, len(prompt) :].tolist()
    steps = run(smollm, prompt, max_tokens=60)
    assert tokens(steps) == expected
    assert "".join(step.text for step in steps) == smollm.tokenizer.decode(expected, skip_special_tokens=True)


def test_eos_ends_the_answer(smollm: LanguageModel, prompt: torch.Tensor) -> None:
    third = tokens(run(smollm, prompt, max_tokens=8))[2]
    steps = run(replace(smollm, eos_ids=frozenset({third, 49000})), prompt, max_tokens=8)
    assert tokens(steps)[-1] == third
    assert len(tokens(steps)) == 3
    assert steps[-1].finish is FinishReason.STOP


def test_max_tokens(smollm: LanguageModel, prompt: torch.Tensor) -> None:
    steps = run(smollm, prompt, max_tokens=5)
    assert len(tokens(steps)) == 5
    assert [step.finish for step in steps] == [None] * 5 + [FinishReason.LENGTH]


def test_the_end_of_the_cache_ends_the_answer(smollm: LanguageModel, prompt: torch.Tensor) -> None:
    steps = run(smollm, prompt, room=2, max_tokens=50)
    assert tokens(steps) == tokens(run(smollm, prompt, max_tokens=3))
    assert steps[-1].finish is FinishReason.LENGTH


def test_stop_strings(smollm: LanguageModel, prompt: torch.Tensor) -> None:
    whole = "".join(step.text for step in run(smollm, prompt, max_tokens=20))
    stop = whole[10:14]
    steps = run(smollm, prompt, max_tokens=20, stop=(stop,))
    assert "".join(step.text for step in steps) == whole[: whole.find(stop)]
    assert steps[-1].finish is FinishReason.STOP


def test_a_seed_repeats_an_answer(smollm: LanguageModel, prompt: torch.Tensor) -> None:
    first = tokens(run(smollm, prompt, max_tokens=12, temperature=1.0, seed=3))
    assert first == tokens(run(smollm, prompt, max_tokens=12, temperature=1.0, seed=3))
    assert first != tokens(run(smollm, prompt, max_tokens=12, temperature=1.0, seed=4))


def test_pool_reuses_what_fits(tiny_model: Callable[[str], LanguageModel]) -> None:
    pool = CachePool(tiny_model("llama"))
    first = pool.take(700)
    assert first.capacity == 1024
    first.length = 5
    second = pool.take(700)
    assert second is not first
    pool.give_back(first)
    assert pool.take(2000) is not first
    again = pool.take(1024)
    assert again is first
    assert again.length == 0


def test_pool_keeps_a_bounded_number(tiny_model: Callable[[str], LanguageModel]) -> None:
    pool = CachePool(tiny_model("llama"))
    caches = [pool.take(512 * (i + 1)) for i in range(KEPT + 3)]
    for cache in caches:
        pool.give_back(cache)
    kept = [pool.take(1) for _ in range(KEPT)]
    assert {id(cache) for cache in kept} == {id(cache) for cache in caches[-KEPT:]}
