"""KV restored from captured hidden states equal those of a plain transformers prefill, wherever they are put."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ragcache.errors import UnsupportedModelError
from ragcache.model.capture import capture_states, prefill
from ragcache.model.certify import reference_kv, relative_error
from ragcache.model.forward import Segment, forward, run_layers
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from tests.model.families import FAMILIES

TEXT = """The with statement is used to wrap the execution of a block with methods defined by a context manager. This
allows common try, except, finally usage patterns to be encapsulated for convenient reuse. The execution of the with
statement with one item proceeds as follows: the context expression is evaluated to obtain a context manager."""


def captured(model: LanguageModel, prefix: KVCache, chunks: list[list[int]]) -> list[Tensor]:
    """Hidden states of each layer."""
    hidden: list[Tensor] = []
    capture_states(model, prefix, chunks, lambda _, states: hidden.append(states.clone()))
    return hidden


def restored_kv(model: LanguageModel, prefix: list[int], chunk: list[int], start: int) -> list[tuple[Tensor, Tensor]]:
    """The chunk captured after the prefix, restored at position `start`."""
    hidden = captured(model, prefill(model, prefix), [chunk])
    with torch.inference_mode():
        tables = model.decoder.tables(torch.arange(start, start + len(chunk)))
        cache = model.new_cache(len(chunk))
        for layer in model.decoder.layers:
            layer.restore(hidden[layer.index], tables[layer.index], cache.keys[layer.index], cache.values[layer.index])
    return list(zip(cache.keys, cache.values, strict=True))


def check_agreement(model: LanguageModel, shift: int) -> None:
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    prefix, chunk = ids[:12], ids[12:72]
    restored = restored_kv(model, prefix, chunk, len(prefix) + shift)
    # The reference's prefix moves along: what the chunk attends to stays as far away as it was.
    reference = reference_kv(model, prefix + chunk, shift)
    for layer, ours, theirs in zip(model.decoder.layers, restored, reference, strict=True):
        # The reference keeps only the newest tokens of a layer with a window.
        kept = len(chunk) if layer.window is None else layer.window - 1
        assert theirs[0].shape[1] == (len(ids[:72]) if layer.window is None else kept)
        for our_part, their_part in zip(ours, theirs, strict=True):
            assert relative_error(our_part[:, -kept:], their_part[:, -kept:]) < 1e-4


@pytest.mark.parametrize("shift", [0, 1, 700, 3000])
def test_smollm2(smollm: LanguageModel, shift: int) -> None:
    check_agreement(smollm, shift)


@pytest.mark.parametrize("shift", [0, 1, 2000])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tiny_model: Callable[[str], LanguageModel], family: str, shift: int) -> None:
    check_agreement(tiny_model(family), shift)


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


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma", "granite", "olmo2", "gpt-neox", "gemma3"])
def test_the_input_of_the_first_layers_alone(
    tiny_model: Callable[[str], LanguageModel], family: str, layers: int
) -> None:
    """What a pass that ends early hands over equals what a whole one does, multipliers and norms included."""
    model = tiny_model(family)
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    prefix = prefill(model, ids[:8])
    whole = captured(model, prefix, [ids[8:30], ids[30:37]])
    first: list[Tensor] = []
    capture_states(model, prefix, [ids[8:30], ids[30:37]], lambda _, it: first.append(it.clone()), layers=layers)
    assert len(first) == layers
    for part, full in zip(first, whole[:layers], strict=True):
        torch.testing.assert_close(part, full, rtol=0, atol=0)


def test_a_pass_that_ends_early_leaves_the_caches_as_long_as_they_were(
    tiny_model: Callable[[str], LanguageModel],
) -> None:
    """And what follows is computed as if it had not been."""
    model = tiny_model("llama")
    ids = torch.tensor(model.tokenizer(TEXT, add_special_tokens=False)["input_ids"][:40])
    cache, untouched = prefill(model, ids[:20].tolist(), 40), prefill(model, ids[:20].tolist(), 40)
    seen: list[int] = []
    run_layers(model, [Segment(ids[30:], cache)], lambda layer, hidden: seen.append(layer), layers=2)
    assert seen == [0, 1]
    assert cache.length == 20
    after = forward(model, [Segment(ids[20:], cache)])
    torch.testing.assert_close(after, forward(model, [Segment(ids[20:], untouched)]), rtol=0, atol=0)


def test_a_pass_that_does_not_end_is_no_pass(tiny_model: Callable[[str], LanguageModel]) -> None:
    """Without the hooks nothing would be captured, and nobody would know."""
    model = tiny_model("llama")
    bare = replace(model, module=copy.deepcopy(model.module))
    for module in bare.module.modules():
        module._forward_pre_hooks.clear()
    with pytest.raises(UnsupportedModelError, match="keyword arguments"):
        run_layers(bare, [Segment(torch.arange(5), bare.new_cache(5))], lambda layer, hidden: None, layers=1)
