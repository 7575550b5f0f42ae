"""What the store may delete, believe and run: nothing of anybody else's, and nothing that is only away for a while."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.errors import DocumentNotFoundError, SourceError, StoreError
from ragcache.maintenance import rebuild_store
from ragcache.retriever.embedding import Embedder
from ragcache.settings import load_settings
from ragcache.states.folders import shard_files
from ragcache.states.store import StateStore
from tests.conftest import make_document
from tests.encodings import states_of

OpenTiny = Callable[..., RagCache]
DOCUMENTS = [make_document(number) for number in range(3)]


def misses(cache: RagCache) -> set[str]:
    return {str(miss.reason) for miss in cache.query("Which ships passed?", top_k=50).misses}


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.suffix in (".arrow", ".parquet"))


def refuse_to_embed() -> Embedder:
    raise AssertionError("nothing is to be embedded")


def without_catalog(cache: RagCache) -> None:
    cache.store.catalog.close()
    for file in cache.path.glob("catalog.sqlite*"):
        file.unlink()


class TestFoldersOfShards:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Path:
        return tmp_path / "disk"

    @pytest.fixture
    def cache(self, open_tiny: OpenTiny, disk: Path) -> RagCache:
        cache = open_tiny(state_folders=(disk,))
        cache.index(DOCUMENTS)
        return cache

    @pytest.mark.parametrize("spelling", ["dots", "link"])
    def test_another_spelling_is_the_same_folder(
        self, cache: RagCache, open_tiny: OpenTiny, disk: Path, spelling: str
    ) -> None:
        other = disk.parent / "x" / ".." / "disk"
        if spelling == "link":
            other = disk.parent / "link"
            other.symlink_to(disk)
        else:
            (disk.parent / "x").mkdir()
        before = shards(disk)
        again = open_tiny(state_folders=(other,))
        assert again.index(DOCUMENTS).unchanged == 3
        assert shards(disk) == before
        assert not misses(again)

    def test_a_folder_that_was_moved_is_followed(self, cache: RagCache, open_tiny: OpenTiny, disk: Path) -> None:
        moved = disk.rename(disk.parent / "moved")
        before = shards(moved)
        again = open_tiny(state_folders=(moved,))
        report = again.index(DOCUMENTS)
        assert (report.unchanged, report.encoded_tokens) == (3, 0)
        assert shards(moved) == before
        assert not misses(again)
        assert not again.verify().faults

    def test_compacting_gives_nothing_up_that_is_only_away(self, cache: RagCache, disk: Path) -> None:
        cache.delete("doc-0")
        away = disk.rename(disk.parent / "away")
        assert {miss.reason for miss in cache.compact(0.0).damaged} == {"missing"}
        away.rename(disk)
        assert not misses(cache)
        assert cache.index(DOCUMENTS[1:]).unchanged == 2

    def test_rebuilding_waits_for_a_disk_that_is_away(self, cache: RagCache, open_tiny: OpenTiny, disk: Path) -> None:
        """Even when `store.toml` has other folders by now, or is gone."""
        other = open_tiny(state_folders=(disk.parent / "second",))
        other.index([*DOCUMENTS, make_document(3)])
        (other.path / "store.toml").unlink()
        without_catalog(other)
        away = disk.rename(disk.parent / "away")
        settings = load_settings(other.path)
        with pytest.raises(StoreError, match="mount its disk"):
            rebuild_store(other.path, settings, refuse_to_embed)
        away.rename(disk)
        report, _ = rebuild_store(other.path, settings, refuse_to_embed)
        assert (report.faults, report.with_states) == ([], report.chunks)
        assert not misses(open_tiny(state_folders=(disk.parent / "second",)))

    def test_a_shard_that_cannot_be_used_is_kept(self, cache: RagCache, open_tiny: OpenTiny, disk: Path) -> None:
        (shard,) = shard_files(disk / cache.store.id)
        content = shard.read_bytes()
        shard.write_bytes(b"of a newer version")
        without_catalog(cache)
        report, _ = rebuild_store(cache.path, cache.settings, refuse_to_embed)
        (kept,) = (path for path, _ in report.faults)
        assert kept.read_bytes() == b"of a newer version"
        again = open_tiny(state_folders=(disk,))
        again.delete("doc-0")
        assert kept.exists()
        kept.write_bytes(content)
        kept.rename(shard)
        without_catalog(again)
        report, _ = rebuild_store(again.path, again.settings, refuse_to_embed)
        assert not report.faults
        assert not misses(open_tiny(state_folders=(disk,)))

    def test_the_same_shard_in_two_folders(self, cache: RagCache, open_tiny: OpenTiny, disk: Path) -> None:
        shutil.copytree(disk, disk.parent / "second")
        without_catalog(cache)
        settings = load_settings(cache.path, state_folders=(disk, disk.parent / "second"))
        report, _ = rebuild_store(cache.path, settings, refuse_to_embed)
        assert (report.faults, report.with_states) == ([], report.chunks)

    def test_a_disk_that_is_full_costs_only_what_lies_on_it(
        self, cache: RagCache, open_tiny: OpenTiny, disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = disk.parent / "full"
        monkeypatch.setattr(
            "ragcache.states.budget._free", lambda folder: 0 if full in (folder, *folder.parents) else 2**40
        )
        monkeypatch.setattr("ragcache.states.budget._device", lambda path: 2 if full in (path, *path.parents) else 1)
        again = open_tiny(state_folders=(full,))
        again.index([*DOCUMENTS, make_document(3)])
        assert misses(again) == {"evicted"}
        assert {miss.chunk_id.split("#")[0] for miss in again.query("Which ships passed?", top_k=50).misses} == {
            "doc-3"
        }


class TestOwners:
    """Of several paths to a store, and several stores of one id, in folders of shards."""

    @pytest.fixture
    def disk(self, tmp_path: Path) -> Path:
        return tmp_path / "disk"

    @pytest.fixture
    def cache(self, open_tiny: OpenTiny, disk: Path) -> RagCache:
        cache = open_tiny(state_folders=(disk,))
        cache.index(DOCUMENTS)
        return cache

    @staticmethod
    def spelled(store: Path, spelling: str) -> Path:
        if spelling == "dots":
            return store / "shards" / ".."
        link = store.parent / "link"
        link.symlink_to(store if spelling == "link" else store.parent)
        return link if spelling == "link" else link / store.name

    @pytest.mark.parametrize("spelling", ["dots", "link", "link to its parent"])
    def test_a_store_under_another_spelling_is_no_copy(
        self, cache: RagCache, open_tiny: OpenTiny, disk: Path, spelling: str
    ) -> None:
        again = open_tiny(self.spelled(cache.path, spelling), state_folders=(disk,))
        again.index([*DOCUMENTS, make_document(3)])
        again.delete("doc-0")
        again.compact(0.0)
        cache.delete("doc-1")
        assert not misses(cache)
        assert not again.verify().faults

    @pytest.mark.parametrize("spelling", ["dots", "link"])
    def test_what_another_spelling_has_made(
        self, open_tiny: OpenTiny, tmp_path: Path, disk: Path, spelling: str
    ) -> None:
        """Also when the link has gone since: the folder then belongs to the store it led to, not to a copy."""
        store = tmp_path / "store"
        (store / "shards").mkdir(parents=True)
        other = self.spelled(store, spelling)
        open_tiny(other, state_folders=(disk,)).index(DOCUMENTS)
        if spelling == "link":
            other.unlink()
        shutil.copytree(store, tmp_path / "copy")
        original, copy = (open_tiny(path, state_folders=(disk,)) for path in (store, tmp_path / "copy"))
        for action in (lambda: copy.delete("doc-0"), lambda: copy.index(DOCUMENTS[:1])):
            with pytest.raises(StoreError, match="is a copy"):
                action()
        original.delete("doc-0")
        assert not misses(original)

    def test_a_link_that_older_versions_have_noted_is_followed_while_it_is_there(
        self, cache: RagCache, open_tiny: OpenTiny, disk: Path
    ) -> None:
        link = self.spelled(cache.path, "link")
        (disk / cache.store.id / "store.txt").write_text(str(link))
        cache.delete("doc-0")
        link.unlink()
        shutil.copytree(cache.path, cache.path.parent / "copy")
        with pytest.raises(StoreError, match="is a copy"):
            open_tiny(cache.path.parent / "copy", state_folders=(disk,)).delete("doc-1")

    @pytest.mark.parametrize("what", ["nothing", "file", "folder", "folder of a file", "another store"])
    def test_whatever_is_where_the_store_was(self, cache: RagCache, open_tiny: OpenTiny, disk: Path, what: str) -> None:
        """The store was moved, and goes on."""
        before = cache.path
        moved = open_tiny(before.rename(before.parent / "moved"), state_folders=(disk,))
        if what == "file":
            before.touch()
        elif what == "folder":
            before.mkdir()
            (before / "mine.txt").touch()
        elif what == "folder of a file":
            (disk / moved.store.id / "store.txt").write_text(str(moved.path / "store.toml" / "x"))
        elif what == "another store":
            open_tiny(before).index(DOCUMENTS[:1])
        moved.delete("doc-0")
        moved.compact(0.0)
        assert not misses(moved)
        assert not moved.verify().faults

    def test_an_original_without_its_catalog_is_not_gone(
        self, cache: RagCache, open_tiny: OpenTiny, disk: Path
    ) -> None:
        shutil.copytree(cache.path, cache.path.parent / "copy")
        without_catalog(cache)
        with pytest.raises(StoreError, match="rebuild"):
            open_tiny(cache.path.parent / "copy", state_folders=(disk,)).delete("doc-0")


class TestFilesOfOthers:
    @pytest.mark.parametrize("place", ["shards/mine.parquet", "vectors/mine.npy"])
    def test_a_folder_with_other_files_is_no_new_store(self, open_tiny: OpenTiny, tmp_path: Path, place: str) -> None:
        mine = tmp_path / "folder" / place
        mine.parent.mkdir(parents=True)
        mine.touch()
        with pytest.raises(StoreError, match="holds other files"):
            open_tiny(tmp_path / "folder")
        assert mine.exists()

    def test_files_that_came_later_are_let_be(self, cache: RagCache) -> None:
        mine = [cache.path / place for place in ("shards/mine.parquet", "vectors/mine.npy", "mine.txt")]
        for path in mine:
            path.touch()
        cache.index([*DOCUMENTS, make_document(3)])
        cache.delete("doc-0")
        cache.compact(0.0)
        assert all(path.exists() for path in mine)
        assert not cache.verify().faults

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE shards SET name = 'precious.txt', folder = '{folder}'",
            "UPDATE shards SET folder = '{folder}'",
            "UPDATE meta SET value = '{folder}' WHERE key = 'store_id'",
        ],
    )
    def test_a_catalog_cannot_name_files_of_others(
        self, cache: RagCache, open_tiny: OpenTiny, tmp_path: Path, statement: str
    ) -> None:
        """As one that somebody has sent."""
        folder = tmp_path / "home"
        folder.mkdir()
        mine = [folder / name for name in ("precious.txt", ".writing-a-letter", f"{'0' * 32}.parquet")]
        for path in mine:
            path.touch()
        with sqlite3.connect(cache.path / "catalog.sqlite") as connection:
            connection.execute(statement.format(folder=folder))
        connection.close()
        for action in (lambda: cache.delete("doc-0"), lambda: cache.compact(0.0), lambda: open_tiny().index(DOCUMENTS)):
            with pytest.raises(StoreError, match="damaged"):
                action()
        assert all(path.exists() for path in mine)

    def test_a_store_cannot_make_its_models_code_run(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "store.toml").write_text('trust_remote_code = true\ncache_folder = "/elsewhere"\ntop_k = 9\n')
        settings = load_settings(tmp_path)
        assert (settings.trust_remote_code, settings.top_k) == (False, 9)
        assert settings.cache_folder != Path("/elsewhere")
        assert load_settings(tmp_path, trust_remote_code=True).trust_remote_code
        warned = [record.getMessage() for record in caplog.records]
        assert [text.split(" is ignored")[0] for text in warned] == [
            f"{name} in {tmp_path / 'store.toml'}" for name in ("trust_remote_code", "cache_folder")
        ]


class TestDocuments:
    @pytest.mark.parametrize(
        "metadata", [None, [1], "text", {1: "a number as key"}, {"a": json.loads("[" * 60 + "]" * 60)}]
    )
    def test_metadata_that_cannot_be_kept(self, cache: RagCache, metadata: Any) -> None:
        with pytest.raises(SourceError, match="metadata of document 'x'"):
            cache.index([Document("x", "text", "title", metadata)])
        assert set(cache.store.catalog.signatures()) == {"doc-0", "doc-1", "doc-2"}

    def test_ids_that_are_no_text(self, cache: RagCache) -> None:
        with pytest.raises(DocumentNotFoundError):
            cache.delete("\ud800")


class TestTransactions:
    def test_an_interrupt_before_the_transaction_was_noticed(self, cache: RagCache) -> None:
        """The statement has begun one, and nothing has rolled it back."""
        connection = cache.store.catalog._database._connection(write=True).sqlite
        connection.execute("BEGIN IMMEDIATE")
        cache.index([*DOCUMENTS, make_document(3)])
        assert len(cache.store.catalog.signatures()) == 4

    def test_a_writer_that_fails_on_entering_lets_go_of_the_lock(
        self, cache: RagCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: StateStore) -> list[str]:
            raise StoreError("out of order")

        monkeypatch.setattr(StateStore, "broken_shards", fail)
        with pytest.raises(StoreError, match="out of order") as kept:
            cache.delete("doc-0")
        monkeypatch.undo()
        cache.delete("doc-0")
        assert kept.value


class TestBudget:
    def test_a_lower_budget_counts_although_nothing_changed(self, open_tiny: OpenTiny) -> None:
        many = [make_document(number) for number in range(14)]
        cache = open_tiny(shard_megabytes=1)
        cache.index(many)
        lower = open_tiny(shard_megabytes=1, budget_megabytes=1)
        report = lower.index(many)
        assert (report.unchanged, report.encoded_tokens) == (14, 0)
        assert report.without_states > 0
        assert lower.stats().shard_bytes <= 2**20

    def test_no_more_is_encoded_than_can_be_kept(self, open_tiny: OpenTiny) -> None:
        """Also when the ageing clock makes every newcomer worth more than what is there."""
        cache = open_tiny(shard_megabytes=1, budget_megabytes=1)
        cache.index([make_document(number) for number in range(14)])
        cache.store.usage.advance_clock(10.0**12)
        report = cache.index([make_document(number) for number in range(100, 130)], source="others")
        kept = sum(
            len(chunk.token_ids) for chunks in cache.store.catalog.all_chunks() for chunk in chunks if states_of(chunk)
        )
        assert 0 < report.encoded_tokens <= 1.2 * kept
        assert cache.stats().shard_bytes <= 2**20
