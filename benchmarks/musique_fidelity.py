"""Fidelity on multi-hop questions over passages encoded apart: MuSiQue in the selection of CacheBlend's evaluation.

python benchmarks/musique_fidelity.py DATA.json --folder .musique --questions 30

DATA.json is a list of {question, answers, passages}. Each passage, cut to 256 tokens of the model, is one document and
one chunk of the store; the passages of all records are the pool that neighbours come from. Asked is with the first 6
passages of a record. A second run goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from ragcache import Document, RagCache
from ragcache.console import EvaluationProgress, IndexingProgress, loading
from ragcache.evaluation.grid import PLAIN, Axes, Setting, distinct, read_grid
from ragcache.evaluation.job import EvaluationOptions, evaluate
from ragcache.evaluation.questions import Question, read_questions
from ragcache.evaluation.text_table import text_table
from ragcache.indexer.report import ENCODING, Progress
from ragcache.prompt.template import PromptTemplate

PASSAGE_TOKENS = 256
"""Of a chunk, header included."""
PASSAGES = 6
"""Of a record, that its question is asked with."""
SPARE_CHUNKS = 24
"""Encoded in context beyond those that are asked about: more than there are in a shard of 64 MB."""

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


def pool_of(records: list[dict[str, Any]], asked: Iterable[int]) -> list[str]:
    """Every passage once, those that are asked about first."""
    first = [passage for number in asked for passage in records[number]["passages"][:PASSAGES]]
    return list(dict.fromkeys([*first, *(passage for record in records for passage in record["passages"])]))


def documents(pool: list[str], template: PromptTemplate) -> list[Document]:
    """Each passage as one document, named by its place in the pool."""
    return [Document(str(number), cut(template, str(number), text), str(number)) for number, text in enumerate(pool)]


def write_questions(records: list[dict[str, Any]], asked: Iterable[int], pool: list[str], path: Path) -> list[Question]:
    """Questions as `ragcache evaluate --questions` reads them."""
    number_of = {passage: str(number) for number, passage in enumerate(pool)}
    lines = [
        json.dumps(
            {
                "question": records[number]["question"],
                "answers": records[number]["answers"],
                "documents": list(dict.fromkeys(number_of[it] for it in records[number]["passages"][:PASSAGES])),
            }
        )
        for number in asked
    ]
    path.write_text("\n".join(lines) + "\n")
    return read_questions(path)


class EnoughError(Exception):
    """All passages that are asked about have their contexts."""


class UntilAsked:
    """Stops the pass in context after the passages that are asked about, which come first.

    What they come after is chosen from the whole pool all the same; the contexts of the others would never be read.
    """

    def __init__(self, progress: Progress, chunks: int) -> None:
        # What is in a shard that is not full is not kept.
        self._progress, self._left, self._counting = progress, chunks + SPARE_CHUNKS, False

    def start(self, documents: int, words: str = ENCODING) -> None:
        """A pass begins."""
        self._counting = words != ENCODING
        self._progress.start(documents, words)

    def advance(self, documents: int, chunks: int, tokens: int) -> None:
        """So much more is done."""
        self._progress.advance(documents, chunks, tokens)
        self._left -= chunks if self._counting else 0
        if self._left < 0:
            raise EnoughError


def lacking_contexts(cache: RagCache, questions: list[Question]) -> int:
    """How many of the passages that are asked about have no encoding in context yet."""
    asked = {it for question in questions for it in question.documents}
    if not cache.path.exists():
        return len(asked)
    catalog = cache.store.catalog
    chunks = catalog.chunks_by_vector(catalog.vector_ids(sorted(asked)))
    return len(asked) - sum(it.encoding("context") is not None for it in chunks)


def main() -> None:
    """Index the passages, ask the questions, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="musique_dev75.json")
    parser.add_argument("--folder", type=Path, default=Path(".musique"), help="for store and results")
    parser.add_argument("--records", type=int, help="use this many records only, for the pool too")
    parser.add_argument("--questions", type=int, default=30, help="ask this many of them")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--context", default="neighbours", help="document or neighbours")
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--contexts", type=int, default=3)
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
            contexts=arguments.contexts,
            shard_megabytes=64,
            context=arguments.context,
            context_tokens=arguments.context_tokens,
            # Every passage is one chunk, so nothing is ever cut here.
            chunk_tokens=2 * PASSAGE_TOKENS,
        )
    with cache:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        asked = sorted(random.Random(0).sample(range(len(records)), min(arguments.questions, len(records))))
        pool = pool_of(records, asked)
        questions = write_questions(records, asked, pool, arguments.folder / "questions.jsonl")
        needed = lacking_contexts(cache, questions)
        with IndexingProgress(console) as progress, suppress(EnoughError):
            if needed:
                cache.index(documents(pool, cache.template), source="musique", progress=UntilAsked(progress, needed))
        grid = read_grid(arguments.grid) if arguments.grid else GRID
        options = EvaluationOptions(max_tokens=arguments.max_tokens, top_k=PASSAGES)
        with EvaluationProgress(console) as measuring:
            found = evaluate(cache, questions, grid, arguments.folder / "evaluation", options, measuring, console.print)
    print(f"{len(questions)} questions, {PASSAGES} passages of up to {PASSAGE_TOKENS} tokens")
    print("\n".join(text_table(found)))


if __name__ == "__main__":
    main()
