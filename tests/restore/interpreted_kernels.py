"""Kernels against their twins, in Triton's interpreter. Run by `test_kernels.py` in a process of its own."""

from __future__ import annotations

from itertools import product
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton import knobs

from ragcache.model.attention import KeyNorm
from ragcache.restore import kernels
from ragcache.restore.backend import Implementation
from ragcache.restore.gpu_check.shapes import Rotation
from ragcache.restore.twins import Twins
from ragcache.states.codec import Part
from tests.restore.states_in_memory import CODECS, TOLERANCES, Case, cases, encoded

IMPLEMENTATIONS = (Twins(), cast(Implementation, kernels))
FEW = settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Without those that are another name for `raw`.
FORMATS = pytest.mark.parametrize(
    ("codec", "dtype"),
    sorted(set(product(CODECS, TOLERANCES)) - {("bf16", "bfloat16"), ("fp16", "float16")}),
)


def assert_equal(case: Case, outs: list[tuple[Tensor, Tensor]]) -> None:
    """Keys and values are the same, slots that nothing moved to included."""
    for twin, kernel in zip(*outs, strict=True):
        scale = twin.float().square().mean().sqrt().item()
        torch.testing.assert_close(kernel, twin, rtol=TOLERANCES[case.dtype], atol=TOLERANCES[case.dtype] * scale)


def test_this_is_the_interpreter() -> None:
    assert knobs.runtime.interpret


@FORMATS
@FEW
@given(data=st.data())
def test_keys_and_values_before_rope(data: st.DataObject, codec: str, dtype: str) -> None:
    case = data.draw(cases(codec, dtype))
    compare_pre_rope_kv(case)


@FORMATS
@FEW
@given(
    data=st.data(),
    hidden_size=st.sampled_from([64, 80]),
    has_bias=st.booleans(),
    norm=st.sampled_from([None, "each head", "each head, centred", "over heads", "over heads, centred"]),
)
def test_hidden_states(
    data: st.DataObject, hidden_size: int, has_bias: bool, norm: str | None, codec: str, dtype: str
) -> None:
    compare_hidden(data.draw(cases(codec, dtype)), hidden_size, has_bias, norm)


@pytest.mark.parametrize(
    ("head_dim", "rotation"),
    [(96, Rotation(False, 32)), (128, Rotation(True, 96)), (256, Rotation(False, 256)), (512, None)],
)
def test_large_heads(head_dim: int, rotation: Rotation | None) -> None:
    case = Case((70, 3), False, 2, head_dim, rotation, "int4", "float32")
    compare_pre_rope_kv(case)
    compare_hidden(case, 64, True, "each head, centred")


def compare_pre_rope_kv(case: Case) -> None:
    torch.manual_seed(case.tokens)
    keys, values = torch.randn(2, case.tokens, case.kv_heads * case.head_dim).to(case.torch_dtype)
    tables, outs = case.tables(), []
    stored_keys = encoded(keys, case.chunks, case.codec, case.dtype, Part.KEYS)
    stored_values = encoded(values, case.chunks, case.codec, case.dtype, Part.VALUES)
    for implementation in IMPLEMENTATIONS:
        out = case.empty_cache(), case.empty_cache()
        implementation.restore_pre_rope_kv(stored_keys, stored_values, case.rotation, tables, case.moves, *out)
        outs.append(out)
    assert_equal(case, outs)


def compare_hidden(case: Case, hidden_size: int, has_bias: bool, norm: str | None) -> None:
    torch.manual_seed(case.tokens)
    width, dtype = case.kv_heads * case.head_dim, case.torch_dtype
    stored = encoded(torch.randn(case.tokens, hidden_size).to(dtype), case.chunks, case.codec, case.dtype, Part.HIDDEN)
    weight = (torch.randn(2 * width, hidden_size) / hidden_size**0.5).to(dtype)
    bias = torch.randn(2 * width).to(dtype) if has_bias else None
    key_norm = None
    if norm is not None:
        centred = norm.endswith("centred")
        norm_weight = 1 + 0.3 * torch.randn(case.head_dim if norm == "each head" else width)
        key_norm = KeyNorm(norm_weight, 1e-5, norm.startswith("over heads"), centred)
    tables, outs = case.tables(), []
    for implementation in IMPLEMENTATIONS:
        out = case.empty_cache(), case.empty_cache()
        implementation.restore_hidden(stored, weight, bias, key_norm, case.rotation, tables, case.moves, *out)
        outs.append(out)
    assert_equal(case, outs)
