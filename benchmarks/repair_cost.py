"""What repairing costs beside a full prefill: the same prompt with each choice of tokens, from a store of real text.

python benchmarks/repair_cost.py --tokens 4096 --ratio 0.15
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import get_args

import torch

from ragcache import Document, RagCache
from ragcache.generate.engine import PromptReport
from ragcache.prompt.layout import Layout
from ragcache.prompt.repair import NO_REPAIR, RepairOptions
from ragcache.settings import Repair, Reuse
from ragcache.stream import ContextChunk

QUESTION = "What does the with statement do, and which methods of a context manager does it call?"

WAYS: dict[str, tuple[Reuse, Repair]] = {
    "full prefill": ("none", "off"),
    **{f"repair {method}": ("composed", method) for method in get_args(Repair)},
}


@dataclass(frozen=True)
class Run:
    """A prompt made ready once: milliseconds from its token ids to its logits, and where they went."""

    milliseconds: float
    report: PromptReport


def prepare(cache: RagCache, layout: Layout, chunks: list[ContextChunk], way: str, ratio: float) -> Run:
    """One way, once."""
    reuse, method = WAYS[way]
    repair = NO_REPAIR if method == "off" else RepairOptions(method, ratio)
    clock = time.perf_counter()
    prepared = cache.engine.prepare(layout, chunks, reuse, repair)
    float(prepared.logits[0])
    elapsed = (time.perf_counter() - clock) * 1e3
    cache.engine.pool.give_back(prepared.cache)
    return Run(elapsed, prepared.report)


def enough(cache: RagCache, tokens: int) -> list[ContextChunk]:
    """Stored chunks of at least so many tokens together."""
    chunks: list[ContextChunk] = []
    for hit in cache.retrieve(QUESTION, top_k=tokens // 32):
        chunks.append(cache.answering.find_chunk(hit.chunk.chunk_id, hit.chunk.title, hit.chunk.text, hit.score))
        if sum(len(chunk.token_ids) for chunk in chunks) >= tokens:
            return chunks
    raise SystemExit(f"the corpus has fewer than {tokens} tokens")


def main() -> None:
    """Time all ways in turn, several times; the fastest of each counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = RagCache.open(
            Path(folder) / "store", model=arguments.model, dtype=arguments.dtype, encodings=("alone",)
        )
        text = "\n\n".join(text for _, text in sorted(topics.items()))
        # Four characters a token, and some to spare.
        cache.index([Document("topics", text[: arguments.tokens * 6], "Python")])
        chunks = enough(cache, arguments.tokens)
        layout = cache.answering.lay_out(QUESTION, chunks, 1)
        runs: dict[str, list[Run]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way, done in runs.items():
                done.append(prepare(cache, layout, chunks, way, arguments.ratio))
        settings = cache.settings
    print(
        f"{settings.model}, {settings.dtype}, {sum(map(len, layout.chunks))} tokens in {len(layout.chunks)} chunks, "
        f"question {len(layout.question)}, ratio {arguments.ratio}, {torch.get_num_threads()} threads"
    )
    best = {way: min(done[1:] or done, key=lambda run: run.milliseconds) for way, done in runs.items()}
    full, off = best["full prefill"].milliseconds, best["repair off"].milliseconds
    print(f"{'':<18} {'tokens':>7} {'all ms':>9} {'repair ms':>10} {'added ms':>9} {'added / full prefill':>21}")
    for way, run in best.items():
        added = 0.0 if WAYS[way][1] == "off" else run.milliseconds - off
        print(
            f"{way:<18} {run.report.repaired_tokens:>7} {run.milliseconds:>9.1f} {run.report.repair_ms:>10.1f} "
            f"{added:>9.1f} {added / full:>21.1%}"
        )


if __name__ == "__main__":
    main()
