"""A catalog of a million chunks: how long opening it, looking up chunks and deleting a document take.

    python benchmarks/catalog_scale.py --folder .bench

The rows are synthetic (there are no states behind them) but as wide as real ones: 400 token ids, 1,600 characters, byte
ranges of 30 columns. Each figure is the median and the largest of many, in one process that has just opened the store.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ragcache.maintenance import store_stats
from ragcache.settings import load_settings
from ragcache.states import changes
from ragcache.states.form import Form, LayerFormat, StateFormat
from ragcache.states.key import state_key
from ragcache.states.locked import WriteOptions
from ragcache.states.records import (
    ByteRange,
    DocumentRecord,
    NewChunk,
    NewEncoding,
    NewShard,
    NewStates,
    VectorsVersion,
)
from ragcache.states.store import StateStore, StoreIdentity
from ragcache.states.writer import StoreWriter

CHUNKS_OF_A_DOCUMENT = 20
DOCUMENTS_OF_A_SHARD = 5
TOKENS = 400
LAYERS = 30
KV_WIDTH = 192
FORMAT = StateFormat(
    "bfloat16",
    (LayerFormat(Form.TOKENS, 0, "int8"), *[LayerFormat(Form.PRE_ROPE_KV, KV_WIDTH, "int8")] * (LAYERS - 1)),
)
IDENTITY = StoreIdentity('{"dtype": "bfloat16", "weights": "' + "a" * 64 + '"}', "e" * 64, (1, 2, 3))


def main() -> None:
    """Fill a store unless it is there, then measure."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--chunks", type=int, default=1_000_000)
    arguments.add_argument("--folder", type=Path, default=Path(".bench"))
    options = arguments.parse_args()
    path = options.folder / f"catalog-{options.chunks}"
    if not path.exists():
        clock = time.perf_counter()
        fill(path, options.chunks)
        print(f"{options.chunks:,} chunks written in {time.perf_counter() - clock:.0f} s")
    print(f"catalog.sqlite: {(path / 'catalog.sqlite').stat().st_size / 2**30:.2f} GiB")
    measure(path, options.chunks)


def fill(path: Path, chunks: int) -> None:
    """Make a store with rows for shards that do not exist."""
    unfinished = path.with_name(path.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    store = StateStore.create(unfinished, IDENTITY, load_settings())
    chance = random.Random(0)
    with store.catalog.transaction() as connection:
        for number in range(chunks // (CHUNKS_OF_A_DOCUMENT * DOCUMENTS_OF_A_SHARD)):
            add_shard(connection, number, chance)
        changes.set_vectors(connection, VectorsVersion(1, "0" * 16))
    store.catalog.close()
    unfinished.rename(path)


def add_shard(connection: sqlite3.Connection, number: int, chance: random.Random) -> None:
    """One shard with the documents in it."""
    numbers = np.random.default_rng(number)
    documents = []
    states = []
    for document_number in range(number * DOCUMENTS_OF_A_SHARD, (number + 1) * DOCUMENTS_OF_A_SHARD):
        record = DocumentRecord(document_id(document_number), "bench", "A title", "f" * 64, {"page": document_number})
        chunks = []
        for ordinal in range(CHUNKS_OF_A_DOCUMENT):
            token_ids = tuple(numbers.integers(49152, size=TOKENS).tolist())
            key = state_key(IDENTITY.digest, IDENTITY.prefix, "", token_ids)
            vector_id = document_number * CHUNKS_OF_A_DOCUMENT + ordinal + 1
            chunk_id, encodings = f"{record.id}#{ordinal}", (NewEncoding("alone", key),)
            chunks.append(NewChunk(vector_id, chunk_id, ordinal, "lorem " * 266, token_ids, key, encodings))
            states.append(NewStates(key, 1e11, ranges(chance, ordinal)))
        documents.append((record, chunks))
    shard = NewShard(
        path=Path(f"{number:032x}.arrow"),
        sequence=number + 1,
        bytes=sum(it.bytes for it in states) + 10**6,
        checksum="0" * 16,
        format=FORMAT.to_json(),
        fingerprint=IDENTITY.digest,
        states=tuple(states),
    )
    added = changes.add_shard(connection, shard, "")
    for record, chunks in documents:
        changes.add_document(connection, record, chunks, added)


def ranges(chance: random.Random, place: int) -> tuple[ByteRange, ...]:
    """As of a real chunk: token ids, then the stored layers one after the other."""
    lengths = [4 * TOKENS, *(FORMAT.size(layer, TOKENS) for layer in FORMAT.stored_layers)]
    start = place * sum(lengths)
    return tuple(ByteRange(start + index, length, chance.getrandbits(64)) for index, length in enumerate(lengths))


def document_id(number: int) -> str:
    """Id of a document by its number."""
    return f"folder/document-{number:07d}.md"


def measure(path: Path, chunks: int) -> None:
    """Time what users wait for."""
    chance = random.Random(1)
    documents = chunks // CHUNKS_OF_A_DOCUMENT

    def open_store() -> None:
        store = StateStore.open(path)
        store.identity()
        store.catalog.vectors()
        store.catalog.counts()
        store.catalog.close()

    show("open (identity, vectors, counts)", timed(open_store, 5))
    store = StateStore.open(path)

    def look_up() -> None:
        store.catalog.chunks_by_vector([chance.randrange(1, chunks) for _ in range(8)])

    show("look up 8 chunks", timed(look_up, 200))

    def find_states() -> None:
        store.catalog.find_states(f"{chance.getrandbits(256):064x}", FORMAT)

    show("look for states by key", timed(find_states, 200))

    def delete_rows() -> None:
        # The part of a delete that is the catalog's; every document is deleted once at most.
        number = next(numbers)
        with store.catalog.transaction() as connection:
            candidates = changes.remove_documents(connection, [document_id(number)])
            changes.drop_unused(connection, candidates)

    numbers = distinct(chance, documents)
    show("delete a document of 20 chunks, in the catalog", timed(delete_rows, 50))

    with StoreWriter(store, FORMAT, WriteOptions()) as writer:
        generation = store.catalog.vectors().generation

        def delete_with_journal() -> None:
            nonlocal generation
            generation += 1
            writer.commit([], [document_id(next(numbers))], VectorsVersion(generation, "0" * 16))

        show("delete a document of 20 chunks, with its journal file", timed(delete_with_journal, 50))
    clock = time.perf_counter()
    sizes = store_stats(store)
    print(f"stats: {time.perf_counter() - clock:.1f} s ({sizes.documents:,} documents, {sizes.chunks:,} chunks left)")
    (path / "figures.json").write_text(json.dumps(figures, indent=2))


def distinct(chance: random.Random, count: int) -> Iterator[int]:
    """Numbers below `count`, shuffled, each once."""
    numbers = list(range(count))
    chance.shuffle(numbers)
    return iter(numbers)


def timed(action: Callable[[], None], times: int) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(times):
        clock = time.perf_counter()
        action()
        taken.append((time.perf_counter() - clock) * 1e3)
    return taken


figures: dict[str, dict[str, float]] = {}


def show(what: str, milliseconds: list[float]) -> None:
    """Print and keep median and largest."""
    figures[what] = {"median": statistics.median(milliseconds), "largest": max(milliseconds)}
    print(f"{what}: median {statistics.median(milliseconds):.2f} ms, largest {max(milliseconds):.2f} ms")


if __name__ == "__main__":
    main()
