"""A store that was damaged, replaced or half lost: healed where it can be, refused where it cannot, never believed."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.errors import StoreError, StoreMismatchError, VectorsError
from ragcache.indexer.plan import IndexPlan, plan_run
from tests.conftest import make_document

OpenTiny = Callable[..., RagCache]
DOCUMENTS = [make_document(number) for number in range(4)]


def scores(cache: RagCache) -> dict[str, float]:
    return {hit.chunk.chunk_id: round(hit.score, 4) for hit in cache.retrieve("Which ships passed?", 50)}


def alter(cache: RagCache, statement: str, *values: object) -> None:
    """Change the catalog behind ragcache's back."""
    with sqlite3.connect(cache.path / "catalog.sqlite") as connection:
        connection.execute(statement, values)
    connection.close()


def in_a_thread(action: Callable[[], object]) -> list[object]:
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(action())
        except StoreError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome


def remove_vectors(cache: RagCache) -> None:
    shutil.rmtree(cache.store.vector_folder)
    cache.store.vector_folder.mkdir()


def remove_vector_folder(cache: RagCache) -> None:
    shutil.rmtree(cache.store.vector_folder)


def damage_vectors(cache: RagCache) -> None:
    (file,) = cache.store.vector_folder.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def older_vectors(cache: RagCache) -> None:
    (file,) = cache.store.vector_folder.iterdir()
    old = file.read_bytes()
    cache.index(DOCUMENTS[3:])
    cache.delete([DOCUMENTS[3].id])
    (file,) = cache.store.vector_folder.iterdir()
    file.write_bytes(old[: len(old) // 2] + old[len(old) // 2 :][::-1])


@pytest.mark.parametrize("spoil", [remove_vectors, remove_vector_folder, damage_vectors, older_vectors])
def test_a_vector_index_is_made_anew(cache: RagCache, open_tiny: OpenTiny, spoil: Callable[[RagCache], None]) -> None:
    before = scores(cache)
    spoil(cache)
    again = open_tiny()
    with pytest.raises(VectorsError, match="index a source into the store again"):
        again.query("Which ships passed?")
    report = again.index(DOCUMENTS[:3])
    assert (report.unchanged, report.encoded_tokens) == (3, 0)
    assert report.reembedded == len(before)
    assert scores(again) == before
    assert again.index(DOCUMENTS[:3]).reembedded == 0


def shorten(shards: Path) -> None:
    for file in shards.glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize("spoil", [shutil.rmtree, shorten])
def test_lost_states_are_encoded_again(cache: RagCache, spoil: Callable[[Path], object]) -> None:
    before = cache.query("Which ships passed?", top_k=50)
    assert not before.misses
    spoil(cache.store.shard_folder)
    # Not encoded again along with a document of the same text, nor by itself when its document is not looked at.
    cache.index([Document("copy", DOCUMENTS[0].text, DOCUMENTS[0].title)])
    assert not [miss for miss in cache.query("ships", top_k=50).misses if miss.chunk_id.startswith("copy")]
    report = cache.index(DOCUMENTS[:3])
    assert report.updated == 3
    cache.delete(["copy"])
    after = cache.query("Which ships passed?", top_k=50)
    assert not after.misses
    assert after.answer == before.answer
    assert not cache.store.orphans()


def test_states_that_are_away_for_a_while_are_not_forgotten(cache: RagCache) -> None:
    """As when the disk they lie on is not mounted."""
    away = cache.store.shard_folder.rename(cache.path.parent / "away")
    cache.index(DOCUMENTS[3:])
    shutil.copytree(away, cache.store.shard_folder, dirs_exist_ok=True)
    assert not cache.query("Which ships passed?", top_k=50).misses
    assert cache.index(DOCUMENTS).unchanged == 4


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE chunks SET text = ?", "Something else."),
        ("UPDATE chunks SET token_ids = ?", bytes(12)),
        ("UPDATE chunks SET token_ids = ?", bytes(11)),
        ("UPDATE chunks SET chunk_id = 'x' || chunk_id, ordinal = ?", 7),
        ("UPDATE chunks SET content = ?", "0" * 64),
        ("UPDATE encodings SET name = ?", "context"),
        ("UPDATE encodings SET key = ?", "0" * 64),
        ("UPDATE encodings SET context = ?", "0" * 64),
        ("UPDATE encodings SET contexts = ?", bytes(32)),
        ("UPDATE documents SET title = ?", "Another title"),
        ("UPDATE documents SET metadata = ?", '{"page": 1000}'),
        ("UPDATE documents SET metadata = ?", "not JSON"),
    ],
)
def test_altered_texts_are_never_answered_from(cache: RagCache, statement: str, value: object) -> None:
    alter(cache, statement, value)
    with pytest.raises(StoreError, match="damaged"):
        cache.query("Which ships passed?")


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("DELETE FROM meta WHERE key = ?", "vectors"),
        ("UPDATE meta SET value = ? WHERE key = 'vectors'", "[1]"),
        ("DELETE FROM chunks WHERE id > ?", 1),
    ],
)
def test_a_catalog_without_its_vectors_or_chunks(cache: RagCache, statement: str, value: object) -> None:
    alter(cache, statement, value)
    with pytest.raises(StoreError, match="damaged"):
        cache.query("Which ships passed?")


