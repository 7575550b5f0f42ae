"""Every kind of damage done to a real store: the answer stays what it was, or an error says what to do.

`docs/reliability.md` has the same as a table. States are raw here, so what is restored equals what is computed, and a
damaged store must answer as the whole one does, to the letter.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import Tensor

from ragcache import RagCache
from ragcache.answer import Answer, Source
from ragcache.errors import StoreError, StoreNotFoundError
from ragcache.indexer.contexts import Block, P
from ragcache.indexer.encoder import StateEncoder
from ragcache.maintenance import compact_store, rebuild_store, write_options
from ragcache.model.language_model import LanguageModel
from ragcache.prompt.template import PromptTemplate
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex
from ragcache.settings import load_settings
from ragcache.states.changes import set_vectors
from ragcache.states.journal import journal_files
from ragcache.states.records import ChunkRecord, StoredStates
from ragcache.states.shard import Container, read_shard
from ragcache.states.store import StateStore
from ragcache.states.verify import Part
from tests import encodings
from tests.conftest import make_document
from tests.unprivileged import ordinary_user, reachable_folder, read_only

OpenTiny = Callable[..., RagCache]
QUESTION = "Which ships passed?"
DOCUMENTS = [make_document(number) for number in range(4)]


class Kind(NamedTuple):
    """How a store is made."""

    states: str = "hidden"
    shard_format: str = "arrow"


KINDS = [Kind(*it) for it in itertools.product(("hidden", "pre-rope-kv"), ("arrow", "parquet"))]
every_kind = pytest.mark.parametrize("kind", KINDS, ids="-".join)
# Each form and each container once.
two_kinds = pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids="-".join)


@functools.cache
def template(tokenizer: Any, system_prompt: str, user_prompt: str) -> PromptTemplate:
    return PromptTemplate(tokenizer, system_prompt, user_prompt)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, embedder: Embedder) -> None:
    """Stores are opened and the question is asked a thousand times here; what comes to the same each time is kept."""
    monkeypatch.setattr("ragcache.pipeline.PromptTemplate", template)
    monkeypatch.setattr(embedder, "question", functools.cache(embedder.question))


@dataclass(frozen=True)
class Original:
    """A whole store of the first three documents, in two shards, closed in good order."""

    path: Path
    answer: Answer


@pytest.fixture(scope="module")
def originals() -> dict[Kind, Original]:
    return {}


@pytest.fixture
def original(
    open_tiny: OpenTiny, originals: dict[Kind, Original], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Kind], Original]:
    def make(kind: Kind) -> Original:
        if kind not in originals:
            cache = open_tiny(tmp_path_factory.mktemp("original") / "store", **kind._asdict())
            cache.index(DOCUMENTS[:2])
            cache.index(DOCUMENTS[2:3])
            answer = ask(cache)
            assert not answer.misses
            close(cache)
            originals[kind] = Original(cache.path, answer)
        return originals[kind]

    return make


@dataclass
class Damaged:
    """A copy of a whole store, to be damaged, and what it must go on to answer."""

    path: Path
    cache: RagCache
    expected: Answer
    open_path: Callable[[Path], RagCache]

    @property
    def chunks(self) -> list[ChunkRecord]:
        return [chunk for batch in self.cache.store.catalog.all_chunks() for chunk in batch]

    @property
    def shard(self) -> Path:
        """The one with the first two documents."""
        return states_of(self.chunks[0]).shard

    def open_again(self) -> None:
        self.cache = self.open_path(self.path)

    def in_shard(self) -> list[ChunkRecord]:
        return [chunk for chunk in self.chunks if states_of(chunk).shard == self.shard]

    def check(self, misses: dict[str, str]) -> None:
        """The answer is the right one, and just these chunks were computed: chunk id to reason."""
        answer = ask(self.cache)
        assert answer.answer == self.expected.answer
        assert without_encodings(answer.sources) == without_encodings(self.expected.sources)
        assert {miss.chunk_id: miss.reason for miss in answer.misses} == misses

    def check_all_but(self, misses: dict[str, str]) -> None:
        """The answer is the right one, and no other chunks than these were computed."""
        answer = ask(self.cache)
        assert answer.answer == self.expected.answer
        assert {(miss.chunk_id, miss.reason) for miss in answer.misses} <= misses.items()

    def faults(self) -> set[tuple[Part, str]]:
        return {(fault.part, fault.name) for fault in self.cache.verify().faults}

    def rebuild(self) -> list[str]:
        """Make the catalog anew and go on with it; what could not be used."""
        self.cache.store.catalog.close()
        report, embedded = rebuild_store(self.path, self.cache.settings, lambda: self.cache.embedder)
        assert embedded in (0, report.chunks)
        self.open_again()
        return [detail for _, detail in report.faults]


@pytest.fixture
def damaged(
    open_tiny: OpenTiny, original: Callable[[Kind], Original], tmp_path: Path, encoded: list[tuple[int, ...]]
) -> Callable[..., Damaged]:
    def copy(kind: Kind = KINDS[0]) -> Damaged:
        whole = original(kind)
        encoded.clear()
        shutil.copytree(whole.path, tmp_path / "copy")
        return Damaged(tmp_path / "copy", open_tiny(tmp_path / "copy"), whole.answer, open_tiny)

    return copy


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Token ids of the chunks that were encoded for the store."""
    seen: list[tuple[int, ...]] = []
    encode = StateEncoder.encode

    def noted(self: StateEncoder, blocks: Sequence[Block[P]], *limit: int) -> list[dict[int, Tensor]]:
        seen.extend(chunk.token_ids for block in blocks for chunk in block.chunks)
        return encode(self, blocks, *limit)

    monkeypatch.setattr(StateEncoder, "encode", noted)
    return seen


