"""Stored states from disk, layer by layer, a few layers ahead of whoever consumes them.

Several threads read, each chunk's bytes straight to where they are decoded together with the other chunks'.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ragcache.restore.transfer import transfer_to
from ragcache.restore.workspace import Workspace
from ragcache.states.arrangement import Arrangement
from ragcache.states.encoded import Encoded
from ragcache.states.form import LayerFormat, StateFormat
from ragcache.states.miss import UnusableStatesError
from ragcache.states.reading import ShardFile
from ragcache.states.records import StoredStates

READ_AHEAD = 3
"""Layers in flight. Their buffers are reused, so they stay in the processor's cache between disk and decode."""

START_SECONDS = 60
"""For all threads to start."""

SLOTS = READ_AHEAD + 1
"""Buffers: those being read into, and the one being decoded."""


@dataclass(frozen=True)
class ReadRequest:
    """States of one chunk.

    Attributes:
        states: where they lie.
        token_ids: what they must be states of.
    """

    states: StoredStates
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class LayerStates:
    """One layer of those chunks that it needs, encoded.

    Attributes:
        chunks: indexes of the chunks.
        starts: row of the first token of each.
        parts: their states, one for each part of the layer's form.
    """

    chunks: Sequence[int]
    starts: Sequence[int]
    parts: Sequence[Encoded]


class ReaderPool:
    """Threads that read, shared by all requests.

    Attributes:
        threads: how many.
        executor: what runs them.
    """

    def __init__(self, threads: int) -> None:
        """Start all threads now: where memory is short, starting one later may fail, or never return."""
        self.threads = threads
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="ragcache-read")
        everyone = threading.Barrier(threads)
        for future in [self.executor.submit(everyone.wait, START_SECONDS) for _ in range(threads)]:
            future.result()


class StateReader:
    """Reads the states of several chunks of one format. A context manager: it holds files open.

    A fault concerns one chunk only: it is recorded in `faults` under the chunk's index, what is given for the chunk is
    of no use from then on, and the other chunks go on.

    Attributes:
        faults: chunks that cannot be used, so far.
        asked_bytes: what has been asked of the disks so far, token ids aside.
    """

    def __init__(
        self,
        requests: Sequence[ReadRequest],
        format: StateFormat,
        needed: Callable[[int], Sequence[int]],
        pool: ReaderPool,
        device: torch.device,
        *,
        verify: bool,
    ) -> None:
        """Set up.

        Args:
            requests: what to read.
            format: of all of them.
            needed: indexes of the chunks that a layer needs.
            pool: threads that read.
            device: where states are decoded.
            verify: compare checksums.
        """
        self.faults: dict[int, UnusableStatesError] = {}
        self.asked_bytes = 0
        self._requests = requests
        self._format = format
        self._needed = needed
        self._pool = pool
        self._device = device
        self._verify = verify
        self._files: dict[Path, ShardFile] = {}
        self._arrangements: dict[tuple[LayerFormat, tuple[int, ...]], Arrangement] = {}
        self._known_pieces: dict[tuple[Arrangement, int], list[list[memoryview]]] = {}
        self._submitted = 0
        self._taken = 0
        self._in_flight: deque[list[Future[None]]] = deque()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Open the shards and compare token ids, before anything else is read."""
        for chunk in range(len(self._requests)):
            self._guard(chunk, self._open, chunk)

    def start(self, workspace: Workspace, name: str) -> None:
        """Begin to read the first layers.

        Args:
            workspace: of the request; its buffers are read into.
            name: which of the request's readers this is.
        """
        sizes = [self._arrangement(layer).size for layer in self._format.stored_layers]
        self._transfer = transfer_to(self._device, SLOTS, max(sizes, default=0), workspace, name)
        for _ in range(READ_AHEAD):
            self._submit()

    def take(self) -> LayerStates:
        """The next stored layer, valid until the one after it is taken."""
        if self._taken:
            self._transfer.done((self._taken - 1) % SLOTS)
        self._submit()
        for future in self._in_flight[0]:
            future.result()
        self._in_flight.popleft()
        arrangement = self._arrangement(self._format.stored_layers[self._taken])
        buffer = self._transfer.device(self._taken % SLOTS)
        chunks = self._needed(self._format.stored_layers[self._taken])
        self._taken += 1
        return LayerStates(chunks, arrangement.starts, arrangement.encoded(buffer))

    def close(self) -> None:
        """Stop reading and close the files; not before the last thread is done with them."""
        for future in [future for futures in self._in_flight for future in futures]:
            if not future.cancel():
                future.exception()
        self._in_flight.clear()
        while self._files:
            self._files.popitem()[1].close()

    def _arrangement(self, layer: int) -> Arrangement:
        """Layers that are stored alike and need the same chunks share one."""
        key = self._format.layers[layer], tuple(self._needed(layer))
        if key not in self._arrangements:
            lengths = [len(self._requests[chunk].token_ids) for chunk in key[1]]
            self._arrangements[key] = self._format.arrange(layer, lengths)
        return self._arrangements[key]

    def _submit(self) -> None:
        """Have the next layer read, for every chunk that has had no fault."""
        if self._submitted == len(self._format.stored_layers):
            return
        layer = self._format.stored_layers[self._submitted]
        arrangement, chunks = self._arrangement(layer), self._needed(layer)
        pieces = self._pieces(arrangement, self._submitted % SLOTS)
        self._submitted += 1
        self.asked_bytes += sum(self._requests[chunk].states.ranges[self._submitted].length for chunk in chunks)
        # One task for each thread rather than for each chunk: handing a task over takes as long as reading 100 KB.
        turns = [range(thread, len(chunks), self._pool.threads) for thread in range(self._pool.threads)]
        # Each is known to `close` before the next one is submitted, which may fail.
        futures: list[Future[None]] = []
        self._in_flight.append(futures)
        for turn in turns:
            if turn:
                futures.append(self._pool.executor.submit(self._read, self._submitted, chunks, turn, pieces))

    def _pieces(self, arrangement: Arrangement, slot: int) -> list[list[memoryview]]:
        """Where each chunk's bytes go in a slot, made once for all layers that lie there alike."""
        buffer = self._transfer.host(slot)
        key = arrangement, slot
        if key not in self._known_pieces:
            whole = buffer.numpy().data
            self._known_pieces[key] = [[whole[place] for place in places] for places in arrangement.places]
        return self._known_pieces[key]

    def _read(
        self, column: int, chunks: Sequence[int], turn: Sequence[int], pieces: Sequence[Sequence[memoryview]]
    ) -> None:
        """Read a column of every n-th of some chunks, except for those that have had a fault."""
        for index in turn:
            if chunks[index] not in self.faults:
                self._guard(chunks[index], self._read_chunk, chunks[index], column, pieces[index])

    def _guard(self, chunk: int, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except UnusableStatesError as fault:
            self.faults.setdefault(chunk, fault)

    def _open(self, chunk: int) -> None:
        """Open the chunk's shard and check that it holds states of the right tokens."""
        request = self._requests[chunk]
        shard = request.states.shard
        if shard not in self._files:
            self._files[shard] = ShardFile(shard, verify=self._verify)
        self._files[shard].check_token_ids(request.states, request.token_ids)

    def _read_chunk(self, chunk: int, column: int, targets: Sequence[memoryview]) -> None:
        states = self._requests[chunk].states
        self._files[states.shard].read(states, column, *targets)
