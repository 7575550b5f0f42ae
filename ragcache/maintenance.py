"""Looking after a store. Nothing here needs a language model, except to encode damaged states again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache.errors import DocumentNotFoundError, StoreError, VectorsError
from ragcache.indexer import upkeep
from ragcache.indexer.repair import StateRepair
from ragcache.prompt.validity import is_unicode
from ragcache.retriever.vectors import VectorIndex
from ragcache.settings import Settings
from ragcache.states import changes
from ragcache.states.canary_report import CanaryReport
from ragcache.states.compact import CompactReport, compact, rewrite, shorten_journal
from ragcache.states.form import StateFormat
from ragcache.states.inventory import Inventory
from ragcache.states.locked import LockedStore, WriteOptions
from ragcache.states.rebuild import RebuildReport, rebuild
from ragcache.states.records import NO_VECTORS
from ragcache.states.shard import Container
from ragcache.states.store import StateStore
from ragcache.states.verify import Part, VerifyReport, verify
from ragcache.states.writer import StoreWriter

COMPACT_THRESHOLD = 0.3
OnBytes = Callable[[int, int], None]
"""Told how many bytes are done, and how many there are."""

_NOTHING_PUT = StateFormat("float32", ())
"""Format of a writer that only takes documents out."""


def write_options(settings: Settings, *, wait: bool = False) -> WriteOptions:
    """How a store is written to, by its settings."""
    return WriteOptions(
        shard_bytes=settings.shard_megabytes * 2**20,
        container=Container(settings.shard_format),
        folders=settings.state_folders,
        budget_bytes=settings.budget_megabytes * 2**20,
        free_bytes=settings.free_megabytes * 2**20,
        wait=wait,
    )


def delete_documents(
    store: StateStore,
    document_ids: str | Sequence[str],
    where: Mapping[str, Any] | None,
    options: WriteOptions,
    embedder: upkeep.EmbedderSource,
) -> list[str]:
    """Take documents out of a store, by id or by metadata.

    Args:
        store: the store.
        document_ids: one id or several.
        where: or all documents whose metadata hold these values.
        options: how the store is written to.
        embedder: for the case that the vector index must be made anew.

    Returns:
        Ids of the documents removed.

    Raises:
        DocumentNotFoundError: there is no document of an id, or none with such metadata; nothing was removed.
        StoreError: the store cannot be written to.
    """
    ids = [document_ids] if isinstance(document_ids, str) else list(document_ids)
    if broken := [i for i in ids if not is_unicode(i)]:
        raise DocumentNotFoundError(f"no document {broken[0]!r} in {store.path}; nothing was removed")
    with StoreWriter(store, _NOTHING_PUT, options) as writer:
        known = {document.id for document in store.catalog.documents(ids)}
        if unknown := [i for i in ids if i not in known]:
            raise DocumentNotFoundError(f"no document {unknown[0]!r} in {store.path}; nothing was removed")
        if where:
            found = store.catalog.documents_where(where)
            if not found:
                raise DocumentNotFoundError(
                    f"no document with metadata {json.dumps(dict(where))} in {store.path}; nothing was removed"
                )
            ids += [i for i in found if i not in known]
        if ids:
            upkeep.delete_documents(writer, list(dict.fromkeys(ids)), embedder)
    return list(dict.fromkeys(ids))


def delete_model(store: StateStore, fingerprint: str, options: WriteOptions) -> int:
    """Drop all states of a model; texts and vectors stay, and the next indexing run encodes them again.

    Args:
        store: the store.
        fingerprint: start of the digest that `ragcache stats` shows, at least 6 digits.
        options: how the store is written to.

    Returns:
        The number of states dropped.

    Raises:
        StoreError: not exactly one model has such a fingerprint.
    """
    with LockedStore(store, options) as locked:
        known = {shard.fingerprint for shard in Inventory(store.catalog).shards()}
        chosen = [digest for digest in known if digest.startswith(fingerprint) and len(fingerprint) >= 6]
        if len(chosen) != 1:
            raise StoreError(
                f"{len(chosen)} models have states in {store.path} under a fingerprint that starts with "
                f"{fingerprint!r}; give at least 6 digits of one that ragcache stats shows"
            )
        with locked.changing() as dead, store.catalog.transaction() as connection:
            states = changes.states_of_model(connection, chosen[0])
            dead += changes.give_up(connection, states, evicted=False)
        return len(states)


def compact_store(store: StateStore, threshold: float, options: WriteOptions) -> CompactReport:
    """Give back the space of states that nothing uses, and of the least valuable ones if a limit is exceeded."""
    with LockedStore(store, options) as locked:
        report = compact(locked, threshold)
        _forget_unknown_usage(store)
        return report


def _forget_unknown_usage(store: StateStore) -> None:
    """Keep counts of what is stored, and of what was evicted and may come back."""
    inventory = Inventory(store.catalog)
    known = {states.key for states in inventory.residents()} | inventory.evicted_keys()
    store.usage.forget(store.usage.all().keys() - known)


def verify_store(store: StateStore, progress: OnBytes = lambda done, total: None) -> VerifyReport:
    """Read everything a store holds and name what is not what was written.

    Raises:
        StoreError: the catalog is damaged; `ragcache rebuild` makes it anew.
    """
    report = verify(store, progress)
    version = store.catalog.vectors()
    if version == NO_VECTORS:
        return report
    try:
        ids = VectorIndex.load(store.vector_folder, version).ids
    except VectorsError as error:
        report.add(Part.VECTORS, store.vector_folder, "damaged", str(error))
        return report
    chunks = store.catalog.all_vector_ids()
    if ids != chunks:
        report.add(Part.VECTORS, store.vector_folder, "ids", f"{len(ids ^ chunks)} ids are not those of the chunks")
    return report


def repair_store(
    writer: StoreWriter, states: StateRepair, embedder: upkeep.EmbedderSource, progress: OnBytes
) -> VerifyReport:
    """Verify a locked store and put right what can be.

    Returns:
        What was found before the repair, and what could not be repaired.
    """
    report = verify_store(writer.store, progress)
    inventory = Inventory(writer.store.catalog)
    states.run(encoding for it in report.damaged for encoding in inventory.encodings_of(it.id))
    report.given_up += states.given_up
    # What was damaged in these is out of use by now, unless all of a shard was, which is gone then.
    rewrite(writer, [shard for shard in inventory.shards() if shard.id in report.shards], CompactReport())
    upkeep.restore_vectors(writer, embedder)
    if report.journal:
        shorten_journal(writer)
    return report


def rebuild_store(
    path: Path, settings: Settings, embedder: upkeep.EmbedderSource, *, wait: bool = False
) -> tuple[RebuildReport, int]:
    """Make catalog and, if need be, vectors of a store anew from its shards.

    Returns:
        What was found, and the number of chunks embedded again.
    """
    report = rebuild(path, settings.state_folders, wait=wait)
    with StoreWriter(StateStore.open(path), _NOTHING_PUT, write_options(settings, wait=wait)) as writer:
        embedded = upkeep.restore_vectors(writer, embedder)
        if report.faults:
            shorten_journal(writer)
    return report, embedded


@dataclass(frozen=True)
class StoreStats:
    """What a store holds, and how often its states were used.

    Attributes:
        documents, chunks, tokens: that answers can be given from.
        evicted_chunks: that lack states because space is short.
        shards, shard_bytes: files of states, and their sizes.
        state_bytes: in use within them.
        dead_bytes: that nothing uses any more; `compact` gives them back.
        models: for each fingerprint and format: `fingerprint`, `form`, `codec`, `states`, `bytes`.
        encodings: for each `encoding`: `chunks` that have such states, `evicted` ones, `bytes`.
        largest_documents: `document`, `chunks`, `bytes`; those that take most space.
        hits: chunks restored from states since the store was made.
        misses: chunks recomputed, by reason.
        canary: what checks of answers against a full prefill found (`canary_rate`), as in `CanaryReport`.
    """

    documents: int
    chunks: int
    tokens: int
    evicted_chunks: int
    shards: int
    shard_bytes: int
    state_bytes: int
    dead_bytes: int
    models: list[dict[str, Any]]
    encodings: list[dict[str, Any]]
    largest_documents: list[dict[str, Any]]
    hits: int
    misses: dict[str, int]
    canary: CanaryReport


def store_stats(store: StateStore, documents: int = 10) -> StoreStats:
    """Sizes and counts of a store.

    Args:
        store: the store.
        documents: how many of the largest documents to name.
    """
    inventory, usage = Inventory(store.catalog), store.usage.counts()
    models = [
        {"fingerprint": fingerprint, **_described(format), "states": count, "bytes": size}
        for fingerprint, format, count, size in inventory.bytes_by_format()
    ]
    encodings = [
        {"encoding": name, "chunks": chunks, "evicted": evicted, "bytes": size}
        for name, chunks, evicted, size in inventory.bytes_by_encoding()
    ]
    largest = [
        {"document": document, "chunks": chunks, "bytes": size}
        for document, chunks, size in inventory.bytes_by_document(documents)
    ]
    return StoreStats(
        **store.catalog.counts(),
        **inventory.sizes(),
        models=models,
        encodings=encodings,
        largest_documents=largest,
        hits=usage["hits"],
        misses=usage["misses"],
        canary=store.usage.canary(),
    )


def _described(format: str) -> dict[str, str]:
    """Forms and codecs of the layers that are stored."""
    try:
        parsed = StateFormat.from_json(format)
    except ValueError:
        return {"form": "unknown", "codec": "unknown"}
    stored: Collection[int] = parsed.stored_layers
    forms = {parsed.layers[layer].form.value for layer in stored}
    codecs = {parsed.layers[layer].codec for layer in stored}
    return {"form": "+".join(sorted(forms)), "codec": "+".join(sorted(codecs))}