@pytest.mark.parametrize("key", ["fingerprint", "prefix", "catalog_version"])
@pytest.mark.parametrize("value", [None, "7", "[", "{}"])
def test_a_catalog_without_sense(cache: RagCache, open_tiny: OpenTiny, key: str, value: str | None) -> None:
    if value is None:
        alter(cache, "DELETE FROM meta WHERE key = ?", key)
    else:
        alter(cache, "UPDATE meta SET value = ? WHERE key = ?", value, key)
    with pytest.raises(StoreError):
        open_tiny()


def test_a_store_that_was_made_anew_is_not_mixed_with_the_old_one(cache: RagCache, open_tiny: OpenTiny) -> None:
    cache.query("ships")
    shutil.rmtree(cache.path)
    new = open_tiny()
    new.index(DOCUMENTS[3:])
    before = scores(new)
    actions: list[Callable[[], Any]] = [
        lambda: cache.query("ships"),
        lambda: cache.index(DOCUMENTS[:1]),
        lambda: cache.delete([DOCUMENTS[0].id]),
    ]
    for action in actions:
        with pytest.raises(StoreError, match="replaced"):
            action()
        (outcome,) = in_a_thread(action)
        assert "replaced" in str(outcome)
    assert scores(new) == scores(open_tiny()) == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_store_that_was_deleted(cache: RagCache, whole: bool) -> None:
    if whole:
        shutil.rmtree(cache.path)
    else:
        for file in cache.path.glob("catalog.sqlite*"):
            file.unlink()
    for (outcome,) in (in_a_thread(lambda: cache.query("ships")), in_a_thread(lambda: cache.index(DOCUMENTS))):
        assert isinstance(outcome, StoreError)
    assert not (cache.path / "catalog.sqlite").exists()


def test_a_store_that_another_model_made_meanwhile_is_not_written_to(open_tiny: OpenTiny, tmp_path: Path) -> None:
    early = open_tiny(tmp_path / "new", system_prompt="Be brief.")
    other = open_tiny(tmp_path / "new")
    other.index(DOCUMENTS[:1])
    with pytest.raises(StoreMismatchError):
        early.index(DOCUMENTS[1:2])
    assert set(other.store.catalog.signatures()) == {DOCUMENTS[0].id}


def test_what_writers_that_died_left_is_removed(cache: RagCache) -> None:
    left = [
        ".writing-store.toml",
        "shards/.writing-x.arrow",
        f"shards/{'0' * 32}.arrow",
        f"shards/{'0' * 32}.parquet",
        f"shards/journal-00000009-{'0' * 16}.arrow",
        "vectors/.writing-x",
        "vectors/vectors-00000009.faiss",
    ]
    for name in left:
        (cache.path / name).touch()
    # These are none of ours; they are let be.
    (cache.store.shard_folder / "folder.arrow").mkdir()
    (cache.store.vector_folder / "folder").mkdir()
    cache.index(DOCUMENTS[:3])
    assert not [name for name in left if (cache.path / name).exists()]
    assert not cache.query("ships", top_k=50).misses


def test_a_plan_that_another_process_made_stale_is_made_again(
    cache: RagCache, open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, plans = open_tiny(), []

    def plan_then_be_overtaken(*arguments: Any, **options: Any) -> IndexPlan:
        plans.append(plan_run(*arguments, **options))
        if len(plans) == 1:
            other.delete([DOCUMENTS[0].id])
        return plans[-1]

    monkeypatch.setattr("ragcache.indexing.plan_run", plan_then_be_overtaken)
    report = cache.index(DOCUMENTS[:3])
    assert (plans[0].unchanged, report.unchanged, report.added) == (3, 2, 1)
    assert set(cache.store.catalog.signatures()) == {document.id for document in DOCUMENTS[:3]}


def test_a_store_does_not_depend_on_the_working_directory(
    open_tiny: OpenTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = open_tiny(Path("relative"))
    cache.index(DOCUMENTS[:1])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not cache.query("ships").misses
    cache.index(DOCUMENTS[:2])
    assert not list(Path().iterdir())


def test_vectors_do_not_depend_on_how_chunks_are_batched(
    cache: RagCache, open_tiny: OpenTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.indexer.job.EMBEDDING_BATCH", 2)
    other = open_tiny(tmp_path / "other")
    other.index(DOCUMENTS)
    other.index([replace(DOCUMENTS[0], title="Changed"), *DOCUMENTS[1:]])
    other.index(DOCUMENTS[:3], remove_missing=True)
    assert scores(other) == scores(cache)


def test_an_interrupt_right_after_a_commit_loses_nothing(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = cache.store.catalog.transaction

    @contextmanager
    def interrupted() -> Iterator[sqlite3.Connection]:
        with transaction() as connection:
            yield connection
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.store.catalog, "transaction", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.index(DOCUMENTS[3:])
    monkeypatch.undo()
    assert set(cache.store.catalog.signatures()) == {document.id for document in DOCUMENTS}
    assert not cache.query("Which ships passed?", top_k=50).misses
    assert cache.index(DOCUMENTS).unchanged == 4


def test_a_first_run_that_fails_takes_away_only_what_it_made(
    open_tiny: OpenTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "store.toml").write_text("top_k = 9\n")
    cache = open_tiny(folder)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ragcache.indexer.encoder.StateEncoder.encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.index(DOCUMENTS)
    assert [file.name for file in folder.iterdir()] == ["store.toml"]
    monkeypatch.undo()
    cache.index(DOCUMENTS)
    assert "top_k = 9\n" in (folder / "store.toml").read_text()
