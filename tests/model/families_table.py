"""What is exact for which family of models, measured; `python -m tests.model.families_table` writes docs/models.md."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ragcache.errors import UnsupportedModelError
from ragcache.model.capture import capture_states, prefill
from ragcache.model.certify import own_attention, reference_kv, relative_error
from ragcache.model.forward import Segment, forward
from ragcache.model.gguf import convert
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.model.resolve import resolve
from ragcache.settings import load_settings
from tests.conftest import save_random_model, save_tiny_model
from tests.model.families import REFUSED_FAMILIES, UNCERTIFIED_FAMILIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

EXACT = 1e-4
"""Largest relative error in float32 that is rounding."""

Chunks = list[list[int]]

PREFIX = list(range(500, 512))
CHUNKS: Chunks = [list(range(1000, 1060)), list(range(2000, 2007)), list(range(3000, 3031))]
QUESTION = list(range(4000, 4009))
SHIFT = 1700

TITLES = {
    "llama": "Llama",
    "llama3-rope": "Llama 3.1 and later (`llama3` scaling)",
    "yarn-rope": "Llama with YaRN",
    "llama-biases": "Llama with biases",
    "llama-multi-head": "Llama without grouped queries",
    "qwen2": "Qwen 2, 2.5",
    "qwen2-window": "Qwen 2 with windows",
    "qwen3": "Qwen 3",
    "qwen3-moe": "Qwen 3 MoE",
    "mistral": "Mistral",
    "mistral-window": "Mistral with windows",
    "mixtral": "Mixtral",
    "phi": "Phi 1, 1.5, 2",
    "phi3": "Phi 3 (4k), Phi 4",
    "phi3-window": "Phi 3 with windows",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma3-images": "Gemma 3 with images (text only)",
    "gpt-neox": "GPT-NeoX, Pythia",
    "gpt-neox-serial": "GPT-NeoX, attention before MLP",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM 3",
    "granite": "Granite",
    "cohere": "Cohere (Command R)",
    "cohere-key-norm": "Cohere (Command R+)",
    "glm": "GLM",
    "glm4": "GLM 4 (0414)",
    "helium": "Helium",
    "ernie4.5": "Ernie 4.5",
    "exaone4": "EXAONE 4",
    "cohere2": "Cohere 2 (Command R7B)",
}

REFUSED_TITLES = {
    "dynamic-rope": "any with `dynamic` RoPE",
    "phi3-longrope": "any with `longrope`, such as Phi 3 128k",
    "phi-key-norm": "Phi with `qk_layernorm`",
    "olmo-clipped": "OLMo with `clip_qkv`",
    "embedding-gemma": "EmbeddingGemma",
    "gpt-oss": "gpt-oss",
    "llama4": "Llama 4",
    "deepseek-v2": "DeepSeek V2",
    "deepseek-v3": "DeepSeek V3",
    "mamba": "Mamba",
    "jamba": "Jamba",
    "zamba2": "Zamba 2",
    "bamba": "Bamba",
    "falcon-h1": "Falcon H1",
    "recurrent-gemma": "RecurrentGemma",
    "qwen3-next": "Qwen 3 Next",
    "gpt2": "GPT-2",
    "opt": "OPT",
    "bloom": "BLOOM",
    "bert": "BERT",
    "falcon": "Falcon",
    "t5": "T5",
    "stablelm": "StableLM",
}

TEXT = """# Models

What is here is measured by the tests on small random models in float32, and again on a user's own model whenever it is
loaded (`ragcache.model.certify`): a model whose restored keys and values differ from a prefill's is refused. Families
that are built like one of these work as well. This file is written by `python -m tests.model.families_table`.

"Yes" is agreement with transformers' own prefill to within rounding (a relative error below {exact}); otherwise a cell
holds the largest relative error, rounded up to a power of ten.

- *Own position*: keys and values of a chunk, restored where it was captured.
- *Shifted*: restored {shift} tokens further on, against a prefill of which everything stands that much further on.
- *Ragged batch*: chunks of different lengths captured in one pass, each restored behind the prefix, against a prefill
  of prefix and chunk.
- *Sliding tail*: logits of a question behind a chunk longer than the sliding windows, and of a decoding step after it,
  against those of one prefill of all of it.

## Supported

| Family | Own position | Shifted | Ragged batch | Sliding tail |
|---|---|---|---|---|
{supported}

## Refused

Before weights are read, where the architecture shows it.

| Family | Reason |
|---|---|
{refused}
"""


@dataclass(frozen=True)
class Measured:
    """Largest relative errors.

    Attributes:
        own_position: of keys and values restored where they were captured.
        shifted: of keys and values restored elsewhere.
        ragged: of keys and values of chunks captured in one pass.
        sliding_tail: of logits after a chunk longer than the windows; `None` without windows.
    """

    own_position: float
    shifted: float
    ragged: float
    sliding_tail: float | None


def measure(model: LanguageModel) -> Measured:
    """Compare restored KV of a model with transformers' own prefills."""
    longest = CHUNKS[0]
    alone = capture(model, [longest])
    together = capture(model, CHUNKS)
    ends = [sum(map(len, CHUNKS[: index + 1])) for index in range(len(CHUNKS))]
    ragged = [
        kv_error(model, chunk, [hidden[end - len(chunk) : end] for hidden in together], 0)
        for chunk, end in zip(CHUNKS, ends, strict=True)
    ]
    return Measured(
        own_position=kv_error(model, longest, alone, 0),
        shifted=kv_error(model, longest, alone, SHIFT),
        ragged=max(ragged),
        sliding_tail=tail_error(model, longest, alone) if any(it.window for it in model.decoder.layers) else None,
    )


