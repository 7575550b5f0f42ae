"""What restores on a device is held against plain torch before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from ragcache.errors import CertificationError
from ragcache.model.language_model import LanguageModel
from ragcache.restore.backend import Implementation
from ragcache.restore.proof import prove
from ragcache.restore.twins import Twins
from ragcache.settings import CodecName


class Shifted(Twins):
    """Writes the first token's keys, restored from one form, where the second one's belong."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("restore_") or name != super().__getattribute__("_name"):
            return found

        def shifted(*arguments: Any) -> None:
            found(*arguments)
            keys: Tensor = arguments[-2]
            keys[:, -1] = keys[:, -2]

        return shifted


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "olmo2", "cohere", "smollm3", "gemma3"])
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_what_agrees_passes(tiny_model: Callable[[str], LanguageModel], family: str, codec: CodecName) -> None:
    prove(tiny_model(family), Twins(), codec)


@pytest.mark.parametrize(("name", "form"), [("restore_hidden", "hidden"), ("restore_pre_rope_kv", "pre_rope_kv")])
def test_what_differs_is_refused(tiny_model: Callable[[str], LanguageModel], name: str, form: str) -> None:
    wrong: Implementation = Shifted(name)
    with pytest.raises(CertificationError, match=f"keys restored from {form} in layer 0"):
        prove(tiny_model("llama"), wrong, "int8")
