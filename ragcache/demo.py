"""The demo: index a real corpus, ask three questions, compare with a full prefill of the same tokens."""

from __future__ import annotations

import json
import statistics
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ragcache.console import IndexingProgress, loading, print_answer, printable

if TYPE_CHECKING:
    from ragcache.answer import Answer
    from ragcache.pipeline import RagCache

SOURCE = "pydoc:topics"
QUESTIONS = (
    "What does the with statement do, and which methods does a context manager have?",
    "What is the difference between __getattr__ and __getattribute__?",
    "In which order are the except clauses of a try statement searched?",
)
TOP_K = 10
"""Gives about 4,096 tokens of passages."""
MAX_TOKENS = 64
CONTEXTS = 1
"""Of each chunk. More bring answers nearer to the full prefill's, at twice as long a wait before the first question."""


@dataclass(frozen=True)
class Comparison:
    """One question, answered from stored states and by a full prefill of the same token ids."""

    question: str
    answer: Answer
    prefill_answer: str
    ttft_ms: float
    prefill_ttft_ms: float

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes."""
        return self.prefill_ttft_ms / self.ttft_ms


def run_demo(folder: Path, console: Console, progress_console: Console) -> None:
    """Run the demo and write `result.json` into `folder`."""
    with loading(progress_console) as on_stage:
        from ragcache.indexer.sources import open_source
        from ragcache.pipeline import RagCache

        cache = RagCache.open(folder / "store", on_stage=on_stage, contexts=CONTEXTS)
    source = open_source(SOURCE)
    console.print(f"Indexing {SOURCE}, the language reference of this Python, with {cache.settings.model}.")
    with IndexingProgress(progress_console) as progress:
        report = cache.index(source, source=source.name, remove_missing=True, progress=progress)
    console.print(f"{report.added + report.updated} documents encoded, {report.unchanged} unchanged.\n")

    comparisons = []
    for question in QUESTIONS:
        _warm_up(cache, question)
        console.print(question, style="bold")
        answer = print_answer(console, cache.stream(question, top_k=TOP_K, max_tokens=MAX_TOKENS))
        full = cache.query(question, top_k=TOP_K, max_tokens=MAX_TOKENS, reuse="none")
        # transformers' own forward with its fastest attention: `eager` takes five times as long at this length.
        others = answer.timings_ms.retrieve + transformers_prefill(cache, question)
        prefill_ttft = min(full.timings_ms.ttft, others)
        comparisons.append(Comparison(question, answer, full.answer, answer.timings_ms.ttft, prefill_ttft))
        console.print(f"  TTFT with a full prefill: {prefill_ttft:,.0f} ms; its answer:", style="dim")
        answer_lines = textwrap.indent(printable(full.answer.strip()), "  ")
        console.print(f"{answer_lines}\n", markup=False, style="dim", soft_wrap=True)
    console.print(_table(comparisons))
    path = folder / "result.json"
    path.write_text(json.dumps(_result(cache, comparisons), indent=2) + "\n")
    console.print(f"\nWritten to {path}")


def transformers_prefill(cache: RagCache, question: str) -> float:
    """Milliseconds of a plain transformers forward over the question's prompt, up to the first token."""
    import torch

    from ragcache.model.certify import own_attention
    from ragcache.stream import context_chunk

    chunks = [context_chunk(hit) for hit in cache.retrieve(question, TOP_K)]
    token_ids = cache.model.tensor(cache.answering.lay_out(question, chunks, MAX_TOKENS).token_ids)
    clock = time.perf_counter()
    with torch.inference_mode(), own_attention(cache.model):
        logits = cache.model.module(input_ids=token_ids[None], use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
    return (time.perf_counter() - clock) * 1e3


def _warm_up(cache: RagCache, question: str) -> None:
    """Bring the states into the page cache and both code paths up to speed; the figures are those of a warm server."""
    cache.query(question, top_k=TOP_K, max_tokens=2)
    if question == QUESTIONS[0]:
        transformers_prefill(cache, question)


def _table(comparisons: list[Comparison]) -> Table:
    """Milliseconds and tokens of each question, in the order asked."""
    table = Table(
        title="Tokens, and milliseconds to the first token", box=None, padding=(0, 1, 0, 0), title_justify="left"
    )
    columns = (
        "#",
        "restored",
        "prefilled",
        "retrieve",
        "read",
        "restore",
        "prefill",
        "TTFT",
        "full prefill",
        "ratio",
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for number, item in enumerate(comparisons, start=1):
        tokens, times = item.answer.tokens, item.answer.timings_ms
        milliseconds = (
            times.retrieve,
            times.read,
            times.restore,
            times.prefill,
            times.ttft,
            item.prefill_ttft_ms,
        )
        table.add_row(
            str(number),
            f"{tokens.restored:,}",
            f"{tokens.prefilled:,}",
            *(f"{value:,.0f}" for value in milliseconds),
            f"{item.ratio:.1f}",
        )
    return table


def _result(cache: RagCache, comparisons: list[Comparison]) -> dict[str, Any]:
    return {
        "model": cache.settings.model,
        "dtype": cache.settings.dtype,
        "codec": cache.settings.codec,
        "device": str(cache.model.device),
        "median_ratio": statistics.median(item.ratio for item in comparisons),
        "questions": [
            {
                "question": item.question,
                "ttft_ms": item.ttft_ms,
                "prefill_ttft_ms": item.prefill_ttft_ms,
                "ratio": item.ratio,
                "restored_tokens": item.answer.tokens.restored,
                "prefilled_tokens": item.answer.tokens.prefilled,
                "answer": item.answer.answer,
                "prefill_answer": item.prefill_answer,
                "sources": [source.model_dump() for source in item.answer.sources],
                "timings_ms": item.answer.timings_ms.model_dump(),
            }
            for item in comparisons
        ],
    }
