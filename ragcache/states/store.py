"""The state store: a folder with shards, a catalog and the vector index beside them.

    store.toml       settings its content depends on
    catalog.sqlite   what is visible
    shards/          states, and the journal of commits
    vectors/         vector index, one file per generation
    usage.sqlite     how often states were wanted
    writer.lock      held by the one process that may write

Commit protocol: shard to a temporary name, fsync, rename, fsync of the folder; vector index and journal likewise; then
one transaction that makes all of it visible. Whatever dies in between leaves the old store whole.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from ragcache.errors import StoreError, StoreLockedError, StoreMismatchError, StoreNotFoundError
from ragcache.settings import STORE_TOML, Settings, stored_settings
from ragcache.states.catalog import Catalog
from ragcache.states.durable import TEMPORARY_PREFIX, write_durably
from ragcache.states.folders import claim, foreign_names, owner, shard_files, unfinished_files, vector_files
from ragcache.states.journal import JournalFile, journal_files
from ragcache.states.records import NO_VECTORS
from ragcache.states.usage import USAGE, Usage

CATALOG = "catalog.sqlite"
SHARDS = "shards"
VECTORS = "vectors"
LOCK = "writer.lock"
REPLACED = "catalog.replaced-"
"""Start of the name of the folder that a catalog goes to when `ragcache rebuild` makes another."""


@dataclass(frozen=True)
class StoreIdentity:
    """What all states of a store were made with.

    Attributes:
        fingerprint: of the language model, as JSON (`ragcache.model.fingerprint`).
        embedding: digest of the embedding model.
        prefix: token ids of the prompt's prefix that every chunk was encoded after.
    """

    fingerprint: str
    embedding: str
    prefix: tuple[int, ...]

    @property
    def digest(self) -> str:
        """sha256 of the fingerprint, the part of every key that stands for the model."""
        return hashlib.sha256(self.fingerprint.encode()).hexdigest()


class StateStore:
    """An existing store, open for reading; `ragcache.states.writer.StoreWriter` writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.shard_folder = self.path / SHARDS
        self.vector_folder = self.path / VECTORS
        self.catalog = Catalog(self.path / CATALOG, self.shard_folder)
        self.usage = Usage(self.path / USAGE)
        self._made_settings = False

    @classmethod
    def exists(cls, path: Path) -> bool:
        """Whether there is a store at a path.

        Raises:
            StoreError: there is something else, which must not be written into.
        """
        if not path.exists():
            return False
        if not path.is_dir():
            raise StoreError(f"{path} is a file; a store is a folder, give the path of a new or existing one")
        if (path / CATALOG).is_file() and cls(path).catalog.meta():
            return True
        # What a creation that was killed leaves behind may be written over, a user's own files not.
        ours = (CATALOG, REPLACED, USAGE, TEMPORARY_PREFIX)
        names = {entry.name for entry in path.iterdir() if not entry.name.startswith(ours)}
        foreign = sorted(names - {STORE_TOML, SHARDS, VECTORS, LOCK})
        for folder in (path / SHARDS, path / VECTORS):
            foreign += [f"{folder.name}/{name}" for name in foreign_names(folder)]
        if foreign and not _remains(path):
            raise StoreError(
                f"{path} is not a ragcache store and holds other files ({foreign[0]}); give a new or empty folder"
            )
        # The catalog is made before the first shard, so shards without one are the remains of a store.
        if _remains(path):
            raise StoreError(
                f"{path / CATALOG} is gone or empty, yet there are states; make it anew with: "
                f"ragcache rebuild --store {path}"
            )
        return False

    @classmethod
    def open(cls, path: Path) -> StateStore:
        """Open an existing store.

        Raises:
            StoreNotFoundError: there is none.
            StoreError: the path is a file, a foreign folder or a store of a newer version.
        """
        if not cls.exists(path):
            raise StoreNotFoundError(f"no store at {path}; make one with: ragcache index SOURCE --store {path}")
        return cls(path)

    @classmethod
    def create(cls, path: Path, identity: StoreIdentity, settings: Settings, *, wait: bool = False) -> StateStore:
        """Make an empty store, or open the one that another process made meanwhile.

        Args:
            path: of the new store.
            identity: what its states will be made with.
            settings: for its `store.toml`.
            wait: until another process that is making it is done.

        Raises:
            StoreError: the path cannot be written to.
            StoreLockedError: another process is making it right now.
        """
        try:
            for folder in (path, path / SHARDS, path / VECTORS):
                folder.mkdir(parents=True, exist_ok=True)
            with hold_lock(path, wait=wait):
                store = cls(path)
                if not cls.exists(path):
                    for leftover in path.glob(f"{CATALOG}*"):
                        leftover.unlink()
                    store._made_settings = not (path / STORE_TOML).exists()
                    store.write_settings(settings)
                    store.catalog.create(
                        uuid.uuid4().hex, identity.fingerprint, identity.embedding, json.dumps(identity.prefix)
                    )
                return store
        except OSError as error:
            raise StoreError(f"cannot make a store at {path}: {error.strerror or error}") from error

    @property
    def id(self) -> str:
        """Tells this store's shards from those of others in the same folder."""
        return self.catalog.identity()[0]

    def identity(self) -> StoreIdentity:
        """What the store was made with.

        Raises:
            StoreError: the entries are gone or not what was written.
        """
        _, fingerprint, embedding, prefix = self.catalog.identity()
        return StoreIdentity(fingerprint, embedding, tuple(json.loads(prefix)))

    def check_identity(self, other: StoreIdentity, models: tuple[str, str]) -> None:
        """Refuse to serve states to another model than the one they were made with.

        Args:
            other: of the models now loaded.
            models: their names, for the message: language model and embedding model.

        Raises:
            StoreMismatchError: names what differs, with both values.
        """
        mine = self.identity()
        if mine.fingerprint != other.fingerprint:
            stored, loaded = json.loads(mine.fingerprint), json.loads(other.fingerprint)
            parts = [
                f"{name} {_short(stored.get(name))} in the store, {_short(loaded.get(name))} loaded"
                for name in sorted({*stored, *loaded})
                if stored.get(name) != loaded.get(name)
            ]
            raise StoreMismatchError(
                f"{self.path} holds states of another model than {models[0]!r}: {'; '.join(parts)}; "
                "open it with the model it was made with, or index into a new store"
            )
        if mine.embedding != other.embedding:
            raise StoreMismatchError(
                f"{self.path} was made with another embedding model than {models[1]!r}: {_short(mine.embedding)} in "
                f"the store, {_short(other.embedding)} loaded; use that one, or index into a new store"
            )
        if mine.prefix != other.prefix:
            raise StoreMismatchError(
                f"{self.path} was made with another system prompt or chat template ({len(mine.prefix)} prefix tokens "
                f"in the store, {len(other.prefix)} now, not equal); use that one, or index into a new store"
            )

    def write_settings(self, settings: Settings) -> None:
        """Bring `store.toml` up to date, whole or not at all; what else a user has put there stays.

        Raises:
            StoreError: it cannot be written.
        """
        self.change_settings(stored_settings(settings))

    def change_settings(self, values: Mapping[str, Any]) -> None:
        """Set some values in `store.toml`, or take out those that are `None`, all or nothing; all others stay.

        Raises:
            StoreError: it cannot be written.
        """
        path = self.path / STORE_TOML
        try:
            current = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            wanted = {name: value for name, value in {**current, **values}.items() if value is not None}
            if wanted == current:
                return
            write_durably(path, tomli_w.dumps(wanted).encode())
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error

    def remove_if_empty(self) -> None:
        """Delete a store that nothing was committed to. To be called by the process that holds its lock."""
        if self.catalog.vectors() != NO_VECTORS or self.catalog.signatures() or self.catalog.shards():
            return
        for orphan in self.orphans():
            orphan.unlink(missing_ok=True)
        for file in (*unfinished_files(self.shard_folder), *vector_files(self.vector_folder)):
            file.unlink(missing_ok=True)
        for folder in (self.shard_folder, self.vector_folder):
            with suppress(OSError):
                folder.rmdir()
        for file in (*self.path.glob(f"{CATALOG}*"), *self.path.glob(f"{USAGE}*"), self.path / LOCK):
            file.unlink(missing_ok=True)
        if self._made_settings:
            (self.path / STORE_TOML).unlink(missing_ok=True)
        # The folder stays if there is something in it that is not ours.
        with suppress(OSError):
            self.path.rmdir()

    def orphans(self, folders: Iterable[Path] = ()) -> list[Path]:
        """Finished files that the catalog does not know, left by a writer that died before its commit.

        Args:
            folders: more folders of this store's shards than the catalog names.
        """
        shards = self.catalog.shards()
        searched = {self.shard_folder, *folders, *(path.parent for path in shards)}
        # By name: a shard that the catalog knows is none, wherever it lies.
        known = {path.name for path in shards}
        files = [file for folder in sorted(searched) for file in shard_files(folder) if file.name not in known]
        generation = self.catalog.vectors().generation
        return files + [it.path for it in self.journal() if it.generation > generation]

    def journal(self) -> list[JournalFile]:
        """Files of the journal, oldest commit first, whether committed or not."""
        return journal_files(self.shard_folder) if self.shard_folder.is_dir() else []

    def clean(self, folders: Iterable[Path] = ()) -> None:
        """Remove what writers that died have left, and make folders again that are gone.

        To be called by the process that holds the lock.

        Raises:
            StoreError: shards outside of the store belong to another one.
        """
        for folder in (self.shard_folder, self.vector_folder):
            folder.mkdir(exist_ok=True)
        outside = {*folders, *(path.parent for path in self.catalog.shards())} - {self.shard_folder}
        for folder in outside:
            self._require_ownership(folder)
        searched = {self.path, self.shard_folder, self.vector_folder, *outside}
        unfinished = [file for folder in searched for file in unfinished_files(folder)]
        self.remove_orphans(folders)
        for leftover in (*unfinished, *_superseded(self.journal())):
            leftover.unlink(missing_ok=True)

    def _require_ownership(self, folder: Path) -> None:
        """A copy of a store has the same id, and would delete what only the original knows in a folder of both.

        Raises:
            StoreError: the shards in the folder belong to another store that is still there.
        """
        other = owner(folder)
        if other is None:
            return
        if _is_same_folder(other, self.path):
            # Without links: a link that goes away must not make the next copy look like a store that was moved.
            if other != self.path.resolve():
                claim(folder, self.path)
            return
        # A store whose catalog is gone is still there: `exists` says how to make another.
        stands = (other / CATALOG).is_file() or _remains(other)
        if stands and StateStore.exists(other) and StateStore(other).id == self.id:
            raise StoreError(
                f"the shards in {folder} belong to {other}, of which {self.path} is a copy; only one of the two can be "
                "written to: delete the other, or index into a new store"
            )
        claim(folder, self.path)

    def remove_orphans(self, folders: Iterable[Path] = ()) -> None:
        """Delete what the catalog does not know. To be called by the process that holds the lock.

        Raises:
            StoreError: the catalog is damaged, and may know them after all.
        """
        orphans = self.orphans(folders)
        if orphans:
            self.catalog.require_sound()
        for orphan in orphans:
            orphan.unlink(missing_ok=True)

    def broken_shards(self) -> list[str]:
        """Names of shards in the catalog whose file is gone or of another size than was written."""
        return [path.name for path, size in self.catalog.shards().items() if _size(path) != size]


def _remains(path: Path) -> bool:
    """Whether there are states at a path."""
    return any(shard_files(path / SHARDS)) or ((path / SHARDS).is_dir() and bool(journal_files(path / SHARDS)))


def _is_same_folder(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder, however they are spelled: by device and inode. False if one is gone."""
    try:
        return one.samefile(other)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _superseded(journal: list[JournalFile]) -> list[Path]:
    """Files from before the last snapshot."""
    last = max((index for index, file in enumerate(journal) if file.snapshot), default=0)
    return [file.path for file in journal[:last]]


@contextmanager
def hold_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Be the one process that writes to the store at a path. The lock goes with the process, however it ends.

    Args:
        path: folder of the store.
        wait: until another process that holds it is done.

    Raises:
        StoreLockedError: another process is writing, and `wait` is false.
        StoreError: the folder cannot be written to.
    """
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise StoreLockedError(f"another process is writing to {path}; wait for it (--wait), or stop it") from None
    except OSError as error:
        raise StoreError(f"cannot write to {path}: {error.strerror or error}; see to its permissions") from error
    try:
        yield
    finally:
        lock.release()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _short(value: object) -> str:
    text = str(value or "none")
    return text[:12] if len(text) == 64 else text
