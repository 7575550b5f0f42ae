"""The catalog made anew from what lies beside the shards: their own account of themselves, and the journal."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ragcache.errors import StoreError, StoreNotFoundError
from ragcache.states import changes
from ragcache.states.catalog import Catalog
from ragcache.states.durable import TEMPORARY_PREFIX, file_checksum, sync_folder
from ragcache.states.folders import ShardFolders, is_store_id, shard_files
from ragcache.states.journal import JournalHeader, Replay, journal_files, replay
from ragcache.states.records import NewShard
from ragcache.states.shard import Container, read_shard
from ragcache.states.store import CATALOG, REPLACED, SHARDS, VECTORS, StateStore, hold_lock


@dataclass
class RebuildReport:
    """What was found.

    Attributes:
        documents: in the new catalog.
        chunks: of these.
        with_states: chunks that have states of all of their encodings.
        faults: files that could not be used, with one line for a person. What they held is encoded again when its
            source is indexed the next time.
        replaced: where the old catalog is now, if there was one.
    """

    documents: int = 0
    chunks: int = 0
    with_states: int = 0
    faults: list[tuple[Path, str]] = field(default_factory=list)
    replaced: Path | None = None


def rebuild(path: Path, folders: Iterable[Path] = (), *, wait: bool = False) -> RebuildReport:
    """Make the catalog of a store anew.

    Args:
        path: of the store.
        folders: other folders that its shards are in (`state_folders`).
        wait: until another process that is writing is done.

    Raises:
        StoreNotFoundError: there is neither a store nor what remains of one.
        StoreLockedError: another process is writing.
        StoreError: nothing can be made of what there is, or it cannot be written.
    """
    path = path.absolute()
    if not (path / SHARDS).is_dir() or not journal_files(path / SHARDS):
        raise StoreNotFoundError(f"{path / SHARDS} holds no journal of a store; index into a new store")
    try:
        with hold_lock(path, wait=wait):
            return _rebuild(path, folders)
    except OSError as error:
        raise StoreError(f"cannot write to {path}: {error.strerror or error}; the old catalog is as it was") from error


def _rebuild(path: Path, folders: Iterable[Path]) -> RebuildReport:
    outcome = replay(journal_files(path / SHARDS))
    if outcome.header is None:
        raise StoreError(f"no file of the journal in {path / SHARDS} can be read; delete the store and index again")
    report = RebuildReport(documents=len(outcome.signatures), faults=outcome.faults)
    if not is_store_id(outcome.header.store):
        raise StoreError(f"the journal in {path / SHARDS} names no store; delete the store and index again")
    folders = list(folders)
    targets = ShardFolders(path / SHARDS, folders, outcome.header.store)
    searched = {targets.own, *targets.targets, *(Path(folder) for folder in outcome.header.folders)}
    away = sorted(folder for folder in searched if not folder.is_dir() and str(folder) in outcome.header.folders)
    if away and not folders:
        raise StoreError(
            f"{away[0]} holds shards of {path} and is not there; mount its disk, or say where shards are now "
            "(--state-folder)"
        )
    shards = _find_shards(searched, outcome.header, report)
    new = path / f"{TEMPORARY_PREFIX}{CATALOG}"
    for leftover in path.glob(f"{new.name}*"):
        leftover.unlink()
    _fill(Catalog(new, path / SHARDS), outcome, shards, targets, report)
    report.replaced = _put_in_place(path, new)
    (path / VECTORS).mkdir(exist_ok=True)
    return report


def _find_shards(folders: set[Path], header: JournalHeader, report: RebuildReport) -> list[NewShard]:
    """All shards of this store that can be used, oldest first."""
    found: list[NewShard] = []
    for file in (file for folder in sorted(folders) for file in shard_files(folder)):
        if any(shard.path.name == file.name for shard in found):
            continue
        try:
            content = read_shard(file, Container(file.suffix[1:]))
            if content.header["store"] != header.store:
                raise ValueError("it belongs to another store")
            shard = NewShard(
                path=file,
                sequence=int(content.header["sequence"]),
                bytes=file.stat().st_size,
                checksum=file_checksum(file),
                format=content.format.to_json(),
                fingerprint=content.header["digest"],
                states=content.states,
            )
            found.append(shard)
        except (ValueError, KeyError, TypeError, OSError) as error:
            # Nothing that cannot be read today is deleted as unknown tomorrow.
            kept = file.with_name(f"{file.name}.unusable")
            file.replace(kept)
            report.faults.append((kept, str(error)))
    return sorted(found, key=lambda shard: shard.sequence)


def _fill(
    catalog: Catalog, outcome: Replay, shards: list[NewShard], folders: ShardFolders, report: RebuildReport
) -> None:
    header = outcome.header
    if header is None:
        return
    catalog.create(header.store, header.fingerprint, header.embedding, json.dumps(header.prefix))
    with catalog.transaction() as connection:
        states: dict[str, int] = {}
        written: list[int] = []
        last = 0
        for shard in shards:
            # A shard whose commit failed may have left its number to another.
            last = max(shard.sequence, last + 1)
            added = changes.add_shard(connection, replace(shard, sequence=last), folders.label(shard.path))
            written += added.values()
            # Of several with the same key the youngest counts: it may have replaced one that was damaged.
            states |= added
        for document, chunks in outcome.documents():
            changes.add_document(connection, document, chunks, states)
            report.chunks += len(chunks)
            report.with_states += sum(all(it.key in states for it in chunk.encodings) for chunk in chunks)
        # What a lost journal file put in may be indexed again, and then needs no encoding.
        if not outcome.faults:
            changes.drop_unused(connection, written)
        changes.set_vectors(connection, header.vectors)
        changes.set_last_vector_id(connection, outcome.last_vector_id)
        if header.recipe is not None:
            changes.set_recipe(connection, header.recipe)
    catalog.close()


def _put_in_place(path: Path, new: Path) -> Path | None:
    """Switch catalogs. Dying in between leaves none, and running this again makes it."""
    replaced = None
    for suffix in ("", "-wal", "-shm"):
        old = path / f"{CATALOG}{suffix}"
        if old.exists():
            if replaced is None:
                replaced = path / f"{REPLACED}{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
                replaced.mkdir()
            old.replace(replaced / old.name)
    new.replace(path / CATALOG)
    sync_folder(path)
    StateStore.open(path)
    return replaced
