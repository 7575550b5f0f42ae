"""What the LlamaIndex integration is watched with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from llama_index.core.callbacks import CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

import ragcache.stream
from ragcache import RagCache
from ragcache.generate.decode import Step, decode
from ragcache.model.kv_cache import KVCache


@dataclass
class Generations:
    """What the generations of a store do.

    Attributes:
        lent: KV caches that were taken from the pool and not given back.
        taken: how many were taken.
        steps: decode steps.
        pause: seconds that each step takes longer.
        fail_at: the step that raises `error`.
    """

    lent: list[KVCache] = field(default_factory=list)
    taken: int = 0
    steps: int = 0
    pause: float = 0.0
    fail_at: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("the model broke"))

    def wait_until_over(self, seconds: float = 5.0) -> None:
        """Until all caches are given back."""
        deadline = time.monotonic() + seconds
        while self.lent and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not self.lent, "a KV cache was not given back"


@pytest.fixture
def generations(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> Generations:
    """The generations of the store `cache`."""
    watched = Generations()
    pool = cache.engine.pool
    take, give_back = pool.take, pool.give_back

    def watched_take(capacity: int) -> KVCache:
        watched.taken += 1
        watched.lent.append(take(capacity))
        return watched.lent[-1]

    def watched_give_back(given: KVCache) -> None:
        watched.lent[:] = [it for it in watched.lent if it is not given]
        give_back(given)

    def watched_decode(*arguments: Any) -> Iterator[Step]:
        for step in decode(*arguments):
            watched.steps += 1
            if watched.steps == watched.fail_at:
                raise watched.error
            time.sleep(watched.pause)
            yield step

    monkeypatch.setattr(pool, "take", watched_take)
    monkeypatch.setattr(pool, "give_back", watched_give_back)
    monkeypatch.setattr(ragcache.stream, "decode", watched_decode)
    return watched


class Events(BaseEventHandler):
    """Every event of the instrumentation."""

    seen: list[BaseEvent] = []  # noqa: RUF012 - a field

    def handle(self, event: BaseEvent, **_: Any) -> None:
        """Keep it."""
        self.seen.append(event)

    def names(self) -> list[str]:
        """Events of LLM calls and of exceptions, runs of the same ones as one."""
        names = [type(it).__name__ for it in self.seen]
        kept = [name for name in names if name.startswith(("LLMC", "Exception", "SpanDrop"))]
        return [
            name
            for index, name in enumerate(kept)
            if not name.endswith("InProgressEvent") or index == 0 or kept[index - 1] != name
        ]


@pytest.fixture
def events() -> Iterator[Events]:
    """What the instrumentation tells."""
    root = get_dispatcher()
    handler = Events(seen=[])
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


class Callbacks(LlamaDebugHandler):
    """Every event of the legacy callbacks; it keeps the exceptions of ended calls, as LlamaIndex's own handler does."""

    def __init__(self) -> None:
        super().__init__(print_trace_on_end=False)

    def calls(self) -> list[set[str]]:
        """Keys of the payloads of the ends of all calls of an LLM; each started once."""
        pairs = self.get_event_pairs(CBEventType.LLM)
        assert all(len(pair) == 2 for pair in pairs), "a call was not told to start and end once"
        return [{EventPayload(key).value for key in (pair[1].payload or {})} for pair in pairs]
