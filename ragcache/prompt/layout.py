"""Which chunk stands where, within the context window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.errors import QuestionError
from ragcache.prompt.order import Candidate, arrange
from ragcache.settings import EncodingName, Order


@dataclass(frozen=True)
class Layout:
    """A prompt: prefix, then the chosen chunks, then the question.

    Attributes:
        prefix: ids of the prefix.
        chunks: ids of each chunk, in prompt order.
        kept: for each chunk in prompt order, its index among those offered.
        encodings: for each chunk in prompt order, which of its encodings it takes; `None` where nothing is stored.
        dropped: indices of chunks for which there was no room.
        question: ids of the question.
        answer_room: tokens left for the answer.
    """

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    encodings: tuple[EncodingName | None, ...]
    dropped: tuple[int, ...]
    question: tuple[int, ...]
    answer_room: int

    @property
    def starts(self) -> list[int]:
        """Position of each chunk's first token."""
        position, starts = len(self.prefix), []
        for chunk in self.chunks:
            starts.append(position)
            position += len(chunk)
        return starts

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.prefix, *(i for chunk in self.chunks for i in chunk), *self.question]


def lay_out(
    prefix: tuple[int, ...],
    chunks: Sequence[tuple[int, ...]],
    candidates: Sequence[Candidate],
    order: Order,
    question: tuple[int, ...],
    context_window: int,
    max_tokens: int,
) -> Layout:
    """Place chunks in order; when they do not all fit, those of the lowest scores are left out first.

    A chunk that is too long by itself does not take those of lower scores with it.

    Args:
        prefix: ids of the prefix.
        chunks: ids of each chunk offered.
        candidates: what is known of each.
        order: how those that fit are arranged.
        question: ids of the question.
        context_window: most tokens the model takes, answer included.
        max_tokens: room wanted for the answer; it keeps chunks out of at most half of what the question leaves.

    Raises:
        QuestionError: prefix and question alone leave no room for an answer, or for any of the chunks.
    """
    fixed = len(prefix) + len(question)
    if fixed >= context_window:
        raise QuestionError(
            f"the question is too long: with the system prompt it takes {fixed} tokens, and the model's context "
            f"window is {context_window}; shorten the question"
        )
    room = context_window - fixed
    reserved = min(max_tokens, room - room // 2)
    kept: set[int] = set()
    used = 0
    possible = [index for index in range(len(chunks)) if len(chunks[index]) <= room - reserved]
    for index in sorted(possible, key=lambda i: -candidates[i].score):
        if used + len(chunks[index]) > room - reserved:
            break
        used += len(chunks[index])
        kept.add(index)
    if chunks and not kept:
        raise QuestionError(
            f"no passage fits: the shortest takes {min(map(len, chunks))} tokens, and the model's context window of "
            f"{context_window} leaves {room - reserved} beside the question; lower max_tokens, or index with a "
            "smaller chunk_tokens"
        )
    offered = sorted(kept)
    places = arrange([candidates[index] for index in offered], order)
    arranged = tuple(offered[place.index] for place in places)
    return Layout(
        prefix=prefix,
        chunks=tuple(chunks[index] for index in arranged),
        kept=arranged,
        encodings=tuple(place.encoding for place in places),
        dropped=tuple(index for index in range(len(chunks)) if index not in kept),
        question=question,
        answer_room=min(max_tokens, room - used),
    )
