"""Looking after a store: delete, compact, verify, repair, rebuild, limits, several folders, waiting for the lock."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.answer import Answer
from ragcache.errors import DocumentNotFoundError, StoreError, StoreLockedError, StoreNotFoundError
from ragcache.indexer.encoder import StateEncoder
from ragcache.maintenance import delete_model, rebuild_store, write_options
from ragcache.retriever.embedding import Embedder
from ragcache.states.folders import shard_files
from ragcache.states.inventory import Inventory
from ragcache.states.records import StoredStates
from ragcache.states.store import StateStore, hold_lock
from tests.conftest import make_document
from tests.encodings import states_of

OpenTiny = Callable[..., RagCache]
DOCUMENTS = [make_document(number) for number in range(4)]
MANY = [make_document(number) for number in range(14)]
"""Some 2 MB of states."""

QUESTION = "Which ships passed?"


def ask(cache: RagCache, top_k: int = 50) -> Answer:
    return cache.query(QUESTION, top_k=top_k)


def refuse_to_embed() -> Embedder:
    raise AssertionError("nothing is to be embedded")


def shard_bytes(cache: RagCache) -> int:
    return sum(path.stat().st_size for path in cache.store.catalog.shards())


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def some_states(cache: RagCache, chunk_id: str) -> StoredStates:
    states = states_of(cache.store.catalog.chunks_by_id([chunk_id])[0])
    assert states is not None
    return states


class TestForms:
    @pytest.mark.parametrize("states", ["hidden", "pre-rope-kv"])
    @pytest.mark.parametrize("shard_format", ["arrow", "parquet"])
    def test_every_form_and_container_gives_the_answer_of_a_prefill(
        self, open_tiny: OpenTiny, states: str, shard_format: str
    ) -> None:
        cache = open_tiny(states=states, shard_format=shard_format)
        cache.index(DOCUMENTS)
        (model,) = cache.stats().models
        assert (model["form"], model["codec"]) == (states.replace("-", "_"), "raw")
        assert {path.suffix for path in cache.store.catalog.shards()} == {f".{shard_format}"}
        exact, plain = (cache.query(QUESTION, top_k=1, reuse=reuse) for reuse in ("exact", "none"))
        assert exact.tokens.restored > 0
        assert exact.answer == plain.answer

    def test_auto_takes_what_needs_no_projection(self, open_tiny: OpenTiny) -> None:
        """The tiny Llama: 3 layers, 96 hidden values (its first layer has none to store), 32 keys and 32 values."""
        sizes = {states: open_tiny(states=states).engine.format.bytes_per_token for states in ("auto", "hidden")}
        assert sizes["hidden"] / sizes["auto"] == 2 * 96 / (3 * 64)

    @pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
    def test_every_codec_is_restored_from(self, open_tiny: OpenTiny, codec: str) -> None:
        cache = open_tiny(codec=codec)
        cache.index(DOCUMENTS)
        answer = ask(cache)
        assert not answer.misses
        shutil.rmtree(cache.store.shard_folder)
        assert ask(cache).answer == answer.answer

    def test_another_form_counts_as_a_change_and_can_be_mixed(self, open_tiny: OpenTiny) -> None:
        open_tiny(states="hidden").index(DOCUMENTS[:2], source="one")
        cache = open_tiny(states="pre-rope-kv", shard_format="parquet")
        cache.index(DOCUMENTS[2:], source="two")
        assert not ask(cache).misses
        assert {it["form"] for it in cache.stats().models} == {"hidden", "pre_rope_kv"}
        assert cache.index(DOCUMENTS[:2], source="one").updated == 2
        assert [it["form"] for it in cache.stats().models] == ["pre_rope_kv"]


class TestDelete:
    def test_by_metadata(self, cache: RagCache) -> None:
        cache.index([Document("x", "Something else.", metadata={"team": "a", "tags": [1, 2]})])
        with pytest.raises(DocumentNotFoundError, match='"team": "b"'):
            cache.delete(where={"team": "b"})
        with pytest.raises(DocumentNotFoundError):
            cache.delete(where={"team": "a", "tags": [1]})
        assert cache.delete(where={"team": "a", "tags": [1, 2]}) == ["x"]
        assert cache.delete(where={"number": 1}) == ["doc-1"]
        assert set(cache.store.catalog.signatures()) == {"doc-0", "doc-2"}
        with pytest.raises(DocumentNotFoundError):
            cache.delete(where={"number": True})

    def test_by_id_and_metadata_together(self, cache: RagCache) -> None:
        assert cache.delete("doc-0", where={"number": 0}) == ["doc-0"]
        assert cache.delete(["doc-1", "doc-1"]) == ["doc-1"]
        assert set(cache.store.catalog.signatures()) == {"doc-2"}

    def test_all_states_of_a_model(self, cache: RagCache) -> None:
        before = ask(cache)
        digest = cache.model.fingerprint.digest
        options = write_options(cache.settings)
        for unknown in ("", "abc", "f" * 12):
            with pytest.raises(StoreError, match="models have states"):
                delete_model(cache.store, unknown, options)
        assert delete_model(cache.store, digest[:12], options) == len(before.sources)
        assert not list(shard_files(cache.store.shard_folder))
        after = ask(cache)
        assert {miss.reason for miss in after.misses} == {"not_stored"}
        assert after.answer == before.answer
        assert cache.index(DOCUMENTS[:3]).encoded_tokens > 0
        assert not ask(cache).misses


class TestCompact:
    def test_dead_bytes_are_given_back(self, cache: RagCache) -> None:
        cache.delete(["doc-0", "doc-1"])
        before, sizes = ask(cache), cache.stats()
        assert sizes.dead_bytes > sizes.state_bytes
        size = shard_bytes(cache)
        report = cache.compact()
        assert report.rewritten == 1
        assert report.freed_bytes == size - shard_bytes(cache) > 0
        assert cache.stats().dead_bytes == 0
        after = ask(cache)
        assert not after.misses
        assert after.answer == before.answer
        assert not cache.store.orphans()
        assert cache.compact().rewritten == 0

    def test_little_waste_is_left_alone(self, cache: RagCache) -> None:
        cache.delete("doc-0")
        assert cache.compact(0.9).rewritten == 0
        assert cache.compact(0.1).rewritten == 1

    def test_small_shards_are_joined(self, cache: RagCache) -> None:
        cache.index(DOCUMENTS[3:])
        assert cache.stats().shards == 2
        assert cache.compact().rewritten == 2
        assert cache.stats().shards == 1
        assert not ask(cache).misses

    def test_a_reader_that_looked_before_finds_the_copies(self, cache: RagCache) -> None:
        cache.delete("doc-0")
        chunks = [hit.chunk for hit in cache.retrieve(QUESTION, 50)]
        old = {states.shard for chunk in chunks if (states := states_of(chunk))}
        cache.compact(0.0)
        assert not any(path.exists() for path in old)
        layout = cache.answering.lay_out(
            QUESTION, [cache.answering.find_chunk(it.chunk_id, it.title, it.text, 1.0) for it in chunks], 4
        )
        report = cache.engine.prepare(layout, chunks, "composed").report
        assert not report.misses
        assert report.restored_chunks == len(chunks)

    def test_the_journal_gets_short(self, cache: RagCache) -> None:
        cache.delete("doc-0")
        assert len(cache.store.journal()) == 2
        cache.compact()
        (snapshot,) = cache.store.journal()
        assert snapshot.snapshot
        cache.delete("doc-1")
        assert len(cache.store.journal()) == 2
        assert not cache.verify().faults

    def test_what_cannot_be_copied_is_named_and_encoded_by_the_next_run(self, cache: RagCache) -> None:
        cache.delete("doc-0")
        states = some_states(cache, "doc-1#0")
        flip(states.shard, states.ranges[1].offset)
        report = cache.compact(0.0)
        assert [(miss.chunk_id, miss.reason) for miss in report.damaged] == [("doc-1#0", "checksum")]
        assert [miss.reason for miss in ask(cache).misses] == ["not_stored"]
        assert cache.index(DOCUMENTS[1:3]).updated == 1
        assert not ask(cache).misses


class TestVerify:
    def test_a_sound_store(self, cache: RagCache) -> None:
        report = cache.verify()
        assert not report.faults
        assert report.states == len(ask(cache).sources)
        assert report.bytes == shard_bytes(cache)

    def test_damaged_states_are_named_and_only_they_are_encoded_again(self, cache: RagCache) -> None:
        before = ask(cache)
        for chunk_id, column in (("doc-1#0", 1), ("doc-2#1", 0)):
            states = some_states(cache, chunk_id)
            flip(states.shard, states.ranges[column].offset)
        found = cache.verify()
        assert [(it.part, it.name, it.reason) for it in found.faults] == [
            ("chunk", "doc-1#0", "checksum"),
            ("chunk", "doc-2#1", "checksum"),
        ]
        encoded: list[int] = []
        encode = StateEncoder.encode

        def counted(self: StateEncoder, blocks: Any, *limit: int) -> Any:
            encoded.append(len(blocks))
            return encode(self, blocks, *limit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateEncoder, "encode", counted)
            assert cache.verify(repair=True).faults == found.faults
        assert sum(encoded) == 2
        assert not cache.verify().faults
        after = ask(cache)
        assert not after.misses
        assert after.answer == before.answer

    def test_states_that_several_chunks_share(self, cache: RagCache) -> None:
        cache.index([replace(DOCUMENTS[0], id="copy")])
        assert some_states(cache, "copy#0") == some_states(cache, "doc-0#0")
        states = some_states(cache, "copy#0")
        flip(states.shard, states.ranges[-1].offset)
        cache.verify(repair=True)
        assert some_states(cache, "copy#0") == some_states(cache, "doc-0#0") != states
        assert not ask(cache).misses

    def test_damage_between_the_states(self, cache: RagCache) -> None:
        (shard,) = cache.store.catalog.shards()
        flip(shard, shard.stat().st_size - 3)
        assert [(it.part, it.name) for it in cache.verify().faults] == [("shard", str(shard))]
        assert not ask(cache).misses
        cache.verify(repair=True)
        assert not cache.verify().faults
        assert not ask(cache).misses

    def test_vectors_and_journal(self, cache: RagCache) -> None:
        before = ask(cache)
        (vectors,) = cache.store.vector_folder.iterdir()
        flip(vectors, 50)
        cache.store.journal()[0].path.unlink()
        assert [it.part for it in cache.verify().faults] == ["journal", "vectors"]
        cache.verify(repair=True)
        assert not cache.verify().faults
        assert ask(cache).answer == before.answer


class TestRebuild:
    def rebuild(self, cache: RagCache, open_tiny: OpenTiny, **settings: Any) -> RagCache:
        before, documents = ask(cache), list(Inventory(cache.store.catalog).documents())
        for file in cache.path.glob("catalog.sqlite*"):
            file.unlink()
        with pytest.raises(StoreError, match="ragcache rebuild"):
            StateStore.exists(cache.path)
        report, embedded = rebuild_store(cache.path, cache.settings, refuse_to_embed)
        assert (report.faults, embedded) == ([], 0)
        again = open_tiny(**settings)
        assert list(Inventory(again.store.catalog).documents()) == documents
        after = ask(again)
        assert after.sources == before.sources
        assert after.answer == before.answer
        assert after.misses == before.misses
        assert not again.verify().faults
        return again

    @pytest.mark.parametrize("shard_format", ["arrow", "parquet"])
    def test_everything_comes_back(self, open_tiny: OpenTiny, shard_format: str) -> None:
        """Also what shards do not tell: copies, deletions, changed metadata, documents without text."""
        cache = open_tiny(shard_format=shard_format)
        cache.index(DOCUMENTS)
        cache.index([replace(DOCUMENTS[0], id="copy"), Document("empty", " ", "T", {"a": [1]})])
        cache.index([replace(DOCUMENTS[1], metadata={"page": 9})])
        cache.delete("doc-2")
        last = cache.store.catalog.last_vector_id()
        again = self.rebuild(cache, open_tiny, shard_format=shard_format)
        assert again.store.catalog.last_vector_id() == last
        assert again.index([replace(DOCUMENTS[1], metadata={"page": 9})]).unchanged == 1
        assert again.index(DOCUMENTS[:1]).unchanged == 1

    def test_after_a_compaction_and_a_repair(self, cache: RagCache, open_tiny: OpenTiny) -> None:
        cache.delete("doc-0")
        cache.compact(0.0)
        states = some_states(cache, "doc-1#0")
        flip(states.shard, states.ranges[1].offset)
        cache.verify(repair=True)
        again = self.rebuild(cache, open_tiny)
        assert not ask(again).misses

    def test_a_damaged_catalog_is_put_aside(self, cache: RagCache, open_tiny: OpenTiny) -> None:
        before = ask(cache)
        (cache.path / "catalog.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
        report, _ = rebuild_store(cache.path, cache.settings, refuse_to_embed)
        assert report.replaced is not None
        assert (report.replaced / "catalog.sqlite").exists()
        assert ask(open_tiny()).answer == before.answer

    def test_with_vectors_lost_too(self, cache: RagCache, open_tiny: OpenTiny, embedder: Embedder) -> None:
        before = ask(cache)
        shutil.rmtree(cache.store.vector_folder)
        for file in cache.path.glob("catalog.sqlite*"):
            file.unlink()
        _, embedded = rebuild_store(cache.path, cache.settings, lambda: embedder)
        assert embedded == len(before.sources)
        assert ask(open_tiny()).answer == before.answer

    def test_a_lost_journal_is_named_and_the_next_run_brings_its_documents_back(
        self, cache: RagCache, open_tiny: OpenTiny
    ) -> None:
        cache.index(DOCUMENTS[3:])
        before = ask(cache)
        cache.store.journal()[0].path.unlink()
        for file in cache.path.glob("catalog.sqlite*"):
            file.unlink()
        report, _ = rebuild_store(cache.path, cache.settings, lambda: cache.embedder)
        assert "commit 1 is missing" in report.faults[0][1]
        again = open_tiny()
        assert set(again.store.catalog.signatures()) == {"doc-3"}
        outcome = again.index(DOCUMENTS)
        assert (outcome.added, outcome.unchanged, outcome.encoded_tokens) == (3, 1, 0)
        assert {it.chunk_id for it in ask(again).sources} == {it.chunk_id for it in before.sources}
        assert not again.verify().faults

    def test_nothing_to_rebuild_from(self, tmp_path: Path, cache: RagCache) -> None:
        with pytest.raises(StoreNotFoundError):
            rebuild_store(tmp_path / "nowhere", cache.settings, refuse_to_embed)


class TestLimits:
    def test_chunks_beyond_the_budget_answer_without_states(self, open_tiny: OpenTiny) -> None:
        unlimited = open_tiny()
        unlimited.index(MANY)
        size = shard_bytes(unlimited)
        assert size > 1.4 * 2**20
        sources = {source.chunk_id for source in ask(unlimited).sources}

        cache = open_tiny(unlimited.path.parent / "limited", budget_megabytes=1, shard_megabytes=1)
        report = cache.index(MANY)
        assert report.without_states > 0
        assert shard_bytes(cache) <= 2**20
        answer = ask(cache)
        assert {source.chunk_id for source in answer.sources} == sources
        assert {miss.reason for miss in answer.misses} == {"evicted"}
        assert answer.answer == ask(unlimited).answer
        assert cache.stats().evicted_chunks == report.without_states - report.readmitted
        assert not cache.verify().faults
        # The same run again has nothing to do, and does not swap equals.
        again = cache.index(MANY)
        assert (again.unchanged, again.encoded_tokens, again.without_states) == (len(MANY), 0, 0)
        assert again.readmitted <= 1

        wider = open_tiny(cache.path, budget_megabytes=0, shard_megabytes=1)
        assert wider.index(MANY).readmitted > 0
        assert not ask(wider).misses

    def test_the_least_wanted_go_first(self, open_tiny: OpenTiny) -> None:
        cache = open_tiny(shard_megabytes=1)
        cache.index(MANY)
        wanted = [source.chunk_id for source in cache.query("[7.3]", top_k=5).sources]
        for _ in range(3):
            cache.query("[7.3]", top_k=5)
        cache.close()
        # Popularity is kept on disk: another object, as after a restart, evicts.
        small = open_tiny(shard_megabytes=1, budget_megabytes=1)
        report = small.compact()
        assert report.evicted > 0
        assert shard_bytes(small) <= 2**20
        kept = {chunk.chunk_id for batch in small.store.catalog.all_chunks() for chunk in batch if states_of(chunk)}
        assert set(wanted) <= kept
        assert len(kept) < cache.store.catalog.counts()["chunks"]
        assert not small.verify().faults

    def test_what_is_wanted_comes_back(self, open_tiny: OpenTiny) -> None:
        documents = MANY
        cache = open_tiny(budget_megabytes=1, shard_megabytes=1)
        cache.index(documents)
        missed = next(it for it in ask(cache).misses if it.reason == "evicted").chunk_id
        (chunk,) = cache.store.catalog.chunks_by_id([missed])
        for _ in range(5):
            cache.query(chunk.text, top_k=1)
        assert cache.index(documents).readmitted > 0
        assert states_of(cache.store.catalog.chunks_by_id([missed])[0]) is not None
        assert shard_bytes(cache) <= 2**20

    def test_the_free_space_floor(self, open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragcache.states.budget._free", lambda folder: 2**29)
        cache = open_tiny(free_megabytes=1024)
        report = cache.index(DOCUMENTS)
        assert report.without_states == report.chunks
        assert report.encoded_tokens == 0
        assert {miss.reason for miss in ask(cache).misses} == {"evicted"}

    def test_hits_and_misses_are_counted_across_processes(self, cache: RagCache, open_tiny: OpenTiny) -> None:
        with cache:
            ask(cache)
        other = open_tiny()
        chunks = len(ask(other).sources)
        shutil.rmtree(other.store.shard_folder)
        ask(other)
        stats = other.stats()
        assert (stats.hits, stats.misses) == (2 * chunks, {"missing": chunks})


class TestFolders:
    def test_shards_go_to_the_disks_in_turn(self, open_tiny: OpenTiny, tmp_path: Path) -> None:
        folders = (tmp_path / "disk1", tmp_path / "disk2")
        cache = open_tiny(state_folders=folders, shard_megabytes=1)
        for document in DOCUMENTS:
            cache.index([document])
        assert [len(list(shard_files(folder / cache.store.id))) for folder in folders] == [2, 2]
        assert not list(shard_files(cache.store.shard_folder))
        before = ask(cache)
        assert not before.misses

        # Settings are kept: another process needs not be told.
        again = open_tiny(state_folders=None)
        assert again.settings.state_folders == folders
        again.delete("doc-0")
        again.compact(0.0)
        assert not again.verify().faults
        assert {path.parent.parent for path in again.store.catalog.shards()} <= set(folders)

        before = ask(again)
        away = folders[0].rename(tmp_path / "away")
        missing = {miss.reason for miss in ask(again).misses}
        assert missing <= {"missing"}
        assert ask(again).answer == before.answer
        away.rename(folders[0])
        assert not ask(again).misses

        for file in again.path.glob("catalog.sqlite*"):
            file.unlink()
        report, _ = rebuild_store(again.path, again.settings, refuse_to_embed)
        assert not report.faults
        assert not ask(open_tiny(state_folders=None)).misses

    def test_two_stores_share_a_folder(self, open_tiny: OpenTiny, tmp_path: Path) -> None:
        stores = [open_tiny(tmp_path / name, state_folders=(tmp_path / "disk",)) for name in ("a", "b")]
        for store in stores:
            store.index(DOCUMENTS)
        stores[0].delete("doc-0")
        stores[0].compact(0.0)
        for store in stores:
            assert not store.verify().faults
            assert not ask(store).misses

    def test_a_copy_of_a_store_does_not_touch_the_shards_of_the_original(
        self, open_tiny: OpenTiny, tmp_path: Path
    ) -> None:
        """They have the same id. The copy answers, but only one of them writes; a moved store does."""
        original = open_tiny(tmp_path / "original", state_folders=(tmp_path / "disk",))
        original.index(DOCUMENTS[:2])
        shutil.copytree(original.path, tmp_path / "copy")
        original.index(DOCUMENTS[2:])
        copy = open_tiny(tmp_path / "copy", state_folders=(tmp_path / "disk",))
        assert not ask(copy).misses
        for change in (lambda: copy.index(DOCUMENTS[:1]), lambda: copy.delete("doc-0"), copy.compact):
            with pytest.raises(StoreError, match="is a copy"):
                change()
        assert not ask(original).misses
        assert not original.verify().faults

        shutil.rmtree(copy.path)
        moved = open_tiny(original.path.rename(tmp_path / "moved"), state_folders=(tmp_path / "disk",))
        moved.delete("doc-0")
        moved.compact(0.0)
        assert not ask(moved).misses
        assert not moved.verify().faults


class TestTheLock:
    def test_at_once_or_after_waiting(self, cache: RagCache) -> None:
        actions: list[Callable[[bool], object]] = [
            lambda wait: cache.index(DOCUMENTS, wait=wait),
            lambda wait: cache.delete("doc-0", wait=wait),
            lambda wait: cache.compact(wait=wait),
            lambda wait: cache.verify(repair=True, wait=wait),
        ]
        for action in actions:
            done = threading.Event()
            with hold_lock(cache.path):
                with pytest.raises(StoreLockedError, match="--wait"):
                    action(False)
                thread = threading.Thread(target=lambda action=action, done=done: (action(True), done.set()))
                thread.start()
                time.sleep(0.1)
                assert not done.is_set()
            thread.join(60)
            assert done.is_set()
