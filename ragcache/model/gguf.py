"""GGUF files, de-quantised once and kept as safetensors."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragcache.errors import UnsupportedModelError
from ragcache.model.digest import cache_folder_in_use, file_digest

MANIFEST = "conversion.json"
"""File with the digest of every other file of a conversion."""


def find_conversion(path: Path, dtype: str, cache_folder: Path) -> Path | None:
    """The folder with a GGUF file's conversion to safetensors in `dtype`, if there is one and it is unchanged.

    States are bound to the GGUF file, so what is loaded in its place must be what was made from it.
    """
    folder = _folder(path, dtype, cache_folder)
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        whole = all(file_digest(folder / name, cache_folder) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return None
    return folder if whole else None


def _folder(path: Path, dtype: str, cache_folder: Path) -> Path:
    return cache_folder / "models" / f"{path.stem}-{file_digest(path, cache_folder)[:16]}-{dtype}"


def convert(path: Path, dtype: str, cache_folder: Path) -> Path:
    """De-quantise a GGUF file into a model folder, or find the one from last time.

    De-quantising takes seconds for a small model and minutes for a large one, loading the result does not. The
    folder appears whole or not at all; one that was damaged since is made anew.

    Raises:
        UnsupportedModelError: the file is damaged or of an architecture that transformers cannot read from GGUF.
        SettingsError: the cache folder cannot be written to.
    """
    if found := find_conversion(path, dtype, cache_folder):
        return found
    folder = _folder(path, dtype, cache_folder)
    with cache_folder_in_use(cache_folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        model, tokenizer = _read(path, dtype)
        with cache_folder_in_use(cache_folder):
            _write(model, tokenizer, temporary)
            temporary.chmod(0o755)
            # Another process may have finished the same conversion meanwhile.
            if not find_conversion(path, dtype, cache_folder):
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _read(path: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedModelError(f"{path} cannot be read as a GGUF model: {reason}") from error
    # The tensors are plain now; left in place, this entry would have the next load look for the GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    digests = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as content:
            digests[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2))
