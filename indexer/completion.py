"""What chunks lack of their encodings after documents have come and gone: the second pass of an indexing run.

Contexts hold neighbours from the whole corpus, so they are chosen once all of it is there. What is to be done follows
from the store alone: a run that was interrupted is simply gone on with, and one after which nothing has changed does
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ragcache.indexer.contexts import Block, ContextRecipe, alone, plan_blocks
from ragcache.indexer.encoder import StateEncoder
from ragcache.indexer.encoding_pass import EncodingPass
from ragcache.indexer.neighbours import Neighbours
from ragcache.indexer.renewal import worth_renewing
from ragcache.indexer.report import Progress
from ragcache.indexer.similar import SimilarChunks
from ragcache.retriever.vectors import VectorIndex
from ragcache.settings import EncodingName
from ragcache.states.compact import shorten_journal
from ragcache.states.lacking import Lacking
from ragcache.states.records import ChunkRecord
from ragcache.states.schema import UNFINISHED_RECIPE
from ragcache.states.writer import StoreWriter

_CHUNKS = 512
"""Contexts are chosen for the chunks of several documents at once, so that one search in the vectors serves them all.
After so many there is no further document: the records of all their neighbours are held in memory."""

_WORDS: dict[EncodingName, str] = {"alone": "alone", "context": "in context"}


@dataclass
class Completion:
    """Brings the encodings of all chunks in line with what is asked for.

    Attributes:
        writer: entered, with nothing pending.
        encoder: chunks to states.
        vectors: of all chunks.
        encodings: what every chunk is to have.
        recipe: how contexts are chosen.
        batch_tokens: most tokens in one forward pass.
        progress: told how it goes.
    """

    writer: StoreWriter
    encoder: StateEncoder
    vectors: VectorIndex
    encodings: tuple[EncodingName, ...]
    recipe: ContextRecipe
    batch_tokens: int
    progress: Progress

    def __post_init__(self) -> None:
        self._catalog = self.writer.store.catalog
        self._lacking = Lacking(self._catalog)

    def run(self) -> list[EncodingPass]:
        """Make what is lacking, then take away what is not wanted any more; what was made, by name.

        Raises:
            EncodingError: the model gave NaN or infinity.
            StoreError: the store cannot be written to. What was committed before is intact.
        """
        passes = []
        if "alone" in self.encodings:
            passes.append(self._make("alone", self._lacking.never_made("alone")))
        if "context" in self.encodings:
            passes.append(self._make_contexts())
        unwanted: list[EncodingName] = [name for name in ("alone", "context") if name not in self.encodings]
        if dropped := [name for name in unwanted if self._lacking.any(name)]:
            for name in dropped:
                self.writer.remove_encodings(name)
            shorten_journal(self.writer)
        return passes

    def _make_contexts(self) -> EncodingPass:
        recipe = json.dumps([self.recipe.text, self.recipe.tokens, self.recipe.count])
        known = self._catalog.recipe()
        if known is None:
            self.writer.write_recipe(recipe)
        elif known != recipe:
            # Until all are chosen anew some are of the one and some of the other, whichever is asked for next.
            self.writer.write_recipe(UNFINISHED_RECIPE)
        if known not in (None, recipe):
            wanted = self._catalog.all_vector_ids()
        else:
            new = self._lacking.never_made("context")
            wanted = {
                *new,
                *self._lacking.lost("context", self.writer.store.broken_shards()),
                *self._lacking.orphaned(),
            }
            if self._lacking.any("context"):
                wanted |= worth_renewing(new, self._catalog, Neighbours(self.vectors), self.recipe)
        made = self._make("context", sorted(wanted))
        if known != recipe:
            self.writer.write_recipe(recipe)
        return made

    def _make(self, name: EncodingName, chunks: list[int]) -> EncodingPass:
        """Give some chunks an encoding."""
        encoding = EncodingPass(name, self.writer, self.encoder, self.vectors, self.batch_tokens, self.progress)
        if chunks:
            self.progress.start(sum(1 for _ in self._lacking.documents_of(chunks)), f"encoding {_WORDS[name]}")
            encoding.run(self._blocks(name, chunks))
        return encoding

    def _blocks(self, name: EncodingName, chunks: list[int]) -> Iterator[Block[ChunkRecord]]:
        similar = SimilarChunks(self._catalog, Neighbours(self.vectors), self.recipe)
        documents = self._lacking.documents_of(chunks)
        for batch in _together(documents):
            loaded = [(self._chunks_of(document), ids) for document, ids in batch]
            if name == "context":
                similar.prepare(loaded)
            for document, ids in loaded:
                wanted = {index for index, chunk in enumerate(document) if chunk.vector_id in ids}
                if name == "context":
                    yield from plan_blocks(document, wanted, similar.to, self.recipe)
                else:
                    yield from (alone(document[index]) for index in sorted(wanted))
                self.progress.advance(1, 0, 0)

    def _chunks_of(self, document: str) -> list[ChunkRecord]:
        chunks = self._catalog.chunks_by_vector(self._catalog.vector_ids([document]))
        return sorted(chunks, key=lambda chunk: chunk.ordinal)


def _together(documents: Iterable[tuple[str, set[int]]]) -> Iterator[list[tuple[str, set[int]]]]:
    """Documents with the chunks that are meant, several at once (`_CHUNKS`)."""
    batch: list[tuple[str, set[int]]] = []
    for document, ids in documents:
        batch.append((document, ids))
        if sum(len(mine) for _, mine in batch) >= _CHUNKS:
            yield batch
            batch = []
    if batch:
        yield batch
