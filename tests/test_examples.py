"""Every script in examples/ runs as its first lines say, with the real models."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples") / "harbour"


def test_batch_index(store: Path) -> None:
    output = run("batch_index.py", "--store", str(store))
    assert "6 added, 0 updated, 0 unchanged" in output
    assert "0 added, 0 updated, 6 unchanged" in output
    assert "smollm2-135m" in output


def test_llama_index_query_engine(store: Path) -> None:
    output = run("llama_index_query_engine.py", "--store", str(store), "How tall is the lighthouse?")
    answer, *sources, tokens = output.strip().splitlines()
    assert "31" in answer
    assert any("lighthouse#0" in source for source in sources)
    assert int(tokens.split()[0]) > 150


def test_rest_query(store: Path) -> None:
    output = run("rest_query.py", "--store", str(store), "How tall is the lighthouse?")
    whole, streamed = output.split("once more, streamed:")
    assert "31" in whole
    assert streamed.strip() == whole.split("\n  ")[0].strip()


def test_llama_index_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_CONTEXTS", "1")
    output = run("llama_index_quickstart.py", "--store", str(tmp_path / "store"))
    assert output.count("HuggingFaceLLM ") == output.count("ragcache  ") == 3
    ratios = [float(it) for it in re.findall(r"first token ([0-9.]+) times sooner", output)]
    prefilled = [int(it) for it in re.findall(r"([0-9]+) tokens prefilled", output)]
    # Some ten times sooner; prefilled is the question alone.
    assert len(ratios) == 3
    assert max(prefilled) < 40


def test_the_quickstart_differs_in_two_lines() -> None:
    tree = ast.parse((EXAMPLES / "llama_index_quickstart.py").read_text())
    functions = {it.name: it for it in tree.body if isinstance(it, ast.FunctionDef)}
    plain, ours = ([ast.unparse(it) for it in functions[name].body[1:]] for name in ("plain", "with_ragcache"))
    assert len([line for line in ours if line not in plain]) == 2


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{script.name}"' in tested for script in EXAMPLES.glob("*.py"))
