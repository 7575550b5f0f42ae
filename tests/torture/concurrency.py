"""Readers that query while a writer changes the store under them: no error, no stale or foreign text, no other answer.

Every sentence says of which document and version it is. The writer notes when it begins and ends each commit, readers
when each query begins and ends, all by one clock; what was answered is held against that afterwards.
"""

from __future__ import annotations

import os

# Before torch is imported: many processes share few cores. And nothing waits for a network.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import argparse
import json
import math
import multiprocessing
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from ragcache import Document, RagCache
from ragcache.answer import Answer
from ragcache.maintenance import compact_store
from ragcache.settings import load_settings
from ragcache.states.locked import WriteOptions
from ragcache.states.miss import MissReason
from ragcache.states.records import ChunkRecord, StoredStates
from ragcache.stream import ContextChunk, context_chunk
from tests.torture.workshop import Workshop
from tests.unprivileged import ordinary_user, reachable_folder

READERS = 4
DOCUMENTS = 10
SENTENCES = 12
ALLOWED_MISSES = {MissReason.EVICTED, MissReason.MISSING}
TAG = re.compile(r"\[(doc-\d+) v(\d+)\]")
TOPICS = ("granite harbour walls", "ferries in winter", "children who row", "lighthouse keepers", "ships and the wind")


class CountingCache(RagCache):
    """Counts how often states were found where a compaction had put them."""

    relocations = 0

    def _relocated(self, states: StoredStates) -> StoredStates | None:
        found = super()._relocated(states)
        self.relocations += found is not None
        return found


def open_store(path: Path, workshop: Workshop) -> CountingCache:
    """States decode exactly; shards are as small as settings allow."""
    given = {"dtype": "float32", "codec": "raw", "chunk_tokens": 96, "max_tokens": 8, "shard_megabytes": 1}
    given |= {"encodings": ("alone",), "order": "score"}
    settings = load_settings(path, model="tiny", free_megabytes=0, **given)
    return CountingCache(path, settings, workshop.model, workshop.embedder)


