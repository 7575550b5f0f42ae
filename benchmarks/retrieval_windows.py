"""How often a sentence finds the chunk it was taken from, with what the embedding model reads of it and with all of it.

make demo
python benchmarks/retrieval_windows.py --store .demo/store
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from ragcache.retriever.embedding import Embedder
from ragcache.retriever.vectors import VectorIndex
from ragcache.settings import load_settings
from ragcache.states.store import StateStore

TOP_K = 5


def sentences(texts: list[str], part: slice) -> list[tuple[str, int]]:
    """One sentence out of some tenths of each text that is long enough, and the text's index."""
    chosen = []
    for index, text in enumerate(texts):
        window = text[len(text) * part.start // 10 : len(text) * part.stop // 10]
        whole = [s for s in re.split(r"(?<=[.!?])\s+", window)[1:-1] if 60 < len(s) < 250]
        if len(text) > 1500 and whole:
            chosen.append((random.choice(whole), index))
    return chosen


def main() -> None:
    """Compare both on the same sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    store = StateStore.open(parser.parse_args().store)
    settings = load_settings(store.path)
    embedder = Embedder(settings.embedding_model, "cpu", settings.cache_folder)
    texts = [chunk.text for chunk in store.catalog.chunks_by_vector(range(1, store.catalog.last_vector_id() + 1))]
    owners, vectors = embedder.passages(texts)
    first_of = [owners.index(index) for index in range(len(texts))]
    first, every = (VectorIndex.empty(embedder.dimension) for _ in range(2))
    first.add(list(range(len(texts))), vectors[first_of])
    every.add(owners, vectors)

    random.seed(0)
    print(f"{settings.embedding_model}, {len(texts)} chunks, {len(owners)} vectors; found among the best {TOP_K}")
    for name, part in (("first half", slice(0, 5)), ("last four tenths", slice(6, 10))):
        asked = sentences(texts, part)
        found = [
            sum(owner in dict(index.search(embedder.question(text), TOP_K)) for text, owner in asked)
            for index in (first, every)
        ]
        print(f"  {name:<18} first window {found[0] / len(asked):.0%}, all windows {found[1] / len(asked):.0%}")


if __name__ == "__main__":
    main()
