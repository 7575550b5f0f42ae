"""Token F1 and exact match by hand."""

from __future__ import annotations

import pytest

from ragcache.evaluation.gold import exact_match, normalised, token_f1


def test_normalised_as_in_squad() -> None:
    assert normalised(" The  Exeter-College,\nOxford! ") == "exetercollege oxford"
    assert normalised("An answer, a theatre and the end") == "answer theatre and end"


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "exact"),
    [
        ("Exeter College", ["exeter college."], 1.0, 1.0),
        ("He was at Exeter College", ["Exeter College"], 4 / 7, 0.0),  # precision 2/5, recall 2/2
        ("Oxford", ["Exeter College", "Oxford"], 1.0, 1.0),
        ("red red blue", ["red blue blue"], 2 / 3, 0.0),  # each word as often as in both
        ("green", ["red"], 0.0, 0.0),
        ("the", ["an"], 1.0, 1.0),  # nothing is left of either
        ("", ["red"], 0.0, 0.0),
    ],
)
def test_by_hand(answer: str, gold: list[str], f1: float, exact: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(f1)
    assert exact_match(answer, gold) == exact
