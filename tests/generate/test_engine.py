"""Prompts that were prefilled in full are served from memory, whatever else is reused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragcache import RagCache
from ragcache.generate.engine import PreparedPrompt
from ragcache.prompt.layout import Layout
from ragcache.prompt.repair import NO_REPAIR, RepairOptions
from ragcache.settings import Reuse
from ragcache.stream import ContextChunk, context_chunk
from tests.conftest import make_document

OpenTiny = Callable[..., RagCache]

QUESTION = "Which ships passed?"


@pytest.fixture
def opened(open_tiny: OpenTiny) -> RagCache:
    cache = open_tiny(sequence_megabytes=64)
    cache.index([make_document(number) for number in range(3)])
    return cache


def prompt_of(cache: RagCache, top_k: int) -> tuple[Layout, list[ContextChunk]]:
    chunks = [context_chunk(hit) for hit in cache.retrieve(QUESTION, top_k)]
    return cache.answering.lay_out(QUESTION, chunks, 8), chunks


def prepare(
    cache: RagCache, top_k: int, reuse: Reuse, repair: RepairOptions = NO_REPAIR, *, finish: bool = True
) -> PreparedPrompt:
    layout, chunks = prompt_of(cache, top_k)
    prompt = cache.engine.prepare(layout, chunks, reuse, repair)
    if finish:
        cache.engine.finish(prompt)
    return prompt


@pytest.mark.parametrize("reuse", ["exact", "composed"])
def test_what_was_prefilled_is_served_exactly(opened: RagCache, reuse: Reuse) -> None:
    plain = prepare(opened, 4, "none")
    assert plain.exact
    assert plain.report.remembered_tokens == 0
    served = prepare(opened, 4, reuse)
    report, layout = served.report, served.layout
    assert served.exact
    assert (report.remembered_chunks, report.restored_chunks) == (4, 0)
    assert report.remembered_tokens == sum(map(len, layout.chunks))
    assert report.prefilled_tokens == len(layout.question)
    torch.testing.assert_close(served.logits, plain.logits, rtol=0, atol=1e-3)


def test_a_plain_prefill_stays_one(opened: RagCache) -> None:
    for _ in range(2):
        plain = prepare(opened, 4, "none")
        assert plain.report.prefilled_tokens == len(plain.layout.token_ids)
        assert plain.report.remembered_tokens == 0
    assert opened.sequence_report().taken == 4


def test_the_rest_is_prefilled_or_restored(opened: RagCache) -> None:
    prepare(opened, 2, "none")
    plain = prepare(opened, 4, "none", finish=False)
    exact = prepare(opened, 4, "exact", finish=False)
    assert (exact.report.remembered_chunks, exact.report.restored_chunks) == (2, 0)
    torch.testing.assert_close(exact.logits, plain.logits, rtol=0, atol=1e-3)
    composed = prepare(opened, 4, "composed")
    assert (composed.report.remembered_chunks, composed.report.restored_chunks) == (2, 2)
    assert not composed.exact
    assert opened.sequence_report().taken == 2


def test_a_repair_of_everything_is_exact_and_remembered(opened: RagCache) -> None:
    repaired = prepare(opened, 3, "composed", RepairOptions("boundary", 1.0))
    assert repaired.exact
    assert repaired.report.repaired_tokens == sum(map(len, repaired.layout.chunks[1:]))
    served = prepare(opened, 3, "composed")
    assert served.report.remembered_chunks == 3
    plain = prepare(opened, 3, "none")
    torch.testing.assert_close(served.logits, plain.logits, rtol=0, atol=1e-3)


def test_what_comes_after_quantised_states_is_not_remembered(open_tiny: OpenTiny) -> None:
    cache = open_tiny(sequence_megabytes=64, codec="int8")
    cache.index([make_document(number) for number in range(3)])
    assert not prepare(cache, 3, "composed", RepairOptions("boundary", 1.0)).exact
    assert not prepare(cache, 1, "composed").exact
    assert prepare(cache, 3, "exact").exact
    assert cache.sequence_report().taken == 3
    # What is remembered is repaired no more, and the rest is exact then.
    repaired = prepare(cache, 4, "composed", RepairOptions("boundary", 1.0))
    assert repaired.report.repaired_tokens == len(repaired.layout.chunks[3])
    torch.testing.assert_close(repaired.logits, prepare(cache, 4, "none").logits, rtol=0, atol=1e-3)
    assert repaired.exact


def test_answers_say_what_was_remembered(opened: RagCache) -> None:
    plain = opened.query(QUESTION, top_k=3, reuse="none")
    answer = opened.query(QUESTION, top_k=3)
    assert answer.answer == plain.answer
    assert [it.encoding for it in answer.sources] == [None] * 3
    assert answer.tokens.remembered == plain.tokens.prompt - len(opened.template.prefix) - answer.tokens.prefilled
    assert answer.tokens.restored == 0
    assert answer.tokens.prompt == plain.tokens.prompt
    longer = opened.query(QUESTION, top_k=4)
    assert [it.encoding for it in longer.sources] == [None] * 3 + ["alone"]
    opened.close()
    chunks = opened.store.catalog.chunks_by_id([it.chunk_id for it in longer.sources])
    # Only states that were needed were used.
    assert opened.store.usage.all().keys() == {chunks[3].content}


def test_a_question_without_passages(opened: RagCache) -> None:
    expected = opened.stream_from(QUESTION, [], reuse="none").answer
    answer = opened.stream_from(QUESTION, []).answer
    assert answer.answer == expected.answer
    assert answer.tokens.remembered == 0


def test_off_unless_it_is_given_memory(cache: RagCache) -> None:
    prepare(cache, 3, "none")
    assert prepare(cache, 3, "composed").report.remembered_chunks == 0


def test_threads_that_remember_and_recall(opened: RagCache) -> None:
    expected = {top_k: prepare(opened, top_k, "none", finish=False).logits for top_k in (1, 2, 3, 4)}

    def request(number: int) -> None:
        top_k, reuse = 1 + number % 4, ("exact", "none")[number // 4 % 2]
        logits = prepare(opened, top_k, reuse).logits  # type: ignore[arg-type]
        torch.testing.assert_close(logits, expected[top_k], rtol=0, atol=1e-3)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(request, range(24)))
    assert opened.sequence_report().served > 0
