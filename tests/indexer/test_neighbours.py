"""Neighbours are those that a comparison of everything with everything finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.indexer.neighbours import Neighbours
from ragcache.retriever.vectors import VectorIndex

DIMENSION = 3


@settings(deadline=None)
@given(
    owners=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_as_by_brute_force(owners: list[int], count: int, seed: int) -> None:
    """However many vectors a chunk has, and however they are interleaved."""
    vectors = np.random.default_rng(seed).normal(size=(len(owners), DIMENSION)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = VectorIndex.empty(DIMENSION)
    index.add(owners, vectors)
    similarity = {
        one: {
            other: max(
                float(vectors[i] @ vectors[j])
                for i, a in enumerate(owners)
                for j, b in enumerate(owners)
                if (a, b) == (one, other)
            )
            for other in set(owners) - {one}
        }
        for one in set(owners)
    }
    neighbours = Neighbours(index)
    for one, nearest in neighbours.nearest(sorted(set(owners)), count).items():
        expected = sorted(similarity[one].values(), reverse=True)[:count]
        assert [it[1] for it in nearest] == pytest.approx(expected, abs=1e-5)
        assert all(similarity[one][other] == pytest.approx(cosine, abs=1e-5) for other, cosine in nearest)
    for one, others in neighbours.similarities({one: list(set(owners) - {one}) for one in owners}).items():
        assert others == pytest.approx(similarity[one], abs=1e-5)


def test_what_has_no_vectors_has_no_neighbours() -> None:
    index = VectorIndex.empty(DIMENSION)
    assert Neighbours(index).nearest([3], 2) == {3: []}
    index.add([4], np.eye(1, DIMENSION, dtype=np.float32))
    assert Neighbours(index).nearest([3, 4], 2) == {3: [], 4: []}
    assert Neighbours(index).similarities({4: [3], 3: [4]}) == {4: {}}
