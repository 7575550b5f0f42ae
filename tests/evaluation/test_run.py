"""Whole runs over stores of tiny models: figures against a plain prefill, and what is done again after a stop."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ragcache import RagCache
from ragcache.errors import EvaluationError
from ragcache.evaluation.grid import PLAIN, Setting
from ragcache.evaluation.job import JOURNAL, REPORT, RESULT, EvaluationOptions, evaluate
from ragcache.evaluation.measure import Measurement
from ragcache.evaluation.passages import find_passages
from ragcache.evaluation.questions import Question
from ragcache.evaluation.result import Evaluation
from ragcache.fidelity.divergence import Divergence, divergence
from ragcache.model.forward import Segment, forward
from ragcache.model.language_model import LanguageModel
from tests.conftest import make_document
from tests.evaluation.samples import BETTER

OpenTiny = Callable[..., RagCache]
QUESTIONS = [Question("Which ships passed?", ("Harbour 1",)), Question("When does the ferry run?")]
DOCUMENT_ORDER = Setting(encodings=("alone",), order="document")
SCORE_LAST = Setting(encodings=("alone",), order="score-last")
OPTIONS = EvaluationOptions(max_tokens=6, top_k=3)


class Counting:
    """Counts measurements, and stops the run after some of them as Ctrl-C does."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.started = self.done = 0
        self._stop_after = stop_after

    def start(self, measurements: int) -> None:
        self.started = measurements

    def advance(self) -> None:
        self.done += 1
        if self.done == self._stop_after:
            raise KeyboardInterrupt


def run(cache: RagCache, folder: Path, progress: Counting, *settings: Setting) -> Evaluation:
    return evaluate(cache, QUESTIONS, settings or (PLAIN, DOCUMENT_ORDER), folder, OPTIONS, progress)


def next_logits(model: LanguageModel, token_ids: list[int]) -> torch.Tensor:
    return forward(model, [Segment(model.tensor(token_ids), model.new_cache(len(token_ids)))])[0]


def test_figures_are_those_of_plain_prefills_one_token_at_a_time(cache: RagCache) -> None:
    asked = find_passages(cache, QUESTIONS[0], top_k=3)
    other, record = Measurement(cache, max_tokens=4).records([(asked, SCORE_LAST), (asked, PLAIN)])
    # Another order is another prompt, with another full prefill.
    assert other.chunk_ids != record.chunk_ids
    assert sorted(other.chunk_ids) == sorted(record.chunk_ids)
    layout, prompt = cache.answering.prepare(QUESTIONS[0].text, asked.chunks, PLAIN.query(4))
    ids = list(layout.token_ids)
    rows: list[torch.Tensor] = []
    composed: list[torch.Tensor] = []
    logits = prompt.logits
    while len(rows) < len(record.kl):
        rows.append(next_logits(cache.model, ids))
        composed.append(logits)
        ids.append(int(rows[-1].argmax()))
        logits = forward(cache.model, [Segment(cache.model.tensor(ids[-1:]), prompt.cache)])[0]
    wanted = divergence(torch.stack(rows), torch.stack(composed))
    assert record.kl == pytest.approx(wanted.kl, abs=1e-4)
    assert record.agrees == wanted.agrees
    assert record.divergence.mean_kl > 1e-3
    answered = ids[len(layout.token_ids) :]
    assert record.full_answer == str(cache.model.tokenizer.decode(answered, skip_special_tokens=True)).strip()
    assert record.chunk_ids == tuple(it.chunk_id for it in asked.chunks)
    assert (record.prompt_tokens, record.misses, record.dropped) == (len(layout.token_ids), (), ())
    assert record.restored_tokens == sum(len(it) for it in layout.chunks)
    assert record.prefilled_tokens == len(layout.question)
    assert 0 < record.retrieve_ms < min(record.ttft_ms, record.full_ttft_ms)


def test_the_setting_s_own_answer_is_the_one_that_users_get(cache: RagCache) -> None:
    asked = find_passages(cache, QUESTIONS[0], top_k=3)
    [record] = Measurement(cache, max_tokens=6).records([(asked, PLAIN)])
    assert record.answer == cache.query(QUESTIONS[0].text, top_k=3, max_tokens=6).answer.strip()
    full = cache.query(QUESTIONS[0].text, top_k=3, max_tokens=6, reuse="none")
    assert record.full_answer == full.answer.strip()


