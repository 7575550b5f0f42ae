"""Quantised weights: loaded as what they stand for, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from ragcache import RagCache
from ragcache.errors import UnsupportedModelError
from ragcache.model.certify import certify
from ragcache.model.fingerprint import model_fingerprint
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.model.quantisation import prepare_quantised
from ragcache.retriever.embedding import Embedder
from ragcache.settings import load_settings
from tests.conftest import make_document

Folder = Callable[[str], Path]
Quantise = Callable[[Path, Path], None]

DENSE = "dense"


Bits = tuple[dict[str, Tensor], Tensor]
"""What a file holds for one matrix, and the matrix that it stands for."""


def write(base: Path, folder: Path, quantise: Callable[[str, Tensor], Bits], config: Any) -> None:
    """A model folder with all projections quantised by hand, and one beside it with what the bits stand for."""
    stored: dict[str, Tensor] = {}
    plain = load_file(base / "model.safetensors")
    for name, tensor in plain.items():
        if name.endswith("_proj.weight"):
            bits, plain[name] = quantise(name, tensor)
            stored |= bits
        else:
            stored[name] = tensor
    dense = shutil.copytree(folder, folder.parent / DENSE)
    save_file(plain, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(folder, config)


def set_quantisation(folder: Path, quantisation: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))


def fp8(base: Path, folder: Path) -> None:
    """8-bit floats with a scale for each block of 32x32 (as DeepSeek's)."""

    def quantise(name: str, tensor: Tensor) -> Bits:
        rows, columns = tensor.shape
        blocks = tensor.view(rows // 32, 32, columns // 32, 32)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        bits = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        dense = bits.float() * scales[:, None, :, None]
        return {name: bits.view(rows, columns), f"{name}_scale_inv": scales}, dense.view(rows, columns)

    write(base, folder, quantise, {"quant_method": "fp8", "weight_block_size": [32, 32]})


def compressed_tensors(base: Path, folder: Path) -> None:
    """8-bit integers with a scale for each row (as vLLM's)."""

    def quantise(name: str, tensor: Tensor) -> Bits:
        scales = tensor.abs().amax(1, keepdim=True) / 127
        bits = (tensor / scales).round().to(torch.int8)
        return {name: bits, f"{name}_scale": scales}, bits * scales

    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel"},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    config = {"format": "int-quantized", "quantization_status": "compressed", "config_groups": {"group_0": group}}
    write(base, folder, quantise, {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config})


def by_transformers(config: Callable[[], Any]) -> Quantise:
    def quantise(base: Path, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config())
        model.save_pretrained(folder)

    return quantise


def torchao_int8() -> TorchAoConfig:
    return TorchAoConfig(import_module("torchao.quantization").Int8WeightOnlyConfig(version=2))


METHODS: dict[str, tuple[str | None, Quantise]] = {
    "fp8": (None, fp8),
    "compressed-tensors": ("compressed_tensors", compressed_tensors),
    "torchao": ("torchao", by_transformers(torchao_int8)),
    "bitsandbytes": ("bitsandbytes", by_transformers(lambda: BitsAndBytesConfig(load_in_8bit=True))),
}


@pytest.fixture(params=METHODS)
def quantised(request: pytest.FixtureRequest, tiny_folder: Folder, tmp_path: Path) -> Path:
    """A tiny Llama, quantised; with nothing of its own weights left where the format keeps none."""
    package, quantise = METHODS[request.param]
    if package and find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "quantised")
    (folder / "model.safetensors").unlink()
    quantise(tiny_folder("llama"), folder)
    return folder


@pytest.fixture
def load(cache_folder: Path) -> Callable[..., LanguageModel]:
    def load_folder(folder: Path, dtype: str = "bfloat16", adapter: str = "") -> LanguageModel:
        return load_language_model(str(folder), dtype=dtype, device="cpu", cache_folder=cache_folder, adapter=adapter)

    return load_folder


@torch.inference_mode()
def logits(module: PreTrainedModel) -> Tensor:
    token_ids = torch.randint(49152, (1, 50), generator=torch.Generator().manual_seed(1))
    return module(input_ids=token_ids).logits.float()  # type: ignore[no-any-return]  # a Tensor


def relative(difference: Tensor, reference: Tensor) -> float:
    return float(difference.norm() / reference.norm())


def test_computes_what_the_bits_stand_for(
    quantised: Path, load: Callable[..., LanguageModel], tiny_folder: Folder
) -> None:
    """Where they were made by hand; else, what transformers computes with them."""
    model = load(quantised)
    dense = quantised.parent / DENSE
    expected = logits(
        AutoModelForCausalLM.from_pretrained(dense if dense.is_dir() else quantised, dtype=torch.bfloat16)
    )
    assert relative(logits(model.module) - expected, expected) < 0.03
    plain = logits(AutoModelForCausalLM.from_pretrained(tiny_folder("llama")))
    assert 0.001 < relative(expected - plain, plain) < 0.4
    assert certify(model).in_place < 0.02


@pytest.mark.parametrize(("device", "dequantised"), [("cpu", True), ("cuda", False)])
def test_where_the_model_goes_decides_about_8_bit_floats(
    tiny_folder: Folder, tmp_path: Path, device: str, dequantised: bool
) -> None:
    """On a machine with a GPU, too."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    set_quantisation(folder, {"quant_method": "fp8"})
    config = AutoConfig.from_pretrained(folder)
    prepare_quantised(config, torch.device(device))
    assert config.quantization_config.get("dequantize", False) is dequantised


def test_a_store_of_a_quantised_model(
    quantised: Path, load: Callable[..., LanguageModel], embedder: Embedder, tmp_path: Path
) -> None:
    """Its states restore to what a prefill gives, so the answers are the same."""
    settings = load_settings(model=str(quantised), codec="raw", chunk_tokens=64, max_tokens=8)
    cache = RagCache(tmp_path / "store", settings, load(quantised), embedder)
    cache.index([make_document(number) for number in range(3)])
    answer = cache.query("Which ships passed?", reuse="exact", top_k=1)
    assert answer.tokens.restored
    assert not answer.misses
    assert answer.answer == cache.query("Which ships passed?", reuse="none", top_k=1).answer


def test_how_it_is_quantised_is_part_of_the_fingerprint(quantised: Path, cache_folder: Path) -> None:
    before = model_fingerprint(quantised, "bfloat16", cache_folder)
    config = json.loads((quantised / "config.json").read_text())
    set_quantisation(quantised, config["quantization_config"] | {"a_field_nobody_knows": 1})
    assert before.differences(model_fingerprint(quantised, "bfloat16", cache_folder)) == ["config"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_precisions_than_it_was_quantised_from(
    quantised: Path, load: Callable[..., LanguageModel], dtype: str
) -> None:
    if "bitsandbytes" in (quantised / "config.json").read_text():
        with pytest.raises(UnsupportedModelError, match="use --dtype bfloat16"):
            load(quantised, dtype)
    else:
        assert certify(load(quantised, dtype)).in_place < 0.02


def test_a_tensor_that_is_missing(quantised: Path, load: Callable[..., LanguageModel]) -> None:
    weights = load_file(quantised / "model.safetensors")
    name = next(name for name in sorted(weights) if "layers.1.self_attn.k_proj" in name)
    del weights[name]
    with safe_open(quantised / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(weights, quantised / "model.safetensors", metadata=metadata)
    with pytest.raises(UnsupportedModelError) as caught:
        load(quantised)
    assert "\n" not in str(caught.value)


def test_an_adapter_on_quantised_weights(
    quantised: Path, load: Callable[..., LanguageModel], tiny_folder: Folder, tmp_path: Path
) -> None:
    """Merged where they are de-quantised as they are loaded, refused where they would be rounded again."""
    pytest.importorskip("peft", reason='peft is not installed: pip install "ragcache[lora]"')
    from tests.model.test_adapters import save_adapter

    adapter = save_adapter(tiny_folder("llama"), tmp_path / "adapter")
    if getattr(load(quantised).module, "is_quantized", False):
        with pytest.raises(UnsupportedModelError, match="quantised weights"):
            load(quantised, adapter=str(adapter))
    else:
        assert load(quantised, adapter=str(adapter)).fingerprint.adapter


PACKAGES = {
    "aqlm": "aqlm",
    "auto-round": "auto_round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "gptq": "optimum",
    "hqq": "hqq",
    "quanto": "optimum",
    "torchao": "torchao",
    "vptq": "vptq",
}


@pytest.mark.parametrize("method", PACKAGES)
def test_a_package_that_is_missing_is_named(
    tiny_folder: Folder, load: Callable[..., LanguageModel], tmp_path: Path, method: str
) -> None:
    if find_spec(PACKAGES[method]):
        pytest.skip(f"the package {PACKAGES[method]} is installed")
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    set_quantisation(folder, {"quant_method": method, "bits": 4, "load_in_4bit": method == "bitsandbytes"})
    with pytest.raises(UnsupportedModelError, match=f"quantised with {method}, cannot be loaded: ") as caught:
        load(folder)
    reason = str(caught.value).split("cannot be loaded: ")[1]
    assert PACKAGES[method] in reason.lower().replace("-", "_")
    assert "\n" not in reason


@pytest.mark.parametrize("quantisation", [{"quant_method": "of-tomorrow"}, {}, {"bits": 4}, "int4", [1]])
def test_what_transformers_does_not_know_is_not_taken_for_plain_numbers(
    tiny_folder: Folder, load: Callable[..., LanguageModel], tmp_path: Path, quantisation: Any
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    set_quantisation(folder, quantisation)
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
