"""The journal: what each commit changed, in files beside the shards, so that the catalog can be made anew from them.

Shards alone do not tell everything: chunks of equal text share states, texts whose states were evicted have none, and a
shard goes on holding chunks of documents that were deleted. So each commit also writes one Arrow IPC file, with the
documents that it put in and the ids of those it took out. A *snapshot* holds all documents and stands for all that was
before. The end of a file's name is the xxh3 of its content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ragcache.states.durable import DurableFile, file_checksum
from ragcache.states.records import DocumentChunks, DocumentRecord, NewChunk, NewEncoding, VectorsVersion

JOURNAL_VERSION = 3
SCHEMA_KEY = b"ragcache.journal"
JOURNAL_NAME = re.compile(r"(journal|snapshot)-(\d{8,})-([0-9a-f]{16})\.arrow")
_BATCH = 256

_ENCODING = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("context", pa.string(), nullable=False),
        pa.field("contexts", pa.list_(pa.list_(pa.string())), nullable=False),
    ]
)
_CHUNK = pa.struct(
    [
        pa.field("vector_id", pa.int64(), nullable=False),
        pa.field("chunk_id", pa.string(), nullable=False),
        pa.field("ordinal", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("encodings", pa.list_(_ENCODING), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        pa.field("embedding_text", pa.string(), nullable=False),
    ]
)
_FIELDS = [
    *(pa.field(name, pa.string(), nullable=False) for name in ("id", "source", "title", "signature", "metadata")),
    pa.field("chunks", pa.list_(_CHUNK), nullable=False),
]
_NAMES = [field.name for field in _FIELDS]


@dataclass(frozen=True)
class JournalHeader:
    """What a commit says about itself.

    Attributes:
        store: id of the store.
        fingerprint: of the language model, as JSON.
        embedding: digest of the embedding model.
        prefix: token ids that chunks are encoded after.
        vectors: the vector index that belongs to the documents visible after this commit.
        last_vector_id: highest id ever given to a chunk.
        removed: ids of documents taken out.
        folders: outside of the store that hold shards of it.
        recipe: how contexts were chosen, as it stood in the catalog; `None` where it did not.
    """

    store: str
    fingerprint: str
    embedding: str
    prefix: tuple[int, ...]
    vectors: VectorsVersion
    last_vector_id: int
    removed: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    recipe: str | None = None


@dataclass(frozen=True)
class JournalFile:
    """A journal file by its name.

    Attributes:
        path: the file.
        generation: of the commit that it tells of.
        snapshot: it holds all documents visible after that commit; earlier files do not count.
        checksum: xxh3 (64 bit, hexadecimal) that its content must have.
    """

    path: Path
    generation: int
    snapshot: bool
    checksum: str

    @property
    def intact(self) -> bool:
        """Whether the content is what was written."""
        try:
            return file_checksum(self.path) == self.checksum
        except OSError:
            return False

    def header(self) -> JournalHeader:
        """What the commit says about itself.

        Raises:
            ValueError: it was written by another version.
        """
        with pa.OSFile(str(self.path)) as source:
            header = json.loads(pa.ipc.open_file(source).schema.metadata[SCHEMA_KEY])
        if header.pop("version") != JOURNAL_VERSION:
            raise ValueError(f"{self.path} is of another journal version than {JOURNAL_VERSION}")
        header |= {name: tuple(header[name]) for name in ("prefix", "removed", "folders")}
        return JournalHeader(**header | {"vectors": VectorsVersion(**header["vectors"])})

    def signatures(self) -> dict[str, str]:
        """Signatures of the documents that the commit put in, by id."""
        options = pa.ipc.IpcReadOptions(included_fields=[_NAMES.index(name) for name in ("id", "signature")])
        with pa.OSFile(str(self.path)) as source:
            table = pa.ipc.open_file(source, options=options).read_all()
        return dict(zip(*(table.column(name).to_pylist() for name in ("id", "signature")), strict=True))

    def documents(self) -> Iterator[DocumentChunks]:
        """The documents that the commit put in."""
        with pa.OSFile(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                for row in reader.get_batch(index).to_pylist():
                    chunks = [_chunk(chunk) for chunk in row.pop("chunks")]
                    yield DocumentRecord(**row | {"metadata": json.loads(row["metadata"])}), chunks


def journal_files(folder: Path) -> list[JournalFile]:
    """All journal files of a folder, oldest commit first; of one generation a snapshot comes last."""
    found = []
    for path in folder.iterdir():
        if (match := JOURNAL_NAME.fullmatch(path.name)) and path.is_file():
            found.append(JournalFile(path, int(match[2]), match[1] == "snapshot", match[3]))
    return sorted(found, key=lambda file: (file.generation, file.snapshot))


def write_journal(
    folder: Path, header: JournalHeader, documents: Iterable[DocumentChunks], *, snapshot: bool = False
) -> JournalFile:
    """Write the file of a commit, durably.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    metadata = {SCHEMA_KEY: json.dumps({"version": JOURNAL_VERSION, **asdict(header)})}
    schema = pa.schema(_FIELDS, metadata=metadata)
    generation = header.vectors.generation
    name = f"{'snapshot' if snapshot else 'journal'}-{generation:08d}"
    file = DurableFile(folder / f"{name}.arrow")
    try:
        with pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            for batch in _batches(documents):
                writer.write_batch(pa.RecordBatch.from_pylist([_row(*document) for document in batch], schema=schema))
        file.flush()
        file.commit(folder / f"{name}-{file.checksum}.arrow")
    except BaseException:
        file.abort()
        raise
    return JournalFile(file.path, generation, snapshot, file.checksum)


