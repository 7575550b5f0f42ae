"""Questions to evaluate with, from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache.errors import EvaluationError, QuestionError
from ragcache.prompt.validity import check_question, is_unicode

FIELDS = ("question", "answers", "documents")


@dataclass(frozen=True)
class Question:
    """Something to ask.

    Attributes:
        text: the question.
        answers: right ones, if they are known.
        documents: ids of the documents whose chunks are the passages, in this order; none to have them retrieved.
    """

    text: str
    answers: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """Questions of a file: one JSON list, or one JSON object a line (JSONL), each with `question` and, if wanted,
    `answers` and `documents`.

    Raises:
        EvaluationError: it cannot be read or there is something else in it; names the line, or the place in the list.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is not UTF-8 text ({error.reason}); convert it") from error
    except OSError as error:
        raise EvaluationError(f"the questions {path} cannot be read: {error.strerror or error}") from error
    records = _list(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    questions = [_question(where, record) for where, record in records]
    if not questions:
        raise EvaluationError(f'{path} holds no questions; give objects such as {{"question": "Who ...?"}}')
    return questions


def sampled(questions: Sequence[Question], count: int | None, seed: int) -> list[Question]:
    """That many of the questions, in their order; all when there are not more, or `count` is `None`."""
    if count is None or count >= len(questions):
        return list(questions)
    chosen = sorted(random.Random(seed).sample(range(len(questions)), count))
    return [questions[index] for index in chosen]


def _list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise EvaluationError(f"{path}{place}: not JSON ({getattr(error, 'msg', error)})") from error
    for number, record in enumerate(records, start=1):
        yield f"{path}, question {number}", record


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines: a text may hold other characters that end lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise EvaluationError(f"{where}: not JSON ({reason}); give one object per line, or one list") from error


def _question(where: str, record: Any) -> Question:
    if not isinstance(record, dict):
        raise EvaluationError(f"{where}: not a JSON object; give {{'question', 'answers', 'documents'}}")
    if unknown := sorted(set(record) - set(FIELDS)):
        raise EvaluationError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(FIELDS)}")
    try:
        check_question(record.get("question", ""))
    except QuestionError as error:
        raise EvaluationError(f"{where}: {error}") from error
    return Question(record["question"], _texts(where, record, "answers"), _texts(where, record, "documents"))


def _texts(where: str, record: dict[str, Any], field: str) -> tuple[str, ...]:
    values = record.get(field) or []
    if not isinstance(values, list) or not all(isinstance(it, str) and it.strip() and is_unicode(it) for it in values):
        raise EvaluationError(f"{where}: {field!r} must be a list of texts")
    return tuple(values)
