"""Chunks at their places in the prompt, and what happens when stored states are bad."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragcache import RagCache
from ragcache.model.certify import relative_error
from ragcache.model.kv_cache import KVCache
from ragcache.restore.placement import Placement
from ragcache.restore.restoration import RestoreReport
from ragcache.restore.restorer import Restorer
from ragcache.states.key import state_key
from ragcache.states.miss import MissReason
from ragcache.states.records import ChunkRecord
from tests.conftest import make_document
from tests.encodings import states_of, with_states
from tests.formats import hidden_format

OpenTiny = Callable[..., RagCache]


def chunks_of(cache: RagCache) -> list[ChunkRecord]:
    return cache.store.catalog.chunks_by_vector(list(range(1, 100)))


def place(cache: RagCache, chunks: list[ChunkRecord]) -> list[Placement]:
    position, placements = len(cache.template.prefix), []
    for chunk in chunks:
        placements.append(Placement(chunk.chunk_id, chunk.token_ids, position, chunk.encoding("alone")))
        position += len(chunk.token_ids)
    return placements


def restore(cache: RagCache, placements: list[Placement]) -> tuple[KVCache, RestoreReport]:
    request = cache.model.new_cache(placements[-1].span.stop + 8)
    for tensor in request.keys + request.values:
        tensor.fill_(float("nan"))
    request.copy_prefix(cache.engine.prefix)
    restorer = Restorer(cache.model, cache.engine.prefix, cache.template.prefix, threads=2)
    report = restorer.restore(placements, cache.engine.format, request)
    return request, report


def reference(cache: RagCache, placement: Placement, context: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    """KV of a chunk after prefix and context by a plain transformers prefill, at the chunk's final position."""
    before = (*cache.template.prefix, *context)
    ids = torch.tensor([[*before, *placement.token_ids]])
    positions = torch.arange(placement.start - len(before), placement.span.stop)[None]
    with torch.inference_mode():
        output = cache.model.module(input_ids=ids, position_ids=positions, use_cache=True)
    own = slice(-len(placement.token_ids), None)
    return [(layer.keys[0][:, own], layer.values[0][:, own]) for layer in output.cache.layers]


def check_against_reference(cache: RagCache, placements: list[Placement], request: KVCache) -> None:
    for placement in placements:
        for layer, (keys, values) in enumerate(reference(cache, placement)):
            assert relative_error(request.keys[layer][:, placement.span], keys) < 1e-4
            assert relative_error(request.values[layer][:, placement.span], values) < 1e-4


def test_every_chunk_sits_at_its_own_position(cache: RagCache) -> None:
    placements = place(cache, chunks_of(cache)[:5])
    request, report = restore(cache, placements)
    assert not report.misses
    assert report.restored_tokens == sum(len(p.token_ids) for p in placements)
    assert request.length == placements[-1].span.stop
    check_against_reference(cache, placements, request)


def test_order_is_the_callers(cache: RagCache) -> None:
    chunks = chunks_of(cache)[:4]
    placements = place(cache, [chunks[3], chunks[0], chunks[2], chunks[0]])  # one of them twice
    request, report = restore(cache, placements)
    assert not report.misses
    check_against_reference(cache, placements, request)


