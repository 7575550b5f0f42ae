"""LoRA adapters: merged they compute what peft computes, and their states are nobody else's."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ragcache import RagCache
from ragcache.errors import ModelError, ModelNotFoundError, StoreMismatchError, UnsupportedModelError
from ragcache.model.capture import prefill
from ragcache.model.fingerprint import Fingerprint, model_fingerprint
from ragcache.model.gguf import convert
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.model.resolve import resolve, resolve_adapter
from ragcache.retriever.embedding import Embedder
from ragcache.settings import load_settings
from ragcache.states.key import state_key
from tests.conftest import make_document

peft = pytest.importorskip("peft", reason='peft is not installed: pip install "ragcache[lora]"')

Folder = Callable[[str], Path]
MakeAdapter = Callable[..., Path]

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def reference_model(base: Path, adapter: Path) -> torch.nn.Module:
    """The adapted model as peft runs it, unmerged."""
    model: torch.nn.Module = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    return model.eval()


def save_adapter(base: Path, folder: Path, seed: int = 0, **options: Any) -> Path:
    """A LoRA adapter with random weights for all projections."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS, "init_lora_weights": False} | options
    )
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture
def base(tiny_folder: Folder) -> Path:
    return tiny_folder("llama")


@pytest.fixture
def make_adapter(base: Path, tmp_path: Path) -> MakeAdapter:
    return lambda name="adapter", **options: save_adapter(base, tmp_path / name, **options)


@pytest.fixture
def load(base: Path, cache_folder: Path) -> Callable[..., LanguageModel]:
    def load_adapted(adapter: Path | str, **options: Any) -> LanguageModel:
        given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cache_folder": cache_folder} | options
        return load_language_model(str(base), adapter=str(adapter), **given)

    return load_adapted


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


@torch.inference_mode()
def logits(module: torch.nn.Module) -> torch.Tensor:
    token_ids = torch.randint(49152, (1, 50), generator=torch.Generator().manual_seed(1))
    found: torch.Tensor = module(input_ids=token_ids).logits
    return found


def assert_same_keys_and_values(model: LanguageModel, reference: torch.nn.Module) -> None:
    """Of a prefill as it is packed when states are captured."""
    token_ids = list(range(100, 130))
    cache = prefill(model, token_ids)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([token_ids]), use_cache=True).cache
    for keys, values, layer in zip(cache.keys, cache.values, expected.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, layer.values[0], rtol=1e-4, atol=1e-4)


class TestComputesWhatPeftDoes:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"use_rslora": True},
            {"use_dora": True},
            {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"v_proj": 32}},
            {"layers_to_transform": [1], "target_modules": ["k_proj"]},
            {"modules_to_save": ["lm_head"]},
            {"modules_to_save": ["embed_tokens"]},
            {"target_modules": "all-linear"},
        ],
        ids=str,
    )
    def test_logits(
        self, base: Path, make_adapter: MakeAdapter, load: Callable[..., LanguageModel], options: dict[str, Any]
    ) -> None:
        adapter = make_adapter(**options)
        model = load(adapter)
        expected = logits(reference_model(base, adapter))
        torch.testing.assert_close(logits(model.module), expected, rtol=1e-4, atol=1e-4)
        plain = logits(AutoModelForCausalLM.from_pretrained(base))
        assert (expected - plain).norm() > 0.05 * plain.norm()
        assert_same_keys_and_values(model, reference_model(base, adapter))
        assert not any("lora" in name for name, _ in model.module.named_modules())
        assert not any(parameter.requires_grad for parameter in model.module.parameters())

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_in_16_bits(
        self, base: Path, make_adapter: MakeAdapter, load: Callable[..., LanguageModel], dtype: str
    ) -> None:
        adapter = make_adapter()
        expected = logits(reference_model(base, adapter))
        model = load(adapter, dtype=dtype)
        assert {parameter.dtype for parameter in model.module.parameters()} == {model.dtype}
        assert (logits(model.module).float() - expected).norm() < 0.05 * expected.norm()

    def test_on_a_gguf_file(self, smollm: LanguageModel, cache_folder: Path, tmp_path: Path) -> None:
        path = resolve("smollm2-135m")
        base = convert(path, "float32", cache_folder)
        adapter = save_adapter(base, tmp_path / "adapter", target_modules=["k_proj", "v_proj"], r=2)
        model = load_language_model(
            str(path), adapter=str(adapter), dtype="float32", device="cpu", cache_folder=cache_folder
        )
        torch.testing.assert_close(logits(model.module), logits(reference_model(base, adapter)), rtol=1e-3, atol=1e-3)
        assert smollm.fingerprint.differences(model.fingerprint) == ["adapter"]


