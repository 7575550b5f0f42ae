"""What belongs to a chunk beside its text outlives whatever is done to a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.errors import StoreError
from ragcache.indexer.documents import Passage
from ragcache.maintenance import rebuild_store
from ragcache.states.journal import journal_files
from ragcache.states.records import ChunkRecord

OpenTiny = Callable[..., RagCache]

METADATA = {"z": 1, "a": [1.0, {"deep": None, "b": True}], "text": "Ω 🙂", "_node": {"type": 3}}
QUESTION = "Where do storks nest?"


def passage(number: int) -> Passage:
    return Passage(
        f"p-{number}",
        f"They were seen there {number} times.",
        f"Birds\nThey were seen there {number} times.",
        f"Storks nest on chimney number {number}.",
        METADATA | {"number": number},
    )


@pytest.fixture(params=[("alone",), ("alone", "context")], ids=["alone", "context"])
def cache(open_tiny: OpenTiny, request: pytest.FixtureRequest) -> RagCache:
    cache = open_tiny(encodings=request.param, contexts=1)
    birds = Document("birds", "", "Birds", {"shared": [1], "a": "hidden"}, tuple(passage(i) for i in range(3)))
    cache.index([birds, Document("text", "The ferry leaves at seven. " * 20)])
    return cache


def chunks(cache: RagCache) -> list[ChunkRecord]:
    return [replace(chunk, encodings=()) for batch in cache.store.catalog.all_chunks() for chunk in batch]


def scores(cache: RagCache) -> list[tuple[str, Any]]:
    return [(hit.chunk.chunk_id, pytest.approx(hit.score, abs=1e-5)) for hit in cache.retrieve(QUESTION, 9)]


def assert_as_before(cache: RagCache, before: list[ChunkRecord], ranking: list[tuple[str, Any]]) -> None:
    after = chunks(cache)
    assert after == before
    # Types and order too, which == does not see.
    assert repr([it.metadata for it in after]) == repr([it.metadata for it in before])
    assert [it.embedded for it in after] == [it.embedded for it in before]
    assert ranking == [(hit.chunk.chunk_id, hit.score) for hit in cache.retrieve(QUESTION, 9)]
    assert not cache.query(QUESTION).misses
    assert not cache.verify().faults


def test_as_it_was_indexed(cache: RagCache) -> None:
    own = [it for it in chunks(cache) if it.document_id == "birds"]
    assert [(it.text, it.embedding_text, it.own_metadata) for it in own] == [
        (it.text, it.embedding_text, it.metadata) for it in map(passage, range(3))
    ]
    assert list(own[0].own_metadata) == [*METADATA, "number"]
    assert own[0].metadata == {"shared": [1]} | METADATA | {"number": 0}
    assert {it.embedding_text for it in chunks(cache) if it.document_id == "text"} == {""}


@pytest.mark.parametrize("shortened", [False, True])
def test_a_rebuilt_catalog(cache: RagCache, open_tiny: OpenTiny, shortened: bool) -> None:
    before, ranking = chunks(cache), scores(cache)
    if shortened:
        cache.compact()
        assert [file.snapshot for file in journal_files(cache.store.shard_folder)] == [True]
    cache.store.catalog.close()
    (cache.path / "catalog.sqlite").unlink()
    report, embedded = rebuild_store(cache.path, cache.settings, lambda: cache.embedder)
    assert (report.chunks, report.with_states, report.faults, embedded) == (len(before), len(before), [], 0)
    assert_as_before(open_tiny(), before, ranking)


def test_a_compaction(cache: RagCache) -> None:
    cache.delete("text")
    before, ranking = chunks(cache), scores(cache)
    cache.compact(0.0)
    assert_as_before(cache, before, ranking)


@pytest.mark.parametrize("how", ["verify", "rebuild", "index"])
def test_lost_vectors_are_made_of_what_was_embedded(cache: RagCache, open_tiny: OpenTiny, how: str) -> None:
    before, ranking = chunks(cache), scores(cache)
    assert next(iter(ranking))[0] in ("p-0", "p-1", "p-2")
    for file in cache.store.vector_folder.iterdir():
        file.unlink()
    again = open_tiny()
    with pytest.raises(StoreError):
        again.retrieve(QUESTION)
    if how == "verify":
        again.verify(repair=True)
    elif how == "rebuild":
        assert rebuild_store(cache.path, cache.settings, lambda: cache.embedder)[1] == len(before)
        again = open_tiny()
    else:
        assert again.index([Document("more", "Another text.")]).reembedded == len(before)
        again.delete("more")
    assert_as_before(again, before, ranking)


def test_a_changed_row_is_noticed(cache: RagCache) -> None:
    for column in ("metadata", "embedding_text"):
        with cache.store.catalog.transaction() as connection:
            (value,) = connection.execute(f"SELECT {column} FROM chunks WHERE chunk_id = 'p-0'").fetchone()  # noqa: S608
            connection.execute(f"UPDATE chunks SET {column} = ? WHERE chunk_id = 'p-0'", (f"{value} ",))  # noqa: S608
        with pytest.raises(StoreError, match="damaged"):
            cache.store.catalog.chunks_by_id(["p-0"])
        with cache.store.catalog.transaction() as connection:
            connection.execute(f"UPDATE chunks SET {column} = ? WHERE chunk_id = 'p-0'", (value,))  # noqa: S608
        assert cache.store.catalog.chunks_by_id(["p-0"])
