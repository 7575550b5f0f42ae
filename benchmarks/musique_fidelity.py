"""Fidelity on multi-hop questions over passages encoded apart: MuSiQue in the selection of CacheBlend's evaluation.

python benchmarks/musique_fidelity.py DATA.json --folder .musique --questions 30

DATA.json is a list of {question, answers, passages}. Each passage, cut to 256 tokens of the model, is one document and
one chunk of the store; the passages of all records are the pool that neighbours come from. Asked is with the first 6
passages of a record. A second run goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ragcache import Document, RagCache
from ragcache.console import EvaluationProgress, IndexingProgress, loading
from ragcache.evaluation.grid import PLAIN, Axes, Setting, distinct, read_grid
from ragcache.evaluation.job import EvaluationOptions, evaluate
from ragcache.evaluation.questions import Question, read_questions, sampled
from ragcache.evaluation.text_table import text_table
from ragcache.prompt.template import PromptTemplate

PASSAGE_TOKENS = 256
"""Of a chunk, header included."""
PASSAGES = 6
"""Of a record, that its question is asked with."""

GRID: tuple[Setting, ...] = distinct(
    (
        PLAIN,
        *Axes([("alone",)], ["score"], ["query", "boundary", "deviation"], [0.15]).settings(),
        *Axes([("alone", "context")], ["score", "conditioned"], ["off"], [0.0]).settings(),
        *Axes([("alone", "context")], ["conditioned"], ["query", "boundary", "deviation"], [0.15]).settings(),
    )
)


def cut(template: PromptTemplate, title: str, text: str) -> str:
    """As many whole words of a passage as fit."""
    words = text.split()
    fits, too_many = 0, len(words) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(template.chunk(title, " ".join(words[:middle]))) <= PASSAGE_TOKENS:
            fits = middle
        else:
            too_many = middle
    return " ".join(words[:fits])


def documents(records: list[dict[str, Any]], template: PromptTemplate) -> Iterator[Document]:
    """Each passage of each record."""
    for number, record in enumerate(records):
        for place, passage in enumerate(record["passages"]):
            title = f"{number}.{place}"
            yield Document(title, cut(template, title, passage), title)


def write_questions(records: list[dict[str, Any]], path: Path) -> list[Question]:
    """Questions as `ragcache evaluate --questions` reads them."""
    lines = [
        json.dumps(
            {
                "question": record["question"],
                "answers": record["answers"],
                "documents": [f"{number}.{place}" for place in range(PASSAGES)],
            }
        )
        for number, record in enumerate(records)
    ]
    path.write_text("\n".join(lines) + "\n")
    return read_questions(path)


def main() -> None:
    """Index the passages, ask the questions, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="musique_dev75.json")
    parser.add_argument("--folder", type=Path, default=Path(".musique"), help="for store and results")
    parser.add_argument("--records", type=int, help="use this many records only, for the pool too")
    parser.add_argument("--questions", type=int, help="ask this many of them")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--context", default="neighbours", help="document or neighbours")
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--grid", type=Path, help="JSON file with other settings")
    arguments = parser.parse_args()

    records = json.loads(arguments.data.read_text())[: arguments.records]
    console = Console(stderr=True)
    with loading(console) as on_stage:
        cache = RagCache.open(
            arguments.folder / "store",
            on_stage=on_stage,
            model=arguments.model,
            dtype="float32",
            codec=arguments.codec,
            encodings=("alone", "context"),
            context=arguments.context,
            context_tokens=arguments.context_tokens,
            # Every passage is one chunk, so nothing is ever cut here.
            chunk_tokens=2 * PASSAGE_TOKENS,
        )
    with cache:
        with IndexingProgress(console) as progress:
            cache.index(list(documents(records, cache.template)), source="musique", progress=progress)
        questions = sampled(write_questions(records, arguments.folder / "questions.jsonl"), arguments.questions, seed=0)
        grid = read_grid(arguments.grid) if arguments.grid else GRID
        options = EvaluationOptions(max_tokens=arguments.max_tokens, top_k=PASSAGES)
        with EvaluationProgress(console) as measuring:
            found = evaluate(cache, questions, grid, arguments.folder / "evaluation", options, measuring, console.print)
    print(f"{len(questions)} questions, {PASSAGES} passages of up to {PASSAGE_TOKENS} tokens")
    print("\n".join(text_table(found)))


if __name__ == "__main__":
    main()
