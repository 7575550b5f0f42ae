"""How much room there is for states, and which go when it is short."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ragcache.errors import StoreError
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

        Raises:
            StoreError: more is to stay free than a disk has. Taken at its word, that would empty the store.
        """
        self._store = store
        self._inventory = Inventory(store.catalog)
        self._budget_bytes = budget_bytes
        self._free_bytes = free_bytes
        self._folders = folders
        for folder in folders:
            if free_bytes > (there := shutil.disk_usage(_nearest(folder)).total):
                raise StoreError(
                    f"{free_bytes // 2**20} MB are to stay free, and the disk of {folder} has {there // 2**20} MB; "
                    "choose a smaller free_megabytes (--free-mb)"
                )
        self.refresh()

    def refresh(self) -> None:
        """Look at the store again, after it has changed."""
        self.clock = self._store.usage.clock
        self._usage = self._store.usage.all()
        self._shard_bytes = sum(self._store.catalog.shards().values())
        self._ranked: list[Candidate] | None = None
        self._displaced = 0
        self._freed = 0

    def newcomer(self, key: str, size: int, cost: float) -> Candidate:
        """States about to be encoded, as eviction sees them: wanted now.

        Args:
            key: of the states.
            size: bytes that they would take.
            cost: FLOPs that computing them takes.
        """
        used = self._usage.get(key, NEVER_USED)
        return Candidate(key, size, cost, KeyUsage(used.frequency, max(used.clock, self.clock)))

    def admits(self, candidate: Candidate, pending: int) -> bool:
        """Whether states are worth being encoded: there is room, or others are worth less.

        Those others count as gone from then on, so that each makes room once.

        Args:
            candidate: the states.
            pending: bytes of others that were admitted and are not committed yet.
        """
        # What is given up elsewhere need not make room on a disk that is full.
        if self._disk_shortage() > -candidate.bytes:
            return False
        lacking = self._excess(pending) + candidate.bytes - self._freed
        if self._ranked is None:
            self._ranked = sorted((it for _, it in self._candidates()), key=priority)
        victims = self._displaced
        while lacking > 0:
            if victims == len(self._ranked) or not admits(candidate, priority(self._ranked[victims])):
                return False
            lacking -= self._ranked[victims].bytes
            victims += 1
        self._freed += sum(it.bytes for it in self._ranked[self._displaced : victims])
        self._displaced = victims
        return True

    def excess(self) -> int:
        """Bytes of shards by which a limit is exceeded; 0 when none is."""
        return max(0, self._excess(0), self._disk_shortage() if self._devices() & self._full_devices() else 0)

    def choose_victims(self, size: int) -> list[int]:
        """Ids of the least valuable states that together take `size` bytes; the ageing clock goes on.

        Where a disk is short of space only what lies on it can help.
        """
        candidates = list(self._candidates())
        if self._excess(0) <= 0:
            full = self._full_devices()
            candidates = [it for it in candidates if _device(it[0].shard) in full]
        eviction = choose([candidate for _, candidate in candidates], size, self.clock)
        self._store.usage.advance_clock(eviction.clock)
        # Not by key: in another format the same chunk has other states.
        ids = {id(candidate): resident.id for resident, candidate in candidates}
        return [ids[id(victim)] for victim in eviction.victims]

    def _excess(self, pending: int) -> int:
        """Bytes of shards beyond the budget; negative where there is room."""
        return self._shard_bytes + pending - self._budget_bytes if self._budget_bytes else -_UNLIMITED

    def _disk_shortage(self) -> int:
        """Bytes that are lacking on the fullest disk; negative where there is room."""
        return max(self._free_bytes - _free(folder) for folder in self._folders)

    def _devices(self) -> set[int]:
        """Disks that shards lie on."""
        return {_device(path) for path in self._store.catalog.shards()}

    def _full_devices(self) -> set[int]:
        """Disks for new shards with less free space than there is to be."""
        return {_device(folder) for folder in self._folders if _free(folder) < self._free_bytes}

    def _candidates(self) -> list[tuple[ResidentStates, Candidate]]:
        return [(it, _candidate(it, self._usage.get(it.key, NEVER_USED))) for it in self._inventory.residents()]


_UNLIMITED = 2**62


def _candidate(states: ResidentStates, used: KeyUsage) -> Candidate:
    usage = KeyUsage(used.frequency, max(used.clock, states.clock))
    return Candidate(states.key, states.bytes, states.cost, usage)


def _free(folder: Path) -> int:
    return shutil.disk_usage(_nearest(folder)).free


def _device(path: Path) -> int:
    return _nearest(path).stat().st_dev


def _nearest(path: Path) -> Path:
    """The path, or what of it there is."""
    while not path.exists():
        path = path.parent
    return path
