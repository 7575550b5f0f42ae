"""Indexing again touches only what changed, and a run that dies leaves the old store whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache import Document, RagCache
from ragcache.errors import EncodingError, SourceError, StoreError, StoreLockedError
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.report import IndexReport
from ragcache.indexer.sources import open_source
from ragcache.states.store import StateStore, hold_lock
from tests.conftest import make_document

OpenTiny = Callable[..., RagCache]


def documents(*numbers: int) -> list[Document]:
    return [make_document(number) for number in numbers]


def outcome(report: IndexReport) -> tuple[int, int, int, int]:
    return report.added, report.updated, report.unchanged, report.removed


def contents(cache: RagCache) -> dict[str, list[str]]:
    chunks = cache.store.catalog.chunks_by_vector(list(range(1, 500)))
    return {
        document: [chunk.text for chunk in chunks if chunk.document_id == document]
        for document in cache.store.catalog.signatures()
    }


def found(cache: RagCache, question: str) -> set[str]:
    return {hit.chunk.document_id for hit in cache.retrieve(question, 50)}


def test_again_only_what_changed(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    first = cache.index(documents(1, 2, 3))
    assert outcome(first) == (3, 0, 0, 0)
    assert first.encoded_tokens > 0

    again = cache.index(documents(1, 2, 3))
    assert outcome(again) == (0, 0, 3, 0)
    assert (again.chunks, again.encoded_tokens) == (0, 0)

    changed = replace(make_document(2), text="Nothing is left of the harbour.")
    third = cache.index([make_document(1), changed, make_document(4)], remove_missing=True)
    assert outcome(third) == (1, 1, 1, 1)
    assert contents(cache)["doc-2"] == ["Nothing is left of the harbour."]
    assert found(cache, "harbour") == {"doc-1", "doc-2", "doc-4"}


def test_what_a_changed_document_keeps_is_not_encoded_again(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    document = make_document(1, sentences=20)
    whole = cache.index([document])
    longer = cache.index([replace(document, text=document.text + " And one more sentence at the end.")])
    assert longer.updated == 1
    assert 0 < longer.encoded_tokens < whole.encoded_tokens / 2
    assert not cache.query("ships", top_k=50).misses


def test_a_run_without_remove_missing_only_adds(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index(documents(1, 2))
    assert outcome(cache.index(documents(3))) == (1, 0, 0, 0)
    assert set(contents(cache)) == {"doc-1", "doc-2", "doc-3"}


def test_sources_do_not_remove_each_others_documents(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index(documents(1, 2), source="one", remove_missing=True)
    cache.index(documents(3), source="two", remove_missing=True)
    assert outcome(cache.index(documents(1), source="one", remove_missing=True)) == (0, 0, 1, 1)
    assert set(contents(cache)) == {"doc-1", "doc-3"}


def test_folders_of_one_name_do_not_replace_each_others_documents(open_tiny: OpenTiny, tmp_path: Path) -> None:
    cache = open_tiny()
    folders = [tmp_path / parent / "docs" for parent in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.md").write_text(f"This is the file of {folder.parent.name}.")
    first, second = (open_source(str(folder)) for folder in folders)
    cache.index(first, source=first.name, remove_missing=True)
    with pytest.raises(SourceError, match="already, from"):
        cache.index(second, source=second.name, remove_missing=True)
    assert contents(cache) == {"docs/a.md": ["This is the file of one."]}
    shutil.rmtree(folders[0])  # as if it had been moved
    assert outcome(cache.index(second, source=second.name, remove_missing=True)) == (0, 1, 0, 0)
    assert contents(cache) == {"docs/a.md": ["This is the file of two."]}


def test_settings_that_chunks_depend_on_count_as_a_change(open_tiny: OpenTiny) -> None:
    open_tiny().index(documents(1))
    assert outcome(open_tiny(codec="int8").index(documents(1))) == (0, 1, 0, 0)
    report = open_tiny(codec="int8", chunk_tokens=128).index(documents(1))
    assert outcome(report) == (0, 1, 0, 0)
    assert outcome(open_tiny(codec="int8", chunk_tokens=128, top_k=9).index(documents(1))) == (0, 0, 1, 0)


def test_metadata_and_title_count_as_a_change(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index(documents(1))
    report = cache.index([replace(make_document(1), metadata={"page": 9})])
    assert outcome(report) == (0, 1, 0, 0)
    assert report.encoded_tokens == 0  # the states do not depend on it
    assert cache.retrieve("ships", 1)[0].chunk.metadata == {"page": 9}
    assert cache.index([replace(make_document(1), title="Port")]).encoded_tokens > 0


def test_equal_documents_are_encoded_once(open_tiny: OpenTiny) -> None:
    text = make_document(1).text
    report = open_tiny().index([Document("a", text, "T"), Document("b", text, "T")])
    single = open_tiny(path=None).stats()
    assert report.encoded_tokens == single.tokens / 2


def test_delete_then_add_never_mixes_up_chunks(open_tiny: OpenTiny) -> None:
    """Where ids come from the number of vectors, d's vector would lead to c's text."""
    cache = open_tiny()
    texts = {
        "a": "Apples grow on trees.",
        "b": "Bees make honey.",
        "c": "Cats sleep all day.",
        "d": "Dogs like to run.",
    }
    cache.index([Document(name, texts[name]) for name in "abc"])
    cache.delete(["a"])
    cache.index([Document("d", texts["d"])])
    for name in "bcd":
        best = cache.retrieve(texts[name], 1)[0]
        assert (best.chunk.document_id, best.chunk.text) == (name, texts[name])
        assert best.score > 0.95
    assert "a" not in found(cache, texts["a"])


def test_vectors_of_deleted_chunks_do_not_crowd_out_others(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    near = [Document(f"near-{i}", f"The lighthouse keeper number {i} counted ships.") for i in range(30)]
    cache.index([*near, Document("far", "Rye bread needs a sourdough.")])
    cache.delete([document.id for document in near[1:]])
    hits = cache.retrieve("The lighthouse keeper counted ships.", 5)
    assert {hit.chunk.document_id for hit in hits} == {"near-0", "far"}
    changed = [replace(document, text="Nothing of that.") for document in near[:1]]
    cache.index(changed)
    assert len(cache.retrieve("The lighthouse keeper counted ships.", 2)) == 2


def test_an_open_reader_follows_commits(open_tiny: OpenTiny) -> None:
    reader, writer = open_tiny(), open_tiny()
    writer.index(documents(1))
    reader = open_tiny()
    assert found(reader, "harbour") == {"doc-1"}
    writer.index(documents(2))
    assert found(reader, "harbour") == {"doc-1", "doc-2"}
    writer.delete(["doc-1"])
    assert found(reader, "harbour") == {"doc-2"}


def test_documents_without_text(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    report = cache.index([make_document(1), Document("blank", " \n ")])
    assert report.empty == ("blank",)
    assert outcome(cache.index([make_document(1), Document("blank", " \n ")])) == (0, 0, 2, 0)


def test_many_shards(open_tiny: OpenTiny) -> None:
    cache = open_tiny(shard_megabytes=1, batch_tokens=300)
    many = documents(*range(60))
    cache.index(many)
    assert cache.stats().shards > 2
    assert len(contents(cache)) == 60
    answer = cache.query("Which ships passed?", top_k=12)
    assert not answer.misses
    assert answer.tokens.restored > 300


def test_batches_do_not_change_states(open_tiny: OpenTiny, tmp_path: Path) -> None:
    """The answer does not depend on which other chunks were encoded in the same pass."""
    answers = []
    for batch_tokens in (1, 64, 4096):
        cache = open_tiny(path=tmp_path / f"batch-{batch_tokens}", batch_tokens=batch_tokens)
        cache.index(documents(1, 2, 3))
        answers.append(cache.query("Which ships passed?", top_k=5, max_tokens=16).answer)
    assert len(set(answers)) == 1


class Bad:
    """A source whose last document cannot be read."""

    def __init__(self, fail_at_pass: int) -> None:
        self.passes = 0
        self.fail_at_pass = fail_at_pass

    def __iter__(self) -> Iterator[Document]:
        self.passes += 1
        yield make_document(1)
        if self.passes == self.fail_at_pass:
            raise SourceError("the last document cannot be read")
        yield make_document(2)


@pytest.mark.parametrize("fail_at_pass", [1, 2])
def test_a_failed_first_run_leaves_nothing(open_tiny: OpenTiny, fail_at_pass: int) -> None:
    cache = open_tiny()
    with pytest.raises(SourceError, match="cannot be read"):
        cache.index(Bad(fail_at_pass))
    assert not cache.path.exists()
    assert outcome(cache.index(documents(1))) == (1, 0, 0, 0)


def test_a_failed_later_run_leaves_the_store_as_it_was(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index(documents(7))
    before = contents(cache)
    with pytest.raises(SourceError):
        cache.index(Bad(2))
    assert contents(cache) == before
    assert not list(cache.store.shard_folder.glob(".*"))


def test_states_that_overflow_are_not_stored(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_tiny()
    norm = cache.model.module.get_submodule("model.layers.1.input_layernorm")
    handle = norm.register_forward_hook(lambda module, arguments, output: output * float("inf"))
    try:
        with pytest.raises(EncodingError, match="layer 1"):
            cache.index(documents(1))
    finally:
        handle.remove()
    assert not cache.path.exists()


def test_a_full_disk(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_tiny()
    cache.index(documents(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        cache.index(documents(2))
    monkeypatch.undo()
    assert set(contents(cache)) == {"doc-1"}
    assert outcome(cache.index(documents(2))) == (1, 0, 0, 0)


def test_two_writers(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index(documents(1))
    with hold_lock(cache.path):
        with pytest.raises(StoreLockedError):
            cache.index(documents(2))
        with pytest.raises(StoreLockedError):
            cache.delete(["doc-1"])
        assert cache.query("ships").answer is not None
    assert set(contents(cache)) == {"doc-1"}


WRITER = """
import sys
from pathlib import Path
from ragcache.indexer.encoder import StateEncoder
from ragcache.pipeline import RagCache
from tests.conftest import make_document

