"""Files of questions: what they may look like, and what is said of those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache.errors import EvaluationError
from ragcache.evaluation.questions import Question, read_questions, sampled

RECORDS = [
    {"question": "Who keeps the light?", "answers": ["Ada", "Ada M."], "documents": ["b", "a"]},
    {"question": "What is a harbour\u2028for?"},
]
WANTED = [
    Question("Who keeps the light?", ("Ada", "Ada M."), ("b", "a")),
    Question("What is a harbour\u2028for?"),
]


def test_a_list_and_lines_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(RECORDS, indent=2))
    (tmp_path / "lines.jsonl").write_text(
        "\n\n".join(json.dumps(it, ensure_ascii=False) for it in RECORDS), encoding="utf-8-sig"
    )
    assert read_questions(tmp_path / "list.json") == WANTED
    assert read_questions(tmp_path / "lines.jsonl") == WANTED


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"question": "a?"}\n{"question": }', "line 2: not JSON"),
        ('{"question": "a?"}\n\n["b?"]', "line 3: not a JSON object"),
        ('{"question": "a?"}\n{"answers": ["b"]}', "line 2: the question is empty"),
        ('{"question": 7}', "line 1: the question is no text"),
        ('{"question": "a?", "answers": "b"}', "line 1: 'answers' must be a list of texts"),
        ('{"question": "a?", "documents": ["b", 3]}', "line 1: 'documents' must be a list of texts"),
        ('{"question": "a?", "answer": "b"}', "line 1: unknown field 'answer'"),
        ('[{"question": "a?"}, {"question": " "}]', "question 2: the question is empty"),
        ('[{"question": "a?"},\n{"question" "b?"}]', "line 2: not JSON"),
        ("", "holds no questions"),
        ("[]", "holds no questions"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "questions").write_text(content)
    with pytest.raises(EvaluationError, match="questions") as raised:
        read_questions(tmp_path / "questions")
    assert words in str(raised.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes('{"question": "Wo wohnt Jürgen?"}'.encode("latin-1"))
    with pytest.raises(EvaluationError, match="not UTF-8"):
        read_questions(tmp_path / "latin")
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_questions(tmp_path)


def test_a_sample_is_the_same_each_time_and_in_order() -> None:
    questions = [Question(str(number)) for number in range(50)]
    drawn = sampled(questions, 7, seed=3)
    assert drawn == sampled(questions, 7, seed=3) != sampled(questions, 7, seed=4)
    assert drawn == sorted(drawn, key=lambda it: int(it.text))
    assert len({it.text for it in drawn}) == 7
    assert sampled(questions, None, seed=0) == sampled(questions, 99, seed=0) == questions
