"""Layers come one at a time: each waits for its own bytes, needs only the chunks it sees, and may have none stored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import RagCache
from ragcache.indexer.contexts import alone
from ragcache.indexer.encoder import StateEncoder
from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.restore.placement import Placement
from ragcache.restore.restoration import RestoreReport
from ragcache.restore.restorer import Restorer
from ragcache.states.form import Form, LayerFormat, StateFormat
from ragcache.states.key import state_key
from ragcache.states.reading import ShardFile
from ragcache.states.records import Encoding, StoredStates
from ragcache.states.shard import Container, ShardEntry, ShardOrigin, ShardWriter
from tests.conftest import make_document
from tests.restore.test_restorer import check_against_reference, chunks_of, place, restore

OpenTiny = Callable[..., RagCache]


def logits_after(cache: RagCache, request: KVCache) -> torch.Tensor:
    """Of a question behind what a KV cache holds."""
    question = cache.model.tensor(cache.model.tokenizer.encode("Who keeps the light?", add_special_tokens=False))
    return forward(cache.model, [Segment(question, request)])[0]


class TestWindows:
    @pytest.mark.parametrize(
        "family", ["mistral-window", "qwen2-window", "gemma2", "gemma3", "phi3-window", "olmo3", "cohere2"]
    )
    def test_only_what_is_seen_is_read_and_the_answer_is_the_same(self, open_tiny: OpenTiny, family: str) -> None:
        cache = open_tiny(family=family)
        cache.index([make_document(number) for number in range(3)])
        placements = place(cache, chunks_of(cache)[:6])
        # A KV cache that is NaN wherever nothing was restored.
        request, report = restore(cache, placements)
        assert not report.misses
        # Recomputed chunks are written to every layer in full.
        whole, recomputed = restore(cache, [replace(it, encoding=None) for it in placements])
        assert recomputed.restored_chunks == 0
        logits = logits_after(cache, request)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits, logits_after(cache, whole), rtol=1e-4, atol=1e-4)

        end = placements[-1].span.stop
        expected = 0
        for column, layer in enumerate(cache.engine.format.stored_layers, start=1):
            window = cache.model.decoder.layers[layer].window
            for it in placements:
                assert it.states is not None
                # The first token of the question stands at `end`, and sees `window` positions, its own included.
                if window is None or it.span.stop - 1 > end - window:
                    expected += it.states.ranges[column].length
        assert report.read_bytes == expected
        every = sum(sum(range.length for range in it.states.ranges[1:]) for it in placements if it.states)
        assert report.read_bytes < every

    def test_a_window_that_ends_with_a_chunk(self, open_tiny: OpenTiny) -> None:
        """The last chunk may be shorter or longer than what the window sees; one token decides about the one before."""
        cache = open_tiny(family="mistral-window")
        cache.index([make_document(number) for number in range(3)])
        chunks = chunks_of(cache)[:2]
        start = len(cache.template.prefix)
        layers = len(cache.engine.format.stored_layers)
        window = cache.model.decoder.layers[0].window
        assert window is not None
        for tokens, needed in ((window - 1, 1), (window - 2, 2)):
            last = chunks[1].token_ids[:tokens]
            first = Placement("first", chunks[0].token_ids, start, chunks[0].encoding("alone"))
            placements = [first, Placement("last", last, first.span.stop, None)]
            request, report = restore(cache, placements)
            assert first.states is not None
            size = sum(range.length for range in first.states.ranges[1:])
            assert report.read_bytes == (size if needed == 2 else 0)
            assert layers
            whole, _ = restore(cache, [replace(it, encoding=None) for it in placements])
            torch.testing.assert_close(logits_after(cache, request), logits_after(cache, whole), rtol=1e-4, atol=1e-4)


def test_a_layer_waits_for_its_own_bytes_only(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    placements = place(cache, chunks_of(cache)[:3])
    blocked, released, last = threading.Event(), threading.Event(), len(cache.engine.format.stored_layers)
    read = ShardFile.read

    def slow(file: ShardFile, states: StoredStates, column: int, *targets: Any) -> None:
        if column == last:
            blocked.set()
            assert released.wait(30)
        read(file, states, column, *targets)

    monkeypatch.setattr(ShardFile, "read", slow)
    request = cache.model.new_cache(placements[-1].span.stop)
    request.copy_prefix(cache.engine.prefix)
    restorer = Restorer(cache.model, cache.engine.prefix, cache.template.prefix, threads=2)
    done: list[int] = []
    with restorer.restoring(placements, cache.engine.format, request) as restoration:
        layers = len(cache.model.decoder.layers)
        restoration.complete(layers - 2)
        assert blocked.wait(30)
        waiting = threading.Thread(target=lambda: done.append(restoration.complete(layers - 1) or layers))
        waiting.start()
        waiting.join(0.2)
        assert not done
        released.set()
        waiting.join(30)
    assert done
    assert not restoration.report.misses
    check_against_reference(cache, placements, request)


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize("form", [Form.HIDDEN, Form.PRE_ROPE_KV])
def test_the_first_layers_may_follow_from_token_ids(
    cache: RagCache, tmp_path: Path, recomputed: int, form: Form
) -> None:
    """As a plan has it where disks are slow and processors fast (HCache, EuroSys'25, section 4.1)."""
    model, prefix = cache.model, cache.template.prefix
    layer = model.decoder.layers[0]
    width = model.decoder.hidden_size if form is Form.HIDDEN else layer.kv_heads * layer.head_dim
    stored = LayerFormat(form, width, "raw")
    count = len(model.decoder.layers)
    tokens = LayerFormat(Form.TOKENS, 0, "raw")
    format = StateFormat("float32", (tokens,) * recomputed + (stored,) * (count - recomputed))
    records = chunks_of(cache)[:4]
    chunks = [chunk.token_ids for chunk in records]
    digest = model.fingerprint.digest
    writer = ShardWriter(
        tmp_path, 1, format, Container.ARROW, ShardOrigin("test", model.fingerprint.to_json(), digest, prefix)
    )
    encoded = StateEncoder(model, cache.engine.prefix, format).encode([alone(chunk) for chunk in records])
    for token_ids, layers in zip(chunks, encoded, strict=True):
        assert len(layers) == count - recomputed
        writer.add(ShardEntry(state_key(digest, prefix, "", token_ids), token_ids, layers))
    shard = writer.close()
    placements, start = [], len(prefix)
    for index in (2, 0, 3, 1):
        states = shard.states[index]
        stored_states = StoredStates(states.key, shard.path, shard.format, states.ranges)
        encoding = Encoding("alone", states.key, states=stored_states)
        placements.append(Placement(str(index), chunks[index], start, encoding))
        start = placements[-1].span.stop
    request, report = restore(cache, placements)
    assert not report.misses
    assert report.restored_chunks == 4
    check_against_reference(cache, placements, request)


def test_a_chunk_lost_in_the_last_layer_is_right_in_all_of_them(
    cache: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read for it in later layers is of no use, and must not be written over what was recomputed."""
    placements = place(cache, chunks_of(cache)[:4])
    victim = placements[1]
    assert victim.states is not None
    with victim.states.shard.open("rb+") as file:
        file.seek(victim.states.ranges[1].offset + 7)
        file.write(b"\xff\xff\xff\xff")
    request, report = restore(cache, placements)
    assert [miss.chunk_id for miss in report.misses] == [victim.chunk_id]
    assert isinstance(report, RestoreReport)
    assert report.restored_chunks == 3
    check_against_reference(cache, placements, request)
