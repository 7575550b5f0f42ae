"""Repaired prompts: at ratio 1 a full prefill, else what recomputing the right tokens gives, also beside damage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache import RagCache
from ragcache.generate.engine import PreparedPrompt
from ragcache.generate.pace import Pace
from ragcache.generate.repairing import PromptPrefill, pass_flops
from ragcache.model.kv_cache import KVCache
from ragcache.prompt.layout import Layout
from ragcache.prompt.repair import ChunkSpans, RepairOptions
from ragcache.restore.restoration import Restoration
from ragcache.restore.restorer import Restorer
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.settings import Repair
from ragcache.states.reading import ShardFile
from ragcache.states.records import StoredStates
from ragcache.stream import ContextChunk, context_chunk
from tests.conftest import make_document
from tests.model.recomputation import attention_mass, eager_attention, recompute
from tests.restore.test_restorer import Fault, damaged_layer, never_stored, place, truncated

OpenTiny = Callable[..., RagCache]

METHODS: list[Repair] = ["query", "boundary", "deviation"]
FAMILIES = ["llama", "qwen3", "gemma3", "gemma2", "gpt-neox"]
"""gemma3 and gemma2 have windows of less than a tenth of the prompt."""

QUESTION = "Which of the ships passed in the winter of 1801, and who wrote it down?"


@dataclass(frozen=True)
class Prompt:
    """Chunks of several documents behind one another, as a question has them."""

    cache: RagCache
    chunks: list[ContextChunk]
    layout: Layout

    def prepare(self, repair: RepairOptions, chunks: list[ContextChunk] | None = None) -> PreparedPrompt:
        return self.cache.engine.prepare(self.layout, chunks or self.chunks, "composed", repair)

    @property
    def spans(self) -> ChunkSpans:
        return ChunkSpans.laid_out(self.layout.starts, self.layout.chunks, first_exact=True)

    def full(self) -> tuple[Tensor, KVCache]:
        """Transformers' own prefill of the whole prompt."""
        with eager_attention(self.cache.model):
            output = self.cache.model.module(input_ids=torch.tensor([self.layout.token_ids]), use_cache=True)
        # In a layer with a window transformers keeps only what is seen later.
        keys = [layer.keys[0] for layer in output.cache.layers]
        values = [layer.values[0] for layer in output.cache.layers]
        return output.logits[0, -1].float(), KVCache(keys, values, len(self.layout.token_ids))

    def restored(self) -> KVCache:
        """All chunks in all layers."""
        records = self.cache.store.catalog.chunks_by_id([chunk.chunk_id for chunk in self.chunks])
        by_id = {record.chunk_id: record for record in records}
        placements = place(self.cache, [by_id[chunk.chunk_id] for chunk in self.chunks])
        engine, model = self.cache.engine, self.cache.model
        cache = model.new_cache(len(self.layout.token_ids))
        cache.copy_prefix(engine.prefix)
        restorer = Restorer(model, engine.prefix, self.layout.prefix, 1)
        with restorer.restoring(placements, engine.format, cache, attending=0) as restoration:
            assert not restoration.complete_all().misses
        return cache


def prompt_of(cache: RagCache, chunks: int = 7) -> Prompt:
    cache.index([make_document(number, sentences=16) for number in range(4)])
    every = cache.store.catalog.chunks_by_vector(list(range(1, 100)))
    # Neighbours in the prompt were none in their documents.
    chosen = [context_chunk(RetrievedChunk(every[index * 3 % len(every)], 1.0)) for index in range(chunks)]
    return Prompt(cache, chosen, cache.answering.lay_out(QUESTION, chosen, 8))


