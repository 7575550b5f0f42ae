"""The order of chunks in the prompt, as a user sees it, and what it depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import SettingsError
from ragcache.prompt.order import Candidate
from ragcache.settings import EncodingName
from ragcache.states.records import Encoding, StoredStates
from ragcache.stream import ContextChunk, context_chunk

QUESTION = "Which ships passed?"


def order_of(cache: RagCache, order: str | None = None) -> list[str]:
    return [it.chunk_id for it in cache.query(QUESTION, top_k=6, max_tokens=1, order=order).sources]


def test_queries_stand_in_the_order_asked_for(cache: RagCache) -> None:
    hits = cache.retrieve(QUESTION, 6)
    by_score = [hit.chunk.chunk_id for hit in hits]
    documents = list(dict.fromkeys(hit.chunk.document_id for hit in hits))
    assert len(documents) > 1
    assert order_of(cache, "score") == by_score
    assert order_of(cache, "score-last") == by_score[::-1]
    by_document = sorted(hits, key=lambda hit: (documents.index(hit.chunk.document_id), hit.chunk.ordinal))
    assert order_of(cache, "document") == [hit.chunk.chunk_id for hit in by_document] != by_score
    # Chunks were encoded alone, so what is left to go by are documents and scores.
    conditioned = order_of(cache, "conditioned")
    assert sorted(conditioned) == sorted(by_score)
    for document in documents:
        ordinals = [int(it.split("#")[1]) for it in conditioned if it.startswith(f"{document}#")]
        assert ordinals == sorted(ordinals)
    assert order_of(cache) == order_of(cache, cache.settings.order)


def test_an_answer_says_how_chunks_stood(cache: RagCache) -> None:
    answer = cache.query(QUESTION, top_k=2, max_tokens=1, order="score-last")
    assert answer.order == "score-last"
    assert [it.encoding for it in answer.sources] == ["alone", "alone"]
    exact = cache.query(QUESTION, top_k=2, max_tokens=1, reuse="exact")
    assert [it.encoding for it in exact.sources] == ["alone", None]
    plain = cache.query(QUESTION, top_k=2, max_tokens=1, reuse="none")
    assert [it.encoding for it in plain.sources] == [None, None]


def test_passages_of_the_caller_stay_as_they_come_unless_asked_otherwise(cache: RagCache) -> None:
    hits = cache.retrieve(QUESTION, 4)
    passages = [context_chunk(hit) for hit in (hits[2], hits[0], hits[3], hits[1])]
    given = cache.stream_from(QUESTION, passages, max_tokens=1)
    assert [it.chunk_id for it in given.sources] == [it.chunk_id for it in passages]
    assert given.answer.order == "given"
    asked = cache.stream_from(QUESTION, passages, max_tokens=1, order="score")
    assert [it.chunk_id for it in asked.sources] == [hit.chunk.chunk_id for hit in hits]


def test_there_is_no_other_order(cache: RagCache) -> None:
    with pytest.raises(SettingsError, match="order"):
        cache.query(QUESTION, order="random")


STATES = StoredStates("a" * 64, Path("shard"), "{}", ())
ALONE = Encoding("alone", "a" * 64, states=STATES)
CONTEXT = Encoding("context", "c" * 64, "d" * 64, (("b" * 64,),), STATES)


def candidate(encodings: tuple[Encoding, ...], *wanted: EncodingName) -> Candidate:
    return ContextChunk("x#3", "x", "X", "text", 0.5, (1, 2), 3, "a" * 64, encodings).candidate(wanted)


def test_wanted_encodings_with_states_are_chosen_from_first() -> None:
    both = candidate((ALONE, CONTEXT), "alone", "context")
    assert both == Candidate("a" * 64, ("b" * 64,), True, True, "x", 3, 0.5)
    alone, context = replace(both, members=(), has_context=False), replace(both, has_alone=False)
    assert candidate((ALONE, CONTEXT), "alone") == alone
    assert candidate((ALONE, CONTEXT), "context") == context
    assert candidate((CONTEXT,), "alone") == context
    evicted = replace(CONTEXT, states=None, evicted=True)
    assert candidate((ALONE, evicted), "context") == alone
    assert candidate((evicted,), "alone", "context") == context
    assert candidate((), "alone") == replace(alone, has_alone=False)
