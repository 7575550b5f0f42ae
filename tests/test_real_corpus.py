"""SmolLM2 over the Python reference: an answer from one exact chunk is, token for token, that of a full prefill."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from ragcache import Document, RagCache
from ragcache.generate.decode import decode
from ragcache.generate.sampling import SamplingParameters
from ragcache.model.language_model import LanguageModel
from ragcache.retriever.embedding import Embedder
from ragcache.settings import Reuse, load_settings
from ragcache.stream import context_chunk

QUESTIONS = {
    "pass": "What happens when the pass statement is executed?",
    "lambda": "What do lambda expressions create?",
    "break": "Where may the break statement occur?",
    "continue": "What does the continue statement do?",
    "while": "When is the else clause of a while loop executed?",
    "del": "What does deletion of a name do?",
    "return": "What is returned when no expression list is present in a return statement?",
    "nonlocal": "Why is a nonlocal statement useful?",
    "global": "What does the global statement cause identifiers to be interpreted as?",
    "assert": "What are assert statements convenient for?",
    "for": "What is the for statement used to iterate over?",
    "exceptions": "What are exceptions a means of?",
    "subscriptions": "What does subscription of an instance of a container class select?",
    "slicings": "What may slicings be used as?",
    "context-managers": "What are typical uses of context managers?",
    "class": "What does a class definition define?",
    "with": "Which methods does the with statement call?",
    "raise": "What does raise do when no expressions are present?",
    "booleans": "In the context of Boolean operations, which values are interpreted as false?",
    "dynamic-features": "How does name resolution of free variables occur?",
}
ANSWER_TOKENS = 20


@pytest.fixture(scope="module")
def cache(smollm: LanguageModel, embedder: Embedder, tmp_path_factory: pytest.TempPathFactory) -> RagCache:
    path = tmp_path_factory.mktemp("real") / "store"
    settings = load_settings(path, model="smollm2-135m", dtype="float32", codec="raw", encodings=("alone",))
    cache = RagCache(path, settings, smollm, embedder)
    cache.index([Document(name, topics[name], name) for name in QUESTIONS])
    return cache


def reference_answer(cache: RagCache, token_ids: list[int]) -> list[int]:
    """transformers' own greedy generation after a full prefill."""
    prompt = torch.tensor([token_ids])
    generate: Any = cache.model.module.generate
    with torch.inference_mode():
        output = generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answer: list[int] = output[0, len(token_ids) :].tolist()
    return answer


@pytest.mark.parametrize("topic", QUESTIONS)
def test_an_exact_chunk_gives_the_answer_of_a_full_prefill(cache: RagCache, topic: str) -> None:
    question = QUESTIONS[topic]
    chunk = context_chunk(cache.retrieve(question, 1)[0])
    layout = cache.answering.lay_out(question, [chunk], ANSWER_TOKENS)

    prompt = cache.engine.prepare(layout, [chunk], "exact")
    assert prompt.report.restored_tokens == len(chunk.token_ids)
    assert prompt.report.prefix_tokens == len(cache.template.prefix)
    assert prompt.report.prefilled_tokens == len(layout.question)
    assert not prompt.report.misses
    steps = decode(cache.model, prompt.cache, prompt.logits, SamplingParameters(max_tokens=ANSWER_TOKENS))
    answer = [step.token_id for step in steps if step.token_id is not None]

    assert answer == reference_answer(cache, layout.token_ids)


@pytest.mark.parametrize("topic", QUESTIONS)
def test_exact_over_several_chunks_gives_the_answer_of_none(cache: RagCache, topic: str) -> None:
    """The first chunk is restored, the others are prefilled behind it."""
    question = QUESTIONS[topic]
    chunks = [context_chunk(hit) for hit in cache.retrieve(question, 2)]
    layout = cache.answering.lay_out(question, chunks, ANSWER_TOKENS)
    kept = [chunks[index] for index in layout.kept]
    assert len(kept) == 2

    answers = []
    reuses: tuple[Reuse, ...] = ("exact", "none")
    for reuse in reuses:
        prompt = cache.engine.prepare(layout, kept, reuse)
        assert prompt.report.restored_tokens == (len(kept[0].token_ids) if reuse == "exact" else 0)
        steps = decode(cache.model, prompt.cache, prompt.logits, SamplingParameters(max_tokens=ANSWER_TOKENS))
        answers.append([step.token_id for step in steps if step.token_id is not None])
        cache.engine.finish(prompt)
    assert answers[0] == answers[1]


def test_questions_find_their_topics(cache: RagCache) -> None:
    found = sum(cache.retrieve(question, 1)[0].chunk.document_id == topic for topic, question in QUESTIONS.items())
    assert found >= 17


def test_exact_with_several_chunks_restores_the_first_and_prefills_the_rest(cache: RagCache) -> None:
    question = QUESTIONS["with"]
    exact = cache.query(question, top_k=3, reuse="exact", max_tokens=ANSWER_TOKENS)
    plain = cache.query(question, top_k=3, reuse="none", max_tokens=ANSWER_TOKENS)
    assert exact.answer == plain.answer
    first = cache.store.catalog.chunks_by_id([exact.sources[0].chunk_id])[0]
    assert exact.tokens.restored == len(first.token_ids)
    prompt_tokens = plain.tokens.prefilled
    assert exact.tokens.prefix + exact.tokens.restored + exact.tokens.prefilled == prompt_tokens
    assert (plain.tokens.prefix, plain.tokens.restored) == (0, 0)


def test_composed_restores_every_chunk(cache: RagCache) -> None:
    answer = cache.query(QUESTIONS["with"], top_k=4, max_tokens=ANSWER_TOKENS)
    chunks = cache.store.catalog.chunks_by_id([source.chunk_id for source in answer.sources])
    assert answer.tokens.restored == sum(len(chunk.token_ids) for chunk in chunks)
    assert answer.tokens.prefilled == len(cache.template.question(QUESTIONS["with"]))
    assert answer.answer.strip()


def test_none_never_touches_stored_states(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def refuse(*arguments: object) -> None:
        raise AssertionError("stored states were read")

    monkeypatch.setattr(os, "preadv", refuse)
    answer = cache.query(QUESTIONS["pass"], top_k=2, reuse="none", max_tokens=2)
    assert answer.tokens.restored == 0
    assert not answer.misses


def test_int8_states_change_the_next_token_distribution_little(
    smollm: LanguageModel, embedder: Embedder, cache: RagCache, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """KL divergence of the next token's distribution against unquantised states, over eight prompts."""
    path = tmp_path_factory.mktemp("int8") / "store"
    settings = load_settings(path, model="smollm2-135m", dtype="float32", codec="int8", encodings=("alone",))
    int8 = RagCache(path, settings, smollm, embedder)
    int8.index([Document(name, topics[name], name) for name in list(QUESTIONS)[:10]])
    divergences = []
    for topic in list(QUESTIONS)[:8]:
        chunks = [context_chunk(hit) for hit in int8.retrieve(QUESTIONS[topic], 3)]
        layout = int8.answering.lay_out(QUESTIONS[topic], chunks, 1)
        stored = int8.engine.prepare(layout, chunks, "composed")
        raw = cache.store.catalog.chunks_by_id([chunk.chunk_id for chunk in chunks])
        exact = cache.engine.prepare(layout, raw, "composed")
        assert stored.report.restored_tokens == exact.report.restored_tokens
        divergence = torch.nn.functional.kl_div(
            stored.logits.log_softmax(-1), exact.logits.log_softmax(-1), log_target=True, reduction="sum"
        )
        divergences.append(float(divergence))
    assert sum(divergences) / len(divergences) < 1e-3
