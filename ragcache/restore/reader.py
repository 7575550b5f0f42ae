"""Stored states from disk, layer by layer, a few layers ahead of whoever consumes them.

Several threads read, straight into the place where the layer is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ragcache.states.form import StateFormat
from ragcache.states.miss import UnusableStatesError
from ragcache.states.reading import ShardFile
from ragcache.states.records import StoredStates

READ_AHEAD = 3
"""Layers in flight. Their buffers are reused, so they stay in the processor's cache between disk and decode."""


@dataclass(frozen=True)
class ReadRequest:
    """States of one chunk.

    Attributes:
        states: where they lie.
        token_ids: what they must be states of.
    """

    states: StoredStates
    token_ids: tuple[int, ...]


class StateReader:
    """Reads the states of several chunks of one format. A context manager: it holds files open.

    A fault concerns one chunk only: it is recorded in `faults` under the chunk's index, what is given for the chunk is
    of no use from then on, and the other chunks go on.
    """

    def __init__(
        self, requests: Sequence[ReadRequest], format: StateFormat, pool: ThreadPoolExecutor, *, verify: bool
    ) -> None:
        """Set up.

        Args:
            requests: what to read.
            format: of all of them.
            pool: threads that read.
            verify: compare checksums.
        """
        self.faults: dict[int, UnusableStatesError] = {}
        self._requests = requests
        self._format = format
        self._pool = pool
        self._verify = verify
        self._files: dict[Path, ShardFile] = {}

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def layers(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Each stored layer's index and its bytes for each chunk, runs of uint8.

        They are valid until the next layer is asked for. Token ids are compared before anything else is read.
        """
        for index, request in enumerate(self._requests):
            self._guard(index, self._open, request)
        stored = self._format.stored_layers
        sizes = [[self._format.size(layer, len(it.token_ids)) for it in self._requests] for layer in stored]
        largest = max((sum(it) for it in sizes), default=0)
        ring = [torch.empty(largest, dtype=torch.uint8) for _ in range(min(READ_AHEAD + 1, len(stored)))]

        def runs(position: int) -> list[Tensor]:
            buffer = ring[position % len(ring)]
            return list(buffer[: sum(sizes[position])].split(sizes[position]))

        in_flight: list[list[Future[None]]] = []
        try:
            for position in range(len(stored) + READ_AHEAD):
                if position < len(stored):
                    in_flight.append(self._submit(position, runs(position)))
                if position >= READ_AHEAD:
                    done = position - READ_AHEAD
                    for future in in_flight[done]:
                        future.result()
                    yield stored[done], runs(done)
        finally:
            # The buffers and files must not go while a thread still reads into them.
            for future in (future for futures in in_flight for future in futures):
                if not future.cancel():
                    future.exception()

    def _submit(self, position: int, runs: list[Tensor]) -> list[Future[None]]:
        """Read one stored layer of every chunk that has had no fault."""
        return [
            self._pool.submit(self._guard, index, self._read, request, position + 1, run)
            for index, (request, run) in enumerate(zip(self._requests, runs, strict=True))
            if index not in self.faults
        ]

    def _guard(self, index: int, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except UnusableStatesError as fault:
            self.faults.setdefault(index, fault)

    def _open(self, request: ReadRequest) -> None:
        """Open the chunk's shard and check that it holds states of the right tokens."""
        shard = request.states.shard
        if shard not in self._files:
            self._files[shard] = ShardFile(shard, verify=self._verify)
        self._files[shard].check_token_ids(request.states, request.token_ids)

    def _read(self, request: ReadRequest, column: int, target: Tensor) -> None:
        self._files[request.states.shard].read(request.states, column, target.numpy())
