"""Which chunk stands where in the prompt, and which of its encodings it takes there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragcache.prompt.precedence import Wishes, best_order
from ragcache.settings import EncodingName, Order


@dataclass(frozen=True)
class Candidate:
    """A chunk that is to stand in the prompt.

    Attributes:
        content: key of its `alone` encoding, whether or not there is one.
        members: contents of the chunks that its `context` encoding came after; empty without one.
        has_alone: there is an `alone` encoding.
        has_context: there is a `context` encoding.
        document_id: the document it is part of.
        ordinal: which of that document's chunks it is.
        score: higher is better.
    """

    content: str
    members: tuple[str, ...]
    has_alone: bool
    has_context: bool
    document_id: str
    ordinal: int
    score: float


@dataclass(frozen=True)
class Place:
    """A place in the prompt.

    Attributes:
        index: which candidate stands there.
        encoding: which of its encodings it takes; `None` where nothing is stored of it.
    """

    index: int
    encoding: EncodingName | None


def arrange(candidates: Sequence[Candidate], order: Order) -> tuple[Place, ...]:
    """Put chunks in order and choose an encoding for each.

    The first takes `alone`, which is exact there, the others `context`; where that is not stored, the other one.

    `conditioned` goes by four rules, each of which decides only between orders that are equal by those before it:

    1. The first chunk has an `alone` encoding, if any of them has one.
    2. As many pairs as possible of a chunk and a member of its context stand as they were encoded: the member somewhere
       before the chunk. Two chunks may be members of each other's contexts, so not all pairs can.
    3. As many pairs as possible of chunks of one document stand in its order.
    4. The best score comes first, then the best of the others, and so on.

    They hold exactly for up to `ragcache.prompt.precedence.SEARCHED` chunks, and for any number of them if no pair has
    to be given up; beyond that very nearly.

    Args:
        candidates: in any order. It matters for `given`, and between chunks that are alike in everything.
        order: see `ragcache.settings.Order`.

    Returns:
        One place for each candidate, in prompt order.
    """
    indices = _ORDERS[order](candidates)
    return tuple(Place(index, _encoding(candidates[index], first=not at)) for at, index in enumerate(indices))


def _encoding(candidate: Candidate, *, first: bool) -> EncodingName | None:
    if candidate.has_alone and (first or not candidate.has_context):
        return "alone"
    return "context" if candidate.has_context else None


def _given(candidates: Sequence[Candidate]) -> list[int]:
    return list(range(len(candidates)))


def _by_score(candidates: Sequence[Candidate]) -> list[int]:
    def rank(index: int) -> tuple[float, str, int, int]:
        it = candidates[index]
        return -it.score, it.document_id, it.ordinal, index

    return sorted(range(len(candidates)), key=rank)


def _by_score_last(candidates: Sequence[Candidate]) -> list[int]:
    return _by_score(candidates)[::-1]


def _by_document(candidates: Sequence[Candidate]) -> list[int]:
    by_score = _by_score(candidates)
    documents = list(dict.fromkeys(candidates[index].document_id for index in by_score))
    rank = {document_id: at for at, document_id in enumerate(documents)}
    return sorted(by_score, key=lambda index: (rank[candidates[index].document_id], candidates[index].ordinal))


def _conditioned(candidates: Sequence[Candidate]) -> list[int]:
    # Numbered by score, so that the first order by number is the first by score.
    by_score = _by_score(candidates)
    chunks = [candidates[index] for index in by_score]
    exact_in_first_place = tuple(at for at, chunk in enumerate(chunks) if chunk.has_alone)
    wishes = Wishes(
        before=tuple(_set_of(_is_member(other, chunk) for other in chunks) for chunk in chunks),
        before_too=tuple(_set_of(_precedes(other, chunk) for other in chunks) for chunk in chunks),
        starts=exact_in_first_place or tuple(range(len(chunks))),
    )
    return [by_score[at] for at in best_order(wishes)]


def _set_of(contained: Iterable[bool]) -> int:
    return sum(1 << at for at, it in enumerate(contained) if it)


def _is_member(other: Candidate, chunk: Candidate) -> bool:
    return chunk.has_context and other.content in chunk.members and other.content != chunk.content


def _precedes(other: Candidate, chunk: Candidate) -> bool:
    return other.document_id == chunk.document_id and other.ordinal < chunk.ordinal


_ORDERS: dict[Order, Callable[[Sequence[Candidate]], list[int]]] = {
    "conditioned": _conditioned,
    "score": _by_score,
    "score-last": _by_score_last,
    "document": _by_document,
    "given": _given,
}
