"""Stored states from disk, layer by layer, a few layers ahead of whoever consumes them.

Positioned reads of exact byte ranges from several threads, straight into the place where the layer is decoded. No
memory mapping: a truncated file is then a short read, which is a miss, and not a signal that kills the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ragcache.states.catalog import pack_token_ids
from ragcache.states.form import StateFormat
from ragcache.states.miss import MissReason
from ragcache.states.records import ByteRange, StoredStates

READ_AHEAD = 3
"""Layers in flight. Their buffers are reused, so they stay in the processor's cache between disk and decode."""


class UnusableStatesError(Exception):
    """Stored states that must not be used; always caught within this room and turned into a miss."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


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

    A fault concerns one chunk only: it is recorded in `faults` under the chunk's index, the chunk's rows hold nothing
    of use from then on, and the other chunks go on.
    """

    def __init__(self, requests: Sequence[ReadRequest], format: StateFormat, pool: ThreadPoolExecutor) -> None:
        self.faults: dict[int, UnusableStatesError] = {}
        self._requests = requests
        self._format = format
        self._pool = pool
        self._files: dict[Path, int] = {}

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def layers(self) -> Iterator[tuple[int, Tensor]]:
        """Each stored layer's index and rows, `[tokens of all chunks, row_bytes]` uint8.

        The rows are valid until the next layer is asked for. Token ids are compared before anything else is read.
        """
        for index, request in enumerate(self._requests):
            self._guard(index, self._open, request)
        tokens = sum(len(request.token_ids) for request in self._requests)
        stored = self._format.stored_layers
        widest = max((self._format.row_bytes(layer) for layer in stored), default=0)
        ring = [torch.empty(tokens * widest, dtype=torch.uint8) for _ in range(min(READ_AHEAD + 1, len(stored)))]

        def rows(position: int) -> Tensor:
            row_bytes = self._format.row_bytes(stored[position])
            return ring[position % len(ring)][: tokens * row_bytes].view(tokens, row_bytes)

        in_flight: list[list[Future[None]]] = []
        try:
            for position in range(len(stored) + READ_AHEAD):
                if position < len(stored):
                    in_flight.append(self._submit(position, rows(position)))
                if position >= READ_AHEAD:
                    done = position - READ_AHEAD
                    for future in in_flight[done]:
                        future.result()
                    yield stored[done], rows(done)
        finally:
            # The buffers and files must not go while a thread still reads into them.
            for future in (future for futures in in_flight for future in futures):
                if not future.cancel():
                    future.exception()

    def _submit(self, position: int, rows: Tensor) -> list[Future[None]]:
        """Read one stored layer of every chunk that has had no fault."""
        futures, start = [], 0
        for index, request in enumerate(self._requests):
            end = start + len(request.token_ids)
            if index not in self.faults:
                target = rows[start:end].view(-1).numpy()
                futures.append(self._pool.submit(self._guard, index, self._read, request, position + 1, target))
            start = end
        return futures

    def _guard(self, index: int, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except UnusableStatesError as fault:
            self.faults.setdefault(index, fault)
        except FileNotFoundError as error:
            self.faults.setdefault(index, UnusableStatesError(MissReason.MISSING, f"{error.filename} is gone"))
        except OSError as error:
            self.faults.setdefault(index, UnusableStatesError(MissReason.IO, f"reading failed: {error}"))

    def _open(self, request: ReadRequest) -> None:
        """Open the chunk's shard and check that it holds states of the right tokens."""
        shard = request.states.shard
        if shard not in self._files:
            self._files[shard] = os.open(shard, os.O_RDONLY)
        expected = pack_token_ids(request.token_ids)
        if request.states.ranges[0].length != len(expected):
            raise UnusableStatesError(MissReason.TOKEN_IDS, "the states are those of another number of tokens")
        found = np.empty(len(expected), dtype=np.uint8)
        self._read(request, 0, found)
        if found.tobytes() != expected:
            raise UnusableStatesError(MissReason.TOKEN_IDS, "the states are those of other tokens")

    def _read(self, request: ReadRequest, column: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` from a byte range of the chunk and check what came."""
        shard, wanted = request.states.shard, request.states.ranges[column]
        if wanted.length != target.nbytes:
            raise UnusableStatesError(
                MissReason.CODEC, f"column {column} has {wanted.length} bytes, not {target.nbytes}"
            )
        if _read_range(self._files[shard], wanted, target) != wanted.length:
            raise UnusableStatesError(
                MissReason.TRUNCATED, f"{shard.name} ends before column {column} of the chunk does"
            )
        if xxhash.xxh3_64_intdigest(target.data) != wanted.checksum:
            raise UnusableStatesError(MissReason.CHECKSUM, f"{shard.name} is damaged in column {column} of the chunk")


def _read_range(descriptor: int, wanted: ByteRange, target: NDArray[np.uint8]) -> int:
    """Read until `target` is full or the file ends; the number of bytes read."""
    view, done = target.data, 0
    while done < wanted.length:
        count = os.preadv(descriptor, [view[done:]], wanted.offset + done)
        if count == 0:
            break
        done += count
    return done
