"""How long an event loop is held up while eight LlamaIndex queries are answered at once.

    make demo
    python benchmarks/event_loop.py

A task on the loop sleeps for 5 ms again and again; how much later it comes round is how long the loop was held up. The
same is measured beside nothing, for what the machine does by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.query_engine import RetrieverQueryEngine

from ragcache import RagCache
from ragcache.llama_index import RagCacheLLM, RagCacheRetriever, RagCacheSynthesizer

BEAT = 0.005
QUESTIONS = [
    f"What does the {name} statement do?"
    for name in ("with", "try", "raise", "import", "global", "assert", "return", "class")
]


async def hold_ups(work: Callable[[], Awaitable[object]]) -> tuple[float, list[float]]:
    """Seconds that something took, and by how many each beat was late meanwhile, the latest first."""
    late: list[float] = []

    async def beat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(BEAT)
            late.append(time.perf_counter() - before - BEAT)

    heart = asyncio.create_task(beat())
    clock = time.perf_counter()
    await work()
    seconds = time.perf_counter() - clock
    heart.cancel()
    return seconds, sorted(late, reverse=True)


def engine(cache: RagCache, max_tokens: int, *, streaming: bool) -> RetrieverQueryEngine:
    """Retrieves from the store and answers from stored states."""
    synthesizer = RagCacheSynthesizer(RagCacheLLM(cache, max_tokens=max_tokens), streaming=streaming)
    return RetrieverQueryEngine(RagCacheRetriever(cache), synthesizer)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path(".demo/store"))
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    cache = RagCache.open(arguments.store)
    whole, streamed = (engine(cache, arguments.max_tokens, streaming=it) for it in (False, True))

    async def nothing() -> None:
        await asyncio.sleep(5)

    async def ask() -> None:
        await asyncio.gather(*map(whole.aquery, QUESTIONS))

    async def read(question: str) -> None:
        response = await streamed.aquery(question)
        if isinstance(response, AsyncStreamingResponse):
            async for _ in response.response_gen:
                pass

    async def stream() -> None:
        await asyncio.gather(*map(read, QUESTIONS))

    print("| at once | seconds | beats | longest hold-up | 99% of beats below |\n|---|---:|---:|---:|---:|")
    for name, work in (
        ("nothing", nothing),
        ("8 `aquery`, the first", ask),
        ("8 `aquery`", ask),
        ("8 streams", stream),
    ):
        seconds, late = asyncio.run(hold_ups(work))
        longest, most = late[0] * 1e3, late[len(late) // 100] * 1e3
        print(f"| {name} | {seconds:.1f} | {len(late)} | {longest:.1f} ms | {most:.1f} ms |")


if __name__ == "__main__":
    main()
