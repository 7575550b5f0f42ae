"""Checked reads of exact byte ranges of shard files.

No memory mapping: a truncated file is then a short read, which is a miss, and not a signal that kills the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ragcache.states.form import StateFormat
from ragcache.states.key import context_digest
from ragcache.states.miss import MissReason, UnusableStatesError
from ragcache.states.records import ByteRange, StoredStates, pack_token_ids, unpack_token_ids


class ShardFile:
    """A shard open for positioned reads, from any number of threads.

    Every method raises `UnusableStatesError` for whatever is wrong with the file.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        """Open the file.

        Args:
            path: of the shard.
            verify: compare checksums.
        """
        self.path = path
        self._verify = verify
        with _as_unusable():
            # Not blocking: a named pipe in its place would otherwise make whoever reads it wait.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        """No reads after this."""
        os.close(self._descriptor)

    def check_token_ids(self, states: StoredStates, token_ids: tuple[int, ...]) -> None:
        """Make sure that states are those of some token ids."""
        expected = pack_token_ids(token_ids)
        if states.ranges[0].length != len(expected):
            raise UnusableStatesError(MissReason.TOKEN_IDS, "the states are those of another number of tokens")
        found = bytearray(len(expected))
        self.read(states, 0, memoryview(found))
        if found != expected:
            raise UnusableStatesError(MissReason.TOKEN_IDS, "the states are those of other tokens")

    def context_ids(self, states: StoredStates) -> tuple[int, ...]:
        """Token ids that a chunk was encoded after, the prefix aside."""
        length = states.context_ids.length
        if length % 4 or length > os.fstat(self._descriptor).st_size:
            raise UnusableStatesError(MissReason.TRUNCATED, f"{self.path.name} holds no context of {length} bytes")
        found = bytearray(length)
        self._read(states.context_ids, "the token ids of the context", [memoryview(found)])
        return unpack_token_ids(bytes(found))

    def read(self, states: StoredStates, column: int, *targets: memoryview) -> None:
        """Fill targets, one after the other, from a byte range of some states and check what came."""
        self._read(states.ranges[column], _column(column), targets)

    def _read(self, wanted: ByteRange, what: str, targets: Sequence[memoryview]) -> None:
        size = sum(target.nbytes for target in targets)
        if wanted.length != size:
            raise UnusableStatesError(MissReason.CODEC, f"{what} has {wanted.length} bytes, not {size}")
        with _as_unusable():
            done = self._fill(wanted.offset, targets)
        if done != wanted.length:
            raise UnusableStatesError(MissReason.TRUNCATED, f"{self.path.name} ends before {what} of the chunk")
        if self._verify and _checksum(targets) != wanted.checksum:
            raise UnusableStatesError(MissReason.CHECKSUM, f"{self.path.name} is damaged in {what} of the chunk")

    def _fill(self, offset: int, targets: Sequence[memoryview]) -> int:
        """Read until the targets are full or the file ends; the number of bytes read."""
        views, done = [target for target in targets if target.nbytes], 0
        while views:
            count = os.preadv(self._descriptor, views, offset + done)
            if count == 0:
                break
            done += count
            while views and count >= views[0].nbytes:
                count -= views.pop(0).nbytes
            if views:
                views[0] = views[0][count:]
        return done


def _checksum(targets: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for target in targets:
        digest.update(target)
    return digest.intdigest()


def _column(column: int) -> str:
    """What a byte range holds, by its index."""
    return "the token ids" if column == 0 else f"stored layer {column}"


@dataclass(frozen=True)
class ReadStates:
    """What a shard holds of a chunk.

    Attributes:
        context_ids: token ids that it was encoded after, the prefix aside.
        layers: all stored ones, encoded, each a run of uint8.
    """

    context_ids: tuple[int, ...]
    layers: dict[int, Tensor]


def read_states(states: StoredStates, context: str, token_ids: tuple[int, ...]) -> ReadStates:
    """Read and check all that is stored of a chunk.

    Args:
        states: where it lies.
        context: digest of the token ids that the chunk was encoded after.
        token_ids: the chunk's own.

    Raises:
        UnusableStatesError: they must not be used; the reason says why.
    """
    try:
        format = StateFormat.from_json(states.format)
    except ValueError as error:
        raise UnusableStatesError(MissReason.CODEC, str(error)) from error
    if len(states.ranges) != 1 + len(format.stored_layers):
        raise UnusableStatesError(MissReason.CODEC, "the catalog names another number of layers than the format")
    file = ShardFile(states.shard)
    try:
        file.check_token_ids(states, token_ids)
        context_ids = file.context_ids(states)
        if context_digest(context_ids) != context:
            raise UnusableStatesError(MissReason.TOKEN_IDS, "the states are those after other tokens")
        layers = {}
        for column, layer in enumerate(format.stored_layers, start=1):
            layers[layer] = torch.empty(format.size(layer, len(token_ids)), dtype=torch.uint8)
            file.read(states, column, layers[layer].numpy().data)
        return ReadStates(context_ids, layers)
    finally:
        file.close()


@contextmanager
def _as_unusable() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableStatesError(MissReason.MISSING, f"{error.filename} is gone") from error
    except (OSError, OverflowError) as error:
        # An overflow is an offset beyond what any file has: a damaged catalog entry.
        raise UnusableStatesError(MissReason.IO, f"reading failed: {error}") from error
