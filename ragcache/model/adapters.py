"""LoRA adapters: fine-tuning kept apart from a model, merged into its weights when it is loaded.

A merged adapter costs nothing afterwards, neither in a prefill nor when keys and values are restored: the layers are
plain linear layers again. States are those of the adapted model, and its fingerprint holds the adapter's digest.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from ragcache.errors import ModelError, UnsupportedModelError
from ragcache.model.resolve import ADAPTER_CONFIG, read_json_object

INSTALL = 'pip install "ragcache[lora]"'

# What of an adapter_config.json may be set. Anything else that is set is refused, since it may change what is computed
# in a way that merging does not keep, or read further files.
MERGED_FIELDS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)

REFUSED_FIELDS = {
    "alora_invocation_tokens": "it acts only behind certain tokens, which weights cannot express",
    "layer_replication": "it gives the model other layers",
    "trainable_token_indices": "it changes single tokens of the vocabulary",
}

PROMPT_TYPES = frozenset(
    {"ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"}
)

PLAIN_INITIALISATIONS = (True, False, "eva", "gaussian", "orthogonal")
"""Those that leave the base model's weights as they are; the others store the adapter relative to changed ones."""

MERGE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest relative error of the merged model's logits; each weight is rounded to the model's precision again."""

PROBE_TOKENS = 16

FAULTS = (SafetensorError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What peft may raise over an adapter that is damaged or was made for a model that is built otherwise."""


def check_adapter(folder: Path) -> None:
    """Refuse what shows before the model's weights are read.

    Args:
        folder: of the adapter (`ragcache.model.resolve.resolve_adapter`).

    Raises:
        ModelError: peft is not installed.
        UnsupportedModelError: it is no LoRA adapter, or does more than to add to weights.
    """
    if fault := _fault(read_json_object(folder / ADAPTER_CONFIG), _peft().LoraConfig().to_dict()):
        raise UnsupportedModelError(f"the adapter in {folder} cannot be used: {fault}")


def merge_adapter(module: PreTrainedModel, folder: Path, device: torch.device) -> PreTrainedModel:
    """Merge an adapter that `check_adapter` has passed into a model's weights.

    Args:
        module: the base model, changed in place.
        folder: of the adapter.
        device: where the model is.

    Returns:
        The adapted model, without any module of peft.

    Raises:
        UnsupportedModelError: the adapter cannot be merged, was made for another model, or is damaged.
    """
    peft = _peft()
    if getattr(module, "is_quantized", False):
        raise UnsupportedModelError(
            f"the adapter in {folder} cannot be merged into quantised weights without rounding them again; "
            "use the base model in bfloat16, float16 or float32"
        )
    try:
        # Peft warns of what is an error here.
        with warnings.catch_warnings(action="ignore"):
            config = peft.PeftConfig.from_pretrained(str(folder))
            config.inference_mode = True
            adapted = peft.PeftModel(module, config)
            loaded = adapted.load_adapter(str(folder), "default", torch_device=str(device))
            strange = sorted(loaded.missing_keys) + sorted(loaded.unexpected_keys)
            if strange:
                raise ValueError(f"{strange[0]!r} is in only one of the two")
            before = _logits(adapted.eval())
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
            after = _logits(merged.eval())
    except FAULTS as error:
        raise UnsupportedModelError(
            f"the adapter in {folder} does not fit the model, or is damaged: {_reason(error)}; "
            f"it was made for {_base_model(folder)}"
        ) from error
    error_of_merging = float((after - before).norm() / before.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if not error_of_merging <= MERGE_TOLERANCE[merged.dtype]:
        raise UnsupportedModelError(
            f"the adapter in {folder} cannot be merged: logits differ by {error_of_merging:.1e} afterwards"
        )
    return merged


def _peft() -> Any:
    """The module `peft`, an optional dependency."""
    try:
        return import_module("peft")
    except ImportError as error:
        raise ModelError(f"adapters need the package peft, which cannot be imported: {error}; {INSTALL}") from error


def _fault(config: dict[str, Any], defaults: dict[str, Any]) -> str | None:
    """Why an adapter of this configuration is not LoRA, or does more than to add to weights."""
    kind = config.get("peft_type")
    if str(kind) in PROMPT_TYPES:
        return f"{kind} adds tokens, or keys and values, to the prompt; only LoRA adapters can be merged"
    if kind != "LORA":
        return f"it is of type {kind}, and only LoRA adapters can be merged"
    for name, reason in REFUSED_FIELDS.items():
        if config.get(name):
            return f"{reason} ({name})"
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in PLAIN_INITIALISATIONS:
        return (
            f"init_lora_weights {initialisation!r} changes the base model's weights; save the adapter with peft's "
            "path_initial_model_for_weight_conversion"
        )
    unknown = (name for name in config.keys() - MERGED_FIELDS if config[name] and config[name] != defaults.get(name))
    if name := min(unknown, default=""):
        return f"{name} is set, which is not supported"
    return None


@torch.inference_mode()
def _logits(model: Any) -> Tensor:
    """Logits of a few tokens, `[tokens, vocabulary]` in float32."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    token_ids = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    logits: Tensor = model(input_ids=token_ids.to(model.device), use_cache=False).logits[0].float()
    return logits


def _base_model(folder: Path) -> str:
    return repr(read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "a model it does not name")


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # torch puts the reason behind a line that says only that there is one.
    return next((line for line in lines if "size mismatch" in line), lines[0])
