"""How much room there is for states, and which go when it is short."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ragcache.states.eviction import Candidate, admits, choose, priority
from ragcache.states.inventory import Inventory, ResidentStates
from ragcache.states.store import StateStore
from ragcache.states.usage import NEVER_USED, KeyUsage


class Budget:
    """The limits of one store: bytes of all its shards, and bytes that stay free on their disks.

    What counts is the size of shard files. While one is being written, or copied by a compaction, the limits may be
    exceeded by one shard.
    """

    def __init__(self, store: StateStore, budget_bytes: int, free_bytes: int, folders: Collection[Path]) -> None:
        """Set up.

        Args:
            store: whose states are meant.
            budget_bytes: most bytes of all shards; 0 is without limit.
            free_bytes: that stay free on each disk.
            folders: where new shards go.
        """
        self._store = store
        self._inventory = Inventory(store.catalog)
        self._budget_bytes = budget_bytes
        self._free_bytes = free_bytes
        self._folders = folders
        self.refresh()

    def refresh(self) -> None:
        """Look at the store again, after it has changed."""
        self.clock = self._store.usage.clock
        self._shard_bytes = sum(self._store.catalog.shards().values())
        self._least: float | None = None
        self._ranked = False

    def newcomer(self, key: str, size: int, cost: float) -> Candidate:
        """States about to be encoded, as eviction sees them: wanted now.

        Args:
            key: of the states.
            size: bytes that they would take.
            cost: FLOPs that computing them takes.
        """
        used = self._store.usage.of([key]).get(key, NEVER_USED)
        return Candidate(key, size, cost, KeyUsage(used.frequency, max(used.clock, self.clock)))

    def admits(self, candidate: Candidate, pending: int) -> bool:
        """Whether states are worth being encoded: there is room, or others are worth less.

        Args:
            candidate: the states.
            pending: bytes of others that are not committed yet.
        """
        if self._overrun(pending) + candidate.bytes <= 0:
            return True
        if not self._ranked:
            residents = (priority(resident) for _, resident in self._candidates())
            self._least, self._ranked = min(residents, default=None), True
        return self._least is not None and admits(candidate, self._least)

    def excess(self) -> int:
        """Bytes of shards by which a limit is exceeded; 0 when none is."""
        return max(0, self._overrun(0))

    def choose_victims(self, size: int) -> list[int]:
        """Ids of the least valuable states that together take `size` bytes; the ageing clock goes on."""
        candidates = list(self._candidates())
        eviction = choose([candidate for _, candidate in candidates], size, self.clock)
        self._store.usage.advance_clock(eviction.clock)
        # Not by key: in another format the same chunk has other states.
        ids = {id(candidate): resident.id for resident, candidate in candidates}
        return [ids[id(victim)] for victim in eviction.victims]

    def _overrun(self, pending: int) -> int:
        """Bytes beyond the tighter of the limits; negative where there is room."""
        overruns = [-_UNLIMITED]
        if self._budget_bytes:
            overruns.append(self._shard_bytes + pending - self._budget_bytes)
        # Folders on one disk share its room; shards go to disks in turn, so the fullest one decides.
        for folder in self._folders:
            overruns.append(self._free_bytes - _free(folder))
        return max(overruns)

    def _candidates(self) -> list[tuple[ResidentStates, Candidate]]:
        usage = self._store.usage.all()
        return [(it, _candidate(it, usage.get(it.key, NEVER_USED))) for it in self._inventory.residents()]


_UNLIMITED = 2**62


def _candidate(states: ResidentStates, used: KeyUsage) -> Candidate:
    usage = KeyUsage(used.frequency, max(used.clock, states.clock))
    return Candidate(states.key, states.bytes, states.cost, usage)


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
