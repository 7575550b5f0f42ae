"""What an indexing run has to do: documents as they are compared with those in the store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ragcache.errors import SourceError
from ragcache.indexer.documents import Document, checked
from ragcache.states.store import StateStore


@dataclass(frozen=True)
class IndexPlan:
    """What an indexing run has to do.

    Attributes:
        source: name that documents are recorded under.
        changed: ids of the documents to encode, in the order of the source.
        added: how many of them are new.
        unchanged: how many documents stay as they are.
        removed: ids of documents to take out: those that are missing, and those that have come to be without passages.
    """

    source: str
    changed: list[str]
    added: int
    unchanged: int
    removed: list[str]

    @cached_property
    def released(self) -> frozenset[str]:
        """Documents that are replaced or taken out, and so may give ids of chunks up to others."""
        return frozenset((*self.changed, *self.removed))


def signature(document: Document, source: str, settings_digest: str) -> str:
    """sha256 over everything that a document's chunks, their states and their metadata depend on.

    Raises:
        SourceError: the metadata is no JSON.
    """
    parts: list[Any] = [source, document.id, document.title, document.text, document.metadata, settings_digest]
    if document.passages is not None:
        parts.append([list(astuple(passage)) for passage in document.passages])
    try:
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise SourceError(f"{source}: metadata of document {document.id!r} is not JSON: {error}") from error


def plan_run(
    documents: Iterable[Document],
    source: str,
    settings_digest: str,
    store: StateStore | None,
    *,
    remove_missing: bool,
) -> IndexPlan:
    """Read every document once and compare with the store. One whose states are gone counts as changed.

    Args:
        documents: what is to be in the store.
        source: name that they are recorded under.
        settings_digest: settings that chunks depend on.
        store: `None` before the first run.
        remove_missing: documents of this source that are not among `documents` go.

    Raises:
        SourceError: a document cannot be read or makes no sense, or there are no documents at all.
    """
    known = store.catalog.signatures() if store else {}
    sources = store.catalog.sources() if store else {}
    incomplete = store.catalog.documents_without_states(store.broken_shards()) if store else set()
    seen: set[str] = set()
    changed: list[str] = []
    emptied: list[str] = []
    passages: dict[str, list[str]] = {}
    for document in checked(documents, source):
        seen.add(document.id)
        if _of_another_folder(other := sources.get(document.id, source), source):
            raise SourceError(
                f"{document.id!r} is in the store already, from {other}; rename one of the two folders, or index the "
                "folder that holds both"
            )
        if document.passages == ():
            emptied.append(document.id)
            continue
        if document.passages is not None:
            passages[document.id] = [passage.id for passage in document.passages]
        if known.get(document.id) != signature(document, source, settings_digest) or document.id in incomplete:
            changed.append(document.id)
    mine = store.catalog.signatures(source) if store and remove_missing else {}
    removed = [
        *(document_id for document_id in emptied if document_id in known),
        *(document_id for document_id in mine if document_id not in seen),
    ]
    plan = IndexPlan(
        source=source,
        changed=changed,
        added=sum(document_id not in known for document_id in changed),
        unchanged=len(seen) - len(changed) - len(emptied),
        removed=removed,
    )
    if store is not None:
        for document_id, ids in passages.items():
            owners_of_ids(ids, document_id, store, plan)
    return plan


def owners_of_ids(ids: Sequence[str], document: str, store: StateStore, plan: IndexPlan) -> set[str]:
    """Other documents that have chunks of some ids in the store.

    Args:
        ids: of chunks to be.
        document: that they will be of.
        store: the store.
        plan: of the run that makes them.

    Raises:
        SourceError: another document has one and keeps it.
    """
    owners = {id: owner for id, owner in store.catalog.documents_of(ids).items() if owner != document}
    for id, owner in owners.items():
        if owner not in plan.released:
            raise SourceError(
                f"{plan.source}: {id!r} of document {document!r} is in the store already, as one of document "
                f"{owner!r}; delete that document, or give the passage another id"
            )
    return set(owners.values())


def _of_another_folder(other: str, source: str) -> bool:
    """Whether two sources are folders that both exist: equal ids are then different files. A moved folder is not."""
    return other != source and Path(other).is_dir() and Path(source).is_dir()
