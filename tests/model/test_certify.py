"""A model whose KV are not what ragcache thinks they are is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ragcache.errors import CertificationError, UnsupportedModelError
from ragcache.model.attention import AttentionLayer
from ragcache.model.certify import certify
from ragcache.model.language_model import LanguageModel
from tests.model.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_with_room_to_spare(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    certificate = certify(tiny_model(family))
    assert max(certificate.captured, certificate.in_place, certificate.shifted) < 5e-5


def test_bfloat16_passes(cache_folder: Any) -> None:
    from ragcache.model.loading import load_language_model

    model = load_language_model("smollm2-135m", dtype="bfloat16", device="cpu", cache_folder=cache_folder)
    certificate = certify(model)
    assert certificate.captured < 3e-3
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
    with pytest.raises(CertificationError, match="keys restored in layer 2"):
        certify(with_layer(tiny_model("qwen2"), 2, bias=None))


def test_a_swapped_projection_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    model = tiny_model("llama")
    keys, values = model.decoder.layers[0].weight.chunk(2)
    with pytest.raises(CertificationError, match="layer 0"):
        certify(with_layer(model, 0, weight=torch.cat((values, keys))))


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_a_rotation_of_the_wrong_pairs_is_found(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    """Some families pair neighbouring values instead of halves; in place at position 0 nothing would show."""
    model = tiny_model(family)
    rope = model.decoder.ropes[0]
    other = replace(rope, interleaved=not rope.interleaved)
    with pytest.raises(CertificationError, match="keys restored in layer 1"):
        certify(with_layer(model, 1, rope=other))


def test_a_rotation_of_too_much_of_a_head_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    """Phi rotates half of each head."""
    model = tiny_model("phi")
    whole = tiny_model("llama").decoder.ropes[0]
    assert whole.rotary_dim == 2 * model.decoder.ropes[0].rotary_dim
    with pytest.raises(CertificationError, match="keys restored in layer 0"):
        certify(with_layer(model, 0, rope=whole))


def test_a_left_out_rotation_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    with pytest.raises(CertificationError, match="keys restored in layer 2"):
        certify(with_layer(tiny_model("llama"), 2, rope=None))


def test_a_rotation_in_a_layer_without_positions_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    model = tiny_model("smollm3")
    assert [layer.rope is None for layer in model.decoder.layers] == [False, True, False]
    with pytest.raises(CertificationError, match="keys restored in layer 1"):
        certify(with_layer(model, 1, rope=model.decoder.ropes[0]))


def test_the_other_layers_rotation_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    """Gemma 3 rotates by other angles in layers with a window."""
    model = tiny_model("gemma3")
    windowed, full = model.decoder.ropes
    with pytest.raises(CertificationError, match="keys restored in layer 2"):
        certify(with_layer(model, 2, rope=windowed))
    with pytest.raises(CertificationError, match="keys restored in layer 3"):
        certify(with_layer(model, 3, rope=full))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmo2", {"over_heads": False}),
        ("cohere-key-norm", {"centred": False}),
        ("qwen3", {"over_heads": True}),
        ("gemma3", {"eps": 1.0}),
    ],
)
def test_another_norm_of_keys_is_found(
    tiny_model: Callable[[str], LanguageModel], family: str, changes: dict[str, Any]
) -> None:
    model = tiny_model(family)
    norm = model.decoder.layers[1].key_norm
    assert norm is not None
    if changes.get("over_heads"):
        changes = changes | {"weight": norm.weight.repeat(model.decoder.layers[1].kv_heads)}
    with pytest.raises(CertificationError, match="keys restored in layer 1"):
        certify(with_layer(model, 1, key_norm=replace(norm, **changes)))


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo3", "cohere2"])
def test_a_window_that_is_off_by_one_is_found(
    tiny_model: Callable[[str], LanguageModel], family: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows in what the next layer is given: the probe is longer than the window."""
    model = tiny_model(family)
    layer = model.decoder.layers[0]
    assert layer.window is not None
    changed = with_layer(model, 0, window=layer.window + change)
    with pytest.raises(UnsupportedModelError, match="another"):
        certify(changed)
    # Now the family's attention names the wrong window too, but not the mask of the reference.
    monkeypatch.setattr(layer.module, "sliding_window", layer.window + change)
    with pytest.raises(CertificationError, match="restored in layer 1"):
        certify(changed)


def test_left_out_attention_scaling_is_found(tiny_model: Callable[[str], LanguageModel]) -> None:
    """YaRN multiplies cosines and sines by a factor; rotating with bare angles gives keys of the wrong length."""
    model = tiny_model("yarn-rope")
    rope = model.decoder.ropes[0]

    class Unscaled(nn.Module):
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = rope.module(x, position_ids=position_ids)
            return cos / rope.module.attention_scaling, sin / rope.module.attention_scaling

    with pytest.raises(CertificationError, match="keys restored in layer 0"):
        certify(with_layer(model, 0, rope=replace(rope, module=Unscaled())))


def test_nan_is_no_agreement(tiny_model: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(self: AttentionLayer, hidden: Tensor, tables: Any, keys: Tensor, values: Tensor) -> None:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))

    monkeypatch.setattr(AttentionLayer, "restore", poisoned)
    with pytest.raises(CertificationError, match="nan"):
        certify(tiny_model("llama"))
