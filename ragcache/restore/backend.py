"""Which implementation restores on a device; the one place that decides it."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from ragcache.model.attention import KeyNorm, Tables
from ragcache.restore.rope import RopeShape
from ragcache.restore.twins import Twins
from ragcache.restore.workspace import Workspace
from ragcache.states.encoded import Encoded, Moves


class Implementation(Protocol):
    """What restores; `ragcache.restore.twins` tells what the functions do."""

    def restore_pre_rope_kv(
        self,
        keys: Encoded,
        values: Encoded,
        rope: RopeShape | None,
        tables: Tables | None,
        moves: Moves,
        out_keys: Tensor,
        out_values: Tensor,
    ) -> None:
        """Write keys and values that are stored before RoPE to their slots."""

    def restore_hidden(
        self,
        hidden: Encoded,
        weight: Tensor,
        bias: Tensor | None,
        key_norm: KeyNorm | None,
        rope: RopeShape | None,
        tables: Tables | None,
        moves: Moves,
        out_keys: Tensor,
        out_values: Tensor,
    ) -> None:
        """Project hidden states to keys and values, and write them to their slots."""


def implementation(device: torch.device, workspace: Workspace) -> Implementation:
    """The Triton kernels on CUDA, plain torch elsewhere.

    Args:
        device: where states are decoded.
        workspace: memory that plain torch works in; kernels need none.
    """
    if device.type != "cuda":
        return Twins(workspace)
    # Imported when needed: loading Triton takes seconds that nobody without a GPU should wait for.
    from ragcache.restore import kernels

    return cast(Implementation, kernels)
