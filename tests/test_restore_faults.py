"""Faults in every stage of restoring: a request fails alone or falls back, and leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import RagCache
from ragcache.errors import NotEnoughMemoryError
from ragcache.generate.pool import CachePool
from ragcache.restore.reader import StateReader
from ragcache.restore.workspace import Workspace
from ragcache.states.miss import MissReason
from ragcache.states.reading import ShardFile
from tests.conftest import make_document

RUNS = 200
MEMORY_SLACK = 200_000
"""Bytes."""

QUESTION = "Who kept the light of the harbour?"

Stage = Callable[[RagCache, pytest.MonkeyPatch, random.Random], None]
"""Lets one thing go wrong in the next request."""


class Cancelled(BaseException):
    """What an interrupted request unwinds with."""


@pytest.fixture
def cache(open_tiny: Callable[..., RagCache]) -> RagCache:
    cache = open_tiny(shard_megabytes=1, chunk_tokens=200)
    cache.index([make_document(number, sentences=12) for number in range(4)])
    return cache


def nth_call(owner: Any, name: str, patch: pytest.MonkeyPatch, count: int, effect: Callable[[], None]) -> None:
    """Have something happen just before one call of a method, counted from 0."""
    original, calls, lock = getattr(owner, name), iter(range(1 << 30)), threading.Lock()

    def wrapped(*arguments: Any, **options: Any) -> Any:
        with lock:
            call = next(calls)
        if call == count:
            effect()
        return original(*arguments, **options)

    patch.setattr(owner, name, wrapped)


def raising(error: BaseException) -> Callable[[], None]:
    def effect() -> None:
        raise error

    return effect


def reader_error(cache: RagCache, patch: pytest.MonkeyPatch, chance: random.Random) -> None:
    fault = OSError(errno.EIO, os.strerror(errno.EIO))
    nth_call(ShardFile, "_fill", patch, chance.randrange(12), raising(fault))


def slow_disk(cache: RagCache, patch: pytest.MonkeyPatch, chance: random.Random) -> None:
    nth_call(ShardFile, "_fill", patch, chance.randrange(12), lambda: time.sleep(0.02))


def cancelled(cache: RagCache, patch: pytest.MonkeyPatch, chance: random.Random) -> None:
    nth_call(StateReader, "take", patch, chance.randrange(len(cache.engine.format.stored_layers)), raising(Cancelled()))


def out_of_memory(cache: RagCache, patch: pytest.MonkeyPatch, chance: random.Random) -> None:
    fault = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    owner, name, count = chance.choice([(CachePool, "take", 0), (Workspace, "take", chance.randrange(8))])
    nth_call(owner, name, patch, count, raising(chance.choice([fault, torch.OutOfMemoryError("CUDA out of memory")])))


STAGES: dict[Stage, type[BaseException] | None] = {
    reader_error: None,
    slow_disk: None,
    cancelled: Cancelled,
    out_of_memory: NotEnoughMemoryError,
}
"""Each with what the request fails with, if it does."""


def held() -> tuple[int, int, int]:
    """Open files, threads, and bytes of tensors."""
    gc.collect()
    tensors = (it for it in gc.get_objects() if type(it) in (torch.Tensor, torch.nn.Parameter))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), sum(storages.values())


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    files, threads, tensors = held()
    yield
    # Buffers that are kept may have grown once, by little; what each run leaves would be 200 times that.
    assert held()[:2] == (files, threads)
    assert held()[2] - tensors < MEMORY_SLACK


def ask(cache: RagCache) -> Any:
    return cache.query(QUESTION, top_k=4, max_tokens=4)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_faults_leave_nothing_behind(cache: RagCache, stage: Stage) -> None:
    chance = random.Random(stage.__name__)
    expected = ask(cache)
    assert expected.tokens.restored
    ask(cache)
    fell_back = 0
    with nothing_left_behind():
        for _ in range(RUNS):
            with pytest.MonkeyPatch.context() as patch:
                stage(cache, patch, chance)
                if (error := STAGES[stage]) is not None:
                    with pytest.raises(error):
                        ask(cache)
                    continue
                answer = ask(cache)
            assert answer.answer == expected.answer
            assert {miss.reason for miss in answer.misses} <= {MissReason.IO}
            assert len(answer.misses) == (stage is reader_error)
            fell_back += len(answer.misses)
    assert fell_back == (RUNS if stage is reader_error else 0)
    after = ask(cache)
    assert after.answer == expected.answer
    assert not after.misses


def test_a_request_that_fails_does_not_disturb_another(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one thread are cancelled in some layer, those of another go on at the same time."""
    expected, answers = ask(cache), []
    take, doomed, stop = StateReader.take, threading.local(), threading.Event()

    def take_or_fail(reader: StateReader) -> Any:
        if getattr(doomed, "layers", None) is not None:
            if doomed.layers == 0:
                raise Cancelled
            doomed.layers -= 1
        return take(reader)

    monkeypatch.setattr(StateReader, "take", take_or_fail)

    def go_on() -> None:
        while not stop.is_set():
            answers.append(ask(cache))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for count in range(30):
            doomed.layers = count % len(cache.engine.format.stored_layers)
            with pytest.raises(Cancelled):
                ask(cache)
    finally:
        stop.set()
        thread.join()
    assert answers
    assert all(answer.answer == expected.answer and not answer.misses for answer in answers)


def test_no_thread_reads_on_when_a_request_fails(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task was submitted, the next one could not be: the first is waited for before its memory is given away."""
    expected = ask(cache)
    executor, read = cache.engine._restorer._pool.executor, StateReader._read
    submit, started, running = executor.submit, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        running.set()
        started.set()
        time.sleep(0.2)
        read(*arguments)
        running.clear()

    def submit_one(*arguments: Any) -> Any:
        if started.is_set():
            raise RuntimeError("can't start new thread")
        future = submit(*arguments)
        assert started.wait(30)
        return future

    with monkeypatch.context() as patch:
        patch.setattr(StateReader, "_read", slow)
        patch.setattr(executor, "submit", submit_one)
        with pytest.raises(NotEnoughMemoryError):
            ask(cache)
        assert started.is_set()
        assert not running.is_set()
    assert ask(cache).answer == expected.answer
