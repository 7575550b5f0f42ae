"""Walk through everything a store holds and name what is not what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ragcache.states.durable import file_checksum
from ragcache.states.inventory import Inventory, ShardInventory, StatesInUse
from ragcache.states.journal import replay
from ragcache.states.key import state_key
from ragcache.states.miss import Miss, MissReason, UnusableStatesError
from ragcache.states.reading import read_states
from ragcache.states.shard import Container, read_shard
from ragcache.states.store import StateStore


class Part(StrEnum):
    """What a fault concerns."""

    CATALOG = "catalog"
    CHUNK = "chunk"
    SHARD = "shard"
    JOURNAL = "journal"
    VECTORS = "vectors"
    ORPHAN = "orphan"


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was written.

    Attributes:
        part: what it concerns.
        name: chunk id or file.
        reason: kind of fault.
        detail: one line for a person.
    """

    part: Part
    name: str
    reason: str
    detail: str


@dataclass
class VerifyReport:
    """Outcome of a walk.

    Attributes:
        states: whose bytes were read.
        bytes: that were read.
        faults: what was found, in the order it was found.
        damaged: states that must be encoded again.
        shards: with any damage; copying what is sound in them makes them whole.
        journal: cannot be replayed to what the catalog holds.
        given_up: encodings that could not be made again as they were; the next indexing run makes others.
    """

    states: int = 0
    bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    damaged: list[StatesInUse] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    journal: bool = False
    given_up: list[Miss] = field(default_factory=list)

    def add(self, part: Part, name: str | Path, reason: str, detail: str) -> None:
        """Note a fault."""
        self.faults.append(Fault(part, str(name), reason, detail))


def verify(store: StateStore, on_progress: Callable[[int, int], None] = lambda done, total: None) -> VerifyReport:
    """Read every byte of the catalog, the journal and the shards, and compare.

    Args:
        store: open. What changes meanwhile may be reported as a fault; hold its lock to be sure.
        on_progress: told how many bytes of shards are read, and how many there are.

    Raises:
        StoreError: the catalog is damaged; `ragcache rebuild` makes it anew.
    """
    report = VerifyReport()
    store.catalog.require_sound()
    for _ in store.catalog.all_chunks():
        pass  # Each row is checked as it is read.
    inventory = Inventory(store.catalog)
    shards = inventory.shards()
    total, done = sum(shard.bytes for shard in shards), 0
    for shard in shards:
        _verify_shard(store, inventory, shard, report)
        done += shard.bytes
        report.bytes += shard.bytes if shard.path.is_file() else 0
        on_progress(done, total)
    _verify_journal(store, report)
    for orphan in store.orphans():
        report.add(Part.ORPHAN, orphan, "orphan", "no catalog entry; the next writer removes it")
    return report


def _verify_shard(store: StateStore, inventory: Inventory, shard: ShardInventory, report: VerifyReport) -> None:
    """States one by one, then the file as a whole, which also covers what lies between them."""
    identity = store.identity()
    sound = True
    for it in inventory.states(shard.id):
        chunk, context = it.chunk, it.encoding.context
        report.states += 1
        try:
            if it.states.key != state_key(identity.digest, identity.prefix, context, chunk.token_ids):
                raise UnusableStatesError(MissReason.FINGERPRINT, "the states are of another model, context or text")
            read_states(it.states, context, chunk.token_ids)
        except UnusableStatesError as fault:
            sound = False
            report.add(Part.CHUNK, chunk.chunk_id, fault.reason, fault.detail)
            report.damaged.append(it)
    problem = _problem_of(shard)
    if problem is not None and sound:
        report.add(Part.SHARD, shard.path, "checksum", f"{problem}; none of the states in use is affected")
    if problem is not None or not sound:
        report.shards.append(shard.id)


def _problem_of(shard: ShardInventory) -> str | None:
    try:
        if shard.path.exists() and not shard.path.is_file():
            return "it is no file"
        if file_checksum(shard.path) != shard.checksum:
            return "the file is not what was written"
        read_shard(shard.path, Container(shard.path.suffix[1:]))
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _verify_journal(store: StateStore, report: VerifyReport) -> None:
    """Whether the journal leads to the documents that the catalog holds."""
    outcome = replay(store.journal(), up_to=store.catalog.vectors().generation)
    for path, detail in outcome.faults:
        report.add(Part.JOURNAL, path, "damaged", detail)
    if outcome.faults or outcome.signatures != store.catalog.signatures():
        report.journal = True
        if not outcome.faults:
            detail = "it does not lead to the documents in the catalog"
            report.add(Part.JOURNAL, store.shard_folder, "incomplete", detail)
