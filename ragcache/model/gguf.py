"""GGUF files, de-quantised once and kept as safetensors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ragcache.errors import UnsupportedModelError
from ragcache.model.digest import file_digest


def converted_folder(path: Path, dtype: str, cache_folder: Path) -> Path:
    """Where the conversion of a GGUF file to safetensors in `dtype` is kept; it may not exist yet."""
    return cache_folder / "models" / f"{path.stem}-{file_digest(path, cache_folder)[:16]}-{dtype}"


def convert(path: Path, dtype: str, cache_folder: Path) -> Path:
    """De-quantise a GGUF file into a model folder, or find the one from last time.

    De-quantising takes seconds for a small model and minutes for a large one, loading the result does not. The
    folder appears whole or not at all.

    Raises:
        UnsupportedModelError: the file is damaged or of an architecture that transformers cannot read from GGUF.
    """
    folder = converted_folder(path, dtype, cache_folder)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        _write_folder(path, dtype, temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process finished the same conversion first; its result is the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_folder(path: Path, dtype: str, folder: Path) -> None:
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
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