def ask(cache: RagCache) -> Answer:
    return cache.query(QUESTION, top_k=50, max_tokens=3)


def without_encodings(sources: list[Source]) -> list[Source]:
    """Which encodings there are may be lost, and is then reported as a miss."""
    return [source.model_copy(update={"encoding": None}) for source in sources]


def close(cache: RagCache) -> None:
    cache.close()
    cache.store.catalog.close()


def states_of(chunk: ChunkRecord) -> StoredStates:
    states = encodings.states_of(chunk)
    assert states is not None
    return states


def flip(path: Path, place: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ mask]))


@contextmanager
def flipped(path: Path, place: int, mask: int = 0xFF) -> Iterator[None]:
    flip(path, place, mask)
    yield
    flip(path, place, mask)


# ------------------------------------------------------------------------------------------------ regions of a shard

MAGIC, SCHEMA, HEADERS, DESCRIPTION = "magic", "schema", "headers", "description"
KEY, CHUNK_ID, TEXT, FOOTER, END, STATES = "key", "chunk id", "text", "footer", "end", "states"

REGIONS = {
    "arrow": [MAGIC, SCHEMA, HEADERS, DESCRIPTION, KEY, CHUNK_ID, TEXT, FOOTER, END],
    "parquet": [MAGIC, HEADERS, DESCRIPTION, KEY, CHUNK_ID, TEXT, FOOTER, END],
}


class Run(NamedTuple):
    """A run of bytes of a shard and what they are."""

    region: str
    start: int
    stop: int


def arrow_runs(path: Path) -> Iterator[Run]:
    """Messages one after the other: the schema, then a header and a body for each chunk."""
    size = path.stat().st_size
    yield Run(MAGIC, 0, 8)
    with pa.OSFile(str(path)) as file:
        file.seek(8)
        for region in itertools.chain([SCHEMA], itertools.repeat(HEADERS)):
            start = file.tell()
            try:
                body = pa.ipc.read_message(file).body
            except EOFError:
                break
            stop = file.tell() - (len(body) if body else 0)
            yield Run(region, start, stop)
            # Beside the columns also offsets, checksums and padding.
            yield Run(DESCRIPTION, stop, file.tell())
    yield Run(FOOTER, start, size - 10)
    yield Run(END, size - 10, size)


def parquet_runs(path: Path) -> Iterator[Run]:
    """A page for each column of each chunk; the schema is in the footer."""
    size, metadata = path.stat().st_size, pq.read_metadata(path)
    yield Run(MAGIC, 0, 4)
    stop = 4
    for group, number in itertools.product(range(metadata.num_row_groups), range(metadata.num_columns)):
        column = metadata.row_group(group).column(number)
        start, stop = column.data_page_offset, column.data_page_offset + column.total_compressed_size
        # The values of these are painted over; what is left of them is the page's header.
        yield Run(HEADERS if column.path_in_schema.startswith(("layer", "token")) else DESCRIPTION, start, stop)
    yield Run(FOOTER, stop, size - 8)
    yield Run(END, size - 8, size)


