"""A kernel with all that it is started with, so that the tests compile exactly what would run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from ragcache.restore.rope import RopeShape


@dataclass(frozen=True)
class Gpu:
    """What the shape of blocks depends on.

    Attributes:
        shared_memory: bytes that one program can have.
        multiprocessors: programs that run at the same time, at least.
    """

    shared_memory: int
    multiprocessors: int

    @staticmethod
    @cache
    def of(device: torch.device) -> Gpu:
        """The GPU of a device. Tensors on the CPU are there for Triton's interpreter, which knows no limits."""
        if device.type != "cuda":
            return Gpu(227 * 1024, 1)
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = driver.active.utils.get_device_properties(index)
        return Gpu(properties["max_shared_mem"], properties["multiprocessor_count"])


@dataclass(frozen=True)
class Launch:
    """One kernel, ready to run.

    Attributes:
        kernel: a function under `triton.jit`.
        grid: number of programs along each axis.
        arguments: tensors, numbers that are known when it runs, and None for what is left out.
        constants: what it is compiled for.
        num_warps: warps of a program.
        num_stages: blocks of a loop that are in flight.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | int | float | None]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1

    def run(self) -> None:
        """Start the kernel on the device of its tensors; does not wait for it."""
        with _current(next(it.device for it in self.arguments.values() if isinstance(it, Tensor))):
            self.kernel[self.grid](
                **self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
            )


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton starts kernels on the current GPU, whatever its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def head_constants(head_dim: int, rope: RopeShape | None) -> dict[str, Any]:
    """The constants that the functions of `ragcache.restore.kernels.heads` have in common.

    Raises:
        ValueError: heads of an odd number of values.
    """
    if head_dim % 2:
        raise ValueError(f"a head of {head_dim} values cannot be taken in pairs")
    return {
        "HEAD_DIM": head_dim,
        "PAIRS": triton.next_power_of_2(head_dim // 2),
        # Without RoPE pairs are as of a whole head: any will do.
        "ROTARY_DIM": head_dim if rope is None else rope.rotary_dim,
        "INTERLEAVED": rope is not None and rope.interleaved,
    }


def angle_arguments(tables: tuple[Tensor, Tensor] | None) -> dict[str, Tensor | None]:
    """Tables of cosines and sines as the kernels take them."""
    if tables is None:
        return {"cos": None, "sin": None}
    return {"cos": tables[0].contiguous(), "sin": tables[1].contiguous()}


def strides(name: str, out: Tensor) -> dict[str, int]:
    """Strides of a layer of a KV cache under the names of the kernels' arguments."""
    return {
        f"{name}_head_stride": out.stride(0),
        f"{name}_slot_stride": out.stride(1),
        f"{name}_value_stride": out.stride(2),
    }