model, store = sys.argv[1:]
cache = RagCache.open(store, model=model, dtype="float32", chunk_tokens=64, shard_megabytes=1, batch_tokens=64)
encode = StateEncoder.encode

def announced(self, *arguments):
    print("encoding", flush=True)
    return encode(self, *arguments)

StateEncoder.encode = announced
cache.index([make_document(number) for number in range(100, 400)])
"""


@pytest.mark.parametrize("batches", [1, 40, 120])
def test_kill_9(open_tiny: OpenTiny, tiny_folder: Callable[[str], Path], tmp_path: Path, batches: int) -> None:
    """Killed before the first commit, or between commits: the store is whole and the next run finishes the work."""
    cache = open_tiny(codec="int8", shard_megabytes=1)
    cache.index(documents(1))
    command = [sys.executable, "-c", WRITER, str(tiny_folder("llama")), str(cache.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        for _ in range(batches):
            assert process.stdout.readline() == "encoding\n"
        process.send_signal(signal.SIGKILL)
        process.wait()

    StateStore.open(cache.path)
    survivors = set(contents(cache))
    assert "doc-1" in survivors
    answer = cache.query("Which ships passed?", top_k=20)
    assert not answer.misses
    assert {source.document_id for source in answer.sources} <= survivors

    report = cache.index(documents(*range(100, 160)))
    assert report.added + report.unchanged == 60
    assert not cache.store.orphans()
    assert not list(cache.store.shard_folder.glob(".*"))
    assert not cache.query("Which ships passed?", top_k=20).misses


def test_interrupting_is_safe(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_tiny()

    def interrupted(self: StateEncoder, *arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StateEncoder, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.index(documents(1))
    monkeypatch.undo()
    assert not cache.path.exists()
    cache.index(documents(1))
