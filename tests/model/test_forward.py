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
from ragcache.model.attention_mass import AttentionMass
from ragcache.model.certify import own_attention
from ragcache.model.forward import PackedBatch, Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.packed_attention import ATTENTION_NAME, QUERY_BLOCK, packed_attention
from tests.model.families import FAMILIES
from tests.model.recomputation import attention_mass, eager_attention, recompute


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
    amid=st.sets(st.integers(0, 19), max_size=20),
    watched=st.booleans(),
)
def test_attention_equals_its_definition(
    past: int, new: int, group: int, window: int | None, softcap: float | None, amid: set[int], watched: bool
) -> None:
    """Softmax over what each query may see, query by query."""
    generator = torch.Generator().manual_seed(past * 100 + new)
    keys, values = torch.randn(2, 2, past + new, 8, generator=generator)
    slots = (*sorted(slot for slot in amid if slot < past), *range(past, past + new))
    query = torch.randn(2 * group, len(slots), 8, generator=generator)
    mass = AttentionMass(past + new, keys.device) if watched else None
    segment = Segment(
        torch.zeros(len(slots), dtype=torch.long), KVCache([keys], [values], past), slots=slots, mass=mass
    )
    received = torch.zeros(past + new)
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
        for row, position in enumerate(slots):
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            scores = keys[head // group, seen] @ query[head, row] * 0.7
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            received[seen] += scores.softmax(0)
            expected = scores.softmax(0) @ values[head // group, seen]
            torch.testing.assert_close(ours[0, row, head], expected, rtol=1e-4, atol=1e-5)
    if mass is not None:
        torch.testing.assert_close(mass.received, received, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "given", [{"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}, {"is_causal": False}, {"dropout": 0.1}]
)
def test_attention_that_is_not_understood_is_refused(given: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 3, 16)
    with pytest.raises(UnsupportedModelError, match=next(iter(given))):
        packed_attention(nn.Module(), states, states, states, None, packed=PackedBatch([], []), **given)


AMID = ["llama", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt-neox", "smollm3"]
"""Full attention, K norms, windows in all or some layers, softcaps, partial rotation, layers without positions."""


def prefilled(model: LanguageModel, ids: Tensor, room: int = 0) -> KVCache:
    cache = model.new_cache(len(ids) + room)
    forward(model, [Segment(ids, cache)])
    return cache


def copied(cache: KVCache) -> KVCache:
    return KVCache([it.clone() for it in cache.keys], [it.clone() for it in cache.values], cache.length)


def assert_same_kv(ours: KVCache, expected: KVCache) -> None:
    assert ours.length == expected.length
    for mine, theirs in zip(ours.keys + ours.values, expected.keys + expected.values, strict=True):
        torch.testing.assert_close(mine[:, : ours.length], theirs[:, : ours.length], rtol=1e-3, atol=1e-4)


class TestTokensAmidASequence:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_what_is_lost_comes_back(self, tiny_model: Callable[[str], LanguageModel], data: st.DataObject) -> None:
        """Any slots whose KV are gone are filled again by one pass, whatever else is in the batch."""
        model = tiny_model(data.draw(st.sampled_from(AMID)))
        ids = random_ids(data.draw(st.integers(2, 120)))
        whole = prefilled(model, ids)
        damaged = copied(whole)
        slots = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), min_size=1)))
        for tensor in damaged.keys + damaged.values:
            tensor[:, slots] = torch.nan
        # The last ones may lie behind the cache's length, as a question's do.
        damaged.length = data.draw(st.integers(0, slots[0])) if slots[-1] - slots[0] + 1 == len(slots) else slots[-1]
        damaged.length = max(damaged.length, len(ids) if slots[-1] < len(ids) - 1 else 0)
        other = random_ids(30, seed=1)
        beside = prefilled(model, other[:20], room=10)
        logits = forward(model, [Segment(other[20:], beside), Segment(ids[slots], damaged, slots=tuple(slots))])
        assert_same_kv(damaged, whole)
        assert_same_kv(beside, prefilled(model, other))
        torch.testing.assert_close(logits[0], plain_logits(model, other), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(logits[1], plain_logits(model, ids[: slots[-1] + 1]), rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_more_than_a_block(self, tiny_model: Callable[[str], LanguageModel], family: str) -> None:
        model = tiny_model(family)
        ids = random_ids(2 * QUERY_BLOCK)
        whole = prefilled(model, ids)
        damaged = copied(whole)
        slots = [slot for slot in range(1, len(ids)) if slot % 3]
        for tensor in damaged.keys + damaged.values:
            tensor[:, slots] = torch.nan
        forward(model, [Segment(ids[slots], damaged, slots=tuple(slots))])
        assert_same_kv(damaged, whole)

    @pytest.mark.parametrize("family", AMID)
    def test_slots_that_follow_one_another_are_appended(
        self, tiny_model: Callable[[str], LanguageModel], family: str
    ) -> None:
        model = tiny_model(family)
        ids = random_ids(90)
        appended, given = prefilled(model, ids[:60], room=30), prefilled(model, ids[:60], room=30)
        expected = forward(model, [Segment(ids[60:], appended)])
        torch.testing.assert_close(
            forward(model, [Segment(ids[60:], given, slots=tuple(range(60, 90)))]), expected, rtol=0, atol=0
        )
        assert_same_kv(given, appended)

    @pytest.mark.parametrize("family", AMID)
    def test_stale_neighbours_are_attended_to_as_they_are(
        self, tiny_model: Callable[[str], LanguageModel], family: str
    ) -> None:
        """What was not computed again stays, and counts: the same as transformers does slot by slot."""
        model = tiny_model(family)
        ids = random_ids(130)
        stale = prefilled(model, random_ids(130, seed=1))
        ours, theirs = copied(stale), copied(stale)
        slots = (3, 4, 5, 40, 61, 99, 100, 128, 129)
        logits = forward(model, [Segment(ids[list(slots)], ours, slots=slots)])[0]
        expected = recompute(model, theirs, ids.tolist(), slots)
        torch.testing.assert_close(logits, expected.logits[0, -1].float(), rtol=1e-3, atol=1e-4)
        assert_same_kv(ours, theirs)
        untouched = [slot for slot in range(130) if slot not in slots]
        for mine, before in zip(ours.keys + ours.values, stale.keys + stale.values, strict=True):
            torch.testing.assert_close(mine[:, untouched], before[:, untouched], rtol=0, atol=0)

    def test_each_layer_is_made_ready_first(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        """What comes into being before a layer is attended to does not replace what is computed there."""
        model = tiny_model("llama")
        ids = random_ids(50)
        whole, stale = prefilled(model, ids), prefilled(model, random_ids(50, seed=1))
        cache = model.new_cache(50)
        cache.length = 50
        slots = (0, 1, 7, 30, 49)

        def ready(layer: int) -> None:
            cache.keys[layer].copy_(stale.keys[layer])
            cache.values[layer].copy_(stale.values[layer])

        logits = forward(model, [Segment(ids[list(slots)], cache, ready, slots)])
        expected = copied(stale)
        torch.testing.assert_close(logits, forward(model, [Segment(ids[list(slots)], expected, slots=slots)]))
        assert_same_kv(cache, expected)
        torch.testing.assert_close(cache.keys[2][:, 0], whole.keys[2][:, 0], rtol=1e-3, atol=1e-4)


class TestAttentionMass:
    @pytest.mark.parametrize("family", AMID)
    def test_it_is_the_models_own(self, tiny_model: Callable[[str], LanguageModel], family: str) -> None:
        """Of the last tokens of a sequence, over all layers and heads, as transformers' eager attention tells."""
        model = tiny_model(family)
        ids = random_ids(140)
        with eager_attention(model):
            attentions = model.module(input_ids=ids[None], output_attentions=True).attentions
        for start in (0, 120, 139):
            cache = prefilled(model, ids[:start], room=140) if start else model.new_cache(140)
            mass = AttentionMass(140, ids.device)
            logits = forward(model, [Segment(ids[start:], cache, mass=mass)])[0]
            torch.testing.assert_close(logits, plain_logits(model, ids), rtol=1e-3, atol=1e-4)
            expected = attention_mass([layer[:, :, start:] for layer in attentions])
            torch.testing.assert_close(mass.received, expected, rtol=1e-3, atol=1e-3)
            heads = attentions[0].shape[1]
            assert float(mass.received.sum()) == pytest.approx(len(attentions) * heads * (140 - start), rel=1e-4)

    def test_only_of_the_layers_that_are_asked_for(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("gemma3")
        ids = random_ids(60)
        with eager_attention(model):
            attentions = model.module(input_ids=ids[None], output_attentions=True).attentions
        mass = AttentionMass(60, ids.device, 2)
        forward(model, [Segment(ids, model.new_cache(60), mass=mass)])
        torch.testing.assert_close(mass.received, attention_mass(attentions[2:]), rtol=1e-3, atol=1e-3)

    def test_only_of_whom_it_is_asked(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        model = tiny_model("gemma2")
        ids, other = random_ids(40), random_ids(25, seed=1)
        alone, packed = AttentionMass(40, ids.device), AttentionMass(40, ids.device)
        forward(model, [Segment(ids, model.new_cache(40), mass=alone)])
        segments = [Segment(other, model.new_cache(25)), Segment(ids, model.new_cache(40), mass=packed)]
        forward(model, segments)
        torch.testing.assert_close(packed.received, alone.received)
