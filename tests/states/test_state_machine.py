"""Any order of changes to a store, against a plain dictionary: what is there, byte for byte, and nothing else."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from ragcache.errors import StoreError
from ragcache.indexer.contexts import Block
from ragcache.indexer.contexts import context_ids as ids_of_contexts
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.repair import StateRepair, readmit
from ragcache.maintenance import (
    compact_store,
    delete_documents,
    rebuild_store,
    repair_store,
    store_stats,
    verify_store,
)
from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex, remove_other_generations
from ragcache.settings import EncodingName, load_settings
from ragcache.states.compact import CompactReport, enforce_limits, rewrite
from ragcache.states.eviction import Candidate, priority
from ragcache.states.folders import shard_files
from ragcache.states.form import StateFormat
from ragcache.states.inventory import Inventory
from ragcache.states.journal import write_journal
from ragcache.states.key import CONTEXT_END, context_digest, state_key
from ragcache.states.locked import LockedStore, WriteOptions
from ragcache.states.miss import MissReason, UnusableStatesError
from ragcache.states.reading import ReadStates, read_states
from ragcache.states.rebuild import rebuild
from ragcache.states.records import (
    ChunkRecord,
    DocumentRecord,
    Encoding,
    NewChunk,
    NewEncoding,
    StoredStates,
    VectorsVersion,
)
from ragcache.states.shard import Container, ShardEntry, entry_size
from ragcache.states.store import StateStore, StoreIdentity
from ragcache.states.usage import NEVER_USED, KeyUsage
from ragcache.states.verify import Part
from ragcache.states.writer import StoreWriter
from tests.formats import hidden_format, mixed_format

IDENTITY = StoreIdentity('{"dtype": "float32"}', "e" * 64, (1, 2, 3))
FORMATS = {it.to_json(): it for it in (hidden_format(2, 64, "int8", "float32"), mixed_format("raw", "float32"))}
SETTINGS = load_settings()
CONTENTS = 6
"""Different sequences of token ids; chunks of the same one share states."""


def token_ids(content: int) -> tuple[int, ...]:
    return tuple(range(100 * content, 100 * content + 1 + 4 * (content % 4)))


Context = tuple[int, ...]
"""Contents that a chunk is encoded after; none when it is encoded alone."""


def context_ids(context: Context) -> tuple[int, ...]:
    """Each content is a context of its own."""
    return separated([token_ids(content) for content in context])


def separated(contexts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(it for index, ids in enumerate(contexts) for it in ([CONTEXT_END] * (index > 0) + [*ids]))


def key_of(content: int, context: Context = ()) -> str:
    return state_key(IDENTITY.digest, IDENTITY.prefix, context_digest(context_ids(context)), token_ids(content))


def layers_of(context: Sequence[int], ids: Sequence[int], format: StateFormat) -> dict[int, Tensor]:
    """Bytes that stand for the states of some tokens: always the same, others for other tokens, context or format."""
    seed = [ids[0], len(format.layers), *format.layers[1].codec.encode(), *(it % 2**32 for it in context)]
    random = np.random.default_rng(seed)
    return {
        layer: torch.from_numpy(random.integers(0, 256, format.size(layer, len(ids)), dtype=np.uint8))
        for layer in format.stored_layers
    }


class FakeEncoder:
    """Stands where a `StateEncoder` is wanted."""

    model = SimpleNamespace(fingerprint=SimpleNamespace(digest=IDENTITY.digest))

    def __init__(self, format: StateFormat) -> None:
        self.format = format

    def encode(self, blocks: Sequence[Block[ChunkRecord]], pass_tokens: int | None = None) -> list[dict[int, Tensor]]:
        return [
            layers_of(ids_of_contexts(block.contexts(index)), chunk.token_ids, self.format)
            for block in blocks
            for index, chunk in enumerate(block.chunks)
        ]

    def size(self, tokens: int, context_tokens: int = 0) -> int:
        return entry_size(self.format, tokens, context_tokens)

    def cost(self, tokens: int, context_tokens: int = 0) -> float:
        return 1000.0 * (tokens + context_tokens) + 50.0 * (tokens + context_tokens) ** 2


def embedder() -> Embedder:
    """Stands where the embedding model is wanted; no vectors are ever lost here, so it has nothing to embed."""
    return cast(Embedder, SimpleNamespace(dimension=1))


@dataclass
class Made:
    """What the store must say of an encoding."""

    content: int
    context: Context
    format: str | None
    evicted: bool = False

    @property
    def name(self) -> EncodingName:
        return "context" if self.context else "alone"

    @property
    def key(self) -> str:
        return key_of(self.content, self.context)

    @property
    def described(self) -> NewEncoding:
        contexts = tuple((key_of(it),) for it in self.context)
        return NewEncoding(self.name, self.key, context_digest(context_ids(self.context)), contexts)


@dataclass
class Chunk:
    """What the store must say of a chunk."""

    vector_id: int
    chunk_id: str
    ordinal: int
    text: str
    content: int
    encodings: list[Made]


@dataclass
class Document:
    """What the store must say of a document."""

    record: DocumentRecord
    chunks: list[Chunk] = field(default_factory=list)


Contents = dict[str, list[tuple[int, list[Context]]]]
"""Documents by name, with the content of each chunk and what it is encoded after."""
Unencoded = set[tuple[int, EncodingName]]

NAMES = st.sampled_from("abcdef")
CONTENT = st.integers(0, CONTENTS - 1)
CONTEXT = st.lists(CONTENT, min_size=1, max_size=2).map(tuple)
CHUNKS = st.tuples(CONTENT, st.just([()]) | st.tuples(st.just(()), CONTEXT).map(list) | st.tuples(CONTEXT).map(list))
DOCUMENTS = st.dictionaries(NAMES, st.lists(CHUNKS, max_size=4), min_size=1, max_size=3)
COMMITS = st.lists(
    st.tuples(
        DOCUMENTS,
        st.sets(NAMES, max_size=1),  # removed
        st.sets(st.tuples(CONTENT, st.sampled_from(["alone", "context"])), max_size=4),  # not encoded for lack of space
    ),
    min_size=1,
    max_size=2,
)
FORMAT = st.sampled_from(list(FORMATS.values()))
# Shards of one chunk, of a few, of all; in the store's own folder or in one or two others.
OPTIONS = st.tuples(st.sampled_from([1, 4000, 10**6]), st.sampled_from(Container), st.integers(0, 2))
Options = tuple[int, Container, int]


class StoreMachine(RuleBasedStateMachine):
    """A store, what must be in it, and a reader that was opened at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ragcache-machine-"))
        self.path = self.folder / "store"
        self.folders = (self.folder / "disk-0", self.folder / "disk-1")
        self.settings = SETTINGS.model_copy(update={"state_folders": self.folders})
        self.store = StateStore.create(self.path, IDENTITY, SETTINGS)
        self.reader = StateStore.open(self.path)
        self.looked_up: list[ChunkRecord] = []
        self.documents: dict[str, Document] = {}
        self.journaled: dict[str, Document] | None = None
        self.strays: set[Path] = set()
        self.last_vector_id = 0
        self.serial = 0

    def teardown(self) -> None:
        for store in (self.store, self.reader):
            store.catalog.close()
        shutil.rmtree(self.folder)

    # Changes.

    @rule(commits=COMMITS, format=FORMAT, options=OPTIONS)
    def put(self, commits: list[tuple[Contents, set[str], Unencoded]], format: StateFormat, options: Options) -> None:
        with StoreWriter(self.store, format, self.write_options(options)) as writer:
            for contents, removed, unencoded in commits:
                gone = (removed & self.documents.keys()) - contents.keys()
                documents = self.prepare(writer, contents, unencoded)
                after = {**{name: it for name, it in self.documents.items() if name not in gone}, **documents}
                version = self.save_vectors(after)
                evicted = {it.key for it in encodings_of(documents) if it.evicted}
                writer.commit([new_chunks(it) for it in documents.values()], gone, version, evicted)
                remove_other_generations(self.store.vector_folder, version.generation)
                self.documents = after
                self.last_vector_id = max([self.last_vector_id, *(chunk.vector_id for chunk in self.chunks())])
        self.written()

    @precondition(lambda self: self.documents)
    @rule(data=st.data(), options=OPTIONS)
    def delete(self, data: st.DataObject, options: Options) -> None:
        names = data.draw(st.sets(st.sampled_from(sorted(self.documents)), min_size=1, max_size=3))
        delete_documents(self.store, sorted(names), None, self.write_options(options), embedder)
        for name in names:
            del self.documents[name]
        self.written()

    @rule(threshold=st.sampled_from([0.0, 0.3, 1.0]), options=OPTIONS)
    def compact(self, threshold: float, options: Options) -> None:
        report = compact_store(self.store, threshold, self.write_options(options))
        assert not report.damaged
        assert not report.evicted
        assert [file.snapshot for file in self.store.journal()] == [True]
        if threshold == 0:
            assert Inventory(self.store.catalog).sizes()["dead_bytes"] == 0
        self.written()

    @rule(part=st.floats(0, 1), options=OPTIONS)
    def evict(self, part: float, options: Options) -> None:
        total = sum(self.store.catalog.shards().values())
        budget = max(1, int(part * total))
        before = self.with_states()
        with LockedStore(self.store, replace(self.write_options(options), budget_bytes=budget)) as locked:
            choose_victims = locked.budget.choose_victims

            # Watched as they are chosen: copies have other sizes than what they are copies of, and so another worth.
            def choose_and_check(size: int) -> list[int]:
                worth = self.priorities()
                victims = choose_victims(size)
                kept = worth.keys() - set(victims)
                assert len(set(victims)) == len(victims)
                assert max((worth[it] for it in victims), default=0.0) <= min(
                    (worth[it] for it in kept), default=np.inf
                )
                return victims

            with mock.patch.object(locked.budget, "choose_victims", choose_and_check):
                report = enforce_limits(locked)
        assert not report.damaged
        assert sum(self.store.catalog.shards().values()) <= budget
        gone = before - self.with_states()
        assert total > budget or not gone
        for place, made in self.encodings():
            if place in gone:
                made.format, made.evicted = None, True
        self.written()

    @rule(part=st.none() | st.floats(0, 2), format=FORMAT, options=OPTIONS)
    def readmit(self, part: float | None, format: StateFormat, options: Options) -> None:
        """Within a budget of a part of what there is, or without any."""
        total = sum(self.store.catalog.shards().values())
        budget = 0 if part is None else max(1, int(part * total))
        chosen = replace(self.write_options(options), budget_bytes=budget)
        with StoreWriter(self.store, format, chosen) as writer:
            readmitted = readmit(repair_with(writer))
        assert part is None or readmitted == 0 or sum(self.store.catalog.shards().values()) <= budget
        found = self.catalog_encodings()
        for place, made in self.encodings():
            if made.evicted and found[place].states is not None:
                made.format, made.evicted = format.to_json(), False
            elif made.evicted and not found[place].evicted:
                assert not self.can_be_made_again(made)
                made.evicted = False
            elif made.format is not None and found[place].states is None:
                assert readmitted
                made.format, made.evicted = None, True
            assert part is not None or not made.evicted
        self.written()

    @rule(contents=st.lists(st.integers(0, CONTENTS - 1), min_size=1, max_size=4), times=st.integers(1, 5))
    def use(self, contents: list[int], times: int) -> None:
        for _ in range(times):
            used = [it.key for it in encodings_of(self.documents) if it.content in contents]
            self.store.usage.record([*used, *map(key_of, contents)], len(contents), [])
        self.store.usage.flush()

    # Faults.

    @precondition(lambda self: self.store.catalog.shards())
    @rule(data=st.data(), kind=st.sampled_from(["state", "byte", "truncate", "remove"]), format=FORMAT, options=OPTIONS)
    def damage_and_repair(self, data: st.DataObject, kind: str, format: StateFormat, options: Options) -> None:
        self.damage(data, kind)
        with StoreWriter(self.store, format, self.write_options(options)) as writer:
            report = repair_store(writer, repair_with(writer), embedder, lambda done, total: None)
        assert report.faults
        places = {(it.states.key, it.states.format) for it in report.damaged}
        given_up = []
        for chunk in self.chunks():
            for made in chunk.encodings:
                if (made.key, made.format) in places:
                    again = self.can_be_made_again(made)
                    made.format = format.to_json() if again else None
                    given_up += [] if again else [(chunk.chunk_id, MissReason.CONTEXT)]
        assert sorted((it.chunk_id, it.reason) for it in report.given_up) == sorted(given_up)
        self.written()

    @precondition(lambda self: self.store.catalog.shards())
    @rule(data=st.data(), options=OPTIONS)
    def damage_and_copy(self, data: st.DataObject, options: Options) -> None:
        """A copy leaves out what is damaged; the next indexing run is told of the documents."""
        shard = self.damage(data, "state")
        report = CompactReport()
        with LockedStore(self.store, self.write_options(options)) as locked:
            [chosen] = [it for it in Inventory(self.store.catalog).shards() if it.path == shard]
            rewrite(locked, [chosen], report)
        assert len(report.damaged) == 1
        present = self.with_states()
        lost = {place: it for place, it in self.encodings() if it.format is not None and place not in present}
        vector_ids = {vector_id for vector_id, _ in lost}
        assert report.damaged[0].chunk_id in {it.chunk_id for it in self.chunks() if it.vector_id in vector_ids}
        assert len({it.key for it in lost.values()}) == 1
        for made in lost.values():
            made.format = None
        self.written()

    @rule(contents=DOCUMENTS, format=FORMAT, options=OPTIONS)
    def leave_without_commit(self, contents: Contents, format: StateFormat, options: Options) -> None:
        with StoreWriter(self.store, format, self.write_options(options)) as writer:
            self.prepare(writer, contents, set())
        self.written()

    @rule(
        contents=DOCUMENTS,
        format=FORMAT,
        options=OPTIONS,
        got_to=st.sampled_from(["unfinished shard", "shards", "journal"]),
    )
    def die(self, contents: Contents, format: StateFormat, options: Options, got_to: str) -> None:
        """What a process that is killed before its transaction leaves behind, up to the journal."""
        with StoreWriter(self.store, format, self.write_options(options)) as writer:
            self.written()
            shards = writer.new_shards(format)
        put: dict[str, ShardEntry] = {}
        documents = self.prepare(writer, contents, set(), put)
        for entry in put.values():
            shards.add(entry)
        if got_to != "unfinished shard":
            shards.finish()
        self.strays.update(shard.path for shard in shards.take())
        after = {**self.documents, **documents}
        version = self.save_vectors(after)
        if got_to == "journal":
            header = writer.journal_header(version)
            file = write_journal(self.store.shard_folder, header, [new_chunks(it) for it in documents.values()])
            self.strays.add(file.path)
            self.journaled = after

    @precondition(lambda self: self.store.journal())
    @rule(delete=st.booleans(), alone=st.booleans())
    def rebuild(self, delete: bool, alone: bool) -> None:
        if delete:
            for file in self.path.glob("catalog.sqlite*"):
                file.unlink()
        if alone:
            report = rebuild(self.path, self.folders)
        else:
            report, embedded = rebuild_store(self.path, self.settings, embedder)
            assert embedded == 0
        assert not report.faults
        with pytest.raises(StoreError, match="deleted or replaced"):
            self.reader.catalog.counts()
        self.store, self.reader = StateStore.open(self.path), StateStore.open(self.path)
        self.looked_up = []
        # Without the catalog nobody can tell whether the last commit of the journal was one.
        self.documents = self.journaled if self.journaled is not None else self.documents
        assert self.store.catalog.last_vector_id() >= self.last_vector_id
        self.last_vector_id = self.store.catalog.last_vector_id()
        found = self.catalog_encodings()
        for place, made in self.encodings():
            states = found[place].states
            assert made.format is None or states is not None
            # The journal knows nothing of formats and of what was evicted; of two formats the youngest is taken.
            made.format, made.evicted = states.format if states else None, False
        self.journaled = None
        self.strays = self.files() - self.store.catalog.shards().keys()
        assert alone or not self.strays

    @rule()
    def reopen(self) -> None:
        self.store.catalog.close()
        self.store = StateStore.open(self.path)

    # Reading.

    @rule()
    def look_up(self) -> None:
        """A query that has its chunks, and is slow to read their states."""
        self.looked_up = [it for batch in self.reader.catalog.all_chunks() for it in batch]

    # What always holds.

    @invariant()
    def the_catalog_is_as_the_model(self) -> None:
        for store in (self.store, self.reader):
            found = {it.vector_id: it for batch in store.catalog.all_chunks() for it in batch}
            expected = {chunk.vector_id: chunk for chunk in self.chunks()}
            assert found.keys() == expected.keys()
            for document in self.documents.values():
                for chunk in document.chunks:
                    check_chunk(found[chunk.vector_id], document.record, chunk)
            records = [it.record for it in self.documents.values()]
            assert store.catalog.documents([it.id for it in records]) == records
            assert store.catalog.signatures() == {it.id: it.signature for it in records}
        without = {
            name
            for name, document in self.documents.items()
            if any(it.format is None and not it.evicted for it in encodings_of({name: document}))
        }
        assert self.store.catalog.documents_without_states() == without

    @invariant()
    def what_was_looked_up_is_found(self) -> None:
        in_use = {(made.key, made.format) for _, made in self.encodings()}
        for chunk, encoding, states in with_states(self.looked_up):
            if not states.shard.exists():
                with pytest.raises(UnusableStatesError) as caught:
                    read_states(states, encoding.context, chunk.token_ids)
                assert caught.value.reason is MissReason.MISSING
                moved = self.reader.catalog.relocated(states)
                assert (moved is not None) == ((states.key, states.format) in in_use)
                if moved is None:
                    continue
                states = moved
            check_states(read_states(states, encoding.context, chunk.token_ids), chunk, states)

    @invariant()
    def states_are_those_that_were_put(self) -> None:
        for store in (self.store, self.reader):
            for batch in store.catalog.all_chunks():
                for chunk, encoding, states in with_states(batch):
                    found = read_states(states, encoding.context, chunk.token_ids)
                    check_states(found, chunk, states)
                    members = store.catalog.chunks_by_content(encoding.members)
                    if len(members) == len(set(encoding.members)):
                        contexts = [members[content].token_ids for (content,) in encoding.contexts]
                        assert found.context_ids == separated(contexts)

    @invariant()
    def nothing_is_wrong(self) -> None:
        report = verify_store(self.store)
        known = {self.store.shard_folder, *(path.parent for path in self.store.catalog.shards())}
        orphans = {str(path) for path in self.strays if path.parent in known}
        assert {(fault.part, fault.name) for fault in report.faults} == {(Part.ORPHAN, it) for it in orphans}

    @invariant()
    def files_are_those_of_the_catalog(self) -> None:
        shards = self.store.catalog.shards()
        assert self.files() == shards.keys() | {it for it in self.strays if not it.name.startswith("journal")}
        assert all(path.stat().st_size == size for path, size in shards.items())

    @invariant()
    def sizes_add_up(self) -> None:
        states = {(it.shard, it.ranges, it.context_ids) for _, _, it in with_states(self.catalog_chunks())}
        payload = sum(it.length for _, ranges, context in states for it in (*ranges, context))
        inventory = Inventory(self.store.catalog)
        sizes, shards = inventory.sizes(), inventory.shards()
        assert payload <= sizes["state_bytes"] == sum(it.live_bytes for it in shards)
        assert sizes["dead_bytes"] == sum(it.dead_bytes for it in shards)
        assert all(0 <= it.dead_bytes < it.bytes for it in shards)
        assert sizes["shards"] == len(shards)
        assert sizes["shard_bytes"] == sum(path.stat().st_size for path in self.store.catalog.shards())
        assert sizes["tokens"] == sum(len(token_ids(chunk.content)) for chunk in self.chunks())
        assert sizes["evicted_chunks"] == sum(any(it.evicted for it in chunk.encodings) for chunk in self.chunks())
        stats = store_stats(self.store)
        assert sum(it["bytes"] for it in stats.models) == sizes["state_bytes"]
        for it in stats.encodings:
            mine = [made for _, made in self.encodings() if made.name == it["encoding"]]
            assert it["chunks"] == sum(made.format is not None for made in mine)
            assert it["evicted"] == sum(made.evicted for made in mine)
        unused = [it for it in inventory.residents() if it.key not in {made.key for _, made in self.encodings()}]
        assert sum(it["bytes"] for it in stats.encodings) + sum(it.bytes for it in unused) <= sizes["state_bytes"]
        assert (stats.documents, stats.chunks) == (len(self.documents), len(list(self.chunks())))

    # Help.

    def chunks(self) -> Iterator[Chunk]:
        return (chunk for document in self.documents.values() for chunk in document.chunks)

    def encodings(self) -> Iterator[tuple[tuple[int, EncodingName], Made]]:
        """By the chunk's vector id and the name."""
        return (((chunk.vector_id, it.name), it) for chunk in self.chunks() for it in chunk.encodings)

    def catalog_encodings(self) -> dict[tuple[int, EncodingName], Encoding]:
        return {(chunk.vector_id, it.name): it for chunk in self.catalog_chunks() for it in chunk.encodings}

    def with_states(self) -> set[tuple[int, EncodingName]]:
        return {place for place, it in self.catalog_encodings().items() if it.states is not None}

    def can_be_made_again(self, made: Made) -> bool:
        return set(made.context) <= {chunk.content for chunk in self.chunks()}

    def catalog_chunks(self) -> list[ChunkRecord]:
        return [chunk for batch in self.store.catalog.all_chunks() for chunk in batch]

    def write_options(self, options: Options) -> WriteOptions:
        shard_bytes, container, folders = options
        return WriteOptions(shard_bytes, container, self.folders[:folders])

    def files(self) -> set[Path]:
        """All shards, whether anybody knows of them or not."""
        folders = [self.store.shard_folder, *(it / self.store.id for it in self.folders)]
        return {file for folder in folders for file in shard_files(folder)}

    def written(self) -> None:
        """A writer has been here, and has tidied up where it writes."""
        self.strays = {path for path in self.strays if path.exists()}
        assert not any(path.parent == self.store.shard_folder for path in self.strays)
        self.journaled = None

    def prepare(
        self, writer: StoreWriter, contents: Contents, unencoded: Unencoded, into: dict[str, ShardEntry] | None = None
    ) -> dict[str, Document]:
        """New documents, their states put into the writer, or into a dictionary by key instead."""
        documents = {}
        for name, own in contents.items():
            self.serial += 1
            record = DocumentRecord(name, f"from {name}", f"Title {self.serial}", f"{self.serial}", {"n": self.serial})
            document = documents[name] = Document(record)
            ids = writer.new_vector_ids(len(own))
            assert all(it > self.last_vector_id for it in ids)
            for ordinal, ((content, contexts), vector_id) in enumerate(zip(own, ids, strict=True)):
                text = f"text {self.serial} of {content}"
                encodings = [Made(content, context, writer.format.to_json()) for context in contexts]
                chunk = Chunk(vector_id, f"{name}#{ordinal}", ordinal, text, content, encodings)
                document.chunks.append(chunk)
                for made in encodings:
                    if writer.has(made.key) or (into is not None and made.key in into):
                        continue
                    if (content, made.name) in unencoded:
                        made.format, made.evicted = None, True
                    elif into is not None:
                        into[made.key] = entry(record, chunk, made, writer.format)
                    else:
                        writer.put(entry(record, chunk, made, writer.format))
        return documents

    def save_vectors(self, documents: Mapping[str, Document]) -> VectorsVersion:
        index = VectorIndex.empty(1)
        ids = [chunk.vector_id for document in documents.values() for chunk in document.chunks]
        if ids:
            index.add(ids, np.zeros((len(ids), 1), dtype=np.float32))
        return index.save(self.store.vector_folder, self.store.catalog.vectors().generation + 1)

    def priorities(self) -> dict[int, float]:
        """What all states are worth, by their id in the catalog."""
        usage = self.store.usage.all()
        worth = {}
        for it in Inventory(self.store.catalog).residents():
            used = usage.get(it.key, NEVER_USED)
            recent = KeyUsage(used.frequency, max(used.clock, it.clock))
            worth[it.id] = priority(Candidate(it.key, it.bytes, it.cost, recent))
        return worth

    def damage(self, data: st.DataObject, kind: str) -> Path:
        """Spoil a shard; a state's byte is one that some chunk needs."""
        shard = data.draw(st.sampled_from(Inventory(self.store.catalog).shards()))
        if kind == "remove":
            shard.path.unlink()
        elif kind == "truncate":
            with shard.path.open("rb+") as file:
                file.truncate(data.draw(st.integers(0, shard.bytes - 1)))
        elif kind == "byte":
            flip(shard.path, data.draw(st.integers(0, shard.bytes - 1)))
        else:
            in_use = data.draw(st.sampled_from(list(Inventory(self.store.catalog).states(shard.id))))
            ranges = [*in_use.states.ranges, in_use.states.context_ids]
            part = data.draw(st.sampled_from([it for it in ranges if it.length]))
            flip(shard.path, part.offset + data.draw(st.integers(0, part.length - 1)))
        return shard.path


