"""Getting room back: states that nothing uses are left behind when a shard is copied.

Readers go on meanwhile: one that looked a chunk up before its shard went finds the file missing, looks again and finds
the copy (`Catalog.relocated`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ragcache.settings import EncodingName
from ragcache.states import changes
from ragcache.states.form import StateFormat
from ragcache.states.inventory import Inventory, ShardInventory
from ragcache.states.journal import write_journal
from ragcache.states.locked import LockedStore, disk_error
from ragcache.states.miss import Miss, MissReason, UnusableStatesError
from ragcache.states.reading import ReadStates, read_states
from ragcache.states.records import ChunkRecord, DocumentChunks, as_written
from ragcache.states.rolling import RollingShards
from ragcache.states.shard import ShardEntry

SMALL = 0.25
"""A shard smaller than this part of a full one is copied together with others like it."""


@dataclass
class CompactReport:
    """What a compaction did.

    Attributes:
        rewritten: shards copied.
        freed_bytes: by which the shards got smaller.
        evicted: states given up because a limit was exceeded.
        damaged: states that could not be copied. Those that cannot be read at all stay as they are; the chunks of
            others have none now, and the next indexing run encodes them.
    """

    rewritten: int = 0
    freed_bytes: int = 0
    evicted: int = 0
    damaged: list[Miss] = field(default_factory=list)


def compact(writer: LockedStore, threshold: float) -> CompactReport:
    """Copy what is in use out of shards with many dead bytes, and many small shards into few; shorten the journal.

    Args:
        writer: entered, with nothing pending.
        threshold: share of dead bytes above which a shard is copied.
    """
    # The shorter journal is made from the catalog, and the longer one goes: there is no other account of documents.
    writer.store.catalog.require_sound()
    with writer.changing() as dead, writer.store.catalog.transaction() as connection:
        dead += changes.drop_unused(connection, changes.all_unused(connection))
    report = enforce_limits(writer)
    shards = Inventory(writer.store.catalog).shards()
    wasteful = [shard for shard in shards if shard.dead_bytes > threshold * shard.bytes]
    small = [shard for shard in shards if shard.bytes < SMALL * writer.options.shard_bytes and shard not in wasteful]
    rewrite(writer, [*wasteful, *(small if len(small) > 1 else [])], report)
    shorten_journal(writer)
    return report


def enforce_limits(writer: LockedStore) -> CompactReport:
    """Evict the least valuable states while a limit is exceeded.

    Args:
        writer: entered, with nothing pending.
    """
    report = CompactReport()
    writer.budget.refresh()
    # Again when a copy without what was given up is larger than its share of the old file was.
    while excess := writer.budget.excess():
        before = (report.evicted, report.freed_bytes)
        _evict(writer, excess, report)
        if (report.evicted, report.freed_bytes) == before:
            break
    return report


def _evict(writer: LockedStore, excess: int, report: CompactReport) -> None:
    """Give up states worth so many bytes, less what nothing uses anyway, and take the space back."""
    inventory = Inventory(writer.store.catalog)
    victims = writer.budget.choose_victims(excess - sum(shard.dead_bytes for shard in inventory.shards()))
    with writer.changing() as dead, writer.store.catalog.transaction() as connection:
        dead += changes.give_up(connection, victims, evicted=True)
    report.evicted += len(victims)
    writer.budget.refresh()
    for shard in sorted(inventory.shards(), key=lambda it: it.live_bytes / it.bytes):
        if writer.budget.excess() == 0 or shard.dead_bytes == 0:
            break
        rewrite(writer, [shard], report)
        writer.budget.refresh()


def rewrite(writer: LockedStore, shards: Iterable[ShardInventory], report: CompactReport) -> None:
    """Copy what is in use out of some shards, which go.

    Whenever a copy is full it is committed, and what it replaces is deleted, so little more than one shard is there
    twice.

    Args:
        writer: entered, with nothing pending.
        shards: of a format that this version does not know, they stay as they are.
        report: is added to.
    """
    before = sum(writer.store.catalog.shards().values())
    for format, group in _by_format(shards).items():
        move = _Move(writer, writer.new_shards(format), report)
        try:
            for shard in group:
                move.copy(shard)
                move.commit()
            move.copies.finish()
            move.commit()
        except OSError as error:
            raise disk_error(writer.store.path, error) from error
        finally:
            move.copies.abort()
        report.rewritten += len(group)
    report.freed_bytes += before - sum(writer.store.catalog.shards().values())


@dataclass
class _Move:
    """States on their way into other shards.

    Attributes:
        writer: of the store.
        copies: where they go.
        report: is told what cannot be copied.
    """

    writer: LockedStore
    copies: RollingShards
    report: CompactReport
    _copied: dict[str, list[int]] = field(default_factory=dict)
    _lost: list[int] = field(default_factory=list)

    def copy(self, shard: ShardInventory) -> None:
        """Copy all states of a shard that are in use."""
        for it in Inventory(self.writer.store.catalog).states(shard.id):
            chunk, states = it.chunk, it.states
            if states.key not in self._copied:
                try:
                    found = read_states(states, it.encoding.context, chunk.token_ids)
                except UnusableStatesError as fault:
                    self.report.damaged.append(Miss(chunk.chunk_id, fault.reason, fault.detail))
                    # A disk may only be away; what lies on it is not given up for that.
                    if fault.reason not in (MissReason.MISSING, MissReason.IO):
                        self._lost.append(it.id)
                    continue
                self.copies.add(entry_for(chunk, it.encoding.name, states.key, found, it.cost))
            self._copied.setdefault(states.key, []).append(it.id)

    def commit(self) -> None:
        """Let chunks use those copies whose shards are finished."""
        shards = self.copies.take()
        done = {states.key for shard in shards for states in shard.states}
        with self.writer.changing() as dead, self.writer.store.catalog.transaction() as connection:
            added = self.writer.add_shards(connection, shards)
            pairs = [(old, added[key]) for key in done for old in self._copied[key]]
            dead += changes.use_instead(connection, pairs)
            dead += changes.give_up(connection, self._lost, evicted=False)
        self._copied = {key: ids for key, ids in self._copied.items() if key not in done}
        self._lost = []


def entry_for(chunk: ChunkRecord, name: EncodingName, key: str, states: ReadStates, cost: float) -> ShardEntry:
    """What goes into a shard for an encoding that is in the catalog."""
    return ShardEntry(
        key=key,
        token_ids=chunk.token_ids,
        layers=states.layers,
        encoding=name,
        context_ids=states.context_ids,
        cost=cost,
        chunk_id=chunk.chunk_id,
        document_id=chunk.document_id,
        ordinal=chunk.ordinal,
        title=chunk.title,
        text=chunk.text,
    )


def shorten_journal(writer: LockedStore) -> None:
    """Replace the journal by a snapshot of what it leads to, unless that is all it is."""
    store = writer.store
    journal = store.journal()
    if len(journal) == 1 and journal[0].snapshot:
        return

    def documents() -> Iterator[DocumentChunks]:
        for document, chunks in Inventory(store.catalog).documents():
            yield document, [as_written(chunk) for chunk in chunks]

    try:
        write_journal(store.shard_folder, writer.journal_header(store.catalog.vectors()), documents(), snapshot=True)
        store.clean(writer.folders.targets)
    except OSError as error:
        raise disk_error(store.path, error) from error


def _by_format(shards: Iterable[ShardInventory]) -> dict[StateFormat, list[ShardInventory]]:
    groups: dict[StateFormat, list[ShardInventory]] = {}
    for shard in shards:
        try:
            groups.setdefault(StateFormat.from_json(shard.format), []).append(shard)
        except ValueError:
            logging.getLogger(__name__).warning("%s is in a format of another version; it stays as it is", shard.path)
    return groups
