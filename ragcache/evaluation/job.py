"""A whole evaluation: from questions to the files with what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragcache.errors import EvaluationError, QuestionError
from ragcache.evaluation.grid import Setting, setting_of
from ragcache.evaluation.journal import open_journal
from ragcache.evaluation.measure import Measurement
from ragcache.evaluation.passages import Asked, find_passages
from ragcache.evaluation.questions import Question
from ragcache.evaluation.recommend import recommend
from ragcache.evaluation.report import html_report, plots
from ragcache.evaluation.result import Evaluation, circumstances, summaries
from ragcache.evaluation.run import EvaluationProgress, possible, run
from ragcache.evaluation.transcoding import in_codecs
from ragcache.pipeline import RagCache
from ragcache.states.durable import write_durably

RESULT, REPORT, JOURNAL = "evaluation.json", "report.html", "records.jsonl"
"""Files of an evaluation."""

SHOWN = 80
"""Characters of a question that an error shows."""


@dataclass(frozen=True)
class EvaluationOptions:
    """How an evaluation is done.

    Attributes:
        max_tokens: of an answer.
        top_k: chunks retrieved for questions that name no documents.
        target: agreement for which the fastest setting is recommended; `None` for no recommendation.
        seed: of the intervals, and recorded as that of the choice of questions.
    """

    max_tokens: int = 32
    top_k: int = 4
    target: float | None = None
    seed: int = 0


def evaluate(
    cache: RagCache,
    questions: Sequence[Question],
    settings: Sequence[Setting],
    folder: Path,
    options: EvaluationOptions,
    progress: EvaluationProgress,
    remark: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Measure every question with every setting and write the results into a folder.

    What an earlier run in the same folder has measured is not measured again.

    Args:
        cache: an opened store that remembers no prompts, so that each is composed.
        questions: at least one.
        settings: at least one; those that the store cannot serve are left out.
        folder: is made if need be.
        options: how it is done.
        progress: told how it goes.
        remark: told what is not the result.

    Raises:
        EvaluationError: the store has nothing for a question or for any of the settings, or the folder cannot be used.
            Or the store remembers prompts.
    """
    if cache.settings.sequence_megabytes:
        raise EvaluationError("a prompt that is remembered is not composed; open the store with sequence_megabytes=0")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"cannot write to {folder}: {error.strerror or error}") from error
    with open_journal(folder / JOURNAL) as journal:
        if journal.unreadable:
            remark(f"{journal.unreadable} lines of {journal.path} make no sense and are measured again")
        asked = [find_passages(cache, question, options.top_k) for question in questions]
        _check_room(cache, asked, options.max_tokens)
        with in_codecs(cache, asked, {it.codec for it in settings}, folder) as (passages, reasons):
            served, left_out = possible(settings, passages, reasons)
            for reason, count in Counter(it.reason for it in left_out).items():
                remark(f"left out: {count} {'setting' if count == 1 else 'settings'}: {reason}")
            if not served:
                raise EvaluationError(f"{cache.path} can serve none of the settings: {left_out[0].reason}")
            records = run(Measurement(cache, options.max_tokens), passages, served, journal, progress)
        found = summaries(asked, records, options.seed)
        recommendation = None
        if options.target is not None:
            present = setting_of(cache.settings)
            current = next((it for it in found if it.setting == present), None)
            recommendation = recommend(found, options.target, current)
        evaluation = Evaluation(
            circumstances(cache, options.max_tokens, options.seed), asked, records, found, left_out, recommendation
        )
        try:
            write_durably(folder / RESULT, evaluation.to_json().encode())
            write_durably(folder / REPORT, html_report(evaluation).encode())
            for name, plot in plots(evaluation.summaries).items():
                write_durably(folder / name, plot.encode())
        except OSError as error:
            raise EvaluationError(f"cannot write to {folder}: {error.strerror or error}") from error
    return evaluation


def _check_room(cache: RagCache, asked: Sequence[Asked], max_tokens: int) -> None:
    """See that all questions have room in the context window, before hours are spent on those that come before."""
    for it in asked:
        try:
            cache.answering.lay_out(it.question.text, it.chunks, max_tokens)
        except QuestionError as error:
            raise EvaluationError(f"{it.question.text[:SHOWN]!r} cannot be asked: {error}") from error