def check_kv(prepared: PreparedPrompt, expected: KVCache) -> None:
    assert prepared.cache.length == expected.length
    for ours, theirs in zip(prepared.cache.keys + prepared.cache.values, expected.keys + expected.values, strict=True):
        seen = min(theirs.shape[1], expected.length)
        torch.testing.assert_close(
            ours[:, expected.length - seen : expected.length], theirs[:, :seen], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_repaired_is_a_full_prefill(open_tiny: OpenTiny, family: str) -> None:
    prompt = prompt_of(open_tiny(family=family))
    logits, kv = prompt.full()
    composed = prompt.prepare(RepairOptions())
    assert (composed.logits - logits).abs().max() > 0.01
    assert composed.report.repaired_tokens == composed.report.repair_ms == 0
    for method in METHODS:
        repaired = prompt.prepare(RepairOptions(method, 1.0))
        torch.testing.assert_close(repaired.logits, logits, rtol=1e-4, atol=1e-4)
        check_kv(repaired, kv)
        report = repaired.report
        assert report.repaired_tokens == sum(len(chunk) for chunk in prompt.layout.chunks[1:])
        assert report.restored_tokens == sum(len(chunk) for chunk in prompt.layout.chunks)
        assert report.prefilled_tokens == len(prompt.layout.question)
        assert report.repair_ms > 0
        assert report.prefill_ms > 0


def chosen_slowly(prompt: Prompt, method: Repair, count: int, kv: KVCache) -> list[int]:
    """Slots to compute again, found with transformers alone; runs the question over restored KV for `query`."""
    ids, starts = prompt.layout.token_ids, prompt.layout.starts
    end = len(ids) - len(prompt.layout.question)
    scores: Tensor
    if method == "boundary":
        each = [len(chunk) for chunk in prompt.layout.chunks[1:]]
        taken = [0] * len(each)
        while sum(taken) < count:
            least = min((number, index) for index, number in enumerate(taken) if number < each[index])
            taken[least[1]] += 1
        return [start + i for start, number in zip(starts[1:], taken, strict=True) for i in range(number)]
    if method == "query":
        attentions = recompute(prompt.cache.model, kv, ids, range(end, len(ids))).attentions
        scores = attention_mass(attentions[len(attentions) // 2 :])
    else:
        layer = prompt.cache.model.decoder.layers[1]
        inputs: list[Tensor] = []
        hook = layer.module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append((args[0] if args else kwargs["hidden_states"])[0]),
            with_kwargs=True,
        )
        with eager_attention(prompt.cache.model):
            prompt.cache.model.module(input_ids=torch.tensor([ids]))
        hook.remove()
        fresh = layer.project(inputs[0])[1].transpose(0, 1)
        scores = (fresh - kv.values[1][:, : len(ids)]).square().sum((0, 2))
    allowed = range(starts[1], end)
    return sorted(sorted(allowed, key=lambda slot: -float(scores[slot]))[:count])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_some_repaired_is_what_recomputing_them_gives(open_tiny: OpenTiny, family: str, method: Repair) -> None:
    prompt = prompt_of(open_tiny(family=family))
    ids = prompt.layout.token_ids
    question = range(len(ids) - len(prompt.layout.question), len(ids))
    kv = prompt.restored()
    total = sum(len(chunk) for chunk in prompt.layout.chunks)
    slots = chosen_slowly(prompt, method, round(0.2 * total), kv)
    expected = recompute(prompt.cache.model, kv, ids, [*slots, *question]).logits[0, -1].float()
    kv.length = len(ids)
    repaired = prompt.prepare(RepairOptions(method, 0.2))
    assert repaired.report.repaired_tokens == len(slots) == round(0.2 * total)
    torch.testing.assert_close(repaired.logits, expected, rtol=1e-3, atol=1e-4)
    check_kv(repaired, kv)


def with_fault(prompt: Prompt, fault: Fault) -> list[ContextChunk]:
    """The prompt's chunks, with the fourth one's states spoilt."""
    victim = prompt.chunks[3]
    (placement,) = place(prompt.cache, prompt.cache.store.catalog.chunks_by_id([victim.chunk_id]))
    hurt = fault(placement).encoding
    return [*prompt.chunks[:3], replace(victim, encodings=() if hurt is None else (hurt,)), *prompt.chunks[4:]]


def check_same(hurt: PreparedPrompt, sound: PreparedPrompt) -> None:
    torch.testing.assert_close(hurt.logits, sound.logits, rtol=1e-4, atol=1e-4)
    check_kv(hurt, sound.cache)
    assert hurt.report.repaired_tokens == sound.report.repaired_tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", [never_stored, damaged_layer, truncated])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_damage_changes_nothing(open_tiny: OpenTiny, family: str, method: Repair, fault: Fault) -> None:
    prompt = prompt_of(open_tiny(family=family))
    sound = prompt.prepare(RepairOptions(method, 0.5))
    hurt = prompt.prepare(RepairOptions(method, 0.5), with_fault(prompt, fault))
    lost = {miss.chunk_id for miss in hurt.report.misses}
    assert prompt.chunks[3].chunk_id in lost
    check_same(hurt, sound)
    recomputed = sum(len(it.token_ids) for it in prompt.chunks if it.chunk_id in lost)
    assert hurt.report.prefilled_tokens == len(prompt.layout.question) + recomputed


@pytest.mark.parametrize("method", METHODS)
def test_damage_found_last_leaves_what_was_repaired_before(
    open_tiny: OpenTiny, method: Repair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer is read only when it is asked for; tokens were computed again in all layers before by then."""
    prompt = prompt_of(open_tiny())
    sound = prompt.prepare(RepairOptions(method, 0.5))
    chunks = with_fault(prompt, damaged_layer)
    last, asked = len(prompt.cache.model.decoder.layers) - 1, threading.Event()
    complete, read = Restoration.complete, ShardFile.read

    def tell(restoration: Restoration, layer: int) -> None:
        if layer == last:
            asked.set()
        complete(restoration, layer)

    def wait(file: ShardFile, states: StoredStates, column: int, *targets: Any) -> None:
        if column == len(prompt.cache.engine.format.stored_layers):
            assert asked.wait(30)
        read(file, states, column, *targets)

    monkeypatch.setattr(Restoration, "complete", tell)
    monkeypatch.setattr(ShardFile, "read", wait)
    hurt = prompt.prepare(RepairOptions(method, 0.5), chunks)
    assert [(it.chunk_id, it.reason) for it in hurt.report.misses] == [(prompt.chunks[3].chunk_id, "checksum")]
    check_same(hurt, sound)


def test_a_first_chunk_that_is_not_exact_is_repaired_too(open_tiny: OpenTiny) -> None:
    prompt = prompt_of(open_tiny())
    logits, kv = prompt.full()
    engine, model = prompt.cache.engine, prompt.cache.model
    spans = replace(prompt.spans, first_exact=False)
    for method in METHODS:
        cache = prompt.restored()
        first = slice(spans.spans[0].start, spans.spans[0].stop)
        for tensor in cache.keys + cache.values:
            tensor[:, first] = torch.randn_like(tensor[:, first])
        restorer = Restorer(model, engine.prefix, prompt.layout.prefix, 1)
        with restorer.restoring([], engine.format, cache) as restoration:
            run = PromptPrefill(model, Pace(), prompt.layout.token_ids, cache, restoration)
            prefilled = run.run(spans, RepairOptions(method, 1.0))
        torch.testing.assert_close(prefilled.logits, logits, rtol=1e-4, atol=1e-4)
        check_kv(replace(prompt.prepare(RepairOptions()), cache=cache, logits=prefilled.logits), kv)


@pytest.mark.parametrize("reuse", ["exact", "none"])
def test_what_is_exact_is_not_repaired(open_tiny: OpenTiny, reuse: str) -> None:
    cache = open_tiny()
    prompt = prompt_of(cache)
    plain = cache.engine.prepare(prompt.layout, prompt.chunks, reuse)  # type: ignore[arg-type]
    asked = cache.engine.prepare(prompt.layout, prompt.chunks, reuse, RepairOptions("query", 1.0))  # type: ignore[arg-type]
    torch.testing.assert_close(asked.logits, plain.logits, rtol=0, atol=0)
    assert asked.report.repaired_tokens == asked.report.repair_ms == 0
    assert asked.report.prefilled_tokens == plain.report.prefilled_tokens


def test_nothing_to_repair(open_tiny: OpenTiny) -> None:
    """One chunk is exact where it stands first, and a ratio may be too small for a single token."""
    for count, ratio in ((1, 1.0), (3, 0.0)):
        prompt = prompt_of(open_tiny(), chunks=count)
        plain = prompt.prepare(RepairOptions())
        for method in METHODS:
            repaired = prompt.prepare(RepairOptions(method, ratio))
            torch.testing.assert_close(repaired.logits, plain.logits, rtol=1e-4, atol=1e-5)
            assert repaired.report.repaired_tokens == 0
            assert repaired.report.prefilled_tokens == len(prompt.layout.question)


class TestTimeBudget:
    @pytest.mark.parametrize("method", METHODS)
    def test_none_and_enough(self, open_tiny: OpenTiny, method: Repair) -> None:
        """It takes the place of the ratio. What no time is left for is not begun."""
        prompt = prompt_of(open_tiny())
        none = prompt.prepare(RepairOptions(method, 1.0, 1e-6))
        assert none.report.repaired_tokens == 0
        torch.testing.assert_close(none.logits, prompt.prepare(RepairOptions()).logits, rtol=1e-4, atol=1e-5)
        enough = prompt.prepare(RepairOptions(method, 0.0, 1e9))
        assert enough.report.repaired_tokens == prompt.spans.most
        torch.testing.assert_close(enough.logits, prompt.full()[0], rtol=1e-4, atol=1e-4)

    def test_it_is_filled_as_far_as_passes_before_say(self, open_tiny: OpenTiny) -> None:
        prompt = prompt_of(open_tiny())
        model, engine = prompt.cache.model, prompt.cache.engine
        total, question = len(prompt.layout.token_ids), len(prompt.layout.question)
        pace = Pace()
        # 2 ms a token, if each of them attends to all others.
        pace.record(10 * pass_flops(model, 1, total), 20.0)
        cache = prompt.restored()
        restorer = Restorer(model, engine.prefix, prompt.layout.prefix, 1)
        with restorer.restoring([], engine.format, cache) as restoration:
            run = PromptPrefill(model, pace, prompt.layout.token_ids, cache, restoration)
            prefilled = run.run(prompt.spans, RepairOptions("boundary", 1.0, 2.0 * (question + 50)))
        assert prefilled.repaired_tokens == 50

    def test_an_engine_learns(self, open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
        """What it has to go by at first is the prefix's prefill, later what it ran. On a machine of an even pace."""
        record, rate = Pace.record, 1e-6
        monkeypatch.setattr(Pace, "record", lambda pace, flops, _: record(pace, flops, flops * rate))
        prompt = prompt_of(open_tiny())
        each = rate * pass_flops(prompt.cache.model, 1, len(prompt.layout.token_ids))
        for count in (50, 20, 80):
            budget = each * (len(prompt.layout.question) + count)
            assert abs(prompt.prepare(RepairOptions("boundary", 1.0, budget)).report.repaired_tokens - count) <= 1


def test_options_arrive(open_tiny: OpenTiny) -> None:
    cache = open_tiny(repair="boundary", repair_ratio=0.25)
    cache.index([make_document(number) for number in range(3)])
    by_setting = cache.query(QUESTION, top_k=4)
    assert by_setting.tokens.repaired == round(0.25 * by_setting.tokens.restored) > 0
    assert by_setting.timings_ms.repair > 0
    times = by_setting.timings_ms
    assert times.retrieve + times.read + times.restore + times.repair + times.prefill <= times.ttft
    off = cache.query(QUESTION, top_k=4, repair="off")
    assert off.tokens.repaired == off.timings_ms.repair == 0
    assert off.tokens.prefilled == by_setting.tokens.prefilled
    full = cache.query(QUESTION, top_k=4, reuse="none")
    assert full.tokens.repaired == 0
    for method in METHODS:
        answer = cache.query(QUESTION, top_k=4, repair=method, repair_ratio=1.0)
        assert answer.answer == full.answer
        assert answer.tokens.repaired < answer.tokens.restored
    assert cache.query(QUESTION, top_k=4, repair="query", repair_ms=1e-6).tokens.repaired == 0
