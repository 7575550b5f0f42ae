"""Answers checked after the reply: what is found, and that requests never notice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from ragcache import RagCache
from ragcache.fidelity.canary import WAITING, Canary, _Drawn, _report_of
from ragcache.fidelity.continuation import along
from ragcache.fidelity.divergence import Divergence, divergence
from ragcache.generate.engine import PreparedPrompt, PromptReport
from ragcache.generate.pool import CachePool
from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.layout import Layout
from ragcache.states.canary_report import CanaryReport
from ragcache.stream import context_chunk
from tests.conftest import make_document

QUESTION = "Which ships passed?"
ANSWER = (5, 6, 7)


@pytest.fixture
def model(tiny_model: Callable[[str], LanguageModel]) -> LanguageModel:
    return tiny_model("llama")


@pytest.fixture
def start(model: LanguageModel) -> Iterator[Callable[..., Canary]]:
    """Canaries that end with the test."""
    started = []

    def make(rate: float, pool: CachePool | None = None, seed: int | None = None) -> Canary:
        started.append(Canary(model, pool or CachePool(model), rate, seed))
        return started[-1]

    yield make
    for canary in started:
        canary.close()


def prompt_of(model: LanguageModel, *chunk: int) -> PreparedPrompt:
    """A prompt prefilled in full and then decoded, in a cache that is larger than it needs to be."""
    layout = Layout((1, 2), (chunk,), (0,), (None,), (), (3, 4), answer_room=len(ANSWER))
    cache = model.new_cache(512)
    logits = forward(model, [Segment(model.tensor([*layout.token_ids]), cache)])[0]
    forward(model, [Segment(model.tensor([*ANSWER]), cache)])
    return PreparedPrompt(cache, logits, layout, False, "composed", PromptReport(0, 0, 0, len(layout.token_ids)))


def test_what_is_found_is_what_a_full_prefill_says(open_tiny: Callable[..., RagCache]) -> None:
    with open_tiny(canary_rate=1.0, codec="int8") as cache:
        cache.index([make_document(number) for number in range(3)])
        model, engine = cache.model, cache.engine
        answer = cache.query(QUESTION, top_k=4)
        cache._canary.wait()

        chunks = [context_chunk(hit) for hit in cache.retrieve(QUESTION, 4)]
        layout, prompt = cache.answering.prepare(QUESTION, chunks, cache.settings)
        plain = engine.prepare(layout, chunks, "none")
        token_ids: list[int] = []
        for _ in range(answer.tokens.generated):
            logits = along(model, prompt.cache, prompt.logits, (*token_ids, 0)).logits[-1]
            token_ids.append(int(logits.argmax()))
        given, expected = (along(model, it.cache, it.logits, tuple(token_ids)).logits for it in (prompt, plain))
        found = divergence(expected, given)
        report = cache.canary_report()
        assert cache.stats().canary == report
    # Those of all processes are kept with the store.
    with open_tiny() as again:
        assert again.canary_report() == CanaryReport()
        assert again.stats().canary == report
    assert found.mean_kl > 1e-3
    assert (report.checked, report.tokens) == (1, len(token_ids))
    assert report.mean_kl == pytest.approx(found.mean_kl, rel=1e-3)
    assert report.worst_kl == pytest.approx(found.worst_kl, rel=1e-3)
    assert report.agreement == found.agreement


def test_only_composed_answers_are_checked_and_none_is_changed(
    cache: RagCache, open_tiny: Callable[..., RagCache]
) -> None:
    with open_tiny(cache.path, canary_rate=1.0) as checked:
        for reuse in ("none", "exact", "composed"):
            expected = cache.query(QUESTION, reuse=reuse).answer
            assert [checked.query(QUESTION, reuse=reuse).answer for _ in range(2)] == [expected] * 2
        closed = checked.stream(QUESTION)
        next(closed)
        closed.close()
        checked._canary.wait()
        report = checked.canary_report()
        assert report.checked + report.skipped == 2
        assert report.failed == 0
    assert cache.canary_report() == CanaryReport()


def test_a_full_prefill_agrees_with_itself(model: LanguageModel, start: Callable[..., Canary]) -> None:
    canary = start(1.0)
    assert canary.offer(prompt_of(model, 8, 9), ANSWER)
    canary.wait()
    report = canary.report
    assert (report.checked, report.tokens, report.agreement) == (1, 3, 1.0)
    assert report.worst_kl < 1e-6


def test_another_prompt_does_not(model: LanguageModel, start: Callable[..., Canary]) -> None:
    canary = start(1.0)
    wrong, right = prompt_of(model, 8, 9), prompt_of(model, 9, 8)
    assert canary.offer(replace(wrong, layout=right.layout), ANSWER)
    canary.wait()
    assert canary.report.worst_kl > 1e-3


def test_the_share_is_drawn_by_seed(model: LanguageModel, start: Callable[..., Canary]) -> None:
    prompt = prompt_of(model, 8)

    def drawn(seed: int) -> list[bool]:
        canary = start(0.3, seed=seed)
        taken = []
        for _ in range(40):
            taken.append(canary.offer(replace(prompt, cache=model.new_cache(512)), ANSWER))
            canary.wait()
        return taken

    first = drawn(1)
    assert 4 < sum(first) < 20
    assert drawn(1) == first != drawn(2)
    never = start(0.0)
    assert not any(never.offer(prompt, ANSWER) for _ in range(20))
    assert not start(1.0).offer(prompt, ())


class Waiting(Canary):
    """Compares when it is told to."""

    def __init__(self, model: LanguageModel, pool: CachePool) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        super().__init__(model, pool, rate=1.0)

    def _compare(self, drawn: _Drawn) -> Divergence:
        self.begun.set()
        self.go_on.wait(60)
        return super()._compare(drawn)


class Recording(CachePool):
    """Remembers what was given back."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.given_back: list[KVCache] = []

    def give_back(self, cache: KVCache) -> None:
        self.given_back.append(cache)
        super().give_back(cache)


