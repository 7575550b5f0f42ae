from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import QuestionError
from ragcache.prompt.layout import lay_out
from ragcache.prompt.order import Candidate

PREFIX, QUESTION = (1, 2, 3), (90, 91)


def chunks_of(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple(range(100 * i, 100 * i + length)) for i, length in enumerate(lengths, start=1)]


def scored(*scores: float) -> list[Candidate]:
    return [Candidate(str(i), (), True, False, str(i), 0, score) for i, score in enumerate(scores)]


def test_everything_fits() -> None:
    layout = lay_out(PREFIX, chunks_of(4, 5), scored(0.1, 0.9), "given", QUESTION, context_window=100, max_tokens=10)
    assert layout.token_ids == [1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203, 204, 90, 91]
    assert layout.starts == [3, 7]
    assert (layout.kept, layout.dropped, layout.answer_room) == ((0, 1), (), 10)


def test_the_lowest_scores_go_and_the_order_stays() -> None:
    layout = lay_out(
        PREFIX, chunks_of(10, 10, 10), scored(0.5, 0.1, 0.9), "given", QUESTION, context_window=35, max_tokens=10
    )
    assert layout.kept == (0, 2)
    assert layout.dropped == (1,)


def test_chunks_are_dropped_by_score_and_the_others_put_in_order_with_their_encodings() -> None:
    candidates = [
        Candidate("a", ("b", "c"), True, True, "x", 0, 0.5),
        Candidate("b", (), True, True, "y", 0, 0.1),
        Candidate("c", (), True, False, "z", 0, 0.3),
    ]
    layout = lay_out(PREFIX, chunks_of(10, 10, 10), candidates, "conditioned", QUESTION, 35, max_tokens=10)
    assert (layout.kept, layout.encodings, layout.dropped) == ((2, 0), ("alone", "context"), (1,))
    assert [chunk[0] for chunk in layout.chunks] == [300, 100]


def test_a_greedy_answer_length_does_not_push_all_passages_out() -> None:
    layout = lay_out(PREFIX, chunks_of(10), scored(1.0), "given", QUESTION, context_window=40, max_tokens=1000)
    assert layout.kept == (0,)
    assert layout.answer_room == 40 - 3 - 2 - 10


def test_a_question_that_does_not_fit_gives_both_numbers() -> None:
    with pytest.raises(QuestionError, match=r"takes 25 tokens.*context window is 25"):
        lay_out(PREFIX, [], [], "given", tuple(range(22)), context_window=25, max_tokens=10)


@given(
    lengths=st.lists(st.integers(1, 30), max_size=8),
    window=st.integers(6, 120),
    max_tokens=st.integers(1, 50),
    data=st.data(),
)
def test_nothing_ever_overflows(lengths: list[int], window: int, max_tokens: int, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.floats(-1, 1), min_size=len(lengths), max_size=len(lengths)))
    room = window - len(PREFIX) - len(QUESTION)
    room -= min(max_tokens, room - room // 2)
    possible = {i for i, length in enumerate(lengths) if length <= room}
    if lengths and not possible:
        with pytest.raises(QuestionError, match="no passage fits"):
            lay_out(PREFIX, chunks_of(*lengths), scored(*scores), "score", QUESTION, window, max_tokens)
        return
    layout = lay_out(PREFIX, chunks_of(*lengths), scored(*scores), "score", QUESTION, window, max_tokens)
    assert len(layout.token_ids) + layout.answer_room <= window
    assert 1 <= layout.answer_room <= max_tokens
    assert sorted([*layout.kept, *layout.dropped]) == list(range(len(lengths)))
    assert [scores[i] for i in layout.kept] == sorted((scores[i] for i in layout.kept), reverse=True)
    assert layout.chunks == tuple(chunks_of(*lengths)[i] for i in layout.kept)
    if dropped := possible & set(layout.dropped):
        assert min(scores[i] for i in layout.kept) >= max(scores[i] for i in dropped)
