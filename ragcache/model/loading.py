"""From a model's name to a certified `LanguageModel`."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ragcache.errors import ModelError, UnsupportedModelError
from ragcache.model.adapters import check_adapter, merge_adapter
from ragcache.model.capture import install_hooks
from ragcache.model.certify import certify
from ragcache.model.families import SUPPORTED_FAMILIES, check_config, find_decoder
from ragcache.model.fingerprint import code_files, model_fingerprint
from ragcache.model.gguf import convert, find_conversion
from ragcache.model.language_model import LanguageModel
from ragcache.model.packed_attention import ATTENTION_NAME
from ragcache.model.quantisation import prepare_quantised, quantisation_method
from ragcache.model.quiet import no_progress_bars
from ragcache.model.resolve import resolve, resolve_adapter

FAMILY_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What a family that is built otherwise, or configured without sense, may raise anywhere in its own code."""

OnStage = Callable[[str], None]
"""Called with a few words each time loading goes on to something that takes a while."""


def load_language_model(
    name: str,
    *,
    dtype: str,
    device: str,
    cache_folder: Path,
    adapter: str = "",
    trust_remote_code: bool = False,
    on_stage: OnStage = lambda _: None,
) -> LanguageModel:
    """Load a causal language model and prove that its KV can be restored from hidden states.

    Args:
        name: hub id, local folder, `.gguf` file or alias (see `ragcache.model.resolve`).
        dtype: `bfloat16`, `float32` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        cache_folder: where converted GGUF files and digests are kept.
        adapter: hub id or local folder of a LoRA adapter that is merged into the weights; empty for none.
        trust_remote_code: run Python code that comes with the model.
        on_stage: told what is being done.

    Raises:
        ModelNotFoundError: no model, or no adapter, of that name.
        ModelError: no such device here, or the package that merges adapters is missing.
        UnsupportedModelError: architecture, RoPE type, weights, file format or adapter cannot be used.
        CertificationError: restored KV differ from a prefill's.
    """
    on_stage(f"finding {name}")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    torch_device = choose_device(device)
    path = folder = resolve(name, trust_remote_code=trust_remote_code)
    adapter_folder = resolve_adapter(adapter) if adapter else None
    if adapter_folder:
        check_adapter(adapter_folder)
    if path.is_file():
        if find_conversion(path, dtype, cache_folder) is None:
            on_stage(f"de-quantising {path.name} (once)")
        folder = convert(path, dtype, cache_folder)

    config = _check_architecture(folder, trust_remote_code)
    on_stage("reading weights")
    module = _load_weights(folder, config, torch_dtype, torch_device, trust_remote_code)
    if adapter_folder:
        on_stage(f"merging {adapter}")
        module = merge_adapter(module, adapter_folder, torch_device).eval().requires_grad_(False)
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
        fingerprint=model_fingerprint(path, dtype, cache_folder, code_files(module), adapter_folder),
        dtype=torch_dtype,
        device=torch_device,
        context_window=int(module.config.get_text_config(decoder=True).max_position_embeddings),
        eos_ids=_eos_ids(module, tokenizer),
    )
    on_stage("certifying restored KV")
    try:
        certify(model)
    except (*FAMILY_FAULTS, ImportError) as error:
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
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ModelError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= present:
            there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(present))])
            raise ModelError(f"device {name!r} is not available on this machine; use --device with one of: {there}")
    return device


def _check_architecture(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Refuse an unsupported family before reading gigabytes of weights: build it without memory and look at it."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        check_config(config)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code)
        find_decoder(skeleton, torch.float32, torch.device("meta"))
    except (*FAMILY_FAULTS, OSError, ImportError) as error:
        raise UnsupportedModelError(
            f"model type {_model_type(folder)!r} in {folder} cannot be loaded as a causal language model: "
            f"{_first_line(error)}; supported are {SUPPORTED_FAMILIES}"
        ) from error
    return config


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    method = quantisation_method(config)
    prepare_quantised(config, device)
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                # Some kinds of quantised weights are laid out for the device they are loaded on.
                device_map={"": device} if method else None,
            )
    except (SafetensorError, *FAMILY_FAULTS, OSError, ImportError) as error:
        quantised = f", quantised with {method}," if method else ""
        raise UnsupportedModelError(
            f"the weights in {folder}{quantised} cannot be loaded: {_first_line(error)}"
        ) from error
    module: PreTrainedModel = loaded[0]
    # transformers fills tensors that are not in the files with random numbers and only warns.
    if missing := sorted(loaded[1]["missing_keys"]):
        raise UnsupportedModelError(f"the weights in {folder} are incomplete: {missing[0]} is missing; get them again")
    computes: torch.dtype = module.get_input_embeddings().weight.dtype  # type: ignore[assignment]  # every embedding has one
    if computes != dtype:
        names = [str(it).removeprefix("torch.") for it in (computes, dtype)]
        raise UnsupportedModelError(
            f"the weights in {folder}, quantised with {method}, compute in {names[0]} and not in {names[1]}; "
            f"use --dtype {names[0]}"
        )
    nn.Module.to(module.eval().requires_grad_(False), device)
    return module


def _eos_ids(module: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    declared = module.generation_config.eos_token_id if module.generation_config else None
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text()).get("model_type", "unknown"))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if isinstance(error, StrictDataclassError):  # The first line only names the validator.
        lines = lines[1:] or lines
    if isinstance(error, LookupError):  # Its message is only what was looked for.
        return " ".join([type(error).__name__, *lines[:1]])
    return lines[0] if lines else type(error).__name__
