"""Questions made from the corpus's own text, where the user has none.

A question takes a phrase from a sampled chunk and asks what the chunk's document says about it, or what the document is
about where no words stand out. No model writes it, so
it is plain, it names words of its source, and it has no gold answer: it suits comparing an answer with the full
prefill's, and says little about how real questions are retrieved. docs/fidelity.md says more on the limits.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence

from ragcache.errors import EvaluationError
from ragcache.evaluation.questions import Question
from ragcache.states.catalog import Catalog
from ragcache.states.records import ChunkRecord

READ_CHUNKS = 500
"""Chunks of which words are counted, to tell rare from frequent ones."""

FREQUENT = 0.2
"""Share of chunks from which on a word says nothing about any of them. It takes the place of a list of stop words,
which would be in one language."""

PHRASE_WORDS = 4
"""Words of a phrase, at most."""

_WORD = re.compile(r"[^\W\d_][\w'-]{2,}")
_BREAK = re.compile(r"[^\w\s'-]|\n")


def corpus_questions(catalog: Catalog, count: int, seed: int) -> list[Question]:
    """Questions on chunks drawn from the catalog, each from another document as far as there are so many.

    The same catalog, count and seed give the same questions.

    Raises:
        EvaluationError: the store holds no chunks.
    """
    generator = random.Random(seed)
    vector_ids = sorted(catalog.all_vector_ids())
    drawn = generator.sample(vector_ids, min(len(vector_ids), max(READ_CHUNKS, count)))
    chunks = catalog.chunks_by_vector(drawn)
    frequencies = Counter(word for chunk in chunks for word in set(_words(chunk.text)))
    questions: dict[str, Question] = {}
    for chunk in _by_turns(chunks):
        if len(questions) == count:
            break
        title, phrase = chunk.title or chunk.document_id, _phrase(chunk.text, frequencies, len(chunks))
        text = f'What does "{title}" say about {phrase}?' if phrase else f'What is "{title}" about?'
        questions.setdefault(text, Question(text))
    if not questions:
        raise EvaluationError("the store holds no texts to make questions of; index documents into it first")
    return list(questions.values())


def _by_turns(chunks: Sequence[ChunkRecord]) -> list[ChunkRecord]:
    """First one chunk of each document, then the second ones, and so on."""
    turn: Counter[str] = Counter()
    turns = []
    for chunk in chunks:
        turns.append(turn[chunk.document_id])
        turn[chunk.document_id] += 1
    return [chunks[index] for index in sorted(range(len(chunks)), key=lambda index: turns[index])]


def _phrase(text: str, frequencies: Counter[str], chunks: int) -> str:
    """The run of words, all rare in the corpus, with the highest sum of weights: as RAKE, with idf for its scores."""
    # Of few chunks a single one is a large share.
    most = max(2.0, FREQUENT * chunks)
    best, best_weight = "", 0.0
    for part in _BREAK.split(text):
        run: list[str] = []
        for token in [*part.split(), ""]:
            word = token.lower()
            if _WORD.fullmatch(token) and frequencies[word] < most:
                run = [*run, token][-PHRASE_WORDS:]
                weight = sum(math.log((1 + chunks) / frequencies[it.lower()]) for it in run)
                # The first of equals: what a text begins with is what it is about.
                if weight > best_weight + 1e-9:
                    best, best_weight = " ".join(run), weight
            else:
                run = []
    return best


def _words(text: str) -> list[str]:
    return [token.lower() for part in _BREAK.split(text) for token in part.split() if _WORD.fullmatch(token)]