class TestIdentity:
    def test_fingerprints(self, base: Path, make_adapter: MakeAdapter, cache_folder: Path) -> None:
        one, other = make_adapter("one"), make_adapter("other", seed=1)
        plain, adapted, differently = (
            model_fingerprint(base, "float32", cache_folder, adapter=it) for it in (None, one, other)
        )
        assert plain.differences(adapted) == adapted.differences(differently) == ["adapter"]
        assert len({plain.digest, adapted.digest, differently.digest}) == 3
        assert Fingerprint.from_json(adapted.to_json()) == adapted

    def test_without_an_adapter_all_is_as_before(self) -> None:
        """Stores keep the fingerprint's JSON, and its digest is in the keys of all their states."""
        before = '{"code": "", "config": "c", "dtype": "float32", "state_format": 1, "tokenizer": "t", "weights": "w"}'
        fingerprint = Fingerprint.from_json(before)
        assert fingerprint.to_json() == before
        assert fingerprint.digest == "8867747fe14cc9f59750de6dca4fe5978c12b373a4c9c3630517d75edde30fca"

    @pytest.mark.parametrize(
        ("fields", "same"),
        [
            ({"base_model_name_or_path": "elsewhere", "peft_version": "0", "lora_dropout": 0.5}, True),
            ({"target_modules": PROJECTIONS[::-1]}, True),
            ({"lora_alpha": 9}, False),
            ({"use_rslora": True}, False),
            ({"a_field_nobody_knows": 1}, False),
        ],
    )
    def test_configuration(
        self, base: Path, make_adapter: MakeAdapter, cache_folder: Path, fields: dict[str, Any], same: bool
    ) -> None:
        adapter = make_adapter()
        change_config(adapter, target_modules=PROJECTIONS)
        before = model_fingerprint(base, "float32", cache_folder, adapter=adapter)
        change_config(adapter, **fields)
        assert (model_fingerprint(base, "float32", cache_folder, adapter=adapter) == before) is same

    def test_states_of_another_adapter_are_not_used(
        self,
        base: Path,
        make_adapter: MakeAdapter,
        load: Callable[..., LanguageModel],
        tiny_model: Callable[[str], LanguageModel],
        embedder: Embedder,
        tmp_path: Path,
    ) -> None:
        models = [tiny_model("llama"), load(make_adapter("one")), load(make_adapter("other", seed=1))]
        keys = {state_key(model.fingerprint.digest, (1,), "", (2, 3)) for model in models}
        assert len(keys) == 3
        settings = load_settings(model=str(base), dtype="float32", codec="raw", chunk_tokens=64, max_tokens=8)
        for number, model in enumerate(models):
            path = tmp_path / f"store-{number}"
            cache = RagCache(path, settings, model, embedder)
            cache.index([make_document(0)])
            answer = cache.query("Which ships passed?")
            assert answer.tokens.restored
            assert not answer.misses
            for other in models:
                if other is not model:
                    with pytest.raises(StoreMismatchError, match="adapter"):
                        RagCache(path, settings, other, embedder)


