"""The vector index: FAISS, inner product over unit vectors, ids from the catalog.

Ids are the catalog's monotonic integers. LlamaIndex's FaissMapVectorStore takes them from the number of vectors
instead, so that after a delete and an add one chunk's text is returned for another's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import xxhash
from numpy.typing import NDArray

from ragcache.errors import StoreError, VectorsError
from ragcache.states.durable import sync_folder, write_durably
from ragcache.states.folders import vector_files
from ragcache.states.records import NO_VECTORS, VectorsVersion

Vectors = NDArray[np.float32]

REMEDY = "index a source into the store again, which makes the vector index anew"


class VectorIndex:
    """Vectors of all visible chunks, in memory; each commit writes them to a file of its own generation."""

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def empty(cls, dimension: int) -> VectorIndex:
        """An index of no vectors."""
        return cls(faiss.IndexIDMap2(faiss.IndexFlatIP(dimension)))

    @classmethod
    def load(cls, folder: Path, version: VectorsVersion) -> VectorIndex:
        """Read the file of a version.

        Args:
            folder: with one file per generation.
            version: which one.

        Raises:
            VectorsError: it is gone, because a newer one was committed meanwhile or the store is damaged; it cannot
                be read; or it is not what was written for this version.
        """
        if version == NO_VECTORS:
            raise VectorsError(f"{folder} holds no vectors yet; {REMEDY}")
        path = _file(folder, version.generation)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise VectorsError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
        if xxhash.xxh3_64_hexdigest(content) != version.checksum:
            raise VectorsError(f"{path} is damaged; {REMEDY}")
        return cls(faiss.deserialize_index(np.frombuffer(content, dtype=np.uint8)))

    def save(self, folder: Path, generation: int) -> VectorsVersion:
        """Write the file of a generation, durably; it appears whole or not at all.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            checksum = write_durably(_file(folder, generation), faiss.serialize_index(self._index).data)
        except OSError as error:
            raise StoreError(
                f"cannot write to {folder}: {error.strerror}; what was committed before is intact"
            ) from error
        return VectorsVersion(generation, checksum)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def ids(self) -> set[int]:
        """Ids of all vectors."""
        return set(faiss.vector_to_array(self._index.id_map).tolist())

    def add(self, ids: list[int], vectors: Vectors) -> None:
        """Add vectors `[len(ids), dimension]`; several may have the same id."""
        self._index.add_with_ids(vectors, np.asarray(ids, dtype=np.int64))

    def remove(self, ids: list[int]) -> None:
        """Take out all vectors of some ids; ids that are not there are ignored."""
        self._index.remove_ids(np.asarray(ids, dtype=np.int64))

    def search(self, question: Vectors, count: int) -> list[tuple[int, float]]:
        """The ids nearest to a question, each with the cosine similarity of its best vector, best first."""
        found: dict[int, float] = {}
        wanted = 0
        # Several of the nearest vectors may share an id, so ask for more until there are enough ids.
        while len(found) < count and wanted < len(self):
            wanted = min(2 * max(wanted, count), len(self))
            scores, ids = self._index.search(question, wanted)
            found = {}
            for vector_id, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True):
                found.setdefault(vector_id, score)
        return list(found.items())[:count]

    def of(self, ids: Sequence[int]) -> tuple[list[int], Vectors]:
        """All vectors of some ids: for each the id that it belongs to, and the vectors, `[vectors, dimension]`."""
        owners = faiss.vector_to_array(self._index.id_map)
        places = np.flatnonzero(np.isin(owners, np.asarray(ids, dtype=np.int64)))
        return owners[places].tolist(), self._index.index.reconstruct_batch(places)

    def nearest(self, vectors: Vectors, count: int) -> list[list[tuple[int, float]]]:
        """For each of some vectors the nearest ones' ids and cosine similarities, best first.

        Args:
            vectors: `[vectors, dimension]`, unit length.
            count: how many for each; an id comes as often as vectors of it are among them.
        """
        scores, ids = self._index.search(vectors, min(count, len(self)))
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), scores.tolist(), strict=True)]


def carry_over(folder: Path, version: VectorsVersion) -> VectorsVersion | None:
    """Make the file of a version that of the next generation too, for a commit that changes no vectors.

    A link: an index of a million chunks takes 1.5 GB, and with contexts there is a commit for every shard of states.

    Returns:
        The next version; `None` where that is not possible, and the file has to be written.
    """
    following = VectorsVersion(version.generation + 1, version.checksum)
    path = _file(folder, following.generation)
    try:
        path.unlink(missing_ok=True)
        path.hardlink_to(_file(folder, version.generation))
        sync_folder(folder)
    except OSError:
        return None
    return following


def remove_other_generations(folder: Path, keep: int) -> None:
    """Delete index files that are no longer, or were never, visible, and what a killed writer left."""
    for path in vector_files(folder):
        if path != _file(folder, keep):
            path.unlink(missing_ok=True)


def _file(folder: Path, generation: int) -> Path:
    return folder / f"vectors-{generation:08d}.faiss"
