"""How long a layer takes, beside the time that the GPU needs at least for the bytes and the products.

The floor is the larger of two: bytes that have to be moved at the rate of a plain copy, and products at the rate of a
large matrix product, both measured on the same GPU. The L2 cache is emptied before each run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ragcache.restore.backend import Implementation
from ragcache.restore.gpu_check.shapes import Attention
from ragcache.restore.gpu_check.work import make_work
from ragcache.states.form import Form

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Rates:
    """What a device can do.

    Attributes:
        copy_bytes: bytes a second, read and written together.
        products: floating-point operations a second, in bfloat16 matrix products.
    """

    copy_bytes: float
    products: float


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of some runs on the GPU; of one run elsewhere."""
    if device.type != "cuda":
        clock = time.perf_counter()
        run()
        return (time.perf_counter() - clock) * 1e3
    from triton.testing import do_bench

    median: float = do_bench(run, warmup=10, rep=50, return_mode="median")
    return median


def measure_rates(device: torch.device) -> Rates:
    """Copy a GiB, and multiply matrices of 8192 x 8192; tiny ones where there is no GPU."""
    size, side = (2**29, 8192) if device.type == "cuda" else (2**12, 32)
    source = torch.zeros(size, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copied = milliseconds(partial(target.copy_, source), device)
    matrix = torch.randn(side, side, device=device).to(torch.bfloat16)
    multiplied = milliseconds(partial(torch.matmul, matrix, matrix), device)
    return Rates(copy_bytes=2 * source.nbytes / copied * 1e3, products=2 * side**3 / multiplied * 1e3)


def time_layer(
    form: Form,
    attention: Attention,
    codec: str,
    tokens: int,
    device: torch.device,
    rates: Rates,
    twins: Implementation,
    kernels: Implementation,
) -> dict[str, object]:
    """One layer in bfloat16, chunks of 512 tokens side by side; a row of the report.

    Args:
        form: `hidden` or `pre_rope_kv`.
        attention: the layer's shapes.
        codec: of the states.
        tokens: of all chunks.
        device: the GPU.
        rates: of the GPU.
        twins: for comparison, on the same GPU.
        kernels: what is timed.
    """
    chunks = [min(CHUNK_TOKENS, tokens - start) for start in range(0, tokens, CHUNK_TOKENS)]
    work = make_work(form, attention, codec, torch.bfloat16, chunks, 0, device)
    caches = work.caches()
    kernel, twin = partial(work.restore, kernels, *caches), partial(work.restore, twins, *caches)
    taken = milliseconds(kernel, device)
    copying, multiplying = work.bytes / rates.copy_bytes * 1e3, work.products / rates.products * 1e3
    floor = max(copying, multiplying)
    return {
        "ms": taken,
        "floor_ms": floor,
        "bound": "copying" if copying >= multiplying else "multiplying",
        "times_the_floor": taken / floor,
        "gb_per_s": work.bytes / taken / 1e6,
        "tflop_per_s": work.products / taken / 1e9,
        "twin_ms": milliseconds(twin, device),
        "launch_us": _launch_microseconds(kernel, device),
    }


def _launch_microseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of the host for one launch, without waiting for the GPU."""
    launches = 20 if device.type == "cuda" else 1
    clock = time.perf_counter()
    for _ in range(launches):
        run()
    taken = (time.perf_counter() - clock) / launches * 1e6
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return taken