def test_what_is_exact_does_not_diverge(cache: RagCache) -> None:
    # A single chunk, raw and encoded after the prefix, is what the full prefill computes.
    asked = find_passages(cache, QUESTIONS[0], top_k=1)
    [record] = Measurement(cache, max_tokens=6).records([(asked, PLAIN)])
    assert record.divergence.worst_kl < 1e-6
    assert record.divergence.agreement == 1
    assert record.answer == record.full_answer


def test_no_use_is_counted(cache: RagCache) -> None:
    before = cache.store.usage.counts()
    list(Measurement(cache, max_tokens=2).records([(find_passages(cache, QUESTIONS[0], 3), PLAIN)]))
    assert cache.store.usage.counts() == before


def test_a_question_s_documents_take_the_place_of_retrieval(cache: RagCache) -> None:
    question = Question("Which ships passed?", documents=("doc-2", "doc-0"))
    asked = find_passages(cache, question, top_k=1)
    assert [it.document_id for it in asked.chunks] == sorted((it.document_id for it in asked.chunks), reverse=True)
    assert [it.chunk_id for it in asked.chunks if it.document_id == "doc-2"] == [
        f"doc-2#{ordinal}" for ordinal in range(sum(it.document_id == "doc-2" for it in asked.chunks))
    ]
    assert asked.retrieve_ms == 0
    [record] = Measurement(cache, max_tokens=2).records([(asked, PLAIN)])
    assert record.chunk_ids == tuple(it.chunk_id for it in asked.chunks)
    with pytest.raises(EvaluationError, match="no document 'doc-9'"):
        find_passages(cache, Question("What?", documents=("doc-9",)), top_k=1)


def test_files_and_figures_of_a_whole_run(cache: RagCache, tmp_path: Path) -> None:
    progress = Counting()
    found = run(cache, tmp_path / "out", progress, PLAIN, BETTER)
    assert (progress.started, progress.done) == (2, 2)
    assert [it.setting for it in found.summaries] == [PLAIN]
    assert [it.setting for it in found.left_out] == [BETTER]
    assert "'context'" in found.left_out[0].reason
    assert found.summaries[0].gold is not None
    assert found.summaries[0].gold.questions == 1
    assert (tmp_path / "out" / RESULT).read_text() == found.to_json()
    assert "<svg" in (tmp_path / "out" / REPORT).read_text()
    with pytest.raises(EvaluationError, match="none of the settings"):
        run(cache, tmp_path / "out", Counting(), BETTER)


def test_remembered_prompts_would_be_no_measure(open_tiny: OpenTiny, tmp_path: Path) -> None:
    cache = open_tiny(sequence_megabytes=1)
    cache.index([make_document(0)])
    with pytest.raises(EvaluationError, match="sequence_megabytes=0"):
        run(cache, tmp_path / "out", Counting())