class TestRefused:
    def refused(self, load: Callable[..., LanguageModel], adapter: Path | str) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            load(adapter)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_pickled_weights(self, make_adapter: MakeAdapter, load: Callable[..., LanguageModel]) -> None:
        adapter = make_adapter()
        (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
        assert "pickled weights (adapter_model.bin)" in self.refused(load, adapter)

    def test_truncated_weights(self, make_adapter: MakeAdapter, load: Callable[..., LanguageModel]) -> None:
        adapter = make_adapter()
        (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:3000])
        assert "damaged" in self.refused(load, adapter)

    @pytest.mark.parametrize("change", ["missing", "further", "infinite"])
    def test_weights_that_are_not_those_of_the_adapter(
        self, make_adapter: MakeAdapter, load: Callable[..., LanguageModel], change: str
    ) -> None:
        adapter = make_adapter()
        weights = load_file(adapter / WEIGHTS)
        name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
        if change == "missing":
            del weights[name]
        elif change == "further":
            weights[name.replace("layers.1", "layers.7")] = weights[name].clone()
        else:
            weights[name][0, 0] = float("nan")
        save_file(weights, adapter / WEIGHTS, metadata={"format": "pt"})
        assert ("NaN" if change == "infinite" else "k_proj") in self.refused(load, adapter)

    def test_an_adapter_for_another_model(
        self, tiny_folder: Folder, load: Callable[..., LanguageModel], tmp_path: Path
    ) -> None:
        adapter = save_adapter(tiny_folder("llama-multi-head"), tmp_path / "adapter")
        message = self.refused(load, adapter)
        assert "size mismatch" in message
        assert f"made for {str(tiny_folder('llama-multi-head'))!r}" in message

    def test_an_adapter_that_names_no_module_of_the_model(
        self, tiny_folder: Folder, load: Callable[..., LanguageModel], tmp_path: Path
    ) -> None:
        adapter = save_adapter(tiny_folder("phi"), tmp_path / "adapter", target_modules=["fc1"])
        assert "fc1" in self.refused(load, adapter)

    def test_a_larger_vocabulary(self, base: Path, load: Callable[..., LanguageModel], tmp_path: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(49160)
        model.save_pretrained(tmp_path / "larger")
        adapter = save_adapter(tmp_path / "larger", tmp_path / "adapter", modules_to_save=["embed_tokens"])
        assert "size mismatch" in self.refused(load, adapter)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"peft_type": "PROMPT_TUNING"}, "adds tokens"),
            ({"peft_type": "LOHA"}, "only LoRA"),
            ({"peft_type": None}, "only LoRA"),
            ({"peft_type": []}, "only LoRA"),
            ({"alora_invocation_tokens": [1, 2]}, "behind certain tokens"),
            ({"layer_replication": [[0, 2], [1, 3]]}, "other layers"),
            ({"trainable_token_indices": [1]}, "single tokens"),
            ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
            ({"init_lora_weights": "corda", "corda_config": {"cache_file": "/x"}}, "changes the base model"),
            ({"arrow_config": {"top_k": 3}}, "arrow_config is set"),
            ({"a_field_nobody_knows": True}, "a_field_nobody_knows is set"),
        ],
        ids=str,
    )
    def test_what_cannot_be_merged(
        self, make_adapter: MakeAdapter, load: Callable[..., LanguageModel], fields: dict[str, Any], reason: str
    ) -> None:
        adapter = make_adapter()
        change_config(adapter, **fields)
        assert reason in self.refused(load, adapter)

    def test_what_merging_would_change(self, make_adapter: MakeAdapter, load: Callable[..., LanguageModel]) -> None:
        """Here the embedding is also the output layer, which the adapter leaves alone. Measured, not known by name."""
        adapter = make_adapter(target_modules=["embed_tokens", "v_proj"])
        assert "logits differ" in self.refused(load, adapter)

    @pytest.mark.parametrize("content", ["", "[]", "{", "\udcff"])
    def test_a_damaged_configuration(
        self, make_adapter: MakeAdapter, load: Callable[..., LanguageModel], content: str
    ) -> None:
        adapter = make_adapter()
        (adapter / CONFIG).write_bytes(content.encode(errors="surrogateescape"))
        assert "damaged" in self.refused(load, adapter)

    def test_a_model_as_adapter(self, base: Path, load: Callable[..., LanguageModel], tmp_path: Path) -> None:
        assert "no adapter_config.json" in self.refused(load, base)
        shutil.copy(base / "config.json", tmp_path / CONFIG)
        assert "no adapter_model.safetensors" in self.refused(load, tmp_path)

    @pytest.mark.parametrize("name", ["no-such/adapter", "./missing", "not a name"])
    def test_unknown_names(self, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="adapter") as caught:
            resolve_adapter(name)
        assert "\n" not in str(caught.value)


def test_without_peft(
    make_adapter: MakeAdapter, load: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r'pip install "ragcache\[lora\]"'):
        load(adapter)
