"""KV restored from captured hidden states equal those of a plain transformers prefill, wherever they are put."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ragcache.model.capture import capture_states, prefill
from ragcache.model.certify import relative_error
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from tests.conftest import FAMILIES

TEXT = """The with statement is used to wrap the execution of a block with methods defined by a context manager. This
allows common try, except, finally usage patterns to be encapsulated for convenient reuse. The execution of the with
statement with one item proceeds as follows: the context expression is evaluated to obtain a context manager."""


def reference_kv(model: LanguageModel, token_ids: list[int], offset: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a transformers prefill whose positions start at `offset`."""
    positions = torch.arange(offset, offset + len(token_ids))[None]
    with torch.inference_mode():
        output = model.module(input_ids=torch.tensor([token_ids]), position_ids=positions, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in output.cache.layers]


def captured(model: LanguageModel, prefix: KVCache, chunks: list[list[int]]) -> list[Tensor]:
    """Hidden states of each layer."""
    hidden: list[Tensor] = []
    capture_states(model, prefix, chunks, lambda _, states: hidden.append(states.clone()))
    return hidden


def restored_kv(model: LanguageModel, prefix: list[int], chunk: list[int], start: int) -> list[tuple[Tensor, Tensor]]:
    """The chunk captured after the prefix, restored at position `start`."""
    hidden = captured(model, prefill(model, prefix), [chunk])
    with torch.inference_mode():
        hidden[0] = model.decoder.first_layer_input(torch.tensor(chunk))
        tables = model.decoder.rotary.tables(torch.arange(start, start + len(chunk)))
        cache = model.new_cache(len(chunk))
        for layer in model.decoder.layers:
            layer.restore(hidden[layer.index], tables, cache.keys[layer.index], cache.values[layer.index])
    return list(zip(cache.keys, cache.values, strict=True))


def check_agreement(model: LanguageModel, shift: int) -> None:
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    prefix, chunk = ids[:12], ids[12:60]
    restored = restored_kv(model, prefix, chunk, len(prefix) + shift)
    # The reference's prefix moves along: what the chunk attends to stays as far away as it was.
    for (keys, values), (their_keys, their_values) in zip(
        restored, reference_kv(model, prefix + chunk, shift), strict=True
    ):
        assert relative_error(keys, their_keys[:, -len(chunk) :]) < 1e-4
        assert relative_error(values, their_values[:, -len(chunk) :]) < 1e-4


@pytest.mark.parametrize("shift", [0, 1, 700, 3000])
def test_smollm2(smollm: LanguageModel, shift: int) -> None:
    check_agreement(smollm, shift)


@pytest.mark.parametrize("shift", [0, 1, 2000])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mistral-window"])
def test_families(tiny_model: Callable[[str], LanguageModel], family: str, shift: int) -> None:
    check_agreement(tiny_model(family), shift)


@pytest.mark.parametrize("shift", [0, 700])
def test_sliding_window(tiny_model: Callable[[str], LanguageModel], shift: int) -> None:
    """The reference keeps only the newest tokens of a windowed layer; those must agree."""
    model = tiny_model("mistral-window")
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    prefix, chunk = ids[:10], ids[10:70]
    restored = restored_kv(model, prefix, chunk, len(prefix) + shift)
    for (keys, values), (their_keys, their_values) in zip(
        restored, reference_kv(model, prefix + chunk, shift), strict=True
    ):
        kept = their_keys.shape[1]
        assert kept == 47
        assert relative_error(keys[:, -kept:], their_keys) < 1e-4
        assert relative_error(values[:, -kept:], their_values) < 1e-4


def test_a_chunk_captured_in_company_is_captured_as_alone(smollm: LanguageModel) -> None:
    """Packing several chunks into one forward pass lets none of them see another."""
    ids = smollm.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    prefix = prefill(smollm, ids[:8])
    chunks = [ids[8:30], ids[30:37], ids[20:60]]
    together = captured(smollm, prefix, chunks)
    start = 0
    for chunk in chunks:
        for packed, single in zip(together, captured(smollm, prefix, [chunk]), strict=True):
            assert relative_error(packed[start : start + len(chunk)], single) < 1e-4
        start += len(chunk)


def test_a_capture_does_not_see_a_forward_of_someone_else(smollm: LanguageModel) -> None:
    """Hooks stay installed; what they hand over is decided by each call's own batch."""
    seen: list[int] = []
    ids = smollm.tokenizer(TEXT, add_special_tokens=False)["input_ids"][:16]

    def receive(layer: int, hidden: Tensor) -> None:
        seen.append(hidden.shape[0])
        if layer == 3:
            # A query that runs in the middle of a capture.
            prefill(smollm, ids[:5])

    capture_states(smollm, smollm.new_cache(0), [ids], receive)
    assert seen == [16] * len(smollm.decoder.layers)
