"""Where documents come from: a folder, a JSONL file, or the Python reference inside the running interpreter.

A source is read twice: once to check every document and see what changed, once to encode what did. So a fault in the
last document is found before the first one is encoded, and no more than a few documents are in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, Protocol

from ragcache.errors import SourceError
from ragcache.indexer.documents import Document

TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst")
PYDOC_TOPICS = "pydoc:topics"


class Source(Protocol):
    """A place with documents.

    Attributes:
        name: what documents are recorded under; documents that are gone from the source on the next run are
            removed from the store.
    """

    name: str

    def __iter__(self) -> Iterator[Document]:
        """All documents, in a stable order.

        Raises:
            SourceError: a document cannot be read; the message names it.
        """


def open_source(location: str) -> Source:
    """The source for what a user typed.

    Raises:
        SourceError: there is no such file or folder, or its kind is not known.
    """
    if location == PYDOC_TOPICS:
        return PydocTopics()
    if location.startswith("pydoc:"):
        raise SourceError(f"source {location!r} is not known; the interpreter carries {PYDOC_TOPICS}")
    path = Path(location).expanduser()
    if path.is_dir():
        return TextFolder(path)
    if path.is_file():
        if path.suffix != ".jsonl":
            raise SourceError(f"source {location!r} is not a .jsonl file; give one, or the folder of a text file")
        return JsonLines(path)
    raise SourceError(
        f"source {location!r} does not exist; give a folder of text or Markdown files, a .jsonl file or {PYDOC_TOPICS}"
    )


class TextFolder:
    """Every text and Markdown file under a folder; ids are paths from the folder's parent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.name = str(self._folder)

    def __iter__(self) -> Iterator[Document]:
        """Documents in path order; hidden files and folders are passed over."""
        for folder, folders, files in os.walk(self._folder, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                path = Path(folder) / name
                if path.suffix.lower() in TEXT_SUFFIXES and not name.startswith("."):
                    yield Document(str(path.relative_to(self._folder.parent)), _read_text(path), path.stem)


class JsonLines:
    """One JSON object a line: `id`, `text`, and optionally `title` and `metadata`."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self.name = str(self._path)

    def __iter__(self) -> Iterator[Document]:
        """Documents in file order."""
        try:
            with self._path.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield self._document(number, line)
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._path} is not UTF-8 text ({error.reason}); convert it") from error
        except OSError as error:
            raise SourceError(f"{self._path} cannot be read: {error.strerror}") from error

    def _document(self, number: int, line: str) -> Document:
        where = f"{self._path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            # Beside plain mistakes: numbers of thousands of digits, brackets nested thousands deep.
            reason = getattr(error, "msg", error)
            raise SourceError(f"{where}: not JSON ({reason}); give one object per line") from error
        if not isinstance(record, dict):
            raise SourceError(f"{where}: not a JSON object; give {{'id', 'text', 'metadata'}}")
        for name, kinds in (("id", (str, int)), ("text", (str,))):
            if not isinstance(record.get(name), kinds) or isinstance(record[name], bool):
                raise SourceError(f"{where}: {name!r} is missing or not a string")
        title, metadata = record.get("title") or "", record.get("metadata") or {}
        if not isinstance(title, str) or not isinstance(metadata, dict):
            raise SourceError(f"{where}: 'title' must be a string and 'metadata' an object")
        return Document(str(record["id"]), record["text"], title, metadata)


class PydocTopics:
    """The Python language reference that every CPython carries: 79 topics of its help system."""

    name = PYDOC_TOPICS

    def __iter__(self) -> Iterator[Document]:
        """Documents in name order."""
        from pydoc_data.topics import topics

        for topic, text in sorted(topics.items()):
            yield Document(f"{PYDOC_TOPICS}/{topic}", text, topic)


def _refuse(error: OSError) -> NoReturn:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}; check its permissions") from error


def _read_text(path: Path) -> str:
    # A pipe would be waited for without end.
    if path.exists() and not path.is_file():
        raise SourceError(f"{path} is no regular file; move it out of the folder")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text ({error.reason}); convert it or move it out") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    if "\0" in text:
        raise SourceError(f"{path} is binary; move it out of the folder")
    return text
