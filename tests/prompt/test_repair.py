"""Which tokens are chosen: as many as asked for, where they may be, the right ones."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.prompt.repair import ChunkSpans, RepairOptions, choose_first, choose_highest
from ragcache.settings import QueryOptions


@st.composite
def chunks_in_prompts(draw: st.DrawFn) -> ChunkSpans:
    """Chunks one behind the other, after a prefix."""
    start = draw(st.integers(0, 5))
    starts, chunks = [], []
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=6)):
        starts.append(start)
        chunks.append([0] * length)
        start += length
    return ChunkSpans.laid_out(starts, chunks, first_exact=draw(st.booleans()))


def check(chunks: ChunkSpans, chosen: tuple[int, ...], count: int) -> None:
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == min(count, chunks.most)
    allowed = {slot for span in chunks.spans[chunks.first_exact :] for slot in span}
    assert set(chosen) <= allowed
    if count >= chunks.most:
        assert set(chosen) == allowed


@settings(deadline=None)
@given(chunks=chunks_in_prompts(), count=st.integers(0, 80))
def test_the_first_of_each(chunks: ChunkSpans, count: int) -> None:
    chosen = choose_first(chunks, count)
    check(chunks, chosen, count)
    taken = {span: [slot for slot in span if slot in chosen] for span in chunks.repairable}
    for span, slots in taken.items():
        assert slots == list(span[: len(slots)])
    # Whoever has more to give was not asked for less than others, but for the one that does not divide.
    most = max((len(slots) for slots in taken.values()), default=0)
    for span, slots in taken.items():
        assert len(slots) == len(span) or len(slots) >= most - 1


def test_what_does_not_divide_is_the_first_ones() -> None:
    chunks = ChunkSpans((range(3, 13), range(13, 23), range(23, 33)), first_exact=False)
    assert choose_first(chunks, 7) == (3, 4, 5, 13, 14, 23, 24)
    short = ChunkSpans((range(3, 13), range(13, 14), range(14, 24)), first_exact=False)
    assert choose_first(short, 7) == (3, 4, 5, 13, 14, 15, 16)


@settings(deadline=None)
@given(chunks=chunks_in_prompts(), count=st.integers(0, 80), data=st.data())
def test_the_highest(chunks: ChunkSpans, count: int, data: st.DataObject) -> None:
    total = chunks.spans[-1].stop + data.draw(st.integers(0, 3))
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=total, max_size=total))
    chosen = choose_highest(chunks, torch.tensor(scores), count)
    check(chunks, chosen, count)
    allowed = [slot for span in chunks.repairable for slot in span]
    by_hand = sorted(allowed, key=lambda slot: (-scores[slot], slot))[:count]
    assert chosen == tuple(sorted(by_hand))


@settings(deadline=None)
@given(chunks=chunks_in_prompts(), ratio=st.floats(0, 1))
def test_a_share_is_of_all_chunks(chunks: ChunkSpans, ratio: float) -> None:
    """Also of the one that needs no repair, as far as the others can give as much."""
    total = sum(len(span) for span in chunks.spans)
    count = chunks.share(ratio)
    assert 0 <= count <= chunks.most
    assert count == chunks.most or abs(count - ratio * total) <= 0.5
    assert chunks.share(1.0) == chunks.most
    assert chunks.share(0.0) == 0


def test_one_chunk_that_is_exact_leaves_nothing_to_choose() -> None:
    chunks = ChunkSpans.laid_out([4], [[1, 2, 3]], first_exact=True)
    assert chunks.most == chunks.share(1.0) == 0
    assert choose_first(chunks, 3) == choose_highest(chunks, torch.ones(7), 3) == ()
    assert ChunkSpans.laid_out([], [], first_exact=True).most == 0


def test_first_tokens_are_of_all_chunks_alike() -> None:
    chunks = ChunkSpans.laid_out([2, 12, 22, 32], [[0] * 10] * 4, first_exact=True)
    counts = Counter(slot // 10 for slot in (slot - 2 for slot in choose_first(chunks, 9)))
    assert counts == {1: 3, 2: 3, 3: 3}


def test_options_come_from_a_query() -> None:
    options = QueryOptions(repair="boundary", repair_ratio=0.3, repair_ms=20.0)
    assert RepairOptions.of(options) == RepairOptions("boundary", 0.3, 20.0)
    assert RepairOptions.of(QueryOptions()).method == QueryOptions().repair
