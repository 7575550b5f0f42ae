"""What stands before each question: passages, and what the store holds of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.errors import EvaluationError
from ragcache.evaluation.questions import Question
from ragcache.pipeline import RagCache
from ragcache.retriever.retriever import RetrievedChunk
from ragcache.settings import EncodingName
from ragcache.states.records import StoredStates, pack_token_ids
from ragcache.stream import ContextChunk, context_chunk, milliseconds_since


@dataclass(frozen=True)
class Asked:
    """A question with its passages.

    Attributes:
        question: what is asked.
        chunks: passages, best first.
        retrieve_ms: what finding them took; 0 where the question names them.
    """

    question: Question
    chunks: tuple[ContextChunk, ...]
    retrieve_ms: float


def find_passages(cache: RagCache, question: Question, top_k: int) -> Asked:
    """The chunks of the documents that a question names, else those nearest to it.

    Raises:
        EvaluationError: the store does not hold such a document, or nothing at all.
    """
    clock = time.perf_counter()
    if question.documents:
        return Asked(question, tuple(_chunks_of(cache, question)), 0.0)
    chunks = tuple(context_chunk(hit) for hit in cache.retrieve(question.text, top_k))
    if not chunks:
        raise EvaluationError(f"{cache.path} holds no passages to answer from; index documents into it first")
    return Asked(question, chunks, milliseconds_since(clock))


def _chunks_of(cache: RagCache, question: Question) -> list[ContextChunk]:
    catalog = cache.store.catalog
    found: list[ContextChunk] = []
    for document in question.documents:
        chunks = catalog.chunks_by_vector(catalog.vector_ids([document]))
        if not chunks:
            raise EvaluationError(f"{cache.path} holds no document {document!r}, which {question.text!r} names")
        for chunk in sorted(chunks, key=lambda it: it.ordinal):
            # By score they stand as they are given.
            found.append(context_chunk(RetrievedChunk(chunk, -float(len(found)))))
    return found


def encodings_of(chunk: ContextChunk) -> dict[EncodingName, StoredStates]:
    """The encodings that the store holds states of."""
    return {it.name: it.states for it in chunk.encodings if it.states is not None}


def content_digest(chunks: Sequence[ContextChunk], encodings: Sequence[EncodingName]) -> str:
    """Identity of passages, of their places and of those stored states that may be used (sha256, hexadecimal)."""
    parts = [
        [
            chunk.document_id,
            chunk.ordinal,
            hashlib.sha256(pack_token_ids(chunk.token_ids)).hexdigest(),
            [[states.key, states.format] for states in _usable(chunk, encodings)],
            # Where there are no states at all, the order goes by what there was.
            [] if encodings_of(chunk) else [[it.name, it.key] for it in chunk.encodings],
        ]
        for chunk in chunks
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _usable(chunk: ContextChunk, encodings: Sequence[EncodingName]) -> list[StoredStates]:
    """As `ContextChunk.candidate` has it: others only where there is none of these."""
    stored = encodings_of(chunk)
    return [states for name, states in stored.items() if name in encodings] or list(stored.values())
