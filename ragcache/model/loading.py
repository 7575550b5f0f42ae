"""From a model's name to a certified `LanguageModel`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ragcache.errors import ModelError, UnsupportedModelError
from ragcache.model.attention import SUPPORTED_FAMILIES, find_decoder
from ragcache.model.capture import install_hooks
from ragcache.model.certify import certify
from ragcache.model.fingerprint import code_files, model_fingerprint
from ragcache.model.forward import ATTENTION_NAME
from ragcache.model.gguf import convert, find_conversion
from ragcache.model.language_model import LanguageModel
from ragcache.model.quiet import no_progress_bars
from ragcache.model.resolve import resolve

FAMILY_FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a family that is built otherwise, or configured without sense, may raise anywhere in its own code."""

OnStage = Callable[[str], None]
"""Called with a few words each time loading goes on to something that takes a while."""


def load_language_model(
    name: str,
    *,
    dtype: str,
    device: str,
    cache_folder: Path,
    trust_remote_code: bool = False,
    on_stage: OnStage = lambda _: None,
) -> LanguageModel:
    """Load a causal language model and prove that its KV can be restored from hidden states.

    Args:
        name: hub id, local folder, `.gguf` file or alias (see `ragcache.model.resolve`).
        dtype: `bfloat16`, `float32` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        cache_folder: where converted GGUF files and digests are kept.
        trust_remote_code: run Python code that comes with the model.
        on_stage: told what is being done.

    Raises:
        ModelNotFoundError: nothing of that name.
        UnsupportedModelError: architecture, RoPE type, weights or file format cannot be used.
        CertificationError: restored KV differ from a prefill's.
    """
    on_stage(f"finding {name}")
    path = folder = resolve(name, trust_remote_code=trust_remote_code)
    if path.is_file():
        if find_conversion(path, dtype, cache_folder) is None:
            on_stage(f"de-quantising {path.name} (once)")
        folder = convert(path, dtype, cache_folder)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    torch_device = choose_device(device)

    _check_architecture(folder, trust_remote_code)
    on_stage("reading weights")
    module = _load_weights(folder, torch_dtype, torch_device, trust_remote_code)
    decoder = find_decoder(module, torch_dtype, torch_device)
    install_hooks(decoder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise UnsupportedModelError(f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error
    on_stage("fingerprinting weights")
    model = LanguageModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        decoder=decoder,
        fingerprint=model_fingerprint(path, dtype, cache_folder, code_files(module)),
        dtype=torch_dtype,
        device=torch_device,
        context_window=int(module.config.max_position_embeddings),
        eos_ids=_eos_ids(module, tokenizer),
    )
    on_stage("certifying restored KV")
    try:
        certify(model)
    except FAMILY_FAULTS as error:
        raise UnsupportedModelError(
            f"model type {_model_type(folder)!r} cannot be run: {type(error).__name__}, {_first_line(error)}; "
            f"supported are {SUPPORTED_FAMILIES}"
        ) from error
    return model


def choose_device(name: str) -> torch.device:
    """The device for a setting: `auto` takes CUDA where there is one.

    Raises:
        ModelError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r} is not available on this machine; use --device cpu")
    return device


def _check_architecture(folder: Path, trust_remote_code: bool) -> None:
    """Refuse an unsupported family before reading gigabytes of weights: build it without memory and look at it."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (*FAMILY_FAULTS, OSError, ImportError) as error:
        raise UnsupportedModelError(
            f"model type {_model_type(folder)!r} in {folder} cannot be loaded as a causal language model: "
            f"{_first_line(error)}; supported are {SUPPORTED_FAMILIES}"
        ) from error
    find_decoder(skeleton, torch.float32, torch.device("meta"))


def _load_weights(folder: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except (SafetensorError, ValueError, RuntimeError, OSError, ImportError) as error:
        raise UnsupportedModelError(f"the weights in {folder} cannot be loaded: {_first_line(error)}") from error
    module: PreTrainedModel = loaded[0]
    # transformers fills tensors that are not in the files with random numbers and only warns.
    if missing := sorted(loaded[1]["missing_keys"]):
        raise UnsupportedModelError(f"the weights in {folder} are incomplete: {missing[0]} is missing; get them again")
    nn.Module.to(module.eval().requires_grad_(False), device)
    return module


def _eos_ids(module: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    declared = module.generation_config.eos_token_id if module.generation_config else None
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text()).get("model_type", "unknown"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
