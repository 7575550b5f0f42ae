"""Real parts, loaded once: SmolLM2 in fp32, MiniLM, and tiny random models of several families."""

from __future__ import annotations

import os

# Before anything imports the hub's client: tests never wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

from ragcache import Document, RagCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.retriever.embedding import Embedder
from ragcache.settings import Settings, load_settings

TINY: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama3-rope": lambda: LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn-rope": lambda: LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "llama-biases": lambda: LlamaConfig(**TINY, attention_bias=True),
    "llama-multi-head": lambda: LlamaConfig(**TINY | {"num_key_value_heads": 6}),
    "qwen2": lambda: Qwen2Config(**TINY),
    "qwen3": lambda: Qwen3Config(**TINY),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**TINY, sliding_window=48),
    # Partial rotary embedding, projections with biases, attention and MLP side by side.
    "phi": lambda: PhiConfig(**TINY | {"partial_rotary_factor": 0.5}),
    # Embeddings scaled by the square root of their width.
    "gemma": lambda: GemmaConfig(**TINY),
    # Multipliers on embeddings, attention, residuals and logits.
    "granite": lambda: GraniteConfig(
        **TINY, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "mixtral": lambda: MixtralConfig(**TINY, num_local_experts=4, sliding_window=None),
}

REFUSED_FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "interleaved rotation": (lambda: CohereConfig(**TINY, pad_token_id=0), "keys restored in layer 0"),
    "layers without positions": (
        lambda: SmolLM3Config(**TINY, pad_token_id=0, no_rope_layer_interval=2),
        "keys restored in layer 1",
    ),
    "capped scores": (lambda: Gemma2Config(**TINY), "softcap"),
    "rotary positions by layer type": (lambda: Gemma3TextConfig(**TINY), "differ between layers"),
    "fused projections": (lambda: Phi3Config(**TINY), "no k_proj and v_proj"),
    "norm behind the attention": (lambda: Olmo2Config(**TINY), "no k_proj and v_proj behind an input norm"),
    "attention cut off from arguments": (lambda: StableLmConfig(**TINY), "keyword arguments"),
    "code of its own in the way": (lambda: Llama4TextConfig(**TINY), "cannot be run"),
    "dynamic rope": (
        lambda: LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "depends on the length",
    ),
    "state space": (
        lambda: MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4),
        "no decoder layers with rotary positions",
    ),
    "encoder": (
        lambda: BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        "no decoder layers with rotary positions",
    ),
    "absolute positions": (
        lambda: GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2),
        "no decoder layers with rotary positions",
    ),
}


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    """Where converted models are kept; the user's own, so that a second run is quick."""
    return load_settings().cache_folder


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        if name != "cache_folder":
            monkeypatch.delenv(f"RAGCACHE_{name.upper()}", raising=False)


@pytest.fixture(scope="session")
def smollm(cache_folder: Path) -> LanguageModel:
    """SmolLM2-135M-Instruct in fp32."""
    return load_language_model("smollm2-135m", dtype="float32", device="cpu", cache_folder=cache_folder)


@pytest.fixture(scope="session")
def embedder(cache_folder: Path) -> Embedder:
    return Embedder("all-minilm-l6-v2", "cpu", cache_folder)


def save_tiny_model(family: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a tiny random model of a family to a folder."""
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    for name, parameter in model.named_parameters():
        # The default start gives biases of 0 and norms of 1, which would hide that they are left out.
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_folder(smollm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny random models by family, with SmolLM2's tokenizer."""

    @functools.cache
    def build(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save_tiny_model(family, folder, smollm.tokenizer)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[str], Path], cache_folder: Path) -> Callable[[str], LanguageModel]:
    """Tiny random models by family, loaded as a user's model is."""

    @functools.cache
    def load(family: str) -> LanguageModel:
        return load_language_model(str(tiny_folder(family)), dtype="float32", device="cpu", cache_folder=cache_folder)

    return load


@pytest.fixture
def open_tiny(
    tmp_path: Path, tiny_model: Callable[[str], LanguageModel], embedder: Embedder
) -> Callable[..., RagCache]:
    """Open a store of this test with a tiny Llama; settings as given, raw states unless told otherwise."""

    def open_store(path: Path | None = None, **settings: Any) -> RagCache:
        model = tiny_model("llama")
        given = {"model": model.name, "dtype": "float32", "codec": "raw", "chunk_tokens": 64, "max_tokens": 8}
        path = path or tmp_path / "store"
        return RagCache(path, load_settings(path, **given | settings), model, embedder)

    return open_store


@pytest.fixture
def cache(open_tiny: Callable[..., RagCache]) -> RagCache:
    """A store of the documents doc-0 to doc-2."""
    opened = open_tiny()
    opened.index([make_document(number) for number in range(3)])
    return opened


SENTENCES = (
    "The harbour wall was rebuilt in granite after the storm of {year}.",
    "Its lighthouse keeper wrote down every ship that passed, with the hour and the wind.",
    "In winter the ferry runs twice a day, and not at all when the ice comes in.",
    "Children learn to row before they learn to ride a bicycle.",
)


def make_document(number: int, sentences: int = 8) -> Document:
    """A document whose sentences differ from every other document's."""
    text = " ".join(
        f"[{number}.{i}] {SENTENCES[i % len(SENTENCES)].format(year=1800 + number)}" for i in range(sentences)
    )
    return Document(f"doc-{number}", text, f"Harbour {number}", {"number": number})
