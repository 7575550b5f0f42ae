from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.prompt.order import Candidate, Place, arrange
from ragcache.settings import Order

ORDERS: tuple[Order, ...] = ("conditioned", "score", "score-last", "document", "given")


def chunk(content: str, score: float, *members: str, document: str = "", ordinal: int = 0) -> Candidate:
    """A chunk with both encodings, of a document of its own unless told otherwise."""
    return Candidate(content, members, True, True, document or content, ordinal, score)


@st.composite
def candidate_lists(draw: st.DrawFn, largest: int = 6) -> list[Candidate]:
    """Chunks of a few documents, with circles among their members, members that are not there, and equal scores."""
    count = draw(st.integers(0, largest))
    contents = st.sampled_from([f"c{i}" for i in range(count + 2)])
    return [
        Candidate(
            content=f"c{i}",
            members=tuple(draw(st.lists(contents, max_size=3, unique=True))),
            has_alone=draw(st.booleans()),
            has_context=draw(st.booleans()),
            document_id=draw(st.sampled_from("xyz")),
            ordinal=i,
            score=draw(st.sampled_from([0.1, 0.2, 0.3, 0.4])),
        )
        for i in range(count)
    ]


def indices(candidates: list[Candidate], order: Order) -> list[int]:
    return [place.index for place in arrange(candidates, order)]


def names(candidates: list[Candidate], order: Order) -> str:
    return "".join(candidates[index].content for index in indices(candidates, order))


def rank_by_the_four_rules(candidates: list[Candidate], order: tuple[int, ...]) -> tuple[object, ...]:
    """Smaller is better; written down as the rules read, for comparison with each possible order."""
    arranged = [candidates[index] for index in order]
    pairs = list(combinations(arranged, 2))
    return (
        bool(arranged) and not arranged[0].has_alone,
        -sum(later.has_context and earlier.content in later.members for earlier, later in pairs),
        -sum(earlier.document_id == later.document_id and earlier.ordinal < later.ordinal for earlier, later in pairs),
        [(-it.score, it.document_id, it.ordinal) for it in arranged],
    )


@given(candidate_lists())
def test_conditioned_is_the_first_of_all_orders_by_the_four_rules(candidates: list[Candidate]) -> None:
    best = min(
        permutations(range(len(candidates))), key=lambda order: rank_by_the_four_rules(candidates, order), default=()
    )
    assert indices(candidates, "conditioned") == list(best)


@pytest.mark.parametrize("order", ORDERS)
@given(candidates=candidate_lists(14), data=st.data())
def test_every_order_holds_each_chunk_once_and_depends_on_nothing_else(
    order: Order, candidates: list[Candidate], data: st.DataObject
) -> None:
    places = arrange(candidates, order)
    assert sorted(place.index for place in places) == list(range(len(candidates)))
    if order == "given":
        assert [place.index for place in places] == list(range(len(candidates)))
    else:
        shuffled = data.draw(st.permutations(candidates))
        assert names(shuffled, order) == names(candidates, order)


@pytest.mark.parametrize("order", ORDERS)
@given(candidates=candidate_lists(14))
def test_what_is_exact_is_taken_first_and_context_elsewhere(order: Order, candidates: list[Candidate]) -> None:
    places = arrange(candidates, order)
    for place in places:
        it = candidates[place.index]
        first, other = ("alone", "context") if place == places[0] else ("context", "alone")
        stored = {"alone": it.has_alone, "context": it.has_context}
        assert place.encoding == (first if stored[first] else other if stored[other] else None)
    if order == "conditioned" and any(it.has_alone for it in candidates):
        assert places[0].encoding == "alone"


def test_each_chunk_follows_what_it_was_encoded_with() -> None:
    chain = [chunk("a", 0.9, "b"), chunk("b", 0.5, "c"), chunk("c", 0.7), chunk("d", 0.8)]
    assert names(chain, "conditioned") == "dcba"


def test_of_two_that_were_encoded_with_each_other_the_better_comes_first() -> None:
    assert names([chunk("a", 0.5, "b"), chunk("b", 0.6, "a")], "conditioned") == "ba"


def test_chunks_of_a_document_keep_its_order_unless_a_member_would_be_lost() -> None:
    pages = [chunk(name, 0.5 + at / 10, document="book", ordinal=at) for at, name in enumerate("abc")]
    assert names(pages, "conditioned") == "abc"
    pages[0] = replace(pages[0], members=("b",))
    assert names(pages, "conditioned") == "bac"


def test_members_that_were_not_retrieved_do_not_matter() -> None:
    assert names([chunk("a", 0.2, "z"), chunk("b", 0.3)], "conditioned") == "ba"


def test_only_chunks_that_are_exact_there_come_first() -> None:
    best = replace(chunk("a", 0.9), has_alone=False)
    assert arrange([best, chunk("b", 0.1)], "conditioned") == (Place(1, "alone"), Place(0, "context"))
    assert arrange([best], "conditioned") == (Place(0, "context"),)


def test_plain_orders() -> None:
    candidates = [
        chunk("a", 0.1, document="x", ordinal=3),
        chunk("b", 0.9, document="x", ordinal=5),
        chunk("c", 0.5, document="y", ordinal=1),
        chunk("d", 0.4, document="y", ordinal=0),
    ]
    assert names(candidates, "score") == "bcda"
    assert names(candidates, "score-last") == "adcb"
    assert names(candidates, "document") == "abdc"
    assert names(candidates, "given") == "abcd"
