"""The check for machines with a GPU, here without one: all of it runs, and needs little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ragcache.restore.gpu_check.__main__ import main

# A machine with a GPU may have nothing of what ragcache needs elsewhere.
WITHOUT_MOST = """
import runpy, sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {"pydantic", "typer", "fastapi", "xxhash", "llama_index", "faiss", "rich", "gguf"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.argv[1:] = ["--dry-run-on-cpu", "--output", sys.argv[1]]
runpy.run_module("ragcache.restore.gpu_check", run_name="__main__")
"""


def test_all_of_it_runs_with_tiny_shapes_and_few_packages(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = tmp_path / "folder" / "gpu-check.json"
    run = subprocess.run([sys.executable, "-c", WITHOUT_MOST, output], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(output.read_text())
    assert {row["form"] for row in report["correctness"]} == {"hidden", "pre_rope_kv"}
    assert all(row["passed"] for row in report["correctness"])
    assert [row["wrong_layers"] for row in report["pipeline"]] == [0]
    assert {row["form"] for row in report["timings"]} == {"hidden", "pre_rope_kv"}
    assert all(row["ms"] > 0 and row["times_the_floor"] > 0 for row in report["timings"])
    assert report["rates"]["copy_bytes"] > 0
    assert report["left_out"] == 0


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--output", str(tmp_path / "report.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()
