"""Norm, rotation and projection equal those of the transformers modules that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_neighbours
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ragcache.model.attention import KeyNorm, Rope
from ragcache.model.certify import relative_error
from ragcache.model.families import find_decoder
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.projections import dense
from tests.model.families import FAMILIES

CPU = torch.device("cpu")


class Angles(nn.Module):
    """A rotary module that gives each angle twice, in the order that transformers' families do."""

    def __init__(self, rotary_dim: int, interleaved: bool) -> None:
        super().__init__()
        self.inv_freq = 100.0 ** (-torch.arange(rotary_dim // 2) / rotary_dim)
        self.interleaved = interleaved

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@settings(max_examples=60, deadline=None)
@given(
    interleaved=st.booleans(),
    rotary_dim=st.sampled_from([2, 4, 8, 12]),
    tokens=st.integers(1, 9),
    heads=st.integers(1, 3),
    capacity=st.integers(9, 12),
)
def test_rotation(interleaved: bool, rotary_dim: int, tokens: int, heads: int, capacity: int) -> None:
    """Into a slice of a cache, around which nothing changes."""
    keys = torch.randn(tokens, heads, 12)
    module = Angles(rotary_dim, interleaved)
    rope = Rope(interleaved, rotary_dim, module, interleaved, None, torch.float32, CPU)
    positions = torch.randint(1000, (tokens,))
    tables = rope.tables(positions)
    assert tables[0].shape == tables[1].shape == (tokens, rotary_dim // 2)
    cache = torch.full((heads, capacity, 12), 7.0)
    rope.rotate(keys, tables, out=cache[:, :tokens].transpose(0, 1))

    turned = keys[None].transpose(1, 2)[..., :rotary_dim]
    cos, sin = module(keys, positions[None])
    _, expected = (rotate_neighbours if interleaved else rotate_halves)(turned, turned, cos, sin)
    torch.testing.assert_close(cache[:, :tokens, :rotary_dim], expected[0])
    torch.testing.assert_close(cache[:, :tokens, rotary_dim:], keys.transpose(0, 1)[..., rotary_dim:])
    assert (cache[:, tokens:] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (Qwen3RMSNorm(16, 1e-3), {"over_heads": False, "centred": False}),
        (Gemma3RMSNorm(16, 1e-3), {"over_heads": False, "centred": False}),
        (Qwen3RMSNorm(48, 1e-3), {"over_heads": True, "centred": False}),
        (CohereLayerNorm((3, 16), 1e-3), {"over_heads": False, "centred": True}),
    ],
)
def test_key_norm(module: Any, norm: dict[str, bool], dtype: torch.dtype) -> None:
    with torch.no_grad():
        module.weight.normal_()
    offset = 1.0 if isinstance(module, Gemma3RMSNorm) else 0.0
    keys = (3 * torch.randn(20, 3, 16) + 1).to(dtype)
    ours = KeyNorm(weight=module.weight.detach().flatten() + offset, eps=1e-3, **norm).normalise(keys)
    expected = module.to(dtype)(keys.flatten(1) if norm["over_heads"] else keys).view(keys.shape)
    assert ours.dtype == dtype
    assert relative_error(ours, expected) < (1e-6 if dtype is torch.float32 else 1e-2)
    module.float()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_held_twice(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    """The model's own matrices are views of the joint one, and still its parameters."""
    model = tiny_model(family)
    parameters = dict(model.module.named_parameters())
    for layer in model.decoder.layers:
        owned = {parameter.untyped_storage().data_ptr() for parameter in layer.module.parameters()}
        assert (layer.weight.untyped_storage().data_ptr() in owned) == (not family.startswith("gpt-neox"))
    assert not any(parameter.requires_grad for parameter in parameters.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_is_taken_apart_as_the_model_is(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(FAMILIES[family]())
    found = find_decoder(skeleton, torch.float32, torch.device("meta"))
    model = tiny_model(family).decoder
    assert found.hidden_size == model.hidden_size
    assert len(found.ropes) == len(model.ropes)
    for ours, theirs in zip(found.layers, model.layers, strict=True):
        assert ours.weight.shape == theirs.weight.shape
        assert (ours.kv_heads, ours.head_dim, ours.window) == (theirs.kv_heads, theirs.head_dim, theirs.window)
        assert (ours.rope and ours.rope.rotary_dim) == (theirs.rope and theirs.rope.rotary_dim)


class Int8Linear(nn.Linear):
    """Weights as 8-bit integers with a scale for each row, as quantised models keep them."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original.in_features, original.out_features, bias=original.bias is not None)
        self.bias = original.bias
        scales = original.weight.detach().abs().amax(1, keepdim=True) / 127
        self.scales = nn.Buffer(scales)
        self.weight = nn.Parameter((original.weight.detach() / scales).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype) * self.scales.to(x.dtype), self.bias)


@pytest.mark.parametrize("family", ["llama-biases", "phi3", "gpt-neox", "qwen3"])
def test_quantised_projections_are_read_out(family: str) -> None:
    """KV from the dense matrix equal those that the model computes from its quantised one."""
    torch.manual_seed(1)
    module: Any = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval().requires_grad_(False)
    for layer in module.get_decoder().layers:
        attention = getattr(layer, "self_attn", None) or layer.attention
        for name, child in attention.named_children():
            if isinstance(child, nn.Linear):
                setattr(attention, name, Int8Linear(child))
    decoder = find_decoder(module, torch.float32, CPU)
    ids = torch.randint(1000, (1, 20))
    inputs: list[Tensor] = []
    for layer in decoder.layers:
        layer.module.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args[0] if args else kwargs["hidden_states"])[0]), with_kwargs=True
        )
    with torch.inference_mode():
        cache = module(ids, use_cache=True).cache
        tables = decoder.tables(torch.arange(20))
        ours = KVCache.allocate(decoder.layers, 20, torch.float32, CPU)
        for i, layer in enumerate(decoder.layers):
            layer.restore(inputs[i], tables[i], ours.keys[i], ours.values[i])
            assert relative_error(ours.keys[i], cache.layers[i].keys[0]) < 1e-5
            assert relative_error(ours.values[i], cache.layers[i].values[0]) < 1e-5


def test_a_large_bias_does_not_coarsen_the_matrix() -> None:
    """Qwen 2 has biases of hundreds: the matrix read out next to one would keep few of its digits in 16 bits."""
    original = nn.Linear(32, 16, bias=True).to(torch.bfloat16)
    with torch.no_grad():
        original.bias.fill_(300.0)
    quantised = Int8Linear(original)
    weight, bias = dense(quantised, torch.empty(0, dtype=torch.bfloat16))
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, quantised.weight.to(torch.bfloat16) * quantised.scales)
    assert bias is not None
    assert torch.equal(bias, original.bias)
    assert quantised.bias is original.bias
