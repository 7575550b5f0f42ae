"""What must hold of a store after a process that was changing it has died."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragcache import RagCache
from ragcache.errors import RagCacheError, StoreError, VectorsError
from ragcache.maintenance import rebuild_store, verify_store
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.states.catalog import Catalog
from ragcache.states.durable import TEMPORARY_PREFIX, file_checksum
from ragcache.states.inventory import Inventory
from ragcache.states.journal import journal_files
from ragcache.states.miss import MissReason
from ragcache.states.records import ChunkRecord, DocumentRecord
from ragcache.states.store import SHARDS, StateStore
from ragcache.states.verify import Fault, Part
from ragcache.stream import context_chunk
from tests.torture.encodings import EncodingCheck, passage_of
from tests.torture.oracle import Expected, Oracle
from tests.torture.scenarios import Scenario
from tests.torture.workshop import Workshop

QUESTIONS = (
    "Which ships passed the lighthouse?",
    "How was the harbour wall of 1803 rebuilt?",
    "When does the ferry run in 1809?",
)
TOP_K = 4
SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Chunk:
    """A chunk as far as it is the same in every store with the document."""

    id: str
    ordinal: int
    title: str
    text: str
    token_ids: tuple[int, ...]
    content: str
    metadata: str


Content = dict[str, tuple[DocumentRecord, tuple[Chunk, ...]]]
"""Documents by id, with their chunks."""

# A rebuilt catalog does not know why there are no states.
_GIVEN_UP = (MissReason.EVICTED, MissReason.NOT_STORED)

FaultName = tuple[str, str, str]


@dataclass(frozen=True)
class Reference:
    """A store as it is when nothing was killed.

    Attributes:
        content: of the store; empty when there is none.
        faults: that `verify` finds.
        recipe: how contexts were chosen.
    """

    content: Content
    faults: frozenset[FaultName]
    recipe: str | None

    @property
    def contents(self) -> set[str]:
        """What its chunks say."""
        return {chunk.content for _, chunks in self.content.values() for chunk in chunks}


@dataclass
class Findings:
    """What an examination has found.

    Attributes:
        failures: one line each.
        expected: what it has computed, for the next one.
    """

    expected: Expected
    failures: list[str] = field(default_factory=list)


def refer(workshop: Workshop, path: Path) -> Reference:
    """Note what a store holds."""
    if not StateStore.exists(path):
        return Reference({}, frozenset(), None)
    store = StateStore.open(path)
    faults = set(map(_name, verify_store(store).faults))
    # As long as damaged states are in use they are reported instead of their shard.
    for shard in Inventory(store.catalog).shards():
        if file_checksum(shard.path) != shard.checksum:
            faults.add((str(Part.SHARD), shard.path.name, "checksum"))
    return Reference(_content(store.catalog), frozenset(faults), store.catalog.recipe())


@dataclass
class Examination:
    """Looks at a store in every way there is. Each method adds to the findings.

    Attributes:
        workshop: opens stores.
        scenario: what was going on.
        before, after: the store before and after the whole job.
        findings: are added to.
    """

    workshop: Workshop
    scenario: Scenario
    before: Reference
    after: Reference
    findings: Findings

    def after_kill(self, path: Path) -> None:
        """Everything is as before or as after, document by document, and answers as it should."""
        try:
            exists = StateStore.exists(path)
        except StoreError as error:
            if not (self.scenario.rebuilds and "ragcache rebuild" in str(error)):
                return self._fail(f"the store cannot be opened: {error}")
            rebuild_store(path, self.workshop.settings(path), lambda: self.workshop.embedder)
            exists = StateStore.exists(path)
        if not exists:
            # Only a store that is being made may be not there yet.
            return self._fail("the store is gone") if self.before.content else None
        try:
            cache = self.workshop.open(path)
            self._check_content(_content(cache.store.catalog))
            faults = frozenset(
                name for fault in verify_store(cache.store).faults if (name := _name(fault))[0] != Part.ORPHAN
            )
            for fault in sorted(faults - self.before.faults):
                self._fail(f"verify reports {fault}")
            self._check_encodings(cache, self.before.contents)
            self._check_answers(cache, faults)
            self._check_given_up(cache)
        except RagCacheError as error:
            self._fail(f"{type(error).__name__}: {error}")
        return None

    def without_catalog(self, path: Path) -> None:
        """When the catalog gets lost as well, a rebuilt one is no less consistent."""
        if self.before.faults or not (path / SHARDS).is_dir() or not journal_files(path / SHARDS):
            return
        for file in path.glob("catalog.sqlite*"):
            file.unlink()
        try:
            rebuild_store(path, self.workshop.settings(path), lambda: self.workshop.embedder)
            cache = self.workshop.open(path)
            self._check_content(_content(cache.store.catalog))
            if faults := verify_store(cache.store).faults:
                self._fail(f"after a rebuild verify reports {_name(faults[0])}")
            self._check_encodings(cache, self.before.contents)
            self._check_answers(cache, frozenset())
        except RagCacheError as error:
            self._fail(f"after a rebuild: {type(error).__name__}: {error}")

    def after_completion(self, path: Path) -> None:
        """The job was done again: everything is as if it had never been killed, and nothing is left over."""
        try:
            cache = self.workshop.open(path)
            content = _content(cache.store.catalog)
            if content != self.after.content:
                self._fail(f"done again, the content differs in {sorted(_differences(content, self.after.content))}")
            for fault in verify_store(cache.store).faults:
                self._fail(f"done again, verify reports {_name(fault)}")
            if (recipe := cache.store.catalog.recipe()) != self.after.recipe:
                self._fail(f"done again, the recipe is {recipe!r}, not {self.after.recipe!r}")
            self._check_encodings(cache, frozenset(), complete=True)
            self._check_answers(cache, frozenset())
            self._check_leftovers(cache)
        except RagCacheError as error:
            self._fail(f"done again: {type(error).__name__}: {error}")

    def _check_content(self, content: Content) -> None:
        before, after = self.before.content, self.after.content
        for id in {*before, *after, *content}:
            if content.get(id) not in (before.get(id), after.get(id)):
                self._fail(f"document {id} is neither as before nor as after")

    def _check_encodings(self, cache: RagCache, gone: Collection[str], *, complete: bool = False) -> None:
        if self.scenario.settings:
            check = EncodingCheck(cache, self._oracle(cache), gone)
            self.findings.failures += check.faults()
            self.findings.failures += check.lacking() if complete else []

    def _oracle(self, cache: RagCache) -> Oracle:
        return Oracle(self.workshop.model, cache.template.prefix, self.findings.expected)

    def _check_answers(self, cache: RagCache, faults: frozenset[FaultName]) -> None:
        chunks = [chunk for batch in cache.store.catalog.all_chunks() for chunk in batch]
        for question in QUESTIONS:
            try:
                hits = cache.retrieve(question, TOP_K)
            except VectorsError as error:
                if not any(part == Part.VECTORS for part, *_ in faults):
                    self._fail(f"{question} cannot be answered: {error}")
                continue
            self._check_hits(question, hits, chunks)
            if hits:
                self._check_answer(cache, question, hits, faults)

    def _check_hits(self, question: str, hits: list[RetrievedChunk], chunks: list[ChunkRecord]) -> None:
        """The best chunks that there are were found, by embeddings made anew."""
        vector = self.workshop.embedder.question(question)[0]
        owners, vectors = self.workshop.embedder.passages([chunk.text for chunk in chunks])
        best: dict[int, float] = {}
        for owner, score in zip(owners, (vectors @ vector).tolist(), strict=True):
            best[owner] = max(score, best.get(owner, -1.0))
        scores = {chunks[owner].chunk_id: score for owner, score in best.items()}
        wanted = sorted(scores.values(), reverse=True)[:TOP_K]
        found = [hit.score for hit in hits]
        own = [scores.get(hit.chunk.chunk_id, -1.0) for hit in hits]
        if len(wanted) != len(found) or not _near(wanted, found) or not _near(own, found):
            self._fail(f"{question} finds {[hit.chunk.chunk_id for hit in hits]} with {found}, not {wanted}")

    def _check_answer(
        self, cache: RagCache, question: str, hits: list[RetrievedChunk], faults: frozenset[FaultName]
    ) -> None:
        """The prompt's logits are those after states that the model computes anew, whatever is stored."""
        given = [context_chunk(hit) for hit in hits]
        layout = cache.answering.lay_out(question, given, max_tokens=4)
        kept = [given[index] for index in layout.kept]
        prompt = cache.engine.prepare(layout, kept, "composed")
        named = zip(kept, layout.encodings, strict=True)
        passages = [passage_of(cache.store.catalog, chunk, name) for chunk, name in named]
        if fault := self._oracle(cache).contradicts(prompt.logits, passages, layout.question):
            self._fail(f"the answer to {question} differs: {fault}")
        damaged = {name for part, name, _ in faults if part == Part.CHUNK}
        for miss in prompt.report.misses:
            given_up = self.scenario.evicts and miss.reason in _GIVEN_UP
            if not given_up and miss.chunk_id not in damaged:
                self._fail(f"{miss.chunk_id} is a miss: {miss.reason}, {miss.detail}")
        answer = cache.query(question, top_k=TOP_K, max_tokens=1)
        if [source.text for source in answer.sources] != [chunk.text for chunk in given]:
            self._fail(f"the sources of {question} are not what was retrieved")

    def _check_given_up(self, cache: RagCache) -> None:
        for batch in cache.store.catalog.all_chunks():
            for chunk in batch:
                if any(it.states is None and not (self.scenario.evicts and it.evicted) for it in chunk.encodings):
                    self._fail(f"{chunk.chunk_id} has no states")

    def _check_leftovers(self, cache: RagCache) -> None:
        catalog = cache.store.catalog
        for batch in catalog.all_chunks():
            for chunk in batch:
                if any(it.states is None for it in chunk.encodings):
                    self._fail(f"done again, {chunk.chunk_id} has no states")
        if cache.store.orphans():
            self._fail(f"done again, orphans are left: {cache.store.orphans()}")
        if left := [file.name for file in cache.path.rglob(f"{TEMPORARY_PREFIX}*")]:
            self._fail(f"done again, unfinished files are left: {left}")
        # A job that finds nothing left to do commits nothing. Old vectors go with the next commit.
        cache.delete(next(iter(catalog.signatures())))
        if (number := len(list(cache.store.vector_folder.iterdir()))) != 1:
            self._fail(f"done again, there are {number} files of vectors")
        dead = [shard.path.name for shard in Inventory(catalog).shards() if shard.live_bytes == 0]
        if dead:
            self._fail(f"done again, shards hold nothing of use: {dead}")

    def _fail(self, line: str) -> None:
        self.findings.failures.append(line)


def _content(catalog: Catalog) -> Content:
    content: Content = {}
    for document, chunks in Inventory(catalog).documents():
        ordered = sorted(chunks, key=lambda chunk: chunk.ordinal)
        content[document.id] = (document, tuple(_chunk(chunk) for chunk in ordered))
    return content


def _chunk(chunk: ChunkRecord) -> Chunk:
    said = (chunk.title, chunk.text, chunk.token_ids, chunk.content)
    return Chunk(chunk.chunk_id, chunk.ordinal, *said, repr(chunk.metadata))


def _name(fault: Fault) -> FaultName:
    """A fault, the same wherever the store lies."""
    return str(fault.part), Path(fault.name).name, str(fault.reason)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {id for id in {*one, *other} if one.get(id) != other.get(id)}


def _near(some: list[float], others: list[float]) -> bool:
    return bool(torch.allclose(torch.tensor(some), torch.tensor(others), atol=SCORE_TOLERANCE))
