"""A store that this process may change: the lock, and what every change has in common."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ragcache.errors import StoreError
from ragcache.states import changes
from ragcache.states.budget import Budget
from ragcache.states.folders import ShardFolders
from ragcache.states.form import StateFormat
from ragcache.states.journal import JournalHeader
from ragcache.states.records import NewShard, VectorsVersion
from ragcache.states.rolling import RollingShards
from ragcache.states.shard import Container, ShardOrigin
from ragcache.states.store import StateStore, hold_lock


@dataclass(frozen=True)
class WriteOptions:
    """How a store is written to.

    Attributes:
        shard_bytes: size at which a shard is closed.
        container: file format of new shards.
        folders: where shards go, in turn; the store's own folder when there are none.
        budget_bytes: most bytes that all shards together may take; 0 is without limit.
        free_bytes: bytes that stay free on the disks of the shards.
        wait: until another process that is writing is done.
    """

    shard_bytes: int = 256 * 2**20
    container: Container = Container.ARROW
    folders: tuple[Path, ...] = ()
    budget_bytes: int = 0
    free_bytes: int = 0
    wait: bool = False


@dataclass
class LockedStore:
    """A store whose lock this process holds; a context manager.

    Attributes:
        store: the store.
        options: how it is written to.

    Raises:
        StoreLockedError: on entering, when another process holds the lock.
        StoreError: the disk is full or cannot be written to.
    """

    store: StateStore
    options: WriteOptions = field(default_factory=WriteOptions)
    _lock: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Self:
        self._lock.enter_context(hold_lock(self.store.path, wait=self.options.wait))
        try:
            self.folders = ShardFolders(self.store.shard_folder, self.options.folders, self.store.id)
            # The lock is ours, so whatever is unfinished or unknown was left by a writer that died.
            self.store.clean(self.folders.targets)
            self.moved_shards = self._follow_moved_shards()
            self.budget = Budget(self.store, self.options.budget_bytes, self.options.free_bytes, self.folders.targets)
            self._sequence = itertools.count(self.store.catalog.last_shard_id() + 1)
            self.last_vector_id = self.store.catalog.last_vector_id()
        except OSError as error:
            self._lock.close()
            raise disk_error(self.store.path, error) from error
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A commit may have gone through although an interrupt kept it from returning, so the catalog is asked. What
        # cannot be removed now is left to the next writer.
        with suppress(StoreError, OSError):
            self.store.remove_orphans(self.folders.targets)
        self._lock.close()

    def new_shards(self, format: StateFormat) -> RollingShards:
        """A series of shards that are not yet part of the store."""
        identity = self.store.identity()
        origin = ShardOrigin(
            store=self.store.id,
            fingerprint=identity.fingerprint,
            digest=identity.digest,
            prefix=identity.prefix,
        )
        return RollingShards(
            self.folders, format, self.options.container, self.options.shard_bytes, origin, self._sequence
        )

    def add_shards(self, connection: changes.Connection, shards: Iterable[NewShard]) -> dict[str, int]:
        """Make finished shards known; key to id of their states."""
        added: dict[str, int] = {}
        for shard in shards:
            added |= changes.add_shard(connection, shard, self.folders.label(shard.path), self.budget.clock)
        return added

    def journal_header(self, vectors: VectorsVersion, removed: Collection[str] = ()) -> JournalHeader:
        """What the journal says about a commit."""
        identity = self.store.identity()
        return JournalHeader(
            store=self.store.id,
            fingerprint=identity.fingerprint,
            embedding=identity.embedding,
            prefix=identity.prefix,
            vectors=vectors,
            last_vector_id=self.last_vector_id,
            removed=tuple(removed),
            folders=tuple(sorted(self._folders_outside())),
            recipe=self.store.catalog.recipe(),
        )

    @contextmanager
    def changing(self) -> Iterator[list[changes.ShardName]]:
        """Around a change: the shards that are put into the list are deleted after it.

        A reader that still has the old catalog in view finds such a file missing and looks again. One that cannot be
        removed is an orphan, which the next writer removes.
        """
        dead: list[changes.ShardName] = []
        try:
            yield dead
        except BaseException as error:
            with suppress(StoreError, OSError):
                self.store.remove_orphans(self.folders.targets)
            if isinstance(error, OSError):
                raise disk_error(self.store.path, error) from error
            raise
        for folder, name in dead:
            with suppress(OSError):
                self.store.catalog.shard_path(folder, name).unlink()

    def _folders_outside(self) -> set[str]:
        """Folders outside of the store that hold shards of it, committed or about to be."""
        known = {self.folders.label(path) for path in self.store.catalog.shards()} - {""}
        return known | {
            str(folder) for folder in self.folders.targets if folder != self.folders.own and folder.is_dir()
        }

    def _follow_moved_shards(self) -> bool:
        """Note where shards are now whose folder was moved; whether there are any."""
        moved = [
            (self.folders.label(target / path.name), path.name)
            for path, size in self.store.catalog.shards().items()
            if not path.exists()
            for target in dict.fromkeys((self.folders.own, *self.folders.targets))
            if (target / path.name).is_file() and (target / path.name).stat().st_size == size
        ]
        if moved:
            with self.store.catalog.transaction() as connection:
                connection.executemany("UPDATE shards SET folder = ? WHERE name = ?", moved)
        return bool(moved)


def disk_error(path: Path, error: OSError) -> StoreError:
    """The error for a store that cannot be written to."""
    return StoreError(f"cannot write to {path}: {error.strerror or error}; what was committed before is intact")
