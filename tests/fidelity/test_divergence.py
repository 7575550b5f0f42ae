"""Figures by hand, and properties that every divergence has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcache.fidelity.divergence import divergence


def test_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    compared = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    found = divergence(reference, compared)
    # 0.5 ln(0.5 / 0.25) + 0.25 ln(0.25 / 0.5) + 0
    assert found.kl == pytest.approx((0.25 * math.log(2), 0.0), abs=1e-7)
    assert found.agrees == (False, True)
    assert found.mean_kl == pytest.approx(0.125 * math.log(2))
    assert found.worst_kl == pytest.approx(0.25 * math.log(2))
    assert found.agreement == 0.5


def test_it_is_the_compared_that_is_measured_from_the_reference() -> None:
    sure, unsure = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert divergence(sure, unsure).kl[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert divergence(unsure, sure).kl[0] == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))


def test_what_cannot_come_adds_nothing() -> None:
    reference = torch.tensor([[0.5, 0.5, 0.0]]).log()
    assert divergence(reference, reference).kl == (0.0,)
    assert divergence(reference, torch.tensor([[0.25, 0.25, 0.5]]).log()).kl[0] == pytest.approx(math.log(2))
    # The other way round something comes that the compared distribution rules out.
    assert divergence(torch.tensor([[0.25, 0.25, 0.5]]).log(), reference).kl == (math.inf,)


LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=8, max_size=8)


@given(st.lists(st.tuples(LOGITS, LOGITS), min_size=1, max_size=4), st.floats(-50, 50))
def test_like_a_reference_in_numpy(rows: list[tuple[list[float], list[float]]], shift: float) -> None:
    reference, compared = (torch.tensor([row[side] for row in rows]) for side in (0, 1))
    found = divergence(reference, compared)
    p, q = (
        np.exp(it) / np.exp(it).sum(-1, keepdims=True) for it in (reference.double().numpy(), compared.double().numpy())
    )
    assert found.kl == pytest.approx(tuple((p * np.log(p / q)).sum(-1)), abs=1e-9)
    assert found.agrees == tuple(reference.numpy().argmax(-1) == compared.numpy().argmax(-1))
    # Logits say the same whatever is added to all of them.
    assert divergence(reference.double(), compared.double() + shift).kl == pytest.approx(found.kl, abs=1e-9)
    assert divergence(reference, reference).kl == (0.0,) * len(rows)
    assert all(it >= 0 for it in found.kl)


@pytest.mark.parametrize("shapes", [((2, 3), (1, 3)), ((0, 3), (0, 3))])
def test_what_cannot_be_compared_is_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        divergence(torch.zeros(shapes[0]), torch.zeros(shapes[1]))


def test_what_is_no_number_agrees_with_nothing() -> None:
    rows = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [2.0, 1.0]])
    found = divergence(rows, rows)
    assert found.agrees == (True, False, True)
    assert math.isnan(found.mean_kl)
    assert math.isnan(found.worst_kl)