class Journal:
    """What one process did, a JSON object a line, whole even if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **entry: Any) -> None:
        """Add an entry with the time, by a clock that all processes share."""
        self._file.write(json.dumps({"at": time.monotonic(), **entry}) + "\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_document(name: str, version: int) -> Document:
    """No two versions of no two documents have a sentence in common."""
    sentences = [f"[{name} v{version}] About {TOPICS[i % len(TOPICS)]}, part {i}." for i in range(SENTENCES)]
    return Document(name, " ".join(sentences), name)


class Writer:
    """Changes the store until time is up, and notes every change before and after it is made."""

    def __init__(self, cache: RagCache, journal: Journal, seed: int) -> None:
        self._cache = cache
        self._journal = journal
        self._random = random.Random(seed)
        self._version = 0
        self._visible: set[str] = set()

    def run(self, deadline: float) -> None:
        actions = [self.upsert, self.delete, self.compact, self.evict, self.verify]
        while time.monotonic() < deadline:
            [action] = self._random.choices(actions, weights=[10, 2, 4, 2, 1])
            action()

    def upsert(self, count: int = 0) -> None:
        """New versions, of documents that are there and of some that were deleted."""
        names = self._random.sample([f"doc-{i}" for i in range(DOCUMENTS)], count or self._random.randint(1, 3))
        self._version += 1
        documents = [make_document(name, self._version) for name in names]
        with self._noted("upsert", dict.fromkeys(names, self._version)):
            self._cache.index(documents)
        self._visible.update(names)

    def delete(self) -> None:
        if len(self._visible) <= DOCUMENTS // 2:
            return
        name = self._random.choice(sorted(self._visible))
        with self._noted("delete", {name: None}):
            self._cache.delete(name)
        self._visible.remove(name)

    def compact(self) -> None:
        with self._noted("compact", {}):
            report = self._cache.compact(threshold=0)
        if report.damaged:
            raise AssertionError(f"compaction found damage: {report.damaged}")

    def evict(self) -> None:
        """Give up a part of the states; the next upsert, which has no limit, brings them back."""
        present = sum(self._cache.store.catalog.shards().values())
        budget = int(present * self._random.uniform(0.3, 0.9))
        with self._noted("evict", {}):
            compact_store(self._cache.store, 0.0, WriteOptions(2**20, budget_bytes=budget))
        if sum(self._cache.store.catalog.shards().values()) > budget:
            raise AssertionError("more is left than the budget allows")

    def verify(self) -> None:
        with self._noted("verify", {}):
            report = self._cache.verify()
        if report.faults:
            raise AssertionError(f"verify found {report.faults}")

    @contextmanager
    def _noted(self, kind: str, changes: dict[str, int | None]) -> Iterator[None]:
        self._journal.write(kind=kind, phase="begin", changes=changes)
        yield
        self._journal.write(kind=kind, phase="end", changes=changes)


class Reader:
    """Asks until time is up, and notes what each answer was given from."""

    def __init__(self, cache: CountingCache, journal: Journal, seed: int) -> None:
        self._cache = cache
        self._journal = journal
        self._random = random.Random(seed)
        self._answers: dict[tuple[object, ...], str] = {}

    def run(self, deadline: float) -> None:
        catalog = self._cache.store.catalog
        look_up = catalog.chunks_by_vector

        def look_up_late(vector_ids: Sequence[int]) -> list[ChunkRecord]:
            """A commit may come between the search and this, on a slow machine more often than on a fast one."""
            if self._random.random() < 0.3:
                time.sleep(self._random.uniform(0, 0.1))
            return look_up(vector_ids)

        with mock.patch.object(catalog, "chunks_by_vector", look_up_late):
            self._run(deadline)

    def _run(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            name = f"doc-{self._random.randrange(DOCUMENTS)}"
            question = f"What does {name} say about {self._random.choice(TOPICS)}?"
            begun, relocations = time.monotonic(), self._cache.relocations
            top_k = self._random.choice((1, 1, 3))
            answer = self._ask(question, top_k)
            ended = time.monotonic()
            self._journal.write(
                kind="query",
                begun=begun,
                ended=ended,
                top_k=top_k,
                sources=[(it.chunk_id, it.document_id, it.text) for it in answer.sources],
                misses=[(it.chunk_id, it.reason) for it in answer.misses],
                restored=answer.tokens.restored,
                relocations=self._cache.relocations - relocations,
            )
            if answer.answer != (expected := self._expected(question, answer)):
                self._journal.write(kind="failure", detail=f"{answer!r} should have answered {expected!r}")

    def _ask(self, question: str, top_k: int) -> Answer:
        if self._random.random() < 0.6:
            return self._cache.query(question, top_k=top_k, reuse="composed")
        # One who takes a while between finding passages and answering from them.
        chunks = [context_chunk(hit) for hit in self._cache.retrieve(question, top_k)]
        time.sleep(self._random.uniform(0, 0.2))
        return self._cache.stream_from(question, chunks, reuse="composed").answer

    def _expected(self, question: str, answer: Answer) -> str:
        """From the texts alone: by a plain prefill for one passage; several are encoded apart from each other."""
        key = (question, *(source.text for source in answer.sources))
        if key not in self._answers:
            template = self._cache.template
            chunks = [
                ContextChunk(
                    it.chunk_id, it.document_id, it.title, it.text, it.score, template.chunk(it.title, it.text)
                )
                for it in answer.sources
            ]
            reuse = "none" if len(chunks) == 1 else "composed"
            self._answers[key] = self._cache.stream_from(question, chunks, reuse=reuse).answer.answer
        return self._answers[key]


@dataclass
class Outcome:
    """What all processes together did.

    Attributes:
        queries: of each reader.
        changes: of the writer, by kind.
        misses: chunks that were recomputed, by reason.
        restored: tokens restored from states.
        relocations: states that a compaction had moved and that were found all the same.
        answers: different texts that were answered from.
        failures: whatever must not be.
    """

    queries: dict[str, int] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    relocations: int = 0
    answers: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"queries      {sum(self.queries.values())} ({', '.join(map(str, self.queries.values()))})",
                f"changes      {', '.join(f'{count} {kind}' for kind, count in sorted(self.changes.items()))}",
                f"restored     {self.restored} tokens, of {len(self.answers)} different passages",
                f"relocations  {self.relocations}",
                f"misses       {dict(self.misses)}",
                f"failures     {len(self.failures)}",
                *self.failures[:10],
            ]
        )


@dataclass
class Lifetime:
    """When a version of a document was visible, as far as others can tell.

    Attributes:
        begun: before it was committed.
        going: before the next version was committed, or the document was deleted.
        gone: after that.
    """

    begun: float
    going: float = math.inf
    gone: float = math.inf


def lifetimes(changes: list[dict[str, Any]]) -> dict[tuple[str, int], Lifetime]:
    """Of each version of each document."""
    found: dict[tuple[str, int], Lifetime] = {}
    current: dict[str, int] = {}
    for change in changes:
        for name, version in change["changes"].items():
            old = found.get((name, current.get(name, 0)))
            if change["phase"] == "begin":
                if version is not None:
                    found[name, version] = Lifetime(change["at"])
                if old is not None:
                    old.going = change["at"]
                continue
            if old is not None:
                old.gone = change["at"]
            current.pop(name, None)
            if version is not None:
                current[name] = version
    return found


def judge(folder: Path, readers: list[str]) -> Outcome:
    """Hold what readers answered from against what the writer had put there."""
    outcome = Outcome()
    changes = read_journal(folder / "writer.jsonl")
    outcome.failures += [change["detail"] for change in changes if change["kind"] == "failure"]
    changes = [change for change in changes if change["kind"] != "failure"]
    outcome.changes.update(change["kind"] for change in changes if change["phase"] == "end")
    visible = lifetimes(changes)
    for reader in readers:
        entries = read_journal(folder / f"{reader}.jsonl")
        outcome.failures += [f"{reader}: {entry['detail']}" for entry in entries if entry["kind"] == "failure"]
        queries = [entry for entry in entries if entry["kind"] == "query"]
        outcome.queries[reader] = len(queries)
        if not queries:
            outcome.failures.append(f"{reader} got no answer at all")
        for query in queries:
            outcome.restored += query["restored"]
            outcome.relocations += query["relocations"]
            outcome.misses.update(reason for _, reason in query["misses"])
            outcome.answers.update(text for _, _, text in query["sources"])
            outcome.failures += [f"{reader}: {fault}" for fault in _faults(query, visible, changes)]
    return outcome


def _faults(
    query: dict[str, Any], visible: dict[tuple[str, int], Lifetime], changes: list[dict[str, Any]]
) -> Iterator[str]:
    """What is wrong with what an answer was given from."""
    misses = dict(query["misses"])
    if len(query["sources"]) != query["top_k"]:
        yield f"{len(query['sources'])} passages, not {query['top_k']}"
    for chunk_id, document, text in query["sources"]:
        tags = set(TAG.findall(text))
        if len(tags) != 1:
            yield f"{chunk_id}: tags of {len(tags)} versions in {text!r}"
            continue
        [(name, number)] = tags
        version = int(number)
        if name != document or chunk_id.rpartition("#")[0] != name or text not in make_document(name, version).text:
            yield f"{chunk_id}: text of another document: {text!r}"
            continue
        life = visible.get((name, version), Lifetime(math.inf))
        if life.begun > query["ended"]:
            yield f"{chunk_id}: version {version} was not committed yet"
        if life.gone < query["begun"]:
            yield f"{chunk_id}: version {version} was gone {query['begun'] - life.gone:.3f} s before the query began"
        reason = misses.get(chunk_id)
        if reason not in {None, *ALLOWED_MISSES}:
            yield f"{chunk_id}: a miss because of {reason}"
        if reason == MissReason.MISSING and life.going > query["ended"] and not _disturbed(query, changes):
            yield f"{chunk_id}: its states are missing, though nobody has given them up"


def _disturbed(query: dict[str, Any], changes: list[dict[str, Any]]) -> bool:
    """Whether during a query states were given up, or moved more often than they are looked for."""
    during = [it for it in changes if query["begun"] <= it["at"] <= query["ended"]]
    before = [it for it in changes if it["at"] < query["begun"]][-1:]
    begun = [it["kind"] for it in (*before, *during) if it["phase"] == "begin"]
    return "evict" in begun or begun.count("compact") > 1


def _process(journal_path: Path, work: Callable[[Journal], None], *, unprivileged: bool = False) -> None:
    """The whole of one process; whatever goes wrong is in its journal."""
    journal = Journal(journal_path)
    try:
        with ordinary_user() if unprivileged else nullcontext():
            work(journal)
    except BaseException:
        journal.write(kind="failure", detail=traceback.format_exc())
        raise


def torture(folder: Path, seconds: float, seed: int) -> Outcome:
    """Let them loose on a new store in a folder."""
    workshop, store = Workshop.load(), folder / "store"
    # Forked, so that models are loaded once; each process opens the store for itself.
    context = multiprocessing.get_context("fork")
    filled = context.Event()
    deadline = context.Value("d", 0.0)

    def write(journal: Journal) -> None:
        try:
            cache = open_store(store, workshop)
            writer = Writer(cache, journal, seed)
            writer.upsert(DOCUMENTS)
            deadline.value = time.monotonic() + seconds
        finally:
            # Without a store readers fail too, rather than wait.
            filled.set()
        writer.run(deadline.value)
        writer.verify()
        cache.close()

    def read(journal: Journal, own_seed: int) -> None:
        filled.wait()
        cache = open_store(store, workshop)
        Reader(cache, journal, own_seed).run(deadline.value)
        cache.close()

    readers = [f"reader-{number}" for number in range(READERS)]
    processes = [context.Process(target=_process, args=(folder / "writer.jsonl", write))]
    for number, reader in enumerate(readers):

        def work(journal: Journal, own_seed: int = seed + 1 + number) -> None:
            read(journal, own_seed)

        processes.append(context.Process(target=_process, args=(folder / f"{reader}.jsonl", work)))
    if os.geteuid() == 0:
        # One more, for whom the store is another user's.
        readers.append("unprivileged")
        arguments = (folder / "unprivileged.jsonl", lambda journal: read(journal, seed))
        processes.append(context.Process(target=_process, args=arguments, kwargs={"unprivileged": True}))
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds + 120)
        if process.is_alive():
            process.kill()
            process.join()
    outcome = judge(folder, readers)
    outcome.failures += [f"a process ended with {it.exitcode}" for it in processes if it.exitcode]
    return outcome


def main() -> int:
    """Run for some time and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with reachable_folder() as folder:
        outcome = torture(folder, arguments.seconds, arguments.seed)
    sys.stdout.write(f"{outcome}\n")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
