"""`ragcache evaluate`: what it writes, prints, recommends and refuses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache.console import EvaluationProgress
from tests.cli.runner import Outcome, run_command
from tests.conftest import make_document

Run = Callable[..., Outcome]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_folder: Callable[[str], Path],
) -> Run:
    """Run `ragcache` in this process, on a store of three documents."""
    given = ["--store", tmp_path / "store", "--model", tiny_folder("llama"), "--dtype", "float32"]

    # Results go to the folder one is in, unless told otherwise.
    monkeypatch.chdir(tmp_path)

    def run_cli(command: str, *arguments: object) -> Outcome:
        return run_command([command, *arguments, *given], monkeypatch, capsys)

    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        (folder / f"doc-{number}.txt").write_text(make_document(number).text)
    assert run_cli("index", folder, "--chunk-tokens", 64, "--encodings", "alone").code == 0
    return run_cli


def test_from_questions_to_the_store_s_default(run: Run, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        '{"question": "Which ships passed?", "answers": ["none"]}\n'
        '{"question": "When does it run?", "documents": ["corpus/doc-1.txt"]}\n'
    )
    out = tmp_path / "out"
    arguments = ["--questions", questions, "--out", out, "--max-tokens", 4, "--top-k", 2]
    axes = ["--encodings", "alone,alone+context", "--order", "document", "--repair", "off"]
    outcome = run("evaluate", *arguments, *axes, "--target-agreement", 0, "--apply")
    assert outcome.code == 0, outcome.err
    assert "recommended for an agreement of 0: alone, document, no repair" in outcome.out
    assert "left out: 1 setting: no passage has an encoding 'context'" in outcome.err.replace("\n", " ")
    assert tomllib.loads((tmp_path / "store/store.toml").read_text())["order"] == "document"
    result = json.loads((out / "evaluation.json").read_text())
    assert [it["label"] for it in result["settings"]] == ["alone, document, no repair"]
    assert [it["documents"] for it in result["questions"]] == [[], ["corpus/doc-1.txt"]]
    assert (out / "report.html").read_text().endswith("</html>\n")

    # Nothing is measured again, and what nothing can reach is not reached.
    journal = (out / "records.jsonl").read_bytes()
    again = run("evaluate", *arguments, *axes, "--target-agreement", 1)
    assert again.code == 1
    assert "no setting has an agreement of 1; nearest is alone, document, no repair" in again.out
    assert (out / "records.jsonl").read_bytes() == journal


def test_questions_of_its_own(run: Run, tmp_path: Path) -> None:
    outcome = run("evaluate", "--sample", 2, "--max-tokens", 2, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert len(result["questions"]) == 2
    # Of the default grid the store can serve what needs one encoding.
    assert {it["setting"]["encodings"][0] for it in result["settings"]} == {"alone"}
    assert result["recommendation"] is None
    assert "recommended" not in outcome.out


def test_an_interrupt_keeps_what_is_done(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--sample", 2, "--max-tokens", 2, "--out", tmp_path / "out", "--repair", "off"]
    advance = EvaluationProgress.advance

    def stopped(self: EvaluationProgress) -> None:
        advance(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationProgress, "advance", stopped)
        outcome = run("evaluate", *arguments)
    assert outcome.code == 130
    assert "the same command goes on from there" in outcome.err.replace("\n", " ")
    [first] = (tmp_path / "out/records.jsonl").read_text().splitlines()
    assert run("evaluate", *arguments).code == 0
    assert (tmp_path / "out/records.jsonl").read_text().splitlines()[0] == first


def test_errors_are_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "a?"}\n{"question"}')
    (tmp_path / "unknown.jsonl").write_text('{"question": "a?", "documents": ["nowhere"]}')
    for arguments, words in (
        (("--apply",), "--apply needs --target-agreement"),
        (("--questions", tmp_path / "bad.jsonl"), "line 2: not JSON"),
        (("--questions", tmp_path / "unknown.jsonl"), "no document 'nowhere'"),
        (("--grid", tmp_path / "none.json"), "cannot be read"),
        (("--full-grid", "--order", "score"), "or --full-grid, or"),
        (("--order", "best"), "--order has no 'best'"),
        (("--encodings", "context"), "can serve none of the settings"),
        (("--out", tmp_path / "bad.jsonl"), "cannot write"),
    ):
        outcome = run("evaluate", *arguments)
        assert (outcome.code, outcome.out) == (2, ""), arguments
        [line] = [it for it in outcome.err.splitlines() if it.startswith("error: ")]
        assert words in line