def runs(it: Damaged, kind: Kind) -> dict[str, list[int]]:
    """Places of every byte of the shard, by region."""
    content = it.shard.read_bytes()
    painted = list(arrow_runs(it.shard) if kind.shard_format == "arrow" else parquet_runs(it.shard))
    for chunk in it.in_shard():
        described = {KEY: states_of(chunk).key, CHUNK_ID: chunk.chunk_id, TEXT: chunk.text}
        for region, value in described.items():
            start = content.index(value.encode())
            painted.append(Run(region, start, start + len(value.encode())))
        painted += [Run(STATES, r.offset, r.offset + r.length) for r in states_of(chunk).ranges]
    names = sorted({run.region for run in painted})
    owner = np.full(len(content), -1)
    for run in painted:
        owner[run.start : run.stop] = names.index(run.region)
    assert (owner >= 0).all()
    return {name: np.flatnonzero(owner == index).tolist() for index, name in enumerate(names)}


def spread(places: list[int], count: int) -> list[int]:
    """Some of the places: the first, the last and in between."""
    return sorted({places[index] for index in np.linspace(0, len(places) - 1, count).astype(int)})


@pytest.mark.parametrize(
    ("kind", "region"),
    [(kind, region) for kind in (KINDS[0], KINDS[3]) for region in REGIONS[kind.shard_format]],
    ids=lambda it: it if isinstance(it, str) else "-".join(it),
)
def test_flipped_bytes_around_the_states(
    damaged: Callable[..., Damaged], kind: Kind, region: str, encoded: list[tuple[int, ...]]
) -> None:
    """They are not read to answer; `verify` names the file, and a repair copies what is sound."""
    it = damaged(kind)
    shard, places = it.shard, spread(runs(it, kind)[region], 5)
    for place in places:
        with flipped(shard, place):
            it.check(misses={})
            assert it.faults() == {(Part.SHARD, str(shard))}
    flip(shard, places[-1])
    it.cache.verify(repair=True)
    assert not encoded
    assert not it.faults()
    it.check(misses={})