@dataclass
class Replay:
    """What a journal leads to.

    Attributes:
        header: of the last commit that could be read; `None` when none could.
        signatures: of the documents, by id.
        last_vector_id: highest id that any commit had given out.
        faults: files that are missing or damaged, with one line for a person. Documents that they put in are lacking,
            and ones that they took out are there.
    """

    header: JournalHeader | None = None
    signatures: dict[str, str] = field(default_factory=dict)
    last_vector_id: int = 0
    faults: list[tuple[Path, str]] = field(default_factory=list)
    _owners: dict[str, JournalFile] = field(default_factory=dict)

    def add(self, file: JournalFile) -> None:
        """Go one commit further.

        Raises:
            ValueError, KeyError, TypeError, OSError: the file makes no sense; nothing was changed.
        """
        header, signatures = file.header(), file.signatures()
        for document in header.removed:
            self.signatures.pop(document, None)
            self._owners.pop(document, None)
        self.signatures |= signatures
        self._owners |= dict.fromkeys(signatures, file)
        self.header = header
        self.last_vector_id = max(self.last_vector_id, header.last_vector_id)

    def documents(self) -> Iterator[DocumentChunks]:
        """The documents with their chunks, one after the other: all of them would not fit into memory."""
        for file in dict.fromkeys(self._owners.values()):
            for document, chunks in file.documents():
                if self._owners.get(document.id) == file:
                    yield document, chunks


def replay(files: Sequence[JournalFile], up_to: int | None = None) -> Replay:
    """Go through a journal from its last intact snapshot on.

    Args:
        files: oldest commit first.
        up_to: generation after which commits do not count; all of them by default.
    """
    outcome = Replay()
    files = [file for file in files if up_to is None or file.generation <= up_to]
    intact = [file.intact for file in files]
    start = max((i for i, file in enumerate(files) if file.snapshot and intact[i]), default=0)
    expected = files[start].generation if files and files[start].snapshot else 1
    folder = files[0].path.parent if files else Path()
    for file, whole in zip(files[start:], intact[start:], strict=True):
        outcome.faults += _missing(folder, range(expected, file.generation))
        expected = file.generation + 1
        try:
            if not whole:
                raise ValueError("it is not what was written")
            outcome.add(file)
        except (ValueError, KeyError, TypeError, OSError) as error:
            outcome.faults.append((file.path, f"it cannot be read: {error}"))
    if up_to is not None:
        outcome.faults += _missing(folder, range(expected, up_to + 1))
    return outcome


def _missing(folder: Path, generations: range) -> list[tuple[Path, str]]:
    return [(folder, f"the journal of commit {generation} is missing") for generation in generations]


def _row(document: DocumentRecord, chunks: Sequence[NewChunk]) -> dict[str, Any]:
    return {
        **asdict(document),
        "metadata": json.dumps(document.metadata),
        "chunks": [asdict(chunk) | {"metadata": json.dumps(chunk.metadata)} for chunk in chunks],
    }


def _chunk(row: dict[str, Any]) -> NewChunk:
    """Inverse of `dataclasses.asdict`."""
    encodings = tuple(NewEncoding(**it | {"contexts": tuple(map(tuple, it["contexts"]))}) for it in row["encodings"])
    parsed = {"token_ids": tuple(row["token_ids"]), "encodings": encodings, "metadata": json.loads(row["metadata"])}
    return NewChunk(**row | parsed)


def _batches(documents: Iterable[DocumentChunks]) -> Iterator[list[DocumentChunks]]:
    batch: list[DocumentChunks] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
