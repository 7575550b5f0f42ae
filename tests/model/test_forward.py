"""The packed forward gives the logits of a plain transformers forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ragcache.errors import UnsupportedModelError
from ragcache.model.certify import own_attention
from ragcache.model.forward import PackedBatch, Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.packed_attention import ATTENTION_NAME, QUERY_BLOCK, packed_attention
from tests.model.families import FAMILIES


def plain_logits(model: LanguageModel, token_ids: Tensor) -> Tensor:
    with torch.inference_mode(), own_attention(model):
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
    model = tiny_model(
        data.draw(st.sampled_from(["llama", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt-neox", "smollm3"]))
    )
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eager(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    """Transformers' plainest attention, whatever the family supports; longer than any of the windows."""
    model = tiny_model(family)
    ids = random_ids(130)
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = model.module(input_ids=ids[None]).logits[0, -1].float()
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    logits = forward(model, [Segment(ids, model.new_cache(len(ids)))])[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    past=st.integers(0, 20),
    new=st.integers(1, 20),
    group=st.sampled_from([1, 3]),
    window=st.one_of(st.none(), st.integers(1, 25)),
    softcap=st.one_of(st.none(), st.sampled_from([0.5, 5.0])),
)
def test_attention_equals_its_definition(
    past: int, new: int, group: int, window: int | None, softcap: float | None
) -> None:
    """Softmax over what each query may see, query by query."""
    generator = torch.Generator().manual_seed(past * 100 + new)
    query = torch.randn(2 * group, new, 8, generator=generator)
    keys, values = torch.randn(2, 2, past + new, 8, generator=generator)
    segment = Segment(torch.zeros(new, dtype=torch.long), KVCache([keys], [values], past))
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    ours, _ = packed_attention(
        module,
        query[None],
        keys[None],
        values[None],
        None,
        scaling=0.7,
        sliding_window=window,
        softcap=softcap,
        packed=PackedBatch([segment], [window]),
    )
    for head in range(2 * group):
        for position in range(past, past + new):
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            scores = keys[head // group, seen] @ query[head, position - past] * 0.7
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            expected = scores.softmax(0) @ values[head // group, seen]
            torch.testing.assert_close(ours[0, position - past, head], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "given", [{"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}, {"is_causal": False}, {"dropout": 0.1}]
)
def test_attention_that_is_not_understood_is_refused(given: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 3, 16)
    with pytest.raises(UnsupportedModelError, match=next(iter(given))):
        packed_attention(nn.Module(), states, states, states, None, packed=PackedBatch([], []), **given)
