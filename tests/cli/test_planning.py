"""`ragcache plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ragcache.restore import measure
from ragcache.restore.profile import Profile
from tests.cli.runner import Outcome, run_command
from tests.restore.test_plan import MACHINE

Run = Callable[..., Outcome]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_folder: Callable[[str], Path],
) -> Run:
    """Run `ragcache` in this process with a cache folder of its own, measuring on little."""
    monkeypatch.setenv("RAGCACHE_CACHE_FOLDER", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "FILE_BYTES", 4 * 2**20)
    monkeypatch.setattr(measure, "COMPUTE_SECONDS", 0.0)

    def run_cli(command: str, *arguments: object, family: str = "llama-multi-head") -> Outcome:
        given = [
            command,
            *arguments,
            "--store",
            tmp_path / "store",
            "--model",
            tiny_folder(family),
            "--dtype",
            "float32",
        ]
        return run_command(given, monkeypatch, capsys)

    return run_cli


def save(profile: Profile, path: Path) -> Path:
    path.write_text(profile.to_json())
    return path


def test_measured_once_and_said(run: Run, tmp_path: Path) -> None:
    outcome = run("plan")
    assert outcome.code == 0, outcome.err
    [kept] = (tmp_path / "cache/profiles").iterdir()
    first = Profile.load(kept)
    said = " ".join(outcome.out.split())
    assert f"measured {first.date:%Y-%m-%d %H:%M} UTC" in said
    assert str(kept) in outcome.out.replace("\n", "")
    assert "planned forms" in said
    for tokens in ("1,024", "2,048", "4,096", "8,192", "16,384", "32,768"):
        assert tokens in said
    assert "context window of 4,096 tokens" in outcome.err.replace("\n", " ")
    assert not (tmp_path / "store").exists()

    def measured(*arguments: object) -> Profile:
        return Profile(**json.loads(run("plan", "--json", *arguments).out)["profile"])

    assert measured() == first
    assert measured("--measure") != first


def test_plan_for_another_machine(run: Run, tmp_path: Path) -> None:
    path = save(replace(MACHINE, read_rate=1e5), tmp_path / "machine.json")
    found = json.loads(run("plan", "--profile", path, "--json").out)
    assert [(it["first"], it["last"], it["form"]) for it in found["groups"]] == [
        (0, 0, "tokens"),
        (1, 1, "tokens"),
        (2, 2, "hidden"),
    ]
    assert found["profile"] == asdict(Profile.load(path))
    assert found["profile_file"] == str(path)
    assert [it["tokens"] for it in found["times"]] == [1024, 2048, 4096, 8192, 16384, 32768]
    assert all(it["planned"] < it["hidden"] < it["pre_rope_kv"] for it in found["times"])
    assert found["stored_as_planned"] is None
    assert not (tmp_path / "cache/profiles").exists()
    assert "another model or codec" in run("plan", "--profile", path).err


def test_what_a_store_has_is_compared(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "ferry.md").write_text("The ferry leaves Northport at seven and takes half an hour.")
    assert run("index", folder, "--states", "pre-rope-kv").code == 0
    path = save(replace(MACHINE, device="cpu", read_rate=1e5), tmp_path / "machine.json")
    outcome = run("plan", "--profile", path)
    assert "as stored" in outcome.out
    assert "another format" in outcome.out
    found = json.loads(run("plan", "--profile", path, "--json").out)
    assert found["stored_as_planned"] is False
    assert all(it["stored"] == pytest.approx(it["pre_rope_kv"]) for it in found["times"])


def test_an_index_follows_the_plan(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "ferry.md").write_text("The ferry leaves Northport at seven and takes half an hour.")
    assert run("index", folder).code == 0
    # Measured by `index`; the plan is made of the same rates.
    [kept] = (tmp_path / "cache/profiles").iterdir()
    found = json.loads(run("plan", "--json").out)
    assert found["profile"] == asdict(Profile.load(kept))
    assert found["stored_as_planned"] is True


def test_errors_are_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"read_rate": -3}')
    file = tmp_path / "store"
    for arguments, words in (
        (("--profile", tmp_path / "none.json"), "cannot be read"),
        (("--profile", tmp_path / "bad.json"), "is not a profile"),
        (("--profile", tmp_path / "bad.json", "--measure"), "not both"),
        (("--codec", "int3"), "codec"),
        (("--state-folder", "/proc/ragcache"), "reading from /proc cannot be measured"),
    ):
        outcome = run("plan", *arguments)
        assert (outcome.code, outcome.out) == (2, "")
        [line] = [it for it in outcome.err.splitlines() if it.startswith("error: ")]
        assert words in line
    file.write_text("")
    assert "is a file" in run("plan").err
