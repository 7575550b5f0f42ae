"""What is committed is there, what is not is not, and nothing else gets in."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
import torch

from ragcache.errors import StoreError, StoreLockedError, StoreMismatchError, StoreNotFoundError
from ragcache.settings import load_settings
from ragcache.states.folders import shard_files
from ragcache.states.inventory import Inventory
from ragcache.states.locked import WriteOptions
from ragcache.states.records import DocumentRecord, NewChunk, NewEncoding, VectorsVersion
from ragcache.states.shard import ShardEntry
from ragcache.states.store import StateStore, StoreIdentity
from ragcache.states.writer import StoreWriter
from tests.encodings import states_of
from tests.formats import hidden_format

FORMAT = hidden_format(2, 64, "int8", "float32")
IDENTITY = StoreIdentity('{"dtype": "float32", "weights": "' + "a" * 64 + '"}', "e" * 64, (1, 2, 3))


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore.create(tmp_path / "store", IDENTITY, load_settings(chunk_tokens=77))


def open_writer(store: StateStore, shard_bytes: int = 10**6) -> StoreWriter:
    return StoreWriter(store, FORMAT, WriteOptions(shard_bytes))


def put(writer: StoreWriter, key: str, tokens: int = 4) -> None:
    layers = {1: torch.full((FORMAT.size(1, tokens),), 7, dtype=torch.uint8)}
    writer.put(ShardEntry(key, tuple(range(tokens)), layers, chunk_id=key))


def document(writer: StoreWriter, name: str, keys: list[str]) -> tuple[DocumentRecord, list[NewChunk]]:
    ids = writer.new_vector_ids(len(keys))
    chunks = [
        NewChunk(vector_id, f"{name}#{i}", i, f"text of {key}", (0, 1, 2, 3), key, (NewEncoding("alone", key),))
        for i, (vector_id, key) in enumerate(zip(ids, keys, strict=True))
    ]
    return DocumentRecord(name, "here", name.title(), f"signature of {name}", {"n": 1}), chunks


def add(store: StateStore, name: str, keys: list[str], generation: int) -> None:
    with open_writer(store) as writer:
        for key in keys:
            if not writer.has(key):
                put(writer, key)
        writer.commit([document(writer, name, keys)], [], VectorsVersion(generation, ""))


def shards(store: StateStore) -> list[Path]:
    return list(shard_files(store.shard_folder))


def read_all(store: StateStore) -> list[object]:
    catalog = store.catalog
    chunks = catalog.chunks_by_id(["a#0", "a#1"])
    return [
        store.identity(),
        catalog.counts(),
        Inventory(catalog).sizes(),
        catalog.signatures(),
        catalog.vector_ids(["a"]),
        [(chunk.text, chunk.token_ids, chunk.metadata) for chunk in chunks],
    ]


def use_all(path: Path, expected: list[object]) -> None:
    """Read and write so that every page of a small catalog is touched."""
    assert read_all(StateStore.open(path)) == expected
    add(StateStore.open(path), "b", ["k3"], 2)


def test_committed_chunks_come_back(store: StateStore) -> None:
    add(store, "a", ["k1", "k2"], 1)
    first, second = StateStore.open(store.path).catalog.chunks_by_id(["a#1", "a#0"])
    assert (first.chunk_id, second.chunk_id) == ("a#1", "a#0")
    assert second.text == "text of k1"
    assert second.title == "A"
    assert second.metadata == {"n": 1}
    assert second.token_ids == (0, 1, 2, 3)
    states = states_of(second)
    assert states is not None
    assert states.key == "k1"
    assert states.format == FORMAT.to_json()
    assert [r.length for r in states.ranges] == [16, FORMAT.size(1, 4)]
    assert store.catalog.vectors().generation == 1
    assert store.catalog.signatures() == {"a": "signature of a"}
    assert load_settings(store.path).chunk_tokens == 77


def test_vector_ids_are_never_used_again(store: StateStore) -> None:
    add(store, "a", ["k1", "k2"], 1)
    with open_writer(store) as writer:
        writer.commit([], ["a"], VectorsVersion(2, ""))
    add(store, "b", ["k3"], 3)
    assert store.catalog.vector_ids(["b"]) == [3]


def test_what_was_put_but_not_committed_is_gone(store: StateStore) -> None:
    with open_writer(store, shard_bytes=1) as writer:  # every entry fills a shard
        put(writer, "k1")
        put(writer, "k2")
    with open_writer(store) as writer:
        put(writer, "k3")  # the shard is still open
    assert not shards(store)
    assert store.catalog.counts() == {"documents": 0, "chunks": 0}


def test_an_exception_rolls_everything_back(store: StateStore) -> None:
    add(store, "a", ["k1"], 1)
    with open_writer(store) as writer:
        put(writer, "k2")
        record, chunks = document(writer, "b", ["k2"])
        with pytest.raises(sqlite3.IntegrityError):
            writer.commit([(record, [chunks[0], chunks[0]])], ["a"], VectorsVersion(2, ""))
    assert [c.chunk_id for c in store.catalog.chunks_by_id(["a#0", "b#0"])] == ["a#0"]
    assert store.catalog.vectors().generation == 1
    assert len(shards(store)) == 1


def test_replacing_and_removing_documents(store: StateStore) -> None:
    add(store, "a", ["k1", "k2"], 1)
    add(store, "b", ["k3"], 2)
    add(store, "a", ["k2", "k4"], 3)  # k2 is kept, k1 is not needed any more
    assert store.catalog.find_states("k1", FORMAT) is None
    assert store.catalog.find_states("k2", FORMAT) is not None
    with open_writer(store) as writer:
        writer.commit([], ["a", "b"], VectorsVersion(4, ""))
    assert store.catalog.counts() == {"documents": 0, "chunks": 0}
    assert Inventory(store.catalog).sizes()["state_bytes"] == 0
    assert not shards(store)


def test_equal_chunks_share_states(store: StateStore) -> None:
    add(store, "a", ["k1"], 1)
    add(store, "b", ["k1"], 2)
    first, second = store.catalog.chunks_by_id(["a#0", "b#0"])
    states = states_of(second)
    assert states is not None
    assert states_of(first) == states
    with open_writer(store) as writer:
        writer.commit([], ["a"], VectorsVersion(3, ""))
    assert states_of(store.catalog.chunks_by_id(["b#0"])[0]) == states
    assert states.shard.exists()


def test_states_in_another_codec_do_not_count(store: StateStore) -> None:
    add(store, "a", ["k1"], 1)
    with StoreWriter(store, hidden_format(2, 64, "raw", "float32")) as writer:
        assert not writer.has("k1")


def test_one_writer_at_a_time(store: StateStore) -> None:
    with open_writer(store):
        with pytest.raises(StoreLockedError, match="another process"), open_writer(store):
            pass
        assert StateStore.open(store.path).catalog.counts()["documents"] == 0  # readers go on
    with open_writer(store):
        pass


def test_leftovers_of_a_killed_writer_are_cleared_by_the_next(store: StateStore) -> None:
    add(store, "a", ["k1"], 1)
    (store.shard_folder / ".writing-x.arrow").write_bytes(b"half")
    orphan = f"{'0' * 32}.arrow"
    (store.shard_folder / orphan).write_bytes(b"whole, but never committed")
    assert [path.name for path in store.orphans()] == [orphan]
    with open_writer(store):
        pass
    assert len(shards(store)) == 1
    assert not store.orphans()


def test_every_thread_may_read(store: StateStore) -> None:
    add(store, "a", ["k1"], 1)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(len(store.catalog.chunks_by_id(["a#0"])))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 8


def test_many_ids_at_once(store: StateStore) -> None:
    add(store, "a", ["k1"], 1)
    assert len(store.catalog.chunks_by_vector(list(range(3000)))) == 1


class TestPaths:
    def test_no_store(self, tmp_path: Path) -> None:
        with pytest.raises(StoreNotFoundError, match="ragcache index"):
            StateStore.open(tmp_path / "nothing")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="is a file"):
            StateStore.exists(tmp_path / "file")

    def test_someone_elses_folder(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(StoreError, match=r"thesis\.txt"):
            StateStore.exists(tmp_path)

    def test_a_creation_that_was_killed_is_no_store_and_may_be_repeated(self, tmp_path: Path) -> None:
        for folder in ("shards", "vectors"):
            (tmp_path / folder).mkdir()
        (tmp_path / "catalog.sqlite").touch()
        (tmp_path / "writer.lock").touch()
        (tmp_path / ".writing-store.toml").touch()
        assert not StateStore.exists(tmp_path)
        StateStore.create(tmp_path, IDENTITY, load_settings())
        assert StateStore.exists(tmp_path)

    def test_creating_twice_keeps_the_first(self, store: StateStore) -> None:
        add(store, "a", ["k1"], 1)
        again = StateStore.create(store.path, IDENTITY, load_settings())
        assert again.catalog.counts()["documents"] == 1

    def test_a_damaged_catalog(self, tmp_path: Path) -> None:
        (tmp_path / "catalog.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
        with pytest.raises(StoreError, match="damaged"):
            StateStore.open(tmp_path)

    @pytest.mark.parametrize("empty", [True, False])
    def test_states_without_a_catalog_are_not_written_over(self, store: StateStore, empty: bool) -> None:
        add(store, "a", ["k1"], 1)
        for file in store.path.glob("catalog.sqlite*"):
            file.unlink()
        if empty:
            (store.path / "catalog.sqlite").touch()
        with pytest.raises(StoreError, match="gone or empty"):
            StateStore.create(store.path, IDENTITY, load_settings())
        assert list(store.shard_folder.glob("*.arrow"))

    @pytest.mark.parametrize("page", range(12))
    def test_a_catalog_with_a_damaged_page(self, store: StateStore, page: int) -> None:
        """Whatever is read from it then, it is a named error or what was written."""
        add(store, "a", ["k1", "k2"], 1)
        whole = read_all(store)
        with sqlite3.connect(store.path / "catalog.sqlite") as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        content = bytearray((store.path / "catalog.sqlite").read_bytes())
        content[page * 4096 : (page + 1) * 4096] = b"\xa5" * 4096
        damaged = store.path.parent / "damaged"
        damaged.mkdir()
        (damaged / "catalog.sqlite").write_bytes(content)
        with pytest.raises(StoreError, match="damaged"):
            use_all(damaged, whole)

    def test_a_newer_catalog(self, store: StateStore) -> None:
        with store.catalog.transaction() as connection:
            connection.execute("UPDATE meta SET value = '99' WHERE key = 'catalog_version'")
        with pytest.raises(StoreError, match="newer ragcache"):
            StateStore.open(store.path)

    def test_an_older_catalog(self, store: StateStore) -> None:
        with store.catalog.transaction() as connection:
            connection.execute("UPDATE meta SET value = '2' WHERE key = 'catalog_version'")
        with pytest.raises(StoreError, match="older ragcache in another format; index into a new store"):
            StateStore.open(store.path)


class TestIdentity:
    def check(self, store: StateStore, **changes: object) -> str:
        other = StoreIdentity(**{**vars(IDENTITY), **changes})
        with pytest.raises(StoreMismatchError) as caught:
            store.check_identity(other, ("some-model", "some-embedder"))
        return str(caught.value)

    def test_the_same(self, store: StateStore) -> None:
        store.check_identity(IDENTITY, ("m", "e"))

    def test_another_model_shows_both(self, store: StateStore) -> None:
        other = '{"dtype": "bfloat16", "weights": "' + "b" * 64 + '"}'
        message = self.check(store, fingerprint=other)
        assert "weights aaaaaaaaaaaa in the store, bbbbbbbbbbbb loaded" in message
        assert "dtype float32 in the store, bfloat16 loaded" in message
        assert "some-model" in message

    def test_another_embedding_model(self, store: StateStore) -> None:
        assert "some-embedder" in self.check(store, embedding="f" * 64)

    def test_another_prefix(self, store: StateStore) -> None:
        assert "system prompt" in self.check(store, prefix=(1, 2, 4))
