"""A series of shards: a new one is begun whenever one is full."""

from __future__ import annotations

from collections.abc import Iterator

from ragcache.states.folders import ShardFolders
from ragcache.states.form import StateFormat
from ragcache.states.records import NewShard
from ragcache.states.shard import Container, ShardEntry, ShardOrigin, ShardWriter


class RollingShards:
    """Writes entries of one format into as many shards as they need."""

    def __init__(
        self,
        folders: ShardFolders,
        format: StateFormat,
        container: Container,
        shard_bytes: int,
        origin: ShardOrigin,
        sequence: Iterator[int],
    ) -> None:
        """Set up; nothing is written yet.

        Args:
            folders: where shards go.
            format: of all entries.
            container: file format of shards.
            shard_bytes: size at which a shard is closed.
            origin: what all states are made with.
            sequence: numbers of the shards to come.
        """
        self._finished: list[NewShard] = []
        self._folders = folders
        self._format = format
        self._container = container
        self._shard_bytes = shard_bytes
        self._origin = origin
        self._sequence = sequence
        self._current: ShardWriter | None = None

    @property
    def bytes(self) -> int:
        """Bytes in all that were not taken yet."""
        return sum(shard.bytes for shard in self._finished) + (self._current.bytes if self._current else 0)

    def add(self, entry: ShardEntry) -> None:
        """Append a chunk's states.

        Raises:
            OSError: they cannot be written.
        """
        if self._current is None:
            number = next(self._sequence)
            folder = self._folders.of(number)
            self._current = ShardWriter(folder, number, self._format, self._container, self._origin)
        self._current.add(entry)
        if self._current.bytes >= self._shard_bytes:
            self.finish()

    def finish(self) -> None:
        """Close the shard at hand, full or not."""
        if self._current is not None:
            self._finished.append(self._current.close())
            self._current = None

    def take(self) -> list[NewShard]:
        """The shards that are finished; from now on they are the caller's to commit or to delete."""
        taken, self._finished = self._finished, []
        return taken

    def abort(self) -> None:
        """Take away what is not finished. Finished shards that no catalog names are left to the next writer."""
        if self._current is not None:
            self._current.abort()
            self._current = None
