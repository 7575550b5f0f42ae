"""Files that appear whole under their name, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMPORARY_PREFIX = ".writing-"
"""Start of the name of what is not finished. The next writer of a store removes it."""

_BLOCK = 2**20


class DurableFile:
    """Writes a file under a temporary name; `commit` makes it durable and gives it its own name, `abort` removes it.

    It can stand where pyarrow wants a Python file to write to.

    Attributes:
        path: the file, once it is committed.
        temporary: the file, before that.
        size: bytes written so far.
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.temporary = path.with_name(TEMPORARY_PREFIX + path.name)
        self._aborted = False
        self._digest = xxhash.xxh3_64()
        self._file = self.temporary.open("wb")

    @property
    def checksum(self) -> str:
        """xxh3 (64 bit, hexadecimal) of what was written so far."""
        return self._digest.hexdigest()

    def write(self, data: ReadableBuffer) -> int:
        """Append bytes; after `abort` they are dropped, since pyarrow writes once more when it lets go of a file."""
        if self._aborted:
            return memoryview(data).nbytes
        self._digest.update(data)
        self._file.write(data)
        written = memoryview(data).nbytes
        self.size += written
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        if not self._aborted:
            self._file.flush()

    def close(self) -> None:
        """Nothing: whoever writes through this does not decide whether the file is to stay."""

    def commit(self, path: Path | None = None) -> None:
        """Make the content survive a power cut, then the name.

        Args:
            path: another name than was planned, in the same folder; one that depends on the content.
        """
        self.path = path or self.path
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.temporary.replace(self.path)
        sync_folder(self.path.parent)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._aborted = True
        # On a full disk even closing fails, because it flushes.
        with suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)


def write_durably(path: Path, *parts: ReadableBuffer) -> str:
    """Write a whole file, durably; an older one of that name is replaced at once or stays.

    Returns:
        xxh3 (64 bit, hexadecimal) of its content.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    file = DurableFile(path)
    try:
        for part in parts:
            file.write(part)
        file.commit()
    except BaseException:
        file.abort()
        raise
    return file.checksum


def file_checksum(path: Path) -> str:
    """xxh3 (64 bit, hexadecimal) of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
