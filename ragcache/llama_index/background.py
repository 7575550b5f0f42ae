"""Work on threads for an event loop: items come to the loop as they are made, and dropping them ends the work."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

EXIT_SECONDS = 2.0
"""How long the interpreter waits at its end for generations that it has cancelled.

A thread that comes back from torch when the interpreter is gone may take the process down with a signal. A decode step
is over long before; a long prefill is not waited for.
"""


@dataclass(frozen=True)
class _End:
    """The last message of a job."""

    error: BaseException | None = None


class _Job(Generic[T]):
    """Work that was asked for.

    It knows nothing of the stream that it works for: nobody but its reader must keep that alive.
    """

    def __init__(self, make: Callable[[], Generator[T | None, None, None]]) -> None:
        self.messages: asyncio.Queue[T | _End] = asyncio.Queue()
        # Set from any thread, the garbage collector's among them, so there is no lock.
        self.cancelled = False
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()

    def run(self) -> None:
        """Make the items, in a worker."""
        end = _End()
        try:
            if not self.cancelled:
                self._context.run(self._work)
        except BaseException as error:  # noqa: BLE001 - whoever awaits the items raises it
            end = _End(error)
        self._send(end)

    def _work(self) -> None:
        with closing(self._make()) as items:
            for item in items:
                if self.cancelled:
                    return
                if item is not None:
                    self._send(item)

    def _send(self, message: T | _End) -> None:
        try:
            self._loop.call_soon_threadsafe(self.messages.put_nowait, message)
        except RuntimeError:
            # The loop was closed: nobody will read.
            self.cancelled = True


class Workers:
    """A few threads that share the jobs of all event loops; a thread ends when there is nothing left to do."""

    def __init__(self, most: int) -> None:
        """Start no thread yet.

        Args:
            most: threads that work at once.
        """
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[_Job[Any]] = deque()
        self._at_work: dict[threading.Thread, _Job[Any] | None] = {}

    @property
    def busy(self) -> int:
        """Threads that work."""
        return len(self._at_work)

    def submit(self, job: _Job[Any]) -> None:
        """Have a job done, after those that came before it."""
        with self._lock:
            self._waiting.append(job)
            if len(self._at_work) < self._most:
                thread = threading.Thread(target=self._run, name="ragcache-generation", daemon=True)
                self._at_work[thread] = None
                thread.start()

    def close(self, seconds: float) -> None:
        """Cancel all jobs, and wait for the threads, but no longer than this."""
        deadline = time.monotonic() + seconds
        with self._lock:
            for job in (*self._waiting, *self._at_work.values()):
                if job is not None:
                    job.cancelled = True
            threads = list(self._at_work)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._lock:
                if not self._waiting:
                    del self._at_work[thread]
                    return
                self._at_work[thread] = job = self._waiting.popleft()
            job.run()


# Two, by measurement (SmolLM2 in fp32, 8 questions at once, 2 cores): one took 13 s for them and two 9 s, since a
# decode step does not keep two cores busy; four were no quicker. With two the loop was never held up for more than
# 25 ms, but each further thread is one more that it may have to wait for to get the interpreter.
WORKERS = Workers(2)
atexit.register(WORKERS.close, EXIT_SECONDS)


class BackgroundStream(AsyncGenerator[T, None]):
    """Items made by a worker, which runs ahead of whoever reads them.

    Closing or dropping the stream ends the work before its next item, and so does cancelling a task that waits for
    one. Work that has not begun by then never begins.
    """

    def __init__(self, make: Callable[[], Generator[T | None, None, None]], workers: Workers = WORKERS) -> None:
        """Ask for the work; to be called in the loop that will read.

        Args:
            make: called in a worker. What it yields are the items; `None` is none, but a place to end at.
            workers: who does it.
        """
        self._job = _Job(make)
        self._first: T | None = None
        self._ended = False
        workers.submit(self._job)

    async def ready(self) -> None:
        """Wait for the first item.

        Raises:
            BaseException: what the work raised before it.
        """
        if self._first is None:
            with suppress(StopAsyncIteration):
                self._first = await self.__anext__()

    async def asend(self, value: None) -> T:
        """The next item, or what the work raised instead."""
        if self._first is not None:
            item, self._first = self._first, None
            return item
        if self._ended:
            # `GeneratorExit` tells one that iterates over a closed stream from the end of the work.
            raise GeneratorExit if self._job.cancelled else StopAsyncIteration
        try:
            message = await self._job.messages.get()
        except BaseException:
            self.cancel()
            raise
        if not isinstance(message, _End):
            return message
        self._ended = True
        if message.error is not None:
            raise message.error
        raise StopAsyncIteration

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> T:
        """End the work, and raise."""
        self.cancel()
        raise typ

    async def aclose(self) -> None:
        """End the work."""
        self.cancel()

    def cancel(self) -> None:
        """End the work, from any thread."""
        self._job.cancelled = self._job.cancelled or not self._ended
        self._first, self._ended = None, True

    def __del__(self) -> None:
        self.cancel()


async def in_background(work: Callable[[], Generator[T | None, None, None]]) -> T:
    """What a worker makes, as its one item; see `BackgroundStream`."""
    return await anext(BackgroundStream(work))
