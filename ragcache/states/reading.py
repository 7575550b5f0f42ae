"""Checked reads of exact byte ranges of shard files.

No memory mapping: a truncated file is then a short read, which is a miss, and not a signal that kills the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ragcache.states.form import StateFormat
from ragcache.states.miss import MissReason, UnusableStatesError
from ragcache.states.records import ByteRange, StoredStates, pack_token_ids

Bytes = NDArray[np.uint8]


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
        found = np.empty(len(expected), dtype=np.uint8)
        self.read(states, 0, found)
        if found.tobytes() != expected:
            raise UnusableStatesError(MissReason.TOKEN_IDS, "the states are those of other tokens")

    def read(self, states: StoredStates, column: int, target: Bytes) -> None:
        """Fill `target` from a byte range of some states and check what came."""
        wanted = states.ranges[column]
        if wanted.length != target.nbytes:
            raise UnusableStatesError(
                MissReason.CODEC, f"{_column(column)} has {wanted.length} bytes, not {target.nbytes}"
            )
        with _as_unusable():
            done = self._fill(wanted, target)
        if done != wanted.length:
            raise UnusableStatesError(
                MissReason.TRUNCATED, f"{self.path.name} ends before {_column(column)} of the chunk"
            )
        if self._verify and xxhash.xxh3_64_intdigest(target.data) != wanted.checksum:
            raise UnusableStatesError(
                MissReason.CHECKSUM, f"{self.path.name} is damaged in {_column(column)} of the chunk"
            )

    def _fill(self, wanted: ByteRange, target: Bytes) -> int:
        """Read until `target` is full or the file ends; the number of bytes read."""
        view, done = target.data, 0
        while done < wanted.length:
            count = os.preadv(self._descriptor, [view[done:]], wanted.offset + done)
            if count == 0:
                break
            done += count
        return done


def _column(column: int) -> str:
    """What a byte range holds, by its index."""
    return "the token ids" if column == 0 else f"stored layer {column}"


def read_states(states: StoredStates, token_ids: tuple[int, ...]) -> dict[int, Tensor]:
    """All stored layers of a chunk, encoded, each a run of uint8.

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
        layers = {}
        for column, layer in enumerate(format.stored_layers, start=1):
            layers[layer] = torch.empty(format.size(layer, len(token_ids)), dtype=torch.uint8)
            file.read(states, column, layers[layer].numpy())
        return layers
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
