"""The buffers that states are read into, and their way to the device that decodes them.

On a CPU states are decoded where they were read. On CUDA each buffer is pinned and has a twin on the device: the copy
runs on a stream of its own, next to the projection of the layer before, and events order the two. Nothing waits for
the whole device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ragcache.restore.workspace import Workspace


class Transfer(Protocol):
    """A ring of buffers; slot i is used for every layer whose turn is i modulo the number of slots."""

    def host(self, slot: int) -> Tensor:
        """Memory to read into, uint8. Blocks until what was read into it before is no longer needed."""

    def device(self, slot: int) -> Tensor:
        """The same bytes where they are decoded, for work that is queued from now on."""

    def done(self, slot: int) -> None:
        """The work that needs the bytes is queued."""


class HostTransfer:
    """For a CPU: there is nothing to transfer."""

    def __init__(self, slots: int, size: int, workspace: Workspace, owner: str) -> None:
        cpu = torch.device("cpu")
        self._buffers = [workspace.take(f"{owner}, slot {slot}", (size,), torch.uint8, cpu) for slot in range(slots)]

    def host(self, slot: int) -> Tensor:
        """Memory to read into."""
        return self._buffers[slot]

    def device(self, slot: int) -> Tensor:
        """The same memory."""
        return self._buffers[slot]

    def done(self, slot: int) -> None:
        """Work on a CPU is over when it returns."""


class CudaTransfer:
    """For CUDA: pinned memory, a copy stream, and an event for each end of each slot."""

    def __init__(self, slots: int, size: int, device: torch.device) -> None:
        self._pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(slots)]
        self._resident = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._copied = [torch.cuda.Event() for _ in range(slots)]
        self._decoded = [torch.cuda.Event() for _ in range(slots)]
        self._compute = torch.cuda.current_stream(device)
        self._copy = torch.cuda.Stream(device)
        # The memory may have been handed back by work that is still running.
        self._copy.wait_stream(self._compute)
        for buffer in self._resident:
            buffer.record_stream(self._copy)

    def host(self, slot: int) -> Tensor:
        """Pinned memory, once the copy from it is over."""
        self._copied[slot].synchronize()
        return self._pinned[slot]

    def device(self, slot: int) -> Tensor:
        """Queue the copy, behind the decoding of what the slot held before and ahead of that of what it holds now."""
        self._copy.wait_event(self._decoded[slot])
        with torch.cuda.stream(self._copy):
            self._resident[slot].copy_(self._pinned[slot], non_blocking=True)
            self._copied[slot].record(self._copy)
        self._compute.wait_event(self._copied[slot])
        return self._resident[slot]

    def done(self, slot: int) -> None:
        """The decoding is queued."""
        self._decoded[slot].record(self._compute)


def transfer_to(device: torch.device, slots: int, size: int, workspace: Workspace, owner: str) -> Transfer:
    """Buffers for states that are decoded on a device.

    Args:
        device: where they are decoded.
        slots: number of buffers.
        size: bytes of each.
        workspace: of the request.
        owner: whose buffers they are; nobody else in the request may have that name.
    """
    # PyTorch keeps pinned and device memory of its own accord.
    return CudaTransfer(slots, size, device) if device.type == "cuda" else HostTransfer(slots, size, workspace, owner)
