"""Contexts are made of whole chunks, each chunk is encoded once, and a long document costs one sliding pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragcache.indexer.contexts import (
    Block,
    ContextRecipe,
    alone,
    choose_members,
    choose_others,
    context_ids,
    joined,
    pack,
    plan_blocks,
)
from ragcache.settings import ContextName


@dataclass(frozen=True)
class Words:
    """A chunk that is nothing else; equal ones have equal ids."""

    content: str
    token_ids: tuple[int, ...]


def words(content: str, tokens: int = 10) -> Words:
    return Words(content, tuple([ord(content[0])] * tokens))


def recipe(text: ContextName = "document", tokens: int = 20, block: int = 60, window: int = 1000) -> ContextRecipe:
    return ContextRecipe(text, tokens, block, window)


def contents(passages: tuple[Words, ...] | list[Words]) -> str:
    return "".join(passage.content for passage in passages)


def chosen(preceding: str, neighbours: str, tokens: int = 40, room: int = 1000, size: int = 10) -> str:
    """The context of a chunk `x`, all chunks being of one size."""
    return contents(
        choose_members(
            words("x", size),
            [words(it, size) for it in preceding],
            [words(it, size) for it in neighbours],
            tokens,
            room,
        )
    )


def test_the_document_s_text_stands_next_to_the_chunk_and_neighbours_before_it() -> None:
    assert chosen("abc", "nmo") == "nabc"
    assert chosen("abcdef", "nmo") == "cdef"
    assert chosen("", "nmo") == "omn"
    assert chosen("", "") == ""


def test_what_does_not_fit_whole_is_left_out() -> None:
    assert chosen("abc", "nmo", tokens=39) == "abc"
    assert chosen("abc", "nmo", tokens=29) == "bc"


def test_text_that_was_cut_off_is_not_filled_up() -> None:
    """Something else between the chunk's text and what comes before it would be no real text."""
    long = [words("a", 30), words("b", 5)]
    assert contents(choose_members(words("x"), long, [words("n", 5)], tokens=20, room=1000)) == "b"


def test_the_first_may_be_longer_than_asked_for_but_not_than_there_is_room_for() -> None:
    assert chosen("ab", "n", tokens=3) == "b"
    assert chosen("", "nm", tokens=3) == "n"
    assert chosen("ab", "n", tokens=3, room=9) == ""
    assert chosen("abc", "n", tokens=100, room=25) == "bc"


def test_no_text_stands_in_a_context_twice_or_before_itself() -> None:
    assert chosen("axa", "xanna", tokens=100) == "na"


def test_neighbours_are_not_looked_up_in_vain() -> None:
    def neighbours(chunk: Words) -> Iterator[Words]:
        raise LookupError
        yield

    document = [words(it) for it in "abcd"]
    assert len(list(plan_blocks(document, [2, 3], neighbours, recipe()))) == 1
    with pytest.raises(LookupError):
        list(plan_blocks(document, [1], neighbours, recipe()))


def test_a_long_document_slides() -> None:
    document = [words(it) for it in "abcdefghij"]
    blocks = list(plan_blocks(document, range(10), lambda chunk: [words("n")], recipe()))
    assert [(contents(it.members), contents(it.chunks)) for it in blocks] == [
        ("n", "abcde"),
        ("de", "fghi"),
        ("hi", "j"),
    ]
    assert contents(blocks[1].before(2)) == "defg"


def test_a_document_that_repeats_itself_does_not_stand_before_itself() -> None:
    document = [words(it) for it in "abab"]
    blocks = list(plan_blocks(document, range(4), lambda chunk: [], recipe()))
    assert [(contents(it.members), contents(it.chunks)) for it in blocks] == [("", "ab"), ("b", "a"), ("a", "b")]


def test_neighbours_alone_make_blocks_of_one_chunk() -> None:
    document = [words(it) for it in "abc"]
    blocks = list(plan_blocks(document, range(3), lambda chunk: [words("n"), words("m")], recipe("neighbours")))
    assert [(contents(it.members), contents(it.chunks)) for it in blocks] == [("mn", "a"), ("mn", "b"), ("mn", "c")]


CHUNKS = st.lists(
    st.builds(lambda name, size: Words(f"{name}{size}", (name,) * size), st.integers(0, 6), st.integers(1, 12)),
    max_size=25,
)


