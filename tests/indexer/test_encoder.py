"""States of a chunk in a block are those that a prefill of prefix, context and chunk computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.indexer.contexts import Block, alone, joined
from ragcache.indexer.encoder import StateEncoder
from ragcache.model.capture import capture_states, prefill
from ragcache.model.certify import reference_kv, relative_error
from ragcache.model.language_model import LanguageModel
from ragcache.restore.formats import state_format
from ragcache.settings import StatesName
from ragcache.states.form import Form, StateFormat
from tests.indexer.test_contexts import Words

PREFIX = list(range(300, 309))
TINY = ["llama", "qwen3", "gemma3"]


def random_words(tokens: int, seed: int) -> Words:
    ids = torch.randint(100, 40000, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Words(str(seed), tuple(ids.tolist()))


def encoder_of(model: LanguageModel, states: StatesName) -> StateEncoder:
    return StateEncoder(model, prefill(model, PREFIX), state_format(model, states, "raw"))


@torch.inference_mode()
def kv_at(
    model: LanguageModel, format: StateFormat, layers: dict[int, Tensor], tokens: int, start: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of stored layers at a position, `[kv_heads, tokens, head_dim]` each."""
    tables = model.decoder.tables(torch.arange(start, start + tokens))
    cache = model.new_cache(tokens)
    for index, data in layers.items():
        stored, layer = format.layers[index], model.decoder.layers[index]
        states = torch.empty(len(stored.form.parts), tokens, stored.width)
        format.decode(index, data, states)
        if stored.form is Form.HIDDEN:
            keys, values = layer.project(states[0])
        else:
            keys, values = states.view(2, tokens, layer.kv_heads, layer.head_dim)
        layer.place(keys, values, tables[index], cache.keys[index], cache.values[index])
    return {index: (cache.keys[index], cache.values[index]) for index in layers}


def check(encoder: StateEncoder, blocks: list[Block[Words]]) -> None:
    """Restored where it stood, each chunk has the keys and values of transformers' own prefill."""
    model, encoded = encoder.model, iter(encoder.encode(blocks))
    for block in blocks:
        for index, chunk in enumerate(block.chunks):
            before = [*PREFIX, *joined(block.before(index))]
            tokens = len(chunk.token_ids)
            restored = kv_at(model, encoder.format, next(encoded), tokens, len(before))
            reference = reference_kv(model, [*before, *chunk.token_ids], 0)
            assert list(restored) == encoder.format.stored_layers
            for layer, ours in restored.items():
                # Of a layer with a sliding window transformers keeps no more than the newest tokens.
                kept = min(tokens, (model.decoder.layers[layer].window or tokens + 1) - 1)
                for part, theirs in zip(ours, reference[layer], strict=True):
                    assert relative_error(part[:, -kept:], theirs[:, -kept:]) < 1e-4
    assert next(encoded, None) is None


@pytest.mark.parametrize("states", ["hidden", "pre-rope-kv"])
@pytest.mark.parametrize("family", TINY)
def test_blocks_of_several_chunks_in_one_pass(
    tiny_model: Callable[[str], LanguageModel], family: str, states: StatesName
) -> None:
    """Longer than the sliding window of Gemma 3, with and without a context; what is context here is a chunk there."""
    first, second, third, fourth, fifth = (random_words(tokens, tokens) for tokens in (37, 21, 50, 8, 64))
    check(
        encoder_of(tiny_model(family), states),
        [
            Block((first, second), (third, fourth)),
            alone(second),
            Block((fifth,), (first,)),
            Block((), (fourth, fifth, third)),
        ],
    )


def test_of_a_real_model(smollm: LanguageModel) -> None:
    check(
        encoder_of(smollm, "pre-rope-kv"),
        [Block((random_words(40, 1), random_words(70, 2)), (random_words(30, 3), random_words(20, 4)))],
    )


def test_a_longer_context_costs_more(tiny_model: Callable[[str], LanguageModel]) -> None:
    encoder = encoder_of(tiny_model("llama"), "hidden")
    assert encoder.cost(50, 400) > encoder.cost(50)
    assert encoder.cost(100, 400) > encoder.cost(50, 400)


@pytest.mark.parametrize("states", ["hidden", "pre-rope-kv"])
@pytest.mark.parametrize("family", TINY)
def test_states_in_several_contexts_are_the_mean(
    tiny_model: Callable[[str], LanguageModel], family: str, states: StatesName
) -> None:
    encoder = encoder_of(tiny_model(family), states)
    first, second, third, fourth = (random_words(tokens, tokens) for tokens in (37, 21, 50, 8))
    others: tuple[tuple[tuple[Words, ...], ...], ...] = (((second,), (fourth, second)), (), ((first,),))
    block = Block((first,), (third, second, fourth), others)
    found = encoder.encode([alone(first), block, alone(second)])
    single = [
        Block(context, (chunk,)) for chunk, contexts in zip(block.chunks, others, strict=True) for context in contexts
    ]
    expected = encoder.encode([alone(first), Block((first,), block.chunks), alone(second), *single])
    assert len(found) == 5
    for mine, parts in zip(found, ([0], [1, 5, 6], [2], [3, 7], [4]), strict=True):
        assert list(mine) == encoder.format.stored_layers
        for layer, data in mine.items():
            mean = torch.stack([expected[part][layer].view(torch.float32) for part in parts]).mean(0)
            torch.testing.assert_close(data.view(torch.float32), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pass_tokens", [1, 60, 130])
def test_passes_are_no_longer_than_asked_for(
    tiny_model: Callable[[str], LanguageModel], monkeypatch: pytest.MonkeyPatch, pass_tokens: int
) -> None:
    """Contexts of one chunk may be run in different passes."""
    encoder = encoder_of(tiny_model("llama"), "pre-rope-kv")
    first, second, third, fourth = (random_words(tokens, tokens) for tokens in (37, 21, 50, 8))
    others: tuple[tuple[tuple[Words, ...], ...], ...] = (((second,), (fourth, second)), ((first,),))
    blocks = [alone(first), Block((first,), (third, fourth), others), alone(second)]
    whole = encoder.encode(blocks)
    runs: list[list[int]] = []

    def counted(model: LanguageModel, prefix: object, chunks: Any, receive: Any, *, contexts: Any) -> None:
        runs.append([len(context) + len(chunk) for context, chunk in zip(contexts, chunks, strict=True)])
        capture_states(model, encoder.prefix, chunks, receive, contexts=contexts)

    monkeypatch.setattr("ragcache.indexer.encoder.capture_states", counted)
    found = encoder.encode(blocks, pass_tokens)
    assert [it for run in runs for it in run] == [37, 95, 71, 79, 45, 21]
    assert all(sum(run) <= pass_tokens or len(run) == 1 for run in runs)
    assert len(runs) > 1
    for mine, theirs in zip(found, whole, strict=True):
        assert list(mine) == list(theirs) == encoder.format.stored_layers
        for layer, data in mine.items():
            torch.testing.assert_close(
                data.view(torch.float32), theirs[layer].view(torch.float32), rtol=1e-4, atol=1e-5
            )
