"""Scratch memory that restoring works in, kept from one layer and one request to the next.

Memory that is allocated for each layer costs more than what is done in it: every 4 KiB of it that is touched for the
first time is a page fault. Figures: docs/decisions.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

KEPT = 2
"""Workspaces kept for later requests."""


class Workspace:
    """Named buffers that grow to the largest size asked of them; for one request at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor with undefined content; it shares memory with the last one of that name."""
        size = prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            # Let go of the old one first, so that there are never both.
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[:size].view(dtype).view(shape)


class WorkspacePool:
    """Lends workspaces to requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Workspace] = []

    @contextmanager
    def lend(self) -> Iterator[Workspace]:
        """A workspace that nobody else uses until the block ends.

        After an error it is not kept: should a thread still write into it, nobody reads that.
        """
        with self._lock:
            workspace = self._idle.pop() if self._idle else Workspace()
        yield workspace
        with self._lock:
            if len(self._idle) < KEPT:
                self._idle.append(workspace)
