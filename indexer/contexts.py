"""What a `context` encoding of a chunk comes after: whole chunks, chosen, and laid out so that one pass serves many.

Only a chunk's own states are kept of such a pass. In a prompt they stand for the chunk after text like that, so what
they were computed after should be what stands there: the text of the document before the chunk, and the chunks that
are retrieved together with it, of which the most similar ones are the best guess.

No guess is right for every prompt. A chunk's states after one context hold something of what that says, which is wrong
where it is not in the prompt; their mean over several contexts holds little of any, and is nearest to what they are
after other text of the kind. So a chunk may have several contexts, and one encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

from ragcache.settings import ContextName
from ragcache.states.key import CONTEXT_END


class Passage(Protocol):
    """A chunk as its neighbours see it.

    Attributes:
        content: names it by what it says; chunks of equal token ids have it in common.
        token_ids: its own, header included.
    """

    @property
    def content(self) -> str:
        """See above."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """See above."""


P = TypeVar("P", bound=Passage)


@dataclass(frozen=True)
class ContextRecipe:
    """How contexts are chosen.

    Attributes:
        text: where it comes from.
        tokens: length of a context that is chosen, in tokens; within a block it grows.
        block_tokens: most tokens of a block, unless its first chunk alone takes more.
        window: most tokens that the model takes after the prompt's prefix.
        count: contexts of a chunk; its states are the mean of those in each.
    """

    text: ContextName
    tokens: int
    block_tokens: int
    window: int
    count: int = 1


@dataclass(frozen=True)
class Run(Generic[P]):
    """A sequence that goes through the model.

    Attributes:
        context: only attended to.
        chunks: come after it; their states are kept.
    """

    context: tuple[P, ...]
    chunks: tuple[P, ...]

    @property
    def tokens(self) -> int:
        """All of it."""
        return len(joined((*self.context, *self.chunks)))


@dataclass(frozen=True)
class Block(Generic[P]):
    """Chunks that are encoded one after the other in one sequence, each attending to all before it.

    Attributes:
        members: what stands before the first of them; only attended to.
        chunks: those that are encoded.
        others: for each of them further contexts, in which it is encoded by itself; its states are the mean. Empty when
            there are none.
    """

    members: tuple[P, ...]
    chunks: tuple[P, ...]
    others: tuple[tuple[tuple[P, ...], ...], ...] = ()

    def before(self, index: int) -> tuple[P, ...]:
        """What stands before the chunk of that index in the block: the members of its first context."""
        return self.members + self.chunks[:index]

    def contexts(self, index: int) -> tuple[tuple[P, ...], ...]:
        """All that the chunk of that index is encoded after."""
        return (self.before(index), *(self.others[index] if self.others else ()))

    def part(self, start: int, stop: int) -> Block[P]:
        """Some of its chunks, encoded as they would be in the whole."""
        return Block(self.before(start), self.chunks[start:stop], self.others[start:stop])

    @property
    def sequences(self) -> list[Run[P]]:
        """What is run through the model."""
        further = [
            Run(context, (chunk,))
            for chunk, contexts in zip(self.chunks, self.others, strict=False)
            for context in contexts
        ]
        return [Run(self.members, self.chunks), *further]

    def holds(self, content: str) -> bool:
        """Whether that text stands in it already."""
        return any(passage.content == content for passage in self.before(len(self.chunks)))

    @property
    def length(self) -> int:
        """Tokens of members and chunks, one after the other."""
        return len(joined(self.before(len(self.chunks))))

    @property
    def tokens(self) -> int:
        """All that are run through the model."""
        return sum(it.tokens for it in self.sequences)


def joined(passages: Iterable[Passage]) -> tuple[int, ...]:
    """Their token ids, one after the other."""
    return tuple(chain.from_iterable(passage.token_ids for passage in passages))


def context_ids(contexts: Sequence[Sequence[Passage]]) -> tuple[int, ...]:
    """Token ids of contexts as they are kept, with `CONTEXT_END` between one and the next."""
    ids: list[int] = []
    for index, context in enumerate(contexts):
        ids += [CONTEXT_END] * (index > 0) + list(joined(context))
    return tuple(ids)


def alone(chunk: P) -> Block[P]:
    """A block of a chunk that comes after nothing."""
    return Block((), (chunk,))


def choose_members(chunk: P, preceding: Sequence[P], neighbours: Iterable[P], tokens: int, room: int) -> list[P]:
    """The context of a chunk, in the order it stands in: what is nearest to the chunk last.

    The document's text goes back from the chunk as far as it fits; when all of it does, neighbours go before it. They
    are whole chunks. The first that is chosen may be longer than asked for, since a context of nothing would help
    nobody; after that the first one that does not fit ends it. Text that is in already is passed over, and so is the
    chunk's own.

    Args:
        chunk: whose context it is.
        preceding: chunks of its document before it, in their order.
        neighbours: others, the most similar first; asked for only as far as they are wanted.
        tokens: length of the context.
        room: most tokens of it that the model's window leaves room for.
    """
    chosen: list[P] = []
    seen = {chunk.content}
    taken = 0
    for passage in chain(reversed(preceding), neighbours):
        if passage.content in seen:
            continue
        taken += len(passage.token_ids)
        if taken > (min(tokens, room) if chosen else room):
            break
        seen.add(passage.content)
        chosen.append(passage)
        if taken >= tokens:
            break
    return chosen[::-1]


def choose_others(
    chunk: P, first: Iterable[P], neighbours: Iterable[P], recipe: ContextRecipe
) -> tuple[tuple[P, ...], ...]:
    """Further contexts of a chunk, each of the most similar chunks that stand in none before it.

    Args:
        chunk: whose contexts they are.
        first: what stands in its first one.
        neighbours: the most similar first; asked for only as far as they are wanted.
        recipe: how contexts are chosen.
    """
    room = recipe.window - len(chunk.token_ids)
    seen = {chunk.content, *(passage.content for passage in first)}
    contexts: list[list[P]] = []
    taken = 0
    for passage in neighbours:
        tokens = len(passage.token_ids)
        if passage.content in seen or tokens > room:
            continue
        if not contexts or taken + tokens > min(recipe.tokens, room):
            if len(contexts) == recipe.count - 1:
                break
            contexts.append([])
            taken = 0
        seen.add(passage.content)
        contexts[-1].append(passage)
        taken += tokens
    return tuple(tuple(reversed(context)) for context in contexts)


def plan_blocks(
    document: Sequence[P],
    wanted: Collection[int],
    neighbours: Callable[[P], Iterable[P]],
    recipe: ContextRecipe,
) -> Iterator[Block[P]]:
    """Blocks that encode some chunks of a document, each chunk once, in their order.

    Of the document's text, chunks that follow each other slide along in one block: each attends to all before it there,
    so it has a context at least as long as asked for, and the text between two chosen contexts is not run twice.

    Args:
        document: all of its chunks, in their order.
        wanted: indices of those to encode.
        neighbours: the most similar chunks, best first.
        recipe: how contexts are chosen.
    """
    for block in _sliding(document, wanted, neighbours, recipe):
        if recipe.count == 1:
            yield block
            continue
        others = (
            choose_others(chunk, block.before(index), neighbours(chunk), recipe)
            for index, chunk in enumerate(block.chunks)
        )
        yield Block(block.members, block.chunks, tuple(others))


def _sliding(
    document: Sequence[P],
    wanted: Collection[int],
    neighbours: Callable[[P], Iterable[P]],
    recipe: ContextRecipe,
) -> Iterator[Block[P]]:
    """Blocks with the first context of each chunk; see `plan_blocks`."""
    # Of its own document what precedes a chunk stands in its first context anyway, and what follows comes after it.
    own = {passage.content for passage in document} if recipe.text == "document" else set()
    block: Block[P] | None = None
    for index, chunk in enumerate(document):
        if block is not None and not (index in wanted and _continues(block, chunk, recipe)):
            yield block
            block = None
        if index not in wanted:
            continue
        if block is not None:
            block = Block(block.members, (*block.chunks, chunk))
        else:
            preceding = document[:index] if recipe.text == "document" else ()
            room = recipe.window - len(chunk.token_ids)
            others = (passage for passage in neighbours(chunk) if passage.content not in own)
            members = choose_members(chunk, preceding, others, recipe.tokens, room)
            block = Block(tuple(members), (chunk,))
    if block is not None:
        yield block


def _continues(block: Block[P], chunk: P, recipe: ContextRecipe) -> bool:
    """Whether a chunk, the next of the document, goes into the block."""
    return (
        recipe.text == "document"
        and block.length + len(chunk.token_ids) <= min(recipe.block_tokens, recipe.window)
        and not block.holds(chunk.content)
    )


class Work(Protocol):
    """What is run as a whole, such as a block."""

    @property
    def tokens(self) -> int:
        """That go through the model for it."""


W = TypeVar("W", bound=Work)


def pack(blocks: Iterable[W], tokens: int) -> Iterator[list[W]]:
    """Blocks by forward pass: as many as have together at most so many tokens; a larger one has a pass to itself."""
    together: list[W] = []
    taken = 0
    for block in blocks:
        if together and taken + block.tokens > tokens:
            yield together
            together, taken = [], 0
        together.append(block)
        taken += block.tokens
    if together:
        yield together
