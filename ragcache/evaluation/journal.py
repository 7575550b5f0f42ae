"""Records as they come, in a file that a later run goes on with."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ragcache.errors import EvaluationError
from ragcache.evaluation.record import Record


@dataclass(frozen=True)
class Journal:
    """A JSONL file of records, open for appending.

    Attributes:
        path: the file.
        records: what it holds, by key; `append` adds to it.
        unreadable: lines that were passed over when it was opened, such as one that an interrupt tore.
    """

    path: Path
    records: dict[str, Record]
    unreadable: int
    _descriptor: int = field(repr=False)

    def append(self, record: Record) -> None:
        """Write a record durably, as one whole line.

        Raises:
            EvaluationError: the disk is full or cannot be written to.
        """
        line = (record.model_dump_json() + "\n").encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise EvaluationError(f"cannot write {self.path}: {error.strerror or error}") from error
        self.records[record.key] = record


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Open or make a journal.

    Raises:
        EvaluationError: it cannot be read or written, or another evaluation is writing to it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                # A line that was torn stays alone on its line, and is passed over like any other that makes no sense.
                os.write(descriptor, b"\n")
        except BlockingIOError as error:
            raise EvaluationError(f"another evaluation is writing to {path}; give another --out") from error
        except OSError as error:
            raise EvaluationError(f"cannot use {path}: {error.strerror or error}") from error
        records, unreadable = _read(content)
        yield Journal(path, records, unreadable, descriptor)
    finally:
        os.close(descriptor)


def _read(content: bytes) -> tuple[dict[str, Record], int]:
    records: dict[str, Record] = {}
    unreadable = 0
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = Record.model_validate_json(line)
        except ValidationError:
            unreadable += 1
            continue
        records[record.key] = record
    return records, unreadable
