"""What is done to stores while the process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragcache import Document, RagCache
from ragcache.errors import DocumentNotFoundError
from ragcache.maintenance import rebuild_store
from ragcache.states.inventory import Inventory
from ragcache.states.journal import journal_files
from tests.conftest import make_document
from tests.torture.workshop import Workshop, limits

Work = Callable[[Workshop, Path], None]

SHARD_BYTES = 250_000
"""About two documents."""

BUDGET_BYTES = 900_000
"""About half of what the documents take."""

IN_CONTEXT: dict[str, Any] = {
    "encodings": ("alone", "context"),
    # Enough for a mean; each takes the oracle a prefill for every chunk.
    "contexts": 2,
    # Of about one chunk, so that most contexts lose a member when documents change, and some keep all of theirs.
    "context_tokens": 48,
    # Room for the chunks of a document to slide along in one block.
    "batch_tokens": 256,
}


@dataclass(frozen=True)
class Scenario:
    """A job that is killed.

    Attributes:
        prepare: makes the store as it is before.
        job: what is killed, and later done again.
        evicts: states may be given up in between.
        rebuilds: there may be no catalog in between.
        settings: of the store, besides those that all have.
    """

    prepare: Work
    job: Work
    evicts: bool = False
    rebuilds: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def _documents(*numbers: int) -> list[Document]:
    return [make_document(number, sentences=6) for number in numbers]


def _changed() -> list[Document]:
    text, title, metadata = _documents(1, 2, 3)
    return [
        replace(text, text=text.text.replace("granite", "concrete")),
        replace(title, title="The harbour"),
        replace(metadata, metadata={"number": 3, "checked": True}),
    ]


def all_documents() -> list[Document]:
    """Every document that is in a store at any time."""
    return [*_documents(*range(11)), *_changed()]


def _close(cache: RagCache) -> None:
    """What the end of a process does."""
    cache.close()
    cache.store.catalog.close()


def _index(workshop: Workshop, path: Path, documents: Sequence[Document], budget_bytes: int = 0) -> None:
    with limits(SHARD_BYTES, budget_bytes):
        cache = workshop.open(path)
        cache.index(documents, remove_missing=True)
        _close(cache)


def _index_eight(workshop: Workshop, path: Path) -> None:
    """Eight documents, one of them there twice, so that two share their states."""
    _index(workshop, path, [*_documents(*range(8)), _twin()])


def _twin() -> Document:
    return replace(make_document(1, sentences=6), id="twin")


def _nothing(workshop: Workshop, path: Path) -> None:
    pass


def _create(workshop: Workshop, path: Path) -> None:
    _index(workshop, path, _documents(*range(5)))


def _index_changes(workshop: Workshop, path: Path) -> None:
    """Texts, titles and metadata change, documents come and go; the twin keeps the states of what changes."""
    _index(workshop, path, [*_documents(0, 4, 5, 8, 9, 10), *_changed(), _twin()])


def _index_in_one_context(workshop: Workshop, path: Path) -> None:
    _index_eight(replace(workshop, given={**workshop.given, "contexts": 1}), path)


def _delete(workshop: Workshop, path: Path) -> None:
    with limits(SHARD_BYTES):
        cache = workshop.open(path)
        # All go in one transaction, so after a kill either none is there or all are.
        with suppress(DocumentNotFoundError):
            cache.delete(["doc-0", "doc-1", "doc-5"])
        _close(cache)


def _leave_holes(workshop: Workshop, path: Path) -> None:
    """Shards with unused states, and a journal of several files."""
    _index_eight(workshop, path)
    with limits(SHARD_BYTES):
        cache = workshop.open(path)
        cache.delete(["doc-0", "doc-3", "doc-6"])
        cache.delete("doc-1")


def _leave_holes_in_context(workshop: Workshop, path: Path) -> None:
    """The same, and contexts that were chosen anew since."""
    _leave_holes(workshop, path)
    _index(workshop, path, [*_documents(2, 4, 5, 7), _twin()])


def _compact(workshop: Workshop, path: Path) -> None:
    with limits(SHARD_BYTES):
        cache = workshop.open(path)
        cache.compact(threshold=0.0)
        _close(cache)


def _index_within_budget(workshop: Workshop, path: Path) -> None:
    """States go because space is short, and come back when it no longer is."""
    _index(workshop, path, _documents(*range(10)), BUDGET_BYTES)
    _index(workshop, path, _documents(*range(10)))


def _damage(workshop: Workshop, path: Path) -> None:
    """A byte of states in one shard, one between them in another, one of the journal."""
    _index_eight(workshop, path)
    store = workshop.open(path).store
    first, second, *_ = Inventory(store.catalog).shards()
    states = next(Inventory(store.catalog).states(first.id)).states
    _flip(first.path, states.ranges[1].offset + 7)
    _flip(second.path, second.bytes - 1)
    _flip(journal_files(store.shard_folder)[0].path, 300)


def _damage_vectors(workshop: Workshop, path: Path) -> None:
    _index_eight(workshop, path)
    (vectors,) = (path / "vectors").iterdir()
    _flip(vectors, 2000)


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def _repair(workshop: Workshop, path: Path) -> None:
    with limits(SHARD_BYTES):
        cache = workshop.open(path)
        cache.verify(repair=True)
        _close(cache)


def _leave_log(workshop: Workshop, path: Path) -> None:
    """A catalog whose last changes are in SQLite's log only."""
    _index_eight(workshop, path)
    with limits(SHARD_BYTES):
        workshop.open(path).delete("doc-2")
    if not (path / "catalog.sqlite-wal").stat().st_size:
        raise ValueError("there is no log")
    os.kill(os.getpid(), signal.SIGKILL)


def _rebuild(workshop: Workshop, path: Path) -> None:
    rebuild_store(path, workshop.settings(path), lambda: workshop.embedder)


SCENARIOS = {
    "create": Scenario(_nothing, _create),
    "index": Scenario(_index_eight, _index_changes),
    "delete": Scenario(_index_eight, _delete),
    "compact": Scenario(_leave_holes, _compact),
    "evict": Scenario(_index_eight, _index_within_budget, evicts=True),
    "repair": Scenario(_damage, _repair),
    "vectors": Scenario(_damage_vectors, _repair),
    "rebuild": Scenario(_leave_log, _rebuild, rebuilds=True),
    "create in context": Scenario(_nothing, _create, settings=IN_CONTEXT),
    "index in context": Scenario(_index_eight, _index_changes, settings=IN_CONTEXT),
    "compact in context": Scenario(_leave_holes_in_context, _compact, settings=IN_CONTEXT),
    "recipe": Scenario(_index_in_one_context, _index_eight, settings=IN_CONTEXT),
}
