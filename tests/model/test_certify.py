"""A model whose KV are not what ragcache thinks they are is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ragcache.errors import CertificationError
from ragcache.model.attention import AttentionLayer, Rotary
from ragcache.model.certify import certify
from ragcache.model.language_model import LanguageModel
from tests.conftest import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_with_room_to_spare(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    certificate = certify(tiny_model(family))
    assert max(certificate.in_place, certificate.shifted) < 5e-5


def test_bfloat16_passes(cache_folder: Any) -> None:
    from ragcache.model.loading import load_language_model

    model = load_language_model("smollm2-135m", dtype="bfloat16", device="cpu", cache_folder=cache_folder)
    certificate = certify(model)
    assert certificate.in_place < 5e-3
    assert certificate.shifted < 5e-2


def with_layer(model: LanguageModel, index: int, **changes: Any) -> LanguageModel:
    layers = list(model.decoder.layers)
    layers[index] = replace(layers[index], **changes)
    return replace(model, decoder=replace(model.decoder, layers=tuple(layers)))


def test_a_left_out_key_norm_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    with pytest.raises(CertificationError, match="keys restored in layer 1"):
        certify(with_layer(tiny_model("qwen3"), 1, key_norm=None))


def test_a_left_out_bias_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    model = tiny_model("qwen2")
    projection = model.decoder.layers[2].value_projection
    bare = nn.Linear(projection.in_features, projection.out_features, bias=False)
    bare.weight = projection.weight
    with pytest.raises(CertificationError, match="values restored in layer 2"):
        certify(with_layer(model, 2, value_projection=bare))


def test_a_swapped_projection_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    model = tiny_model("llama")
    layer = model.decoder.layers[0]
    with pytest.raises(CertificationError, match="layer 0"):
        certify(with_layer(model, 0, key_projection=layer.value_projection, value_projection=layer.key_projection))


def test_interleaved_rotation_is_found(
    tiny_model: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some families pair neighbouring values instead of halves; in place at position 0 nothing would show."""

    def interleaved(keys: Tensor, tables: tuple[Tensor, Tensor], out: Tensor) -> None:
        cos, sin = (table[:, None, : keys.shape[-1] // 2] for table in tables)
        even, odd = keys[..., 0::2], keys[..., 1::2]
        out.copy_(torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2))

    monkeypatch.setattr(Rotary, "rotate", staticmethod(interleaved))
    with pytest.raises(CertificationError, match="keys restored"):
        certify(tiny_model("llama"))


def test_left_out_attention_scaling_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    """YaRN multiplies cosines and sines by a factor; rotating with bare angles gives keys of the wrong length."""
    model = tiny_model("yarn-rope")

    class Unscaled(nn.Module):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = model.decoder.rotary.module(x, position_ids=position_ids)
            scaling = model.decoder.rotary.module.attention_scaling
            return cos / scaling, sin / scaling

    rotary = replace(model.decoder.rotary, module=Unscaled())
    with pytest.raises(CertificationError, match="keys restored"):
        certify(replace(model, decoder=replace(model.decoder, rotary=rotary)))


def test_nan_is_no_agreement(tiny_model: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(self: AttentionLayer, hidden: Tensor, tables: Any, keys: Tensor, values: Tensor) -> None:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))

    monkeypatch.setattr(AttentionLayer, "restore", poisoned)
    with pytest.raises(CertificationError, match="nan"):
        certify(tiny_model("llama"))