@every_kind
@pytest.mark.parametrize("column", [0, 1, -1], ids=["token ids", "first layer", "last layer"])
def test_flipped_bytes_of_states(
    damaged: Callable[..., Damaged], kind: Kind, column: int, encoded: list[tuple[int, ...]]
) -> None:
    """The chunk is computed, others are restored; a repair encodes just that chunk again."""
    it = damaged(kind)
    chunks = it.in_shard()
    for chunk in (chunks[0], chunks[len(chunks) // 2], chunks[-1]):
        states = states_of(chunk)
        offset, length, _ = vars(states.ranges[column]).values()
        for place, mask in ((offset, 0x01), (offset + length // 2 | 3, 0x40), (offset + length - 1, 0xFF)):
            with flipped(states.shard, place, mask):
                it.check(misses={chunk.chunk_id: "checksum"})
                assert it.faults() == {(Part.CHUNK, chunk.chunk_id)}
    it.check(misses={})
    flip(states.shard, offset + length // 2)
    it.cache.verify(repair=True)
    assert encoded == [chunk.token_ids]
    assert not it.faults()
    it.check(misses={})


@every_kind
def test_a_single_damaged_chunk_answers_as_a_full_prefill(damaged: Callable[..., Damaged], kind: Kind) -> None:
    it = damaged(kind)
    best = it.cache.retrieve(QUESTION, 1)[0].chunk
    plain = it.cache.query(QUESTION, top_k=1, reuse="none")
    for reuse in ("composed", "exact"):
        assert it.cache.query(QUESTION, top_k=1, reuse=reuse).answer == plain.answer
    for part in states_of(best).ranges:
        # The exponent of a value.
        with flipped(states_of(best).shard, part.offset + 3, 0x40):
            for reuse in ("composed", "exact"):
                answer = it.cache.query(QUESTION, top_k=1, reuse=reuse)
                assert answer.answer == plain.answer
                assert [(miss.chunk_id, miss.reason) for miss in answer.misses] == [(best.chunk_id, "checksum")]


@pytest.mark.parametrize(("kind", "heal"), [(KINDS[0], "index"), (KINDS[3], "repair")], ids=["index", "repair"])
def test_truncated_at_a_hundred_lengths(
    damaged: Callable[..., Damaged], kind: Kind, heal: str, encoded: list[tuple[int, ...]]
) -> None:
    it = damaged(kind)
    shard, content, chunks = it.shard, it.shard.read_bytes(), it.in_shard()
    ends = {chunk.chunk_id: max(r.offset + r.length for r in states_of(chunk).ranges) for chunk in chunks}
    lengths = set(np.linspace(0, len(content) - 1, 100).astype(int).tolist())
    for chunk in (chunks[0], chunks[len(chunks) // 2], chunks[-1]):
        edges = {edge for r in states_of(chunk).ranges for edge in (r.offset, r.offset + r.length)}
        lengths |= edges | {edge - 1 for edge in edges}
    for number, length in enumerate(sorted(lengths)):
        shard.write_bytes(content[:length])
        cut = {chunk_id for chunk_id, end in ends.items() if end > length}
        it.check(misses=dict.fromkeys(cut, "truncated"))
        if number % 8 == 0:
            assert it.faults() == ({(Part.CHUNK, chunk_id) for chunk_id in cut} or {(Part.SHARD, str(shard))})
    shard.write_bytes(content[: len(content) // 2])
    if heal == "index":
        assert it.cache.index(DOCUMENTS[:3]).updated == 2
    else:
        cut = {chunk_id for chunk_id, end in ends.items() if end > len(content) // 2}
        it.cache.verify(repair=True)
        assert set(encoded) == {chunk.token_ids for chunk in chunks if chunk.chunk_id in cut}
    it.check(misses={})
    assert not it.faults()


# ---------------------------------------------------------------------------------------- something else for a shard


def put_nothing(path: Path) -> None:
    path.unlink()


def put_empty(path: Path) -> None:
    path.write_bytes(b"")


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_noise(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


@pytest.mark.parametrize("heal", ["index", "repair", "rebuild"])
@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (put_nothing, "missing"),
        (put_empty, "truncated"),
        (put_folder, "io"),
        (put_loop, "io"),
        (put_pipe, "io"),
        (put_noise, "checksum"),
    ],
)
def test_no_shard(damaged: Callable[..., Damaged], put: Callable[[Path], None], reason: str, heal: str) -> None:
    it = damaged()
    chunks = it.in_shard()
    put(it.shard)
    it.check(misses={chunk.chunk_id: reason for chunk in chunks})
    assert it.faults() == {(Part.CHUNK, chunk.chunk_id) for chunk in chunks}
    if heal == "rebuild":
        it.rebuild()
        it.check(misses={chunk.chunk_id: "not_stored" for chunk in chunks})
    if heal == "repair":
        it.cache.verify(repair=True)
    elif put is put_noise and heal == "index":
        # Nothing shows that it is damaged but reading it.
        assert it.cache.index(DOCUMENTS[:3]).unchanged == 3
        return
    else:
        assert it.cache.index(DOCUMENTS[:3]).updated == 2
    it.check(misses={})
    assert not it.faults()


@every_kind
def test_another_shard_of_the_same_store(damaged: Callable[..., Damaged], kind: Kind) -> None:
    it = damaged(kind)
    chunks, other = it.in_shard(), states_of(it.chunks[-1]).shard
    assert other != it.shard
    shutil.copy(other, it.shard)
    answer = ask(it.cache)
    assert answer.answer == it.expected.answer
    assert {miss.chunk_id for miss in answer.misses} == {chunk.chunk_id for chunk in chunks}
    assert {miss.reason for miss in answer.misses} <= {"checksum", "truncated"}
    it.cache.verify(repair=True)
    it.check(misses={})
    assert not it.faults()


@pytest.fixture
def foreign(
    tiny_model: Callable[[str], LanguageModel], embedder: Embedder, tmp_path: Path
) -> Callable[[Kind], RagCache]:
    """A store of the same documents, made with a model of the same shape and other weights."""

    def make(kind: Kind) -> RagCache:
        path, model = tmp_path / "foreign", tiny_model("llama3-rope")
        settings = load_settings(
            path,
            model=model.name,
            dtype="float32",
            codec="raw",
            chunk_tokens=64,
            encodings=("alone",),
            order="score",
            **kind._asdict(),
        )
        cache = RagCache(path, settings, model, embedder)
        cache.index(DOCUMENTS[:2])
        return cache

    return make


@every_kind
@pytest.mark.parametrize("how", ["file", "payload"])
def test_the_shard_of_another_model(
    damaged: Callable[..., Damaged], foreign: Callable[[Kind], RagCache], kind: Kind, how: str
) -> None:
    """As a whole under the name of the right one, and so that even every place in it is the right one."""
    it, other = damaged(kind), foreign(kind)
    chunks = it.in_shard()
    theirs = {chunk.chunk_id: chunk for batch in other.store.catalog.all_chunks() for chunk in batch}
    source = states_of(theirs[chunks[0].chunk_id]).shard.read_bytes()
    if how == "file":
        it.shard.write_bytes(source)
    else:
        content = bytearray(it.shard.read_bytes())
        for chunk in chunks:
            assert theirs[chunk.chunk_id].token_ids == chunk.token_ids
            pairs = zip(states_of(chunk).ranges, states_of(theirs[chunk.chunk_id]).ranges, strict=True)
            for mine, their in pairs:
                assert mine.length == their.length
                content[mine.offset :][: mine.length] = b""
                content[mine.offset : mine.offset] = source[their.offset : their.offset + their.length]
        it.shard.write_bytes(content)
    answer = ask(it.cache)
    assert answer.answer == it.expected.answer
    assert {miss.chunk_id for miss in answer.misses} == {chunk.chunk_id for chunk in chunks}
    assert {miss.reason for miss in answer.misses} <= {"checksum", "truncated"}
    it.cache.verify(repair=True)
    it.check(misses={})
    assert not it.faults()


def test_a_catalog_that_takes_another_model_s_states_for_its_own(
    damaged: Callable[..., Damaged], foreign: Callable[[Kind], RagCache]
) -> None:
    """Even where checksums and token ids are right, the key tells models apart."""
    it, other = damaged(), foreign(KINDS[0])
    chunks = it.in_shard()
    theirs = {chunk.chunk_id: states_of(chunk) for batch in other.store.catalog.all_chunks() for chunk in batch}
    close(other)
    with sqlite3.connect(it.path / "catalog.sqlite") as connection:
        connection.execute("ATTACH ? AS theirs", (str(other.path / "catalog.sqlite"),))
        for chunk in chunks:
            connection.execute(
                "UPDATE states SET key = ?, ranges = (SELECT ranges FROM theirs.states WHERE key = ?)"
                " WHERE id = (SELECT states FROM encodings JOIN chunks ON id = chunk WHERE chunk_id = ?)",
                (theirs[chunk.chunk_id].key, theirs[chunk.chunk_id].key, chunk.chunk_id),
            )
    connection.close()
    shutil.copy(theirs[chunks[0].chunk_id].shard, it.shard)
    it.check(misses={chunk.chunk_id: "fingerprint" for chunk in chunks})
    it.cache.verify(repair=True)
    it.check(misses={})


def test_a_shard_that_may_not_be_read(open_tiny: OpenTiny, original: Callable[[Kind], Original]) -> None:
    whole = original(KINDS[0])
    with reachable_folder() as folder:
        shutil.copytree(whole.path, folder / "store")
        it = Damaged(folder / "store", open_tiny(folder / "store"), whole.answer, open_tiny)
        chunks = it.in_shard()
        it.shard.chmod(0o000)
        with ordinary_user():
            it.open_again()
            it.check(misses={chunk.chunk_id: "io" for chunk in chunks})
            assert it.faults() == {(Part.CHUNK, chunk.chunk_id) for chunk in chunks}
        it.shard.chmod(0o644)
        it.open_again()
        it.check(misses={})


def test_a_disk_of_states_that_is_not_there(open_tiny: OpenTiny, tmp_path: Path, encoded: list[object]) -> None:
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    cache = open_tiny(state_folders=disks)
    cache.index(DOCUMENTS[:2])
    cache.index(DOCUMENTS[2:3])
    it = Damaged(cache.path, cache, ask(cache), open_tiny)
    chunks, work = it.in_shard(), len(encoded)
    disk = it.shard.parent.parent
    assert disk in disks
    assert 0 < len(chunks) < len(it.chunks)
    disk.rename(tmp_path / "away")
    for mount_point in (False, True):
        if mount_point:
            disk.mkdir()
        it.open_again()
        it.check(misses={chunk.chunk_id: "missing" for chunk in chunks})
        assert it.faults() == {(Part.CHUNK, chunk.chunk_id) for chunk in chunks}
    disk.rmdir()
    (tmp_path / "away").rename(disk)
    it.check(misses={})
    assert not it.faults()
    assert len(encoded) == work


# ------------------------------------------------------------------------------------------------------- the catalog

PAGE = 4096
PATTERNS: dict[str, Callable[[bytearray], None]] = {}


def damages_a_page(change: Callable[[bytearray], None]) -> Callable[[bytearray], None]:
    PATTERNS[change.__name__] = change
    return change


@damages_a_page
def zeros(page: bytearray) -> None:
    page[:] = bytes(PAGE)


@damages_a_page
def noise(page: bytearray) -> None:
    page[:] = b"\xa5" * PAGE


@damages_a_page
def no_rows(page: bytearray) -> None:
    """Their number is zero: SQLite finds nothing wrong with that as long as it does not compare with an index."""
    page[3:5] = bytes(2)


@damages_a_page
def a_bit_of_the_last_row(page: bytearray) -> None:
    page[-8] ^= 0x10


@damages_a_page
def a_bit_in_the_middle(page: bytearray) -> None:
    page[PAGE // 2] ^= 0x04


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_page_of_the_catalog(
    damaged: Callable[..., Damaged], pattern: str, encoded: list[tuple[int, ...]]
) -> None:
    it = damaged()
    close(it.cache)
    catalog = it.path / "catalog.sqlite"
    whole = catalog.read_bytes()
    answered = 0
    assert len(whole) > 10 * PAGE
    for start in range(0, len(whole), PAGE):
        for beside in it.path.glob("catalog.sqlite-*"):
            beside.unlink()
        content = bytearray(whole)
        page = content[start : start + PAGE]
        PATTERNS[pattern](page)
        content[start : start + PAGE] = page
        catalog.write_bytes(content)
        error = error_of(it.open_again) or error_of(lambda: ask(it.cache))
        if error is None:
            answer = ask(it.cache)
            assert answer.answer == it.expected.answer
            assert without_encodings(answer.sources) == without_encodings(it.expected.sources)
            answered += 1
            close(it.cache)
        else:
            assert "ragcache rebuild" in error
        if pattern == "noise" or start % (4 * PAGE) == 0:
            assert not it.rebuild()
            it.check(misses={})
            assert not it.faults()
            close(it.cache)
            for replaced in it.path.glob("catalog.replaced-*"):
                shutil.rmtree(replaced)
    assert not encoded
    assert answered < len(whole) // PAGE


def delete_catalog(path: Path) -> None:
    for file in path.glob("catalog.sqlite*"):
        file.unlink()


def empty_catalog(path: Path) -> None:
    (path / "catalog.sqlite").write_bytes(b"")


def delete_catalog_and_vectors(path: Path) -> None:
    delete_catalog(path)
    shutil.rmtree(path / "vectors")


def put_something_else(path: Path) -> None:
    (path / "catalog.sqlite").write_bytes(b"not a database\n" * 1000)


def delete_wal(path: Path) -> None:
    (path / "catalog.sqlite-wal").unlink()


def delete_shm(path: Path) -> None:
    (path / "catalog.sqlite-shm").unlink()


def garble_header_of_wal(path: Path) -> None:
    flip(path / "catalog.sqlite-wal", 20)


def garble_page_of_wal(path: Path) -> None:
    flip(path / "catalog.sqlite-wal", 32 + 24 + 1000)


def empty_wal(path: Path) -> None:
    (path / "catalog.sqlite-wal").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (delete_catalog, "ragcache rebuild"),
        (empty_catalog, "ragcache rebuild"),
        (put_something_else, "ragcache rebuild"),
        (delete_catalog_and_vectors, "ragcache rebuild"),
        # What is left is the state before the last commit, whose vectors are gone.
        (delete_wal, "index a source"),
        (empty_wal, "index a source"),
        (garble_header_of_wal, "index a source"),
        (garble_page_of_wal, "index a source"),
        (delete_shm, None),
    ],
)
def test_catalog_files(
    damaged: Callable[..., Damaged],
    spoil: Callable[[Path], None],
    error: str | None,
    tmp_path: Path,
    encoded: list[tuple[int, ...]],
) -> None:
    it = damaged()
    # As a writer leaves it that is killed right after a commit, which is then in -wal alone.
    it.cache.index(DOCUMENTS[3:])
    it.expected = ask(it.cache)
    it.path = tmp_path / "killed"
    shutil.copytree(it.cache.path, it.path)
    spoil(it.path)
    encoded.clear()
    if error is not None:
        with pytest.raises(StoreError, match=error):
            ask(it.open_path(it.path))
        assert not it.rebuild()
    it.open_again()
    it.check(misses={})
    assert not encoded
    assert not it.faults()


def test_without_the_last_commit_indexing_goes_on_from_the_one_before(
    damaged: Callable[..., Damaged], tmp_path: Path
) -> None:
    it = damaged()
    it.cache.index(DOCUMENTS[3:])
    it.path = tmp_path / "killed"
    shutil.copytree(it.cache.path, it.path)
    delete_wal(it.path)
    it.open_again()
    assert it.cache.index(DOCUMENTS).unchanged == 3
    assert not ask(it.cache).misses
    assert not it.faults()


def damage_file(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove_file(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("commit", [0, 1])
@pytest.mark.parametrize("spoil", [damage_file, cut_file, remove_file])
@pytest.mark.parametrize("catalog", ["there", "lost too"])
def test_journal(
    damaged: Callable[..., Damaged],
    spoil: Callable[[Path], None],
    commit: int,
    catalog: str,
    encoded: list[tuple[int, ...]],
) -> None:
    """Questions do not need it. Lost together with the catalog, `rebuild` says what is lacking, `index` brings it."""
    it = damaged()
    spoil(journal_files(it.cache.store.shard_folder)[commit].path)
    it.check(misses={})
    assert {part for part, _ in it.faults()} == {Part.JOURNAL}
    if catalog == "there":
        it.cache.verify(repair=True)
        assert not encoded
    else:
        close(it.cache)
        delete_catalog(it.path)
        # Nothing tells of a last commit that has left no file; its states are encoded again.
        unknown = spoil is remove_file and commit == 1
        assert bool(it.rebuild()) != unknown
        assert 0 < len({chunk.document_id for chunk in it.chunks}) < 3
        it.cache.index(DOCUMENTS[:3])
        assert bool(encoded) == unknown
        assert not ask(it.cache).misses
    assert not it.faults()
    close(it.cache)
    delete_catalog(it.path)
    assert not it.rebuild()
    assert {chunk.document_id for chunk in it.chunks} == {document.id for document in DOCUMENTS[:3]}


def test_nothing_is_made_of_nothing(damaged: Callable[..., Damaged]) -> None:
    it = damaged()
    close(it.cache)
    delete_catalog(it.path)
    for file in journal_files(it.path / "shards"):
        file.path.unlink()
    with pytest.raises(StoreNotFoundError, match="no journal"):
        it.rebuild()


def test_counts_of_use(damaged: Callable[..., Damaged]) -> None:
    """They are a help and no more; see tests/states/test_usage.py."""
    it = damaged()
    (it.path / "usage.sqlite").write_bytes(b"\xa5" * 9000)
    it.check(misses={})
    it.cache.close()
    assert it.cache.compact().evicted == 0
    it.check(misses={})


@two_kinds
@pytest.mark.parametrize("region", [KEY, CHUNK_ID, DESCRIPTION, HEADERS, FOOTER, STATES])
def test_damaged_shards_and_no_catalog(damaged: Callable[..., Damaged], kind: Kind, region: str) -> None:
    """What `rebuild` then takes from a shard is right, or a miss; what it cannot read at all it names."""
    it = damaged(kind)
    shard, content, places = it.shard, it.shard.read_bytes(), spread(runs(it, kind)[region], 6)
    mine = {chunk.chunk_id for chunk in it.in_shard()}
    for place in places:
        shard.write_bytes(content)
        flip(shard, place, 0x10)
        close(it.cache)
        it.rebuild()
        answer = ask(it.cache)
        assert answer.answer == it.expected.answer
        assert {miss.chunk_id for miss in answer.misses} <= mine
        assert {miss.reason for miss in answer.misses} <= {"checksum", "not_stored", "truncated", "token_ids", "codec"}
    it.cache.verify(repair=True)
    it.cache.index(DOCUMENTS[:3])
    it.check(misses={})
    assert not it.faults()


def test_a_damaged_footer_does_not_end_the_process(damaged: Callable[..., Damaged]) -> None:
    """Parquet's own library ends it when asked for metadata of a column that are not in order."""
    it = damaged(KINDS[3])
    for place in runs(it, KINDS[3])[FOOTER][:600]:
        with flipped(it.shard, place, 0x04), suppress(ValueError, OSError):
            read_shard(it.shard, Container.PARQUET)


def test_nothing_is_deleted_on_the_word_of_a_damaged_catalog(damaged: Callable[..., Damaged]) -> None:
    """Some damage shows only as rows that are not there; documents must not go from the journal with them."""
    it = damaged()
    close(it.cache)
    catalog = it.path / "catalog.sqlite"
    whole = catalog.read_bytes()
    for start in range(0, len(whole), PAGE):
        content = bytearray(whole)
        page = content[start : start + PAGE]
        no_rows(page)
        content[start : start + PAGE] = page
        catalog.write_bytes(content)
        with suppress(StoreError):
            compact_store(StateStore.open(it.path), 0.0, write_options(it.cache.settings))
        assert not it.rebuild()
        assert {chunk.document_id for chunk in it.chunks} == {document.id for document in DOCUMENTS[:3]}
        assert ask(it.cache).answer == it.expected.answer
        close(it.cache)
        for beside in (*it.path.glob("catalog.sqlite-*"), *it.path.glob("catalog.replaced-*/*")):
            beside.unlink()


@pytest.mark.parametrize("heal", ["repair", "rebuild"])
def test_vectors_of_other_chunks(damaged: Callable[..., Damaged], heal: str) -> None:
    """Damage to the file itself: see tests/test_store_faults.py."""
    it = damaged()
    folder, version = it.cache.store.vector_folder, it.cache.store.catalog.vectors()
    index = VectorIndex.load(folder, version)
    index.remove([it.chunks[0].vector_id])
    index.add([4711], it.cache.embedder.question(QUESTION))
    wrong = index.save(folder, version.generation)
    with it.cache.store.catalog.transaction() as connection:
        set_vectors(connection, wrong)
    with pytest.raises(StoreError, match="chunks are missing"):
        ask(it.cache)
    assert {part for part, _ in it.faults()} == {Part.VECTORS}
    if heal == "repair":
        it.cache.verify(repair=True)
    else:
        it.rebuild()
    it.check(misses={})
    assert not it.faults()


# ------------------------------------------------------------------------------------ folders and disks that refuse


def test_a_folder_that_may_only_be_read(open_tiny: OpenTiny, original: Callable[[Kind], Original]) -> None:
    whole = original(KINDS[0])
    with reachable_folder() as folder:
        path = folder / "store"
        shutil.copytree(whole.path, path)
        with read_only(path):
            it = Damaged(path, open_tiny(path), whole.answer, open_tiny)
            it.check(misses={})
            assert it.cache.stats().documents == 3
            assert not it.faults()
            actions: list[Callable[[], object]] = [
                lambda: it.cache.index(DOCUMENTS),
                lambda: it.cache.delete("doc-0"),
                lambda: it.cache.compact(),
                lambda: it.cache.verify(repair=True),
                lambda: it.rebuild(),
            ]
            for action in actions:
                with pytest.raises(StoreError, match=r"cannot (be written|write) to"):
                    action()
            it.open_again()
            it.check(misses={})
        assert it.cache.index(DOCUMENTS).added == 1


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """No file can get larger than this, so every kind of file is cut off somewhere; Python has the signal ignored."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def error_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except StoreError as error:
        return str(error)
    return None


CHANGES: dict[str, Callable[[Damaged], object]] = {
    "index": lambda it: it.cache.index(DOCUMENTS),
    "delete": lambda it: it.cache.delete("doc-0"),
    "compact": lambda it: it.cache.compact(0.0),
    "repair": lambda it: it.cache.verify(repair=True),
    "rebuild": lambda it: it.rebuild(),
}


@pytest.mark.parametrize("left", [0, 3_000, 20_000, 60_000, 150_000])
@pytest.mark.parametrize("change", CHANGES)
def test_a_full_disk(damaged: Callable[..., Damaged], change: str, left: int) -> None:
    it = damaged()
    misses = {}
    if change == "repair":
        chunk = it.in_shard()[0]
        flip(it.shard, states_of(chunk).ranges[1].offset)
        misses = {chunk.chunk_id: "checksum"}
    before = it.cache.store.catalog.signatures()
    with full_disk(left):
        it.check(misses)
        error = error_of(lambda: CHANGES[change](it))
        if error is not None:
            assert "cannot" in error
            it.open_again()
            # A repair may have come as far as to the next chunk.
            it.check_all_but(misses)
            assert it.cache.store.catalog.signatures() == before
    assert error or left > 3_000
    it.open_again()
    if error is not None:
        it.check_all_but(misses)
        CHANGES[change](it)
    assert not it.faults()
    assert not ask(it.cache).misses
    assert not list(it.path.rglob(".writing-*"))
