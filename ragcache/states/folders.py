"""Where shards go: the store's own folder, or several, one on each disk, in turn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ragcache.states.durable import TEMPORARY_PREFIX, write_durably
from ragcache.states.journal import JOURNAL_NAME
from ragcache.states.shard import Container

OWNER = "store.txt"
"""Says in a folder outside of the store which store its shards belong to."""

_VECTORS_NAME = re.compile(rf"({re.escape(TEMPORARY_PREFIX)})?vectors-\d{{8,}}\.faiss")
_SHARD_NAME = re.compile(r"[0-9a-f]{32}\.(" + "|".join(Container) + ")")


class ShardFolders:
    """The folders that a writer puts shards into.

    A folder that is not the store's own gets a folder of the store's id within, so that several stores can use it.
    """

    def __init__(self, own: Path, others: Iterable[Path], store_id: str) -> None:
        """Set up.

        Args:
            own: folder in the store.
            others: if there are any, shards go to these instead, in turn.
            store_id: of the store.
        """
        self.own = own
        # Resolved: the same folder under another spelling must not look like another one.
        self.targets = [path.resolve() / store_id for path in others] or [own]

    def of(self, sequence: int) -> Path:
        """The folder for the shard of a number; it is made if need be.

        Raises:
            OSError: it cannot be made.
        """
        folder = self.targets[sequence % len(self.targets)]
        if not folder.is_dir():
            folder.mkdir(parents=True)
            claim(folder, self.own.parent)
        return folder

    def label(self, path: Path) -> str:
        """How the catalog names the folder of a shard: `""` for the store's own."""
        return "" if path.parent == self.own else str(path.parent)


def claim(folder: Path, store: Path) -> None:
    """Note which store the shards in a folder outside of it belong to, by its path without symbolic links.

    Raises:
        OSError: it cannot be written.
    """
    write_durably(folder / OWNER, str(store.resolve()).encode())


def owner(folder: Path) -> Path | None:
    """The store that the shards in a folder belong to, if it says so."""
    try:
        return Path((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def is_store_id(text: str) -> bool:
    """Whether a text can be the id of a store, and so the name of a folder of its shards."""
    return re.fullmatch(r"[0-9a-f]{32}", text) is not None


def is_shard_name(name: str) -> bool:
    """Whether a file of that name can be a shard."""
    return _SHARD_NAME.fullmatch(name) is not None


def vector_files(folder: Path) -> Iterator[Path]:
    """Files of the vector index, of all generations, finished or not."""
    return (path for path in _entries(folder) if _VECTORS_NAME.fullmatch(path.name) and path.is_file())


def foreign_names(folder: Path) -> list[str]:
    """Names in a store's folder of shards or of vectors that ragcache has not made."""
    ours = (_SHARD_NAME, _VECTORS_NAME, JOURNAL_NAME)
    names = [path.name for path in _entries(folder) if not path.name.startswith(TEMPORARY_PREFIX)]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in ours)]


def shard_files(folder: Path) -> Iterator[Path]:
    """Finished shards in a folder."""
    return (path for path in _entries(folder) if is_shard_name(path.name) and path.is_file())


def unfinished_files(folder: Path) -> Iterator[Path]:
    """What a writer that died was writing."""
    return (path for path in _entries(folder) if path.name.startswith(TEMPORARY_PREFIX))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
