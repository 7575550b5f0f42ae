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
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from ragcache import Document, RagCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.retriever.embedding import Embedder
from ragcache.settings import Settings, load_settings
from ragcache.states.store import StateStore
from tests.model.families import FAMILIES


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


def save_random_model(
    config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> None:
    """Write a model of random weights to a folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        # The default start gives biases of 0 and norms of 1, which would hide that they are left out.
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_tiny_model(family: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a tiny random model of a family to a folder."""
    save_random_model(FAMILIES[family](), folder, tokenizer, seed=len(family))


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
    """Open a store of this test with a tiny model; settings as given, else raw states of one encoding, best first."""

    def open_store(path: Path | None = None, family: str = "llama", **settings: Any) -> RagCache:
        model = tiny_model(family)
        given: dict[str, Any] = {
            "model": model.name,
            "dtype": "float32",
            "codec": "raw",
            "chunk_tokens": 64,
            "max_tokens": 8,
        }
        path = path or tmp_path / "store"
        if not StateStore.exists(path):
            given |= {"encodings": ("alone",), "order": "score"}
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
