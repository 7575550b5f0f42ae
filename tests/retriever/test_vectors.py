from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.errors import VectorsError
from ragcache.retriever.vectors import VectorIndex, Vectors, remove_other_generations


def unit_vectors(count: int, seed: int = 0) -> Vectors:
    vectors = np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_history_of_adds_and_removes_finds_what_is_there(data: st.DataObject) -> None:
    vectors, index = unit_vectors(40), VectorIndex.empty(16)
    present: set[int] = set()
    next_id = 1
    for _ in range(data.draw(st.integers(1, 8))):
        remove: bool = data.draw(st.booleans())
        if present and remove:
            gone: set[int] = data.draw(st.sets(st.sampled_from(sorted(present)), min_size=1))
            index.remove(sorted(gone))
            present -= gone
        else:
            count = data.draw(st.integers(1, 4))
            ids = list(range(next_id, next_id + count))
            index.add(ids, vectors[ids])
            present |= set(ids)
            next_id += count
    assert len(index) == len(present)
    for vector_id in present:
        (best, score), *_ = index.search(vectors[[vector_id]], 3)
        assert best == vector_id
        assert score == pytest.approx(1.0, abs=1e-5)
    found = {i for i, _ in index.search(vectors[[0]], 100)}
    assert found == present


def test_scores_are_cosines_best_first() -> None:
    vectors, index = unit_vectors(20), VectorIndex.empty(16)
    index.add(list(range(20)), vectors)
    hits = index.search(vectors[[3]], 20)
    expected = sorted(((i, float(vectors[3] @ vectors[i])) for i in range(20)), key=lambda hit: -hit[1])
    assert [i for i, _ in hits] == [i for i, _ in expected]
    np.testing.assert_allclose([s for _, s in hits], [s for _, s in expected], atol=1e-5)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_an_id_with_several_vectors_counts_once(data: st.DataObject) -> None:
    vectors = unit_vectors(30)
    ids: list[int] = data.draw(st.lists(st.integers(1, 8), min_size=30, max_size=30))
    count: int = data.draw(st.integers(1, 12))
    index = VectorIndex.empty(16)
    index.add(ids, vectors)
    best: dict[int, float] = {}
    for vector_id, score in zip(ids, vectors @ vectors[0], strict=True):
        best[vector_id] = max(float(score), best.get(vector_id, -1.0))
    expected = sorted(best.items(), key=lambda hit: -hit[1])[:count]
    hits = index.search(vectors[[0]], count)
    assert [i for i, _ in hits] == [i for i, _ in expected]
    np.testing.assert_allclose([s for _, s in hits], [s for _, s in expected], atol=1e-5)
    index.remove([hits[0][0]])
    assert hits[0][0] not in {i for i, _ in index.search(vectors[[0]], 12)}


def test_generations(tmp_path: Path) -> None:
    vectors, index = unit_vectors(5), VectorIndex.empty(16)
    index.add([1, 2], vectors[:2])
    first = index.save(tmp_path, 1)
    index.add([7], vectors[2:3])
    second = index.save(tmp_path, 2)
    assert len(VectorIndex.load(tmp_path, first)) == 2
    assert VectorIndex.load(tmp_path, second).search(vectors[[2]], 1)[0][0] == 7
    (tmp_path / ".writing-vectors-00000009.faiss").touch()
    remove_other_generations(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(VectorsError, match="cannot be read"):
        VectorIndex.load(tmp_path, first)


def test_an_older_file_under_a_newer_name_is_not_taken(tmp_path: Path) -> None:
    index = VectorIndex.empty(16)
    index.add([1], unit_vectors(1))
    index.save(tmp_path, 1)
    index.add([2], unit_vectors(1))
    second = index.save(tmp_path, 2)
    old, new = sorted(tmp_path.iterdir())
    old.replace(new)
    with pytest.raises(VectorsError, match="damaged"):
        VectorIndex.load(tmp_path, second)


@given(data=st.data())
def test_a_damaged_file_is_never_loaded(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("vectors")
    index = VectorIndex.empty(16)
    index.add([1, 2, 3], unit_vectors(3))
    version = index.save(folder, 1)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(VectorsError, match="damaged"):
        VectorIndex.load(folder, version)


def test_an_empty_index_finds_nothing() -> None:
    assert VectorIndex.empty(16).search(unit_vectors(1), 5) == []