@settings(deadline=None)
@given(
    document=CHUNKS,
    neighbours=CHUNKS,
    wanted=st.sets(st.integers(0, 24)),
    text=st.sampled_from(["document", "neighbours"]),
    tokens=st.integers(1, 40),
    block_tokens=st.integers(1, 80),
    room=st.integers(0, 60),
)
@example(
    document=[words("a", 1), words("a", 1), words("b", 1), words("c", 1), words("b", 1)],
    neighbours=[],
    wanted={0, 1, 4},
    text="document",
    tokens=2,
    block_tokens=1,
    room=0,
)
def test_every_wanted_chunk_is_encoded_once_after_distinct_text(
    document: list[Words],
    neighbours: list[Words],
    wanted: set[int],
    text: ContextName,
    tokens: int,
    block_tokens: int,
    room: int,
) -> None:
    wanted = {index for index in wanted if index < len(document)}
    how = ContextRecipe(text, tokens, block_tokens, 12 + room)
    blocks = list(plan_blocks(document, wanted, lambda chunk: neighbours, how))
    assert [it for block in blocks for it in block.chunks] == [document[index] for index in sorted(wanted)]
    places = iter(sorted(wanted))
    for block in blocks:
        # Texts may repeat, so a chunk is known by its place, not by its text.
        first, *_ = [next(places) for _ in block.chunks]
        stand = block.before(len(block.chunks))
        assert len({it.content for it in stand}) == len(stand)
        assert block.tokens == len(joined(stand)) <= how.window
        assert len(block.chunks) == 1 or block.tokens <= block_tokens
        assert len(joined(block.members)) <= tokens or len(block.members) == 1
        if text == "document":
            own = [it for it in block.members if it in document[:first]]
            assert list(block.members[len(block.members) - len(own) :]) == own or set(own) & set(neighbours)
        else:
            assert len(block.chunks) == 1
            assert list(block.members[::-1]) == [it for it in dict.fromkeys(neighbours) if it in block.members]
    # A sliding pass costs no more than its contexts beside the chunks themselves.
    assert sum(it.tokens for it in blocks) <= sum(len(joined(it.members)) for it in blocks) + len(joined(document))


@settings(deadline=None)
@given(blocks=st.lists(st.integers(1, 30)), tokens=st.integers(1, 40))
def test_packing_keeps_order_and_limit(blocks: list[int], tokens: int) -> None:
    one_each: list[Block[Words]] = [alone(words("a", size)) for size in blocks]
    packed = list(pack(one_each, tokens))
    assert [it for together in packed for it in together] == one_each
    for together in packed:
        assert len(together) == 1 or sum(it.tokens for it in together) <= tokens
    for first, second in pairwise(packed):
        assert sum(it.tokens for it in first) + second[0].tokens > tokens


def several(block: Block[Words]) -> list[list[str]]:
    return [[contents(context) for context in block.contexts(index)] for index in range(len(block.chunks))]


def test_further_contexts_hold_the_next_neighbours() -> None:
    how = ContextRecipe("neighbours", 20, 60, 1000, 3)
    similar = [words(it) for it in "nmopqrs"]
    (block,) = plan_blocks([words("x")], [0], lambda chunk: similar, how)
    assert several(block) == [["mn", "po", "rq"]]
    assert block.tokens == 3 * 30
    (block,) = plan_blocks([words("x")], [0], lambda chunk: similar[:3], how)
    assert several(block) == [["mn", "o"]]
    (block,) = plan_blocks([words("x")], [0], lambda chunk: [], how)
    assert several(block) == [[""]]


def test_in_a_document_only_the_first_context_slides() -> None:
    document = [words(it) for it in "abcd"]
    similar = [document[3], words("n"), document[0], words("m"), words("o")]
    blocks = list(plan_blocks(document, range(4), lambda chunk: similar, ContextRecipe("document", 20, 60, 1000, 2)))
    assert [several(it) for it in blocks] == [[["mn", "od"], ["mna", "od"], ["mnab", "od"], ["mnabc", "o"]]]


def test_several_contexts_are_kept_apart() -> None:
    assert context_ids(()) == context_ids(((),)) == ()
    a, b = words("a", 1), words("b", 1)
    kept = [context_ids(it) for it in (((a, b),), ((a,), (b,)), ((), (a, b)), ((a, b), ()), ((b,), (a,)))]
    assert len(set(kept)) == len(kept)
    assert kept[1] == (97, -1, 98)


@settings(deadline=None)
@given(first=CHUNKS, neighbours=CHUNKS, tokens=st.integers(1, 40), room=st.integers(1, 60), count=st.integers(1, 4))
def test_no_text_stands_in_two_contexts(
    first: list[Words], neighbours: list[Words], tokens: int, room: int, count: int
) -> None:
    chunk = words("x", 10)
    contexts = choose_others(chunk, first, neighbours, ContextRecipe("neighbours", tokens, 60, 10 + room, count))
    assert len(contexts) < count
    stand = [it.content for context in contexts for it in context]
    assert len({*stand, chunk.content}) == len(stand) + 1
    assert not {it.content for it in first} & set(stand)
    for context in contexts:
        assert len(context) == 1 or len(joined(context)) <= min(tokens, room)
        assert 0 < len(joined(context)) <= room