def test_thousands_of_tokens(cache: RagCache) -> None:
    chunks = chunks_of(cache)
    enough = 2500 // min(len(chunk.token_ids) for chunk in chunks)
    placements = place(cache, [chunks[i % len(chunks)] for i in range(enough)])
    request, report = restore(cache, placements)
    assert not report.misses
    check_against_reference(cache, [placements[0], placements[-1], placements[enough // 2]], request)


def test_nothing_to_restore(cache: RagCache) -> None:
    request = cache.model.new_cache(64)
    request.copy_prefix(cache.engine.prefix)
    report = Restorer(cache.model, cache.engine.prefix, cache.template.prefix, 1).restore(
        [], cache.engine.format, request
    )
    assert request.length == len(cache.template.prefix)
    assert not report.misses


def damage_byte(path: Path, offset: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


Fault = Callable[[Placement], Placement]


def damaged_layer(placement: Placement) -> Placement:
    assert placement.states is not None
    damage_byte(placement.states.shard, placement.states.ranges[-1].offset + 100)
    return placement


def damaged_token_ids(placement: Placement) -> Placement:
    assert placement.states is not None
    damage_byte(placement.states.shard, placement.states.ranges[0].offset)
    return placement


def truncated(placement: Placement) -> Placement:
    assert placement.states is not None
    os.truncate(placement.states.shard, placement.states.ranges[-1].offset + 10)
    return placement


def vanished(placement: Placement) -> Placement:
    assert placement.states is not None
    placement.states.shard.unlink()
    return placement


def unreadable(placement: Placement) -> Placement:
    assert placement.states is not None
    placement.states.shard.unlink()
    placement.states.shard.mkdir()
    return placement


def never_stored(placement: Placement) -> Placement:
    return with_states(placement, None)


def of_another_model(placement: Placement) -> Placement:
    assert placement.states is not None
    key = state_key("another model", (1,), "", placement.token_ids)
    return with_states(placement, replace(placement.states, key=key))


def of_other_tokens(placement: Placement) -> Placement:
    """The catalog points to the states of another chunk of the same length."""
    assert placement.states is not None
    ids = (placement.token_ids[0] + 1, *placement.token_ids[1:])
    return replace(placement, token_ids=ids)


def in_an_unknown_codec(placement: Placement) -> Placement:
    assert placement.states is not None
    return with_states(placement, replace(placement.states, format='{"dtype": "float32", "layers": []}'))


def of_another_shape(placement: Placement) -> Placement:
    assert placement.states is not None
    format = hidden_format(3, 50, "raw", "float32").to_json()
    return with_states(placement, replace(placement.states, format=format))


def with_wrong_length(placement: Placement) -> Placement:
    assert placement.states is not None
    *others, last = placement.states.ranges
    ranges = (*others, replace(last, length=last.length - 1))
    return with_states(placement, replace(placement.states, ranges=ranges))


def with_a_layer_missing(placement: Placement) -> Placement:
    assert placement.states is not None
    return with_states(placement, replace(placement.states, ranges=placement.states.ranges[:-1]))


FAULTS: dict[Fault, MissReason] = {
    damaged_layer: MissReason.CHECKSUM,
    damaged_token_ids: MissReason.CHECKSUM,
    truncated: MissReason.TRUNCATED,
    vanished: MissReason.MISSING,
    unreadable: MissReason.IO,
    never_stored: MissReason.NOT_STORED,
    of_another_model: MissReason.FINGERPRINT,
    of_other_tokens: MissReason.FINGERPRINT,
    in_an_unknown_codec: MissReason.CODEC,
    of_another_shape: MissReason.CODEC,
    with_wrong_length: MissReason.CODEC,
    with_a_layer_missing: MissReason.CODEC,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_fault_is_a_miss_of_that_chunk_and_changes_no_answer(open_tiny: OpenTiny, fault: Fault, codec: str) -> None:
    """Each document in a shard of its own, so that a fault of a file concerns one chunk."""
    cache = open_tiny(codec=codec, shard_megabytes=1, chunk_tokens=200)
    for number in range(3):
        cache.index([make_document(number, sentences=3)])
    chunks = chunks_of(cache)
    assert len({states.shard for chunk in chunks if (states := states_of(chunk))}) == 3

    sound = place(cache, chunks)
    expected, report = restore(cache, sound)
    assert not report.misses

    placements = [sound[0], fault(sound[1]), sound[2]]
    if fault is of_other_tokens:
        placements[1] = replace(placements[1], encoding=sound[1].encoding)
    request, report = restore(cache, placements)
    assert [(miss.chunk_id, miss.reason) for miss in report.misses] == [(chunks[1].chunk_id, FAULTS[fault])]
    assert report.misses[0].detail
    assert report.recomputed_tokens == len(placements[1].token_ids)
    assert report.restored_tokens == sum(len(p.token_ids) for p in (placements[0], placements[2]))
    spans = [p.span for p in placements]
    if fault is of_other_tokens:
        check_against_reference(cache, placements, request) if codec == "raw" else None
        spans.pop(1)
    for span in spans:
        for layer in range(len(request.keys)):
            torch.testing.assert_close(request.keys[layer][:, span], expected.keys[layer][:, span])
            torch.testing.assert_close(request.values[layer][:, span], expected.values[layer][:, span])
    if codec == "raw":
        check_against_reference(cache, placements, request)


def test_states_of_other_tokens_under_the_right_key_are_found_out(cache: RagCache) -> None:
    """A catalog that points to the wrong place in a shard: the ids stored there give it away."""
    chunks = chunks_of(cache)
    first = chunks[0]
    other = next(c for c in chunks[1:] if len(c.token_ids) == len(first.token_ids))
    right, wrong = states_of(first), states_of(other)
    assert right is not None
    assert wrong is not None
    states = replace(right, ranges=wrong.ranges, shard=wrong.shard)
    _, report = restore(cache, [with_states(place(cache, [first])[0], states)])
    assert [miss.reason for miss in report.misses] == [MissReason.TOKEN_IDS]


def test_all_chunks_bad(cache: RagCache) -> None:
    placements = [with_states(p, None) for p in place(cache, chunks_of(cache)[:3])]
    request, report = restore(cache, placements)
    assert len(report.misses) == 3
    assert report.restored_tokens == 0
    check_against_reference(cache, placements, request)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_chunks_of_several_formats_in_one_prompt(open_tiny: OpenTiny, order: tuple[int, ...]) -> None:
    """They are read at the same time, into the memory of one request."""
    kinds = [
        ("hidden", "raw", 1e-4),
        ("hidden", "int8", 3e-2),
        ("pre-rope-kv", "int8", 3e-2),
        ("pre-rope-kv", "int4", 0.2),
    ]
    for number, (states, codec, _) in enumerate(kinds):
        cache = open_tiny(states=states, codec=codec)
        cache.index([make_document(number)], source=f"source {number}")
    chunks = chunks_of(cache)
    by_document = {int(chunk.document_id.removeprefix("doc-")): chunk for chunk in chunks}
    formats = {found.format for chunk in chunks if (found := states_of(chunk))}
    assert len(formats) == len(kinds)
    numbers = [*order, *order]
    placements = place(cache, [by_document[number] for number in numbers])
    request, report = restore(cache, placements)
    assert not report.misses
    for number, placement in zip(numbers, placements, strict=True):
        for layer, (keys, values) in enumerate(reference(cache, placement)):
            assert relative_error(request.keys[layer][:, placement.span], keys) < kinds[number][2]
            assert relative_error(request.values[layer][:, placement.span], values) < kinds[number][2]


def test_chunks_that_have_moved_meanwhile(open_tiny: OpenTiny, tmp_path: Path) -> None:
    """They are found at their new place, and read beside those that have not moved, into memory of their own."""
    cache = open_tiny()
    cache.index([make_document(number) for number in range(3)])
    sound = place(cache, chunks_of(cache)[:8])
    moved = {}
    placements = []
    for index, placement in enumerate(sound):
        assert placement.states is not None
        if index % 2:
            gone = replace(placement.states, shard=tmp_path / f"gone-{index}.arrow")
            moved[gone.shard] = placement.states
            placement = with_states(placement, gone)
        placements.append(placement)
    request = cache.model.new_cache(placements[-1].span.stop)
    request.copy_prefix(cache.engine.prefix)
    restorer = Restorer(cache.model, cache.engine.prefix, cache.template.prefix, threads=2)
    for _ in range(3):
        report = restorer.restore(placements, cache.engine.format, request, lambda states: moved.get(states.shard))
        assert not report.misses
        assert report.restored_chunks == len(placements)
        check_against_reference(cache, placements, request)
