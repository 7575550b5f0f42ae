"""Restoring in plain torch against the store's codecs and the models' own norms and rotations."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2 import modeling_olmo2 as olmo2

from ragcache.model.attention import KeyNorm
from ragcache.restore.twins import Twins
from ragcache.states.codec import Part
from tests.restore.states_in_memory import TOLERANCES, Case, cases, decoded, encoded


def rotated(keys: Tensor, case: Case, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """RoPE of keys `[tokens, kv_heads, head_dim]` with the functions of Llama and Cohere."""
    if case.rotation is None or tables is None:
        return keys
    turned, passed = keys.split([case.rotation.rotary_dim, case.head_dim - case.rotation.rotary_dim], -1)
    if case.rotation.interleaved:
        cos, sin = (table.repeat_interleave(2, -1) for table in tables)
        _, turned = cohere.apply_rotary_pos_emb(turned, turned, cos, sin, unsqueeze_dim=1)
    else:
        cos, sin = (table.repeat(1, 2) for table in tables)
        _, turned = llama.apply_rotary_pos_emb(turned, turned, cos, sin, unsqueeze_dim=1)
    return torch.cat((turned, passed), -1)


def assert_placed(case: Case, out: Tensor, expected: Tensor) -> None:
    """Tokens `[tokens, kv_heads, head_dim]` are in their slots of `out`, and no other slot has been touched."""
    whole = case.empty_cache()
    for slot, chunk in zip(case.slots, expected.split(list(case.chunks)), strict=True):
        whole[:, slot : slot + len(chunk)] = chunk.transpose(0, 1)
    scale = expected.float().square().mean().sqrt().item()
    torch.testing.assert_close(out, whole, rtol=TOLERANCES[case.dtype], atol=TOLERANCES[case.dtype] * scale)


@settings(deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_keys_and_values_are_decoded_rotated_and_placed(case: Case, seed: int) -> None:
    torch.manual_seed(seed)
    keys, values = torch.randn(2, case.tokens, case.kv_heads * case.head_dim).to(case.torch_dtype)
    tables, out_keys, out_values = case.tables(), case.empty_cache(), case.empty_cache()
    stored_keys = encoded(keys, case.chunks, case.codec, case.dtype, Part.KEYS)
    stored_values = encoded(values, case.chunks, case.codec, case.dtype, Part.VALUES)
    Twins().restore_pre_rope_kv(stored_keys, stored_values, case.rotation, tables, case.moves, out_keys, out_values)
    heads = (case.tokens, case.kv_heads, case.head_dim)
    back = decoded(keys, case.chunks, case.codec, case.dtype, Part.KEYS).view(heads)
    assert_placed(case, out_keys, rotated(back, case, tables))
    assert_placed(case, out_values, decoded(values, case.chunks, case.codec, case.dtype, Part.VALUES).view(heads))


def key_norms(case: Case) -> dict[str, tuple[KeyNorm, Any] | None]:
    """Norms by the family that has them, beside the family's own module."""
    each, width = (case.kv_heads, case.head_dim), case.kv_heads * case.head_dim
    modules: dict[str, Any] = {
        "qwen3": llama.LlamaRMSNorm(case.head_dim, eps=1e-6),
        "cohere": cohere.CohereLayerNorm(each, eps=1e-5),
        "olmo2": olmo2.Olmo2RMSNorm(width, eps=1e-6),
    }
    norms: dict[str, tuple[KeyNorm, Any] | None] = {"llama": None}
    for family, module in modules.items():
        torch.nn.init.normal_(module.weight, 1.0, 0.3)
        module.to(case.torch_dtype)
        weight = module.weight.detach().float().flatten()
        norm = KeyNorm(weight, module.variance_epsilon, family == "olmo2", family == "cohere")
        norms[family] = (norm, module)
    return norms


@settings(deadline=None)
@given(
    case=cases(),
    hidden_size=st.sampled_from([16, 96, 130]),
    has_bias=st.booleans(),
    family=st.sampled_from(["llama", "qwen3", "cohere", "olmo2"]),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_hidden_states_are_decoded_projected_normalised_rotated_and_placed(
    case: Case, hidden_size: int, has_bias: bool, family: str, seed: int
) -> None:
    torch.manual_seed(seed)
    dtype, width = case.torch_dtype, case.kv_heads * case.head_dim
    hidden = torch.randn(case.tokens, hidden_size).to(dtype)
    weight = (torch.randn(2 * width, hidden_size) / hidden_size**0.5).to(dtype)
    bias = torch.randn(2 * width).to(dtype) if has_bias else None
    norm = key_norms(case)[family]
    tables, out_keys, out_values = case.tables(), case.empty_cache(), case.empty_cache()
    stored = encoded(hidden, case.chunks, case.codec, case.dtype, Part.HIDDEN)
    Twins().restore_hidden(
        stored, weight, bias, norm[0] if norm else None, case.rotation, tables, case.moves, out_keys, out_values
    )
    back = decoded(hidden, case.chunks, case.codec, case.dtype, Part.HIDDEN)
    keys, values = torch.nn.functional.linear(back, weight, bias).split(width, -1)
    heads = (case.tokens, case.kv_heads, case.head_dim)
    if norm is not None:
        keys = norm[1](keys if family == "olmo2" else keys.view(heads))
    assert_placed(case, out_keys, rotated(keys.view(heads), case, tables))
    assert_placed(case, out_values, values.view(heads))
