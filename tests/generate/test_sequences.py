"""Remembered prompts: exact, bounded in bytes, the least valuable given up first."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache.generate.decode import decode
from ragcache.generate.sampling import SamplingParameters
from ragcache.generate.sequences import SequenceMemory
from ragcache.model.capture import prefill
from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.layout import Layout

TinyModel = Callable[[str], LanguageModel]

PREFIX = (1, 2, 3)
QUESTION = (70, 71, 72, 73)


def layout_of(*chunks: tuple[int, ...], prefix: tuple[int, ...] = PREFIX) -> Layout:
    count = len(chunks)
    return Layout(prefix, chunks, tuple(range(count)), (None,) * count, (), QUESTION, answer_room=12)


def chunk(number: int, tokens: int = 30) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(100, 40000), k=tokens))


def prefilled(model: LanguageModel, layout: Layout) -> tuple[KVCache, torch.Tensor]:
    cache = model.new_cache(len(layout.token_ids) + layout.answer_room)
    return cache, forward(model, [Segment(model.tensor(layout.token_ids), cache)])[0]


def stand_in(model: LanguageModel, layout: Layout) -> KVCache:
    """A cache whose content, in each chunk, tells which chunks came before; much quicker than a prefill."""
    cache = model.new_cache(len(layout.token_ids))
    before = hash(layout.prefix)
    for token_ids, start in zip(layout.chunks, layout.starts, strict=True):
        before = hash((before, token_ids))
        for layer, it in enumerate(cache.keys + cache.values):
            it[:, start : start + len(token_ids)] = before % 10007 + layer
    cache.length = len(layout.token_ids)
    return cache


def recalled(model: LanguageModel, memory: SequenceMemory, layout: Layout) -> int:
    """Chunks that are remembered of a prompt; whatever is must be what was put in."""
    cache = model.new_cache(len(layout.token_ids))
    cache.length = len(layout.prefix)
    count = memory.recall(layout, cache)
    assert cache.length == len(layout.prefix) + sum(map(len, layout.chunks[:count]))
    expected, slots = stand_in(model, layout), slice(len(layout.prefix), cache.length)
    for mine, theirs in zip(cache.keys + cache.values, expected.keys + expected.values, strict=True):
        assert torch.equal(mine[:, slots], theirs[:, slots])
    return count


def chunk_bytes(model: LanguageModel, tokens: int = 30) -> int:
    cache = model.new_cache(tokens)
    return sum(it.nbytes for it in cache.keys + cache.values)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_remembered_prompt_equals_a_full_prefill(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    layout = layout_of(chunk(1), chunk(2, 50), chunk(3, 41))
    first, expected = prefilled(model, layout)
    memory = SequenceMemory(model, PREFIX, limit=2**30)
    memory.remember(layout, first)
    parameters = SamplingParameters(max_tokens=layout.answer_room)
    answer = list(decode(model, first, expected, parameters))
    first.keys[0].zero_()

    cache = model.new_cache(len(layout.token_ids) + layout.answer_room)
    cache.copy_prefix(prefill(model, PREFIX))
    assert memory.recall(layout, cache) == 3
    logits = forward(model, [Segment(model.tensor(list(QUESTION)), cache)])[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    assert list(decode(model, cache, logits, parameters)) == answer


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_where_prompts_part_the_rest_can_be_prefilled(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    memory = SequenceMemory(model, PREFIX, limit=2**30)
    known = layout_of(chunk(1), chunk(2), chunk(3))
    memory.remember(known, prefilled(model, known)[0])
    layout = layout_of(chunk(1), chunk(2), chunk(4), chunk(3))
    cache = model.new_cache(len(layout.token_ids))
    cache.copy_prefix(prefill(model, PREFIX))
    assert memory.recall(layout, cache) == 2
    rest = layout.token_ids[cache.length :]
    logits = forward(model, [Segment(model.tensor(rest), cache)])[0]
    torch.testing.assert_close(logits, prefilled(model, layout)[1], rtol=0, atol=1e-3)


def test_only_the_same_chunks_after_the_same_chunks_and_prefix_are_found(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    memory = SequenceMemory(model, PREFIX, limit=2**30)
    layout = layout_of(chunk(1), chunk(2))
    memory.remember(layout, stand_in(model, layout))
    assert recalled(model, memory, layout) == 2
    assert recalled(model, memory, layout_of(chunk(1), chunk(3))) == 1
    assert recalled(model, memory, layout_of(chunk(2), chunk(1))) == 0
    for prefix in ((1, 2), (1, 2, 4), (*PREFIX, *chunk(1)), ()):
        other = layout_of(chunk(1), chunk(2), prefix=prefix)
        assert recalled(model, memory, other) == 0
        memory.remember(other, stand_in(model, other))
    assert memory.report.taken == 2


def test_a_cache_that_does_not_end_with_the_prefix_is_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="holds 0 tokens, and the prefix has 3"):
        SequenceMemory(model, PREFIX, limit=2**30).recall(layout_of(chunk(1)), model.new_cache(64))


def test_what_is_copied_belongs_to_the_request(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    memory = SequenceMemory(model, PREFIX, limit=2**30)
    layout = layout_of(chunk(1))
    mine = stand_in(model, layout)
    memory.remember(layout, mine)
    mine.keys[0].zero_()
    theirs = model.new_cache(64)
    theirs.length = len(PREFIX)
    memory.recall(layout, theirs)
    theirs.values[0].zero_()
    assert recalled(model, memory, layout) == 1


def test_without_room_nothing_is_remembered(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    memory = SequenceMemory(model, PREFIX, limit=0)
    layout = layout_of(chunk(1))
    memory.remember(layout, stand_in(model, layout))
    assert recalled(model, memory, layout) == 0
    assert memory.report.bytes == 0


def test_what_is_wanted_often_stays_and_what_it_was_for_is_overtaken_in_time(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    memory = SequenceMemory(model, PREFIX, limit=2 * chunk_bytes(model))

    def remember(*numbers: int) -> None:
        layout = layout_of(*map(chunk, numbers))
        memory.remember(layout, stand_in(model, layout))

    def count(*numbers: int) -> int:
        return recalled(model, memory, layout_of(*map(chunk, numbers)))

    remember(1)
    remember(2)
    assert count(1) == 1  # a second use
    remember(3)
    assert (count(1), count(3)) == (1, 1)
    assert count(2) == 0
    # 1 was wanted three times, 3 twice. Each newcomer raises the clock until it is worth as much as one of them.
    rounds = 0
    while count(4) == 0:
        remember(4)
        rounds += 1
    assert 1 < rounds < 10
    assert count(3) == 0
    assert memory.report.refused == rounds - 1


def test_leaves_go_before_what_they_come_after(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    memory = SequenceMemory(model, PREFIX, limit=3 * chunk_bytes(model))
    long, other = layout_of(chunk(1), chunk(2), chunk(3)), layout_of(chunk(1), chunk(4))
    memory.remember(long, stand_in(model, long))
    for _ in range(5):
        memory.remember(other, stand_in(model, other))
    assert recalled(model, memory, other) == 2
    assert recalled(model, memory, long) == 2
    # The limit is smaller than this prompt, whose own start does not go for its end.
    longer = layout_of(*map(chunk, range(10, 16)))
    for _ in range(9):
        memory.remember(longer, stand_in(model, longer))
    assert recalled(model, memory, longer) == 3


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 4), max_size=4)), max_size=30),
    room=st.floats(0, 6),
)
def test_never_more_bytes_than_allowed_and_never_another_content(
    tiny_model: TinyModel, requests: list[tuple[bool, list[int]]], room: float
) -> None:
    model = tiny_model("llama")
    limit = int(room * chunk_bytes(model, 10))
    memory = SequenceMemory(model, PREFIX, limit)
    for remembers, numbers in requests:
        layout = layout_of(*(chunk(number, 5 + 3 * number) for number in numbers))
        if remembers:
            memory.remember(layout, stand_in(model, layout))
        recalled(model, memory, layout)
        report, nodes = memory.report, list(memory._nodes())
        assert report.bytes == sum(node.bytes for node in nodes) <= limit
        assert report.chunks == len(nodes) == report.taken - report.evicted


def test_many_threads_at_once(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    limit = 5 * chunk_bytes(model)
    memory = SequenceMemory(model, PREFIX, limit)

    def request(seed: int) -> int:
        draw = random.Random(seed)
        layout = layout_of(*(chunk(draw.randrange(4)) for _ in range(draw.randint(1, 4))))
        memory.remember(layout, stand_in(model, layout))
        assert memory.report.bytes <= limit
        return recalled(model, memory, layout)

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(request, range(300))) == memory.report.served > 0
    assert memory.report.bytes == sum(node.bytes for node in memory._nodes())