def capture(model: LanguageModel, chunks: Chunks) -> list[Tensor]:
    """Hidden states of each layer."""
    hidden: list[Tensor] = []
    capture_states(model, prefill(model, PREFIX), chunks, lambda _, states: hidden.append(states.clone()))
    return hidden


@torch.inference_mode()
def restore(model: LanguageModel, hidden: list[Tensor], start: int, cache: KVCache) -> None:
    """Write KV of a chunk behind what a cache holds, rotated to positions from `start` on."""
    span = slice(cache.length, cache.length + len(hidden[0]))
    tables = model.decoder.tables(torch.arange(start, start + len(hidden[0])))
    for i, layer in enumerate(model.decoder.layers):
        layer.restore(hidden[i], tables[i], cache.keys[i][:, span], cache.values[i][:, span])
    cache.length = span.stop


def kv_error(model: LanguageModel, chunk: list[int], hidden: list[Tensor], shift: int) -> float:
    """Largest error of any layer's keys or values."""
    cache = model.new_cache(len(chunk))
    restore(model, hidden, len(PREFIX) + shift, cache)
    errors = []
    for i, (keys, values) in enumerate(reference_kv(model, PREFIX + chunk, shift)):
        # transformers keeps only the newest tokens of a layer with a window, and the prefix is not compared.
        kept = min(len(chunk), keys.shape[1])
        errors += [
            relative_error(ours[:, -kept:], theirs[:, -kept:])
            for ours, theirs in ((cache.keys[i], keys), (cache.values[i], values))
        ]
    return max(errors)


def tail_error(model: LanguageModel, chunk: list[int], hidden: list[Tensor]) -> float:
    """Largest error of the logits of a question behind a restored chunk, and of a step after it."""
    before = PREFIX + chunk
    cache = prefill(model, PREFIX, len(before) + len(QUESTION) + 1)
    restore(model, hidden, len(PREFIX), cache)
    errors = []
    for new, known in ((QUESTION, before), ([7], before + QUESTION)):
        with torch.inference_mode(), own_attention(model):
            expected = model.module(model.tensor(known + new)[None], logits_to_keep=1).logits[0, -1]
        errors.append(relative_error(forward(model, [Segment(model.tensor(new), cache)])[0], expected))
    return max(errors)


def cell(error: float | None) -> str:
    """An error as the table gives it."""
    if error is None:
        return "no window"
    return "yes" if error < EXACT else f"1e{math.ceil(math.log10(error)):+03d}"


def refusal(config: PreTrainedConfig, cache_folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Why a model is refused; with a tokenizer, once there are weights of it."""
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is None:
            config.save_pretrained(folder)
            (Path(folder) / "model.safetensors").touch()
        else:
            save_random_model(config, Path(folder), tokenizer)
        try:
            load_language_model(folder, dtype="float32", device="cpu", cache_folder=cache_folder)
        except UnsupportedModelError as error:
            return str(error).split(" is not supported: ")[-1].split("; supported are")[0]
    raise ValueError(f"model type {config.model_type!r} is not refused")


def document(load: Callable[[str], LanguageModel], cache_folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """The content of docs/models.md.

    Args:
        load: gives the tiny model of a family.
        cache_folder: of ragcache.
        tokenizer: for models that must be run to be refused.
    """
    supported = []
    for family, title in TITLES.items():
        measured = measure(load(family))
        errors = (measured.own_position, measured.shifted, measured.ragged, measured.sliding_tail)
        supported.append(" | ".join([f"| {title}", *map(cell, errors)]) + " |")
    refused = []
    for family, title in REFUSED_TITLES.items():
        unread = family in REFUSED_FAMILIES
        config = (REFUSED_FAMILIES if unread else UNCERTIFIED_FAMILIES)[family][0]()
        refused.append(f"| {title} | {refusal(config, cache_folder, None if unread else tokenizer)} |")
    return TEXT.format(exact=f"{EXACT:.0e}", shift=SHIFT, supported="\n".join(supported), refused="\n".join(refused))


def main() -> None:
    """Write docs/models.md."""
    cache_folder = load_settings().cache_folder
    tokenizer = AutoTokenizer.from_pretrained(convert(resolve("smollm2-135m"), "float32", cache_folder))

    def load(family: str) -> LanguageModel:
        with tempfile.TemporaryDirectory() as folder:
            save_tiny_model(family, Path(folder), tokenizer)
            return load_language_model(folder, dtype="float32", device="cpu", cache_folder=cache_folder)

    DOCUMENT.write_text(document(load, cache_folder, tokenizer))


if __name__ == "__main__":
    main()