def test_a_run_that_was_stopped_goes_on(cache: RagCache, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(cache, tmp_path, Counting(stop_after=3))
    journal = tmp_path / JOURNAL
    assert len(journal.read_text().splitlines()) == 3
    assert not (tmp_path / RESULT).exists()
    # Killed amid a write: the last line is torn.
    journal.write_bytes(journal.read_bytes()[:-50])
    kept = journal.read_text().splitlines()[:2]
    second = Counting()
    found = run(cache, tmp_path, second)
    assert (second.started, second.done) == (2, 2)
    assert journal.read_text().splitlines()[:2] == kept
    assert [it.model_dump_json() for it in found.records[0]] == kept
    third = Counting()
    again = run(cache, tmp_path, third)
    assert (third.started, third.done) == (0, 0)
    assert again.records == found.records


def test_what_figures_depend_on_is_measured_again(cache: RagCache, open_tiny: OpenTiny, tmp_path: Path) -> None:
    asked = find_passages(cache, QUESTIONS[0], top_k=3)
    key = Measurement(cache, 6).key(asked, PLAIN)
    assert key == Measurement(cache, 6).key(find_passages(cache, QUESTIONS[0], top_k=3), PLAIN)
    others = [
        Measurement(cache, 7).key(asked, PLAIN),
        Measurement(cache, 6).key(asked, DOCUMENT_ORDER),
        Measurement(cache, 6).key(find_passages(cache, QUESTIONS[0], top_k=2), PLAIN),
        Measurement(cache, 6).key(find_passages(cache, QUESTIONS[1], top_k=3), PLAIN),
    ]
    other_codec = open_tiny(tmp_path / "int8", codec="int8")
    other_codec.index([make_document(number) for number in range(3)])
    others.append(Measurement(other_codec, 6).key(find_passages(other_codec, QUESTIONS[0], top_k=3), PLAIN))
    assert len({key, *others}) == 6


def test_times_of_another_machine_are_not_taken(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = find_passages(cache, QUESTIONS[0], top_k=3)
    keys = {Measurement(cache, 6).key(asked, PLAIN)}
    monkeypatch.setattr("ragcache.evaluation.measure.processor_name", lambda device: "another one")
    keys.add(Measurement(cache, 6).key(asked, PLAIN))
    monkeypatch.setattr("ragcache.evaluation.measure.computing_versions", lambda: {"torch": "another one"})
    keys.add(Measurement(cache, 6).key(asked, PLAIN))
    assert len(keys) == 3


def test_states_that_take_the_place_of_others_count(cache: RagCache, open_tiny: OpenTiny, tmp_path: Path) -> None:
    # Of chunks without a context encoding a setting uses the other one.
    other_codec = open_tiny(tmp_path / "int8", codec="int8")
    other_codec.index([make_document(number) for number in range(3)])
    setting = Setting(encodings=("context",), order="score")
    keys = [Measurement(it, 6).key(find_passages(it, QUESTIONS[0], top_k=3), setting) for it in (cache, other_codec)]
    assert keys[0] != keys[1]


def test_what_was_measured_over_damaged_states_is_measured_again(cache: RagCache, tmp_path: Path) -> None:
    shards = {file: file.read_bytes() for file in cache.store.shard_folder.glob("*.arrow")}
    for file, content in shards.items():
        file.write_bytes(bytes(len(content)))
    damaged = run(cache, tmp_path, Counting(), PLAIN)
    assert damaged.summaries[0].misses
    for file, content in shards.items():
        file.write_bytes(content)
    progress = Counting()
    mended = run(cache, tmp_path, progress, PLAIN)
    assert (progress.started, progress.done) == (2, 2)
    assert mended.summaries[0].misses == {}


def test_a_question_without_room_is_named_before_others_are_measured(cache: RagCache, tmp_path: Path) -> None:
    progress = Counting()
    questions = [*QUESTIONS, Question("again " * 10000)]
    with pytest.raises(EvaluationError, match=r"'again again .* the question is too long"):
        evaluate(cache, questions, [PLAIN], tmp_path, OPTIONS, progress)
    assert progress.done == 0


def test_a_figure_that_is_no_number(cache: RagCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_number(reference: torch.Tensor, compared: torch.Tensor) -> Divergence:
        return divergence(reference, compared * torch.nan)

    monkeypatch.setattr("ragcache.evaluation.measure.divergence", without_number)
    assert '"worst_kl": null' in run(cache, tmp_path, Counting(), PLAIN).to_json()


def test_what_has_no_states_depends_on_the_settings(open_tiny: Callable[..., RagCache], tmp_path: Path) -> None:
    path, question = tmp_path / "store", Question("Which ships passed?", documents=("doc-0", "doc-1"))
    with open_tiny(path) as cache:
        cache.index([make_document(number) for number in range(3)])
    with sqlite3.connect(path / "catalog.sqlite") as connection:
        connection.execute(
            "UPDATE encodings SET states = NULL, evicted = 1"
            " WHERE chunk IN (SELECT id FROM chunks WHERE document = 'doc-1')"
        )
    found = []
    for codec in ("raw", "int4"):
        progress = Counting()
        with open_tiny(path, codec=codec) as cache:
            options = EvaluationOptions(max_tokens=3)
            (summary,) = evaluate(cache, [question], [PLAIN], tmp_path / "out", options, progress).summaries
        assert progress.started == 1
        found.append(summary.kl.mean)
    assert found[0] != found[1]
