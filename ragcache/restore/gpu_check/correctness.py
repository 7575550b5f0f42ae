"""Kernels against their twins on the device, variant by variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ragcache.restore.backend import Implementation
from ragcache.restore.gpu_check.shapes import FAMILIES, Attention
from ragcache.restore.gpu_check.work import GAP, make_work
from ragcache.states.form import Form

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest error of a value, relative to itself plus the root mean square of all. A few roundings each."""

CHUNKS = (70, 512, 3, 64, 200)


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for.

    Attributes:
        form: `hidden` or `pre_rope_kv`.
        family: key of the shapes.
        codec: of the states.
        dtype: of the model.
    """

    form: Form
    family: str
    codec: str
    dtype: torch.dtype

    @property
    def name(self) -> dict[str, object]:
        """As the report has it."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def variants() -> Iterator[Variant]:
    """Every family with int8, and some with every codec and precision."""
    for form in (Form.HIDDEN, Form.PRE_ROPE_KV):
        for family in FAMILIES:
            yield Variant(form, family, "int8", torch.bfloat16)
        for family in ("Qwen2.5-7B", "Qwen3-8B", "Phi-2"):
            for codec in ("raw", "bf16", "fp16", "int8", "int4"):
                for dtype in TOLERANCES:
                    # What differs in name only is compiled once.
                    same = (codec, dtype) in (("bf16", torch.bfloat16), ("fp16", torch.float16))
                    if not same and (codec, dtype) != ("int8", torch.bfloat16):
                        yield Variant(form, family, codec, dtype)
        yield Variant(form, "Gemma-3-4B", "int4", torch.bfloat16)
        yield Variant(form, "Command-R+", "int4", torch.float16)


def check(
    variant: Variant, attention: Attention, device: torch.device, twins: Implementation, kernels: Implementation
) -> dict[str, object]:
    """Restore the same states with both; how far apart they are, as a row of the report."""
    work = make_work(variant.form, attention, variant.codec, variant.dtype, CHUNKS, GAP, device)
    by_twins, by_kernels = work.caches(), work.caches()
    work.restore(twins, *by_twins)
    work.restore(kernels, *by_kernels)
    errors = [_error(kernel, twin) for kernel, twin in zip(by_kernels, by_twins, strict=True)]
    tolerance = TOLERANCES[variant.dtype]
    return {
        "key_error": errors[0],
        "value_error": errors[1],
        "tolerance": tolerance,
        # NaN is no less than anything.
        "passed": all(error <= tolerance for error in errors),
    }


def _error(actual: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the value plus the root mean square of all; NaN if there is one."""
    actual, expected = actual.float(), expected.float()
    return ((actual - expected).abs() / (expected.abs() + expected.square().mean().sqrt())).max().item()
