"""Which model stored states belong to: by content, never by name.

Peers that key states by model name serve one model's states to another after a fine-tune is saved over it or a
repository moves on. Here two models are the same only when weights, tokenizer, configuration and precision are.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ragcache.model.digest import file_digest
from ragcache.model.resolve import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json_object, weight_files

STATE_FORMAT = 1
"""Raised when the meaning of stored states changes: which tensor is taken, in which order."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")

# Bookkeeping that does not change what the model computes. Everything else in config.json counts: a field that
# this code has never heard of may well scale a residual.
IRRELEVANT_CONFIG = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)

# Of adapter_config.json: where the adapter comes from, and what only counts in training.
IRRELEVANT_ADAPTER_CONFIG = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "revision",
        "task_type",
    }
)

UNORDERED_ADAPTER_CONFIG = ("exclude_modules", "modules_to_save", "target_modules")
"""Lists that peft writes from sets, in an order that changes from process to process."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model as far as its states are concerned.

    Attributes:
        config: sha256 over the fields of config.json that can matter (RoPE parameters among them).
        weights: sha256 over the digests of all weight files.
        tokenizer: sha256 over the digests of the tokenizer's files.
        dtype: precision the model computes in.
        code: sha256 over the digests of the Python files that came with the model; empty when transformers' own
            code runs it.
        adapter: sha256 over configuration and weights of the adapter merged into the model; empty without one.
        state_format: `STATE_FORMAT` of the code that encoded the states.
    """

    config: str
    weights: str
    tokenizer: str
    dtype: str
    code: str = ""
    adapter: str = ""
    state_format: int = STATE_FORMAT

    @property
    def digest(self) -> str:
        """sha256 over all parts, 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON; equal fingerprints give equal text."""
        parts = asdict(self)
        # Stores from before there were adapters keep their fingerprint, and with it the keys of all their states.
        if not self.adapter:
            del parts["adapter"]
        return json.dumps(parts, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the parts in which two fingerprints differ."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]


def code_files(module: PreTrainedModel) -> list[Path]:
    """The Python files of a model that brings its own code; none where the class is transformers' own."""
    if type(module).__module__.partition(".")[0] == "transformers":
        return []
    return sorted(Path(inspect.getfile(type(module))).parent.glob("*.py"))


def model_fingerprint(
    path: Path, dtype: str, cache_folder: Path, code: Sequence[Path] = (), adapter: Path | None = None
) -> Fingerprint:
    """Fingerprint of a model computing in `dtype`.

    Args:
        path: a model folder, or the GGUF file itself rather than its conversion. A GGUF file holds configuration,
            weights and tokenizer, so its digest stands for all three and does not depend on who converted it.
        dtype: precision the model computes in.
        cache_folder: where digests of files are remembered, so that only the first load reads every byte.
        code: Python files that came with the model and run it.
        adapter: folder of the adapter that is merged into the model.
    """
    adapted = _adapter_digest(adapter, cache_folder) if adapter else ""
    if path.is_file():
        digest = file_digest(path, cache_folder)
        return Fingerprint(config=digest, weights=digest, tokenizer=digest, dtype=dtype, adapter=adapted)
    tokenizer = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
    return Fingerprint(
        config=_config_digest(read_json_object(path / "config.json"), IRRELEVANT_CONFIG),
        weights=_combined(weight_files(path), cache_folder),
        tokenizer=_combined(tokenizer, cache_folder),
        dtype=dtype,
        code=_combined(code, cache_folder) if code else "",
        adapter=adapted,
    )


def _adapter_digest(folder: Path, cache_folder: Path) -> str:
    fields = read_json_object(folder / ADAPTER_CONFIG)
    sets = {key: sorted(fields[key], key=str) for key in UNORDERED_ADAPTER_CONFIG if isinstance(fields.get(key), list)}
    config = _config_digest(fields | sets, IRRELEVANT_ADAPTER_CONFIG)
    weights = file_digest(folder / ADAPTER_WEIGHTS, cache_folder)
    return hashlib.sha256(f"{config}\n{weights}".encode()).hexdigest()


def _config_digest(fields: dict[str, Any], irrelevant: frozenset[str]) -> str:
    relevant = {key: value for key, value in fields.items() if key not in irrelevant}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _combined(files: Sequence[Path], cache_folder: Path) -> str:
    digests = "\n".join(f"{file.name} {file_digest(file, cache_folder)}" for file in files)
    return hashlib.sha256(digests.encode()).hexdigest()