def check_chunk(found: ChunkRecord, record: DocumentRecord, chunk: Chunk) -> None:
    assert (found.chunk_id, found.ordinal, found.text) == (chunk.chunk_id, chunk.ordinal, chunk.text)
    assert (found.document_id, found.title, found.metadata) == (record.id, record.title, record.metadata)
    assert found.token_ids == token_ids(chunk.content)
    assert found.content == key_of(chunk.content)
    for it, made in zip(found.encodings, chunk.encodings, strict=True):
        assert NewEncoding(it.name, it.key, it.context, it.contexts) == made.described
        assert it.evicted == made.evicted
        assert (it.states and it.states.format) == made.format
        assert it.states is None or it.states.key == made.key


def check_states(found: ReadStates, chunk: ChunkRecord, states: StoredStates) -> None:
    expected = layers_of(found.context_ids, chunk.token_ids, FORMATS[states.format])
    assert found.layers.keys() == expected.keys()
    assert all(torch.equal(found.layers[layer], expected[layer]) for layer in expected)


def encodings_of(documents: Mapping[str, Document]) -> Iterator[Made]:
    return (it for document in documents.values() for chunk in document.chunks for it in chunk.encodings)


def with_states(chunks: Sequence[ChunkRecord]) -> Iterator[tuple[ChunkRecord, Encoding, StoredStates]]:
    return ((chunk, it, it.states) for chunk in chunks for it in chunk.encodings if it.states is not None)


def new_chunks(document: Document) -> tuple[DocumentRecord, list[NewChunk]]:
    return document.record, [
        NewChunk(
            vector_id=it.vector_id,
            chunk_id=it.chunk_id,
            ordinal=it.ordinal,
            text=it.text,
            token_ids=token_ids(it.content),
            content=key_of(it.content),
            encodings=tuple(made.described for made in it.encodings),
        )
        for it in document.chunks
    ]


def entry(record: DocumentRecord, chunk: Chunk, made: Made, format: StateFormat) -> ShardEntry:
    ids, context = token_ids(chunk.content), context_ids(made.context)
    return ShardEntry(
        key=made.key,
        token_ids=ids,
        layers=layers_of(context, ids, format),
        encoding=made.name,
        context_ids=context,
        cost=FakeEncoder(format).cost(len(ids), len(context)),
        chunk_id=chunk.chunk_id,
        document_id=record.id,
        ordinal=chunk.ordinal,
        title=record.title,
        text=chunk.text,
    )


def repair_with(writer: StoreWriter) -> StateRepair:
    encoder: Any = FakeEncoder(writer.format)
    return StateRepair(writer, cast(StateEncoder, encoder), batch_tokens=60)


def flip(path: Path, offset: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=70,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
