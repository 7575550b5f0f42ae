"""Every script in examples/ runs as its first lines say, with the real models."""

from __future__ import annotations

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


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'"{script.name}"' in tested for script in EXAMPLES.glob("*.py"))
