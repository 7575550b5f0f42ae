"""A store with two encodings of each chunk: what is restored, what takes its place, and how each is looked after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ragcache import RagCache
from ragcache.maintenance import rebuild_store
from ragcache.model.certify import relative_error
from ragcache.model.kv_cache import KVCache
from ragcache.restore.placement import Placement
from ragcache.settings import EncodingName
from ragcache.states import changes
from ragcache.states.inventory import Inventory
from ragcache.states.key import context_digest
from ragcache.states.locked import LockedStore
from ragcache.states.miss import MissReason
from ragcache.states.records import ChunkRecord
from ragcache.states.store import StateStore
from ragcache.states.verify import Part
from tests.conftest import make_document
from tests.encodings import add_contexts, states_of, with_states
from tests.restore.test_restorer import (
    FAULTS,
    Fault,
    chunks_of,
    damage_byte,
    damaged_layer,
    reference,
    restore,
    truncated,
    with_wrong_length,
)

DOCUMENTS = [make_document(number) for number in range(3)]
WHILE_READING = (damaged_layer, truncated, with_wrong_length)
"""Faults that show only when layers are read."""


@pytest.fixture
def both(cache: RagCache, open_tiny: Callable[..., RagCache]) -> RagCache:
    """The store of the documents doc-0 to doc-2 with two encodings of each chunk, in different shards."""
    add_contexts(cache)
    return open_tiny(encodings=("alone", "context"))


def place(cache: RagCache, chunks: list[ChunkRecord], names: list[EncodingName]) -> list[Placement]:
    start, placements = len(cache.template.prefix), []
    for chunk, name in zip(chunks, names, strict=True):
        otherwise = chunk.encoding("alone") if name == "context" else None
        placements.append(Placement(chunk.chunk_id, chunk.token_ids, start, chunk.encoding(name), otherwise))
        start = placements[-1].span.stop
    return placements


def context_of(cache: RagCache, chunk: ChunkRecord) -> tuple[int, ...]:
    encoding = chunk.encoding("context")
    assert encoding is not None
    members = cache.store.catalog.chunks_by_content(encoding.members)
    return tuple(it for content in encoding.members for it in members[content].token_ids)


def check(cache: RagCache, request: KVCache, placement: Placement, context: tuple[int, ...] = ()) -> None:
    for layer, (keys, values) in enumerate(reference(cache, placement, context)):
        assert relative_error(request.keys[layer][:, placement.span], keys) < 1e-4
        assert relative_error(request.values[layer][:, placement.span], values) < 1e-4


class TestRestoring:
    def test_each_encoding_is_a_prefill_after_its_context(self, both: RagCache) -> None:
        chunks = chunks_of(both)[2:6]
        names: list[EncodingName] = ["alone", "context", "alone", "context"]
        placements = place(both, chunks, names)
        request, report = restore(both, placements)
        assert not report.misses
        assert report.restored_chunks == 4
        for chunk, placement, name in zip(chunks, placements, names, strict=True):
            check(both, request, placement, context_of(both, chunk) if name == "context" else ())

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
    def test_alone_takes_the_place_of_context(self, both: RagCache, fault: Fault) -> None:
        chunks = chunks_of(both)[2:5]
        placements = place(both, chunks, ["alone", "context", "alone"])
        sound = placements[1]
        placements[1] = replace(fault(sound), token_ids=sound.token_ids)
        if placements[1].encoding == sound.encoding and fault.__name__ == "of_other_tokens":
            pytest.skip("token ids are the prompt's: there are none to take their place")
        request, report = restore(both, placements)
        assert [(it.chunk_id, it.reason) for it in report.misses] == [(chunks[1].chunk_id, FAULTS[fault])]
        if fault in WHILE_READING:
            assert report.misses[0].detail.endswith("; recomputed alone")
            assert (report.restored_chunks, report.recomputed_tokens) == (2, len(sound.token_ids))
        else:
            assert report.misses[0].detail.endswith("; its encoding alone takes its place")
            assert (report.restored_chunks, report.recomputed_tokens) == (3, 0)
        for placement in placements:
            check(both, request, placement)

    def test_after_another_context(self, both: RagCache) -> None:
        """The states are sound, but those of another context than the catalog says."""
        chunks = chunks_of(both)[2:4]
        first, second = place(both, chunks, ["alone", "context"])
        assert second.encoding is not None
        second = replace(second, encoding=replace(second.encoding, context=context_digest((1, 2, 3))))
        request, report = restore(both, [first, second])
        assert [(it.chunk_id, it.reason) for it in report.misses] == [(chunks[1].chunk_id, MissReason.FINGERPRINT)]
        assert report.recomputed_tokens == 0
        check(both, request, second)

    def test_both_are_damaged(self, both: RagCache) -> None:
        chunks = chunks_of(both)[2:4]
        placements = place(both, chunks, ["alone", "context"])
        for name in ("alone", "context"):
            states = states_of(chunks[1], name)
            assert states is not None
            damage_byte(states.shard, states.ranges[0].offset)
        request, report = restore(both, placements)
        assert [(it.chunk_id, it.reason) for it in report.misses] == [(chunks[1].chunk_id, MissReason.CHECKSUM)] * 2
        assert report.recomputed_tokens == len(chunks[1].token_ids)
        assert report.restored_chunks == 1
        for placement in placements:
            check(both, request, placement)

    def test_nothing_takes_the_place_of_what_is_not_there(self, both: RagCache) -> None:
        chunks = chunks_of(both)[2:4]
        first, second = place(both, chunks, ["alone", "context"])
        request, report = restore(both, [first, replace(with_states(second, None), otherwise=None)])
        assert [(it.reason, it.detail.endswith("; recomputed alone")) for it in report.misses] == [("not_stored", True)]
        check(both, request, second)

    def test_alone_and_context_may_both_have_moved(self, both: RagCache) -> None:
        """A compaction between looking them up and reading them."""
        both.delete("doc-2")
        chunks = chunks_of(both)
        shards = {states.shard for it in chunks for name in ("alone", "context") if (states := states_of(it, name))}
        both.compact(0.0)
        assert not any(shard.exists() for shard in shards)
        given = [both.answering.find_chunk(it.chunk_id, it.title, it.text, 1.0) for it in chunks]
        names: list[EncodingName] = ["alone" if index % 2 else "context" for index in range(len(chunks))]
        layout = replace(both.answering.lay_out("ships", given, 4), encodings=tuple(names))
        report = both.engine.prepare(layout, chunks, "composed").report
        assert not report.misses
        assert report.restored_chunks == len(chunks)

    def test_only_alone_in_first_place_is_exact(self, both: RagCache) -> None:
        chunks = chunks_of(both)[:3]
        given = [both.answering.find_chunk(it.chunk_id, it.title, it.text, 1.0) for it in chunks]
        layout = both.answering.lay_out("ships", given, 4, encodings=["context"])
        exact = both.engine.prepare(layout, given, "exact")
        assert exact.report.restored_tokens == len(chunks[0].token_ids)
        plain = both.engine.prepare(layout, given, "none")
        torch.testing.assert_close(exact.logits, plain.logits, rtol=1e-4, atol=1e-4)

    def test_the_encodings_used_are_counted(self, both: RagCache) -> None:
        answer = both.query("Which ships passed?", top_k=3, encodings="alone,context")
        assert not answer.misses
        both.close()
        first, *others = both.store.catalog.chunks_by_id([it.chunk_id for it in answer.sources])
        wanted = {first.content}
        for chunk in others:
            encoding = chunk.encoding("context")
            assert encoding is not None
            wanted.add(encoding.key)
        assert both.store.usage.all().keys() == wanted


def damage(chunk: ChunkRecord, name: EncodingName) -> None:
    states = states_of(chunk, name)
    assert states is not None
    damage_byte(states.shard, states.ranges[1].offset)


def chunk_of(cache: RagCache, chunk_id: str) -> ChunkRecord:
    return cache.store.catalog.chunks_by_id([chunk_id])[0]


def evict(cache: RagCache, chunk_id: str, name: EncodingName) -> None:
    states = states_of(chunk_of(cache, chunk_id), name)
    assert states is not None
    with LockedStore(cache.store) as locked:
        ids = [it.id for it in Inventory(cache.store.catalog).residents() if it.key == states.key]
        with locked.changing() as dead, cache.store.catalog.transaction() as connection:
            dead += changes.give_up(connection, ids, evicted=True)


class TestUpkeep:
    def test_sizes_are_told_apart(self, both: RagCache) -> None:
        evict(both, "doc-1#1", "context")
        chunks, stats = both.store.catalog.counts()["chunks"], both.stats()
        alone, context = stats.encodings
        assert (alone["encoding"], alone["chunks"], alone["evicted"]) == ("alone", chunks, 0)
        assert (context["encoding"], context["chunks"], context["evicted"]) == ("context", chunks - 1, 1)
        assert alone["bytes"] + context["bytes"] == stats.state_bytes
        assert stats.evicted_chunks == 1

    def test_one_is_evicted_and_comes_back(self, both: RagCache) -> None:
        evict(both, "doc-1#1", "context")
        chunk = chunk_of(both, "doc-1#1")
        assert states_of(chunk) is not None
        assert states_of(chunk, "context") is None
        assert not both.store.catalog.documents_without_states()
        assert not both.query(chunk.text, top_k=2).misses
        report = both.index(DOCUMENTS)
        assert (report.readmitted, report.updated) == (1, 0)
        again = chunk_of(both, "doc-1#1")
        placements = place(both, [chunk_of(both, "doc-0#0"), again], ["alone", "context"])
        request, restored = restore(both, placements)
        assert not restored.misses
        check(both, request, placements[1], context_of(both, again))

    @pytest.mark.parametrize("name", ["alone", "context"])
    def test_what_is_damaged_is_encoded_again_as_it_was(self, both: RagCache, name: EncodingName) -> None:
        damage(chunk_of(both, "doc-1#1"), name)
        report = both.verify(repair=True)
        assert [(it.part, it.name) for it in report.faults] == [(Part.CHUNK, "doc-1#1")]
        assert not report.given_up
        assert not both.verify().faults
        chunk = chunk_of(both, "doc-1#1")
        placements = place(both, [chunk_of(both, "doc-0#0"), chunk], ["alone", name])
        request, restored = restore(both, placements)
        assert not restored.misses
        check(both, request, placements[1], context_of(both, chunk) if name == "context" else ())

    def test_a_context_that_is_gone_is_given_up(self, both: RagCache) -> None:
        """It is served until it is damaged; then the next run makes another."""
        encoding = chunk_of(both, "doc-1#0").encoding("context")
        assert encoding is not None
        assert both.store.catalog.chunks_by_content(encoding.members)
        both.delete("doc-0")
        assert not both.store.catalog.chunks_by_content(encoding.members)
        assert not both.verify().faults
        damage(chunk_of(both, "doc-1#0"), "context")
        report = both.verify(repair=True)
        assert [(it.chunk_id, it.reason) for it in report.given_up] == [("doc-1#0", MissReason.CONTEXT)]
        assert not both.verify().faults
        assert both.store.catalog.documents_without_states() == {"doc-1"}
        assert states_of(chunk_of(both, "doc-1#0")) is not None
        assert both.index(DOCUMENTS[1:]).updated == 1
        assert not both.store.catalog.documents_without_states()

    def test_an_evicted_one_whose_context_is_gone(self, both: RagCache) -> None:
        both.delete("doc-0")
        evict(both, "doc-1#0", "context")
        report = both.index(DOCUMENTS[1:])
        assert report.in_context > 0
        assert states_of(chunk_of(both, "doc-1#0"), "context") is not None

    def test_copies_and_a_rebuilt_catalog_hold_both(self, both: RagCache, open_tiny: Callable[..., RagCache]) -> None:
        both.delete("doc-2")
        both.compact(0.0)
        assert not both.verify().faults
        expected, embedder = chunks_of(both), both.embedder
        for journal in ("snapshot", "commits"):
            for file in both.path.glob("catalog.sqlite*"):
                file.unlink()
            report, embedded = rebuild_store(both.path, both.settings, lambda: embedder)
            assert (embedded, report.faults, report.with_states) == (0, [], len(expected)), journal
            store = StateStore.open(both.path)
            found = store.catalog.chunks_by_vector([it.vector_id for it in expected])
            assert found == expected
            both = open_tiny(encodings=("alone", "context"))
            assert not both.verify().faults
            both.index([DOCUMENTS[2]], source="another")
            expected = chunks_of(both)
