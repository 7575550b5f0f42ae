"""The packed forward gives the logits of a plain transformers forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.model.forward import QUERY_BLOCK, Segment, forward, packed_attention
from ragcache.model.language_model import LanguageModel
from tests.conftest import FAMILIES


def plain_logits(model: LanguageModel, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model.module(input_ids=token_ids[None], logits_to_keep=1).logits[0, -1].float()
    return logits


def random_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(100, 40000, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    """Prefill, a second prefill behind it longer than a query block, then single tokens."""
    model = tiny_model(family)
    ids = random_ids(QUERY_BLOCK + 150)
    cache = model.new_cache(len(ids))
    start = 0
    for end in (70, len(ids) - 3, len(ids) - 2, len(ids) - 1, len(ids)):
        logits = forward(model, [Segment(ids[start:end], cache)])[0]
        torch.testing.assert_close(logits, plain_logits(model, ids[:end]), rtol=1e-3, atol=1e-4)
        start = end
    assert cache.length == len(ids)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sequences_packed_at_random(tiny_model: Callable[[str], LanguageModel], data: st.DataObject) -> None:
    """Any mix of prefills and decode steps in one row gives each sequence its own logits."""
    model = tiny_model(data.draw(st.sampled_from(["llama", "qwen3", "mistral-window"])))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    sequences = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    caches = [model.new_cache(length + 7) for length in lengths]
    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        active = [i for i, s in enumerate(sequences) if done[i] < len(s)]
        ends = {i: data.draw(st.integers(done[i] + 1, len(sequences[i]))) for i in active}
        logits = forward(model, [Segment(sequences[i][done[i] : ends[i]], caches[i]) for i in active])
        for row, i in enumerate(active):
            expected = plain_logits(model, sequences[i][: ends[i]])
            torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)
            done[i] = ends[i]


def test_what_lies_beyond_the_length_does_not_matter(tiny_model: Callable[[str], LanguageModel]) -> None:
    """A cache from the pool holds another request's KV behind its length."""
    model = tiny_model("llama")
    ids = random_ids(40)
    clean, dirty = model.new_cache(64), model.new_cache(64)
    for tensor in dirty.keys + dirty.values:
        tensor.fill_(float("nan"))
    for cache in (clean, dirty):
        forward(model, [Segment(ids[:30], cache)])
    torch.testing.assert_close(forward(model, [Segment(ids[30:], dirty)]), forward(model, [Segment(ids[30:], clean)]))


def test_attention_that_is_not_understood_is_refused(tiny_model: Callable[[str], LanguageModel]) -> None:
    from ragcache.errors import UnsupportedModelError
    from ragcache.model.forward import PackedBatch

    states = torch.zeros(1, 2, 3, 16)
    batch = PackedBatch([])
    with pytest.raises(UnsupportedModelError, match="softcap"):
        packed_attention(
            tiny_model("llama").decoder.layers[0].module, states, states, states, None, packed=batch, softcap=30.0
        )