def test_what_does_not_fit_is_skipped_and_counted(model: LanguageModel) -> None:
    pool = Recording(model)
    canary = Waiting(model, pool)
    prompts = [prompt_of(model, 8, number) for number in range(WAITING + 3)]
    assert canary.offer(prompts[0], ANSWER)
    assert canary.begun.wait(60)
    assert [canary.offer(it, ANSWER) for it in prompts[1:]] == [True] * WAITING + [False] * 2
    assert canary.report.skipped == 2
    canary.go_on.set()
    canary.close()
    # The check that had begun is finished, the others are not; their caches are free again.
    assert (canary.report.checked, canary.report.skipped) == (1, 2 + WAITING)
    assert not canary.offer(prompts[-1], ANSWER)
    assert not canary._thread.is_alive()
    canary.close()
    owned = {id(it.cache) for it in prompts[: WAITING + 1]}
    assert {id(it) for it in pool.given_back} & {id(it.cache) for it in prompts} == owned


class NoMemory(CachePool):
    """Has no cache for a full prefill."""

    def take(self, capacity: int) -> KVCache:
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 1 bytes")


def test_a_check_that_fails_is_counted_and_the_next_one_runs(
    model: LanguageModel, start: Callable[..., Canary], caplog: pytest.LogCaptureFixture
) -> None:
    canary = start(1.0, NoMemory(model))
    for number in (1, 2):
        with caplog.at_level(logging.WARNING):
            assert canary.offer(prompt_of(model, 8, number), ANSWER)
            canary.wait()
        assert canary.report == CanaryReport(failed=number)
    assert "could not be checked: not enough memory for the check of an answer" in caplog.text


class Faulty(CachePool):
    """Meets something that nobody has thought of."""

    def take(self, capacity: int) -> KVCache:
        raise ValueError("something else")


def test_a_fault_of_any_kind_does_not_end_the_thread(
    model: LanguageModel, start: Callable[..., Canary], caplog: pytest.LogCaptureFixture
) -> None:
    canary = start(1.0, Faulty(model))
    for number in (1, 2):
        assert canary.offer(prompt_of(model, 8, number), ANSWER)
        canary.wait()
        assert canary.report == CanaryReport(failed=number)
    assert "something else" in caplog.text


class Collected(Canary):
    """Closed by its own thread, as when the garbage collector finds its store there, amid an update of the report."""

    error: RuntimeError | None = None

    def _compare(self, drawn: _Drawn) -> Divergence:
        try:
            with self._lock:
                self.close()
        except RuntimeError as error:
            self.error = error
        return super()._compare(drawn)


def test_it_may_be_closed_in_its_own_thread(model: LanguageModel) -> None:
    canary = Collected(model, CachePool(model), 1.0)
    assert canary.offer(prompt_of(model, 8, 1), ANSWER)
    canary._thread.join(20)
    assert not canary._thread.is_alive()
    assert canary.error is None
    assert canary.report.checked == 1


def test_sums() -> None:
    found = divergence(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.5, 0.0], [1.0, 0.0]]))
    report = _report_of(found).plus(_report_of(found))
    assert (report.checked, report.tokens, report.agreement) == (2, 4, 0.5)
    assert report.mean_kl == pytest.approx(found.mean_kl)
    assert report.worst_kl == found.worst_kl
    assert CanaryReport().mean_kl is CanaryReport().agreement is None


def test_the_cache_of_a_prompt_that_waits_is_nobody_elses(cache: RagCache) -> None:
    pool = cache.engine.pool
    cache.answering.canary = canary = Waiting(cache.model, pool)
    assert cache.query(QUESTION).answer
    assert canary.begun.wait(60)
    assert not pool._idle
    canary.go_on.set()
    canary.wait()
    assert pool._idle
    canary.close()


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_finding(
    start: Callable[..., Canary], model: LanguageModel, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    canary, told = start(1.0), list[CanaryReport]()
    canary.on_finding = told.append
    as_it_is = canary._along
    monkeypatch.setattr(canary, "_along", lambda *given: as_it_is(*given) * factor)
    assert canary.offer(prompt_of(model, 9, 10), ANSWER)
    canary.wait()
    assert told == [canary.report] == [CanaryReport(failed=1)]
