"""Messages of LlamaIndex as the token ids of a prompt.

Special tokens come from the model's chat template only: a message that spells out `<|im_end|>` holds the characters,
not the token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from ragcache.errors import QuestionError
from ragcache.prompt.template import PromptTemplate
from ragcache.prompt.validity import is_unicode

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
"""Other providers' names of a role, as chat templates call it."""


@dataclass(frozen=True)
class _Turn:
    """One message, as a chat template takes it."""

    role: str
    content: str


class ChatPrompts:
    """Writes messages as prompts of one model."""

    def __init__(self, template: PromptTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template = template
        added = tokenizer.added_tokens_decoder.values()
        self._special: dict[str, AddedToken] = {token.content: token for token in added if token.special}
        self._ids = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def messages_to_prompt(self, messages: Sequence[ChatMessage]) -> str:
        """A prompt as text, with special tokens spelled out.

        Raises:
            QuestionError: the model cannot be given such messages.
        """
        turns = _turns(messages)
        return self._render(turns if self._marked(turns)[1] else _folded(turns))

    def completion_to_prompt(self, prompt: str) -> str:
        """A prompt as text, with one message of the user."""
        return self.messages_to_prompt([ChatMessage(role=MessageRole.USER, content=prompt)])

    def token_ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """A prompt as token ids.

        Raises:
            QuestionError: the model cannot be given such messages.
        """
        turns = _turns(messages)
        marked, as_given = self._marked(turns)
        rendered = self._render(turns if as_given else _folded(turns))
        contents = [turn.content for turn in turns]
        if not self._spells_special_tokens(contents):
            return self._template.formatted(rendered)
        pieces = _MARK.split(marked)
        return self._joined(pieces[::2], _as_rendered(rendered, pieces, contents))

    def _marked(self, turns: list[_Turn]) -> tuple[str, bool]:
        """A prompt with a mark in place of each content, and whether the template takes the messages as given.

        Some families have no system role, and say so by raising or leave it out (Gemma, early Mistral). The system's
        text then opens the user's first turn, as their own documentation has it.
        """
        marks = [replace(turn, content=_mark(index)) for index, turn in enumerate(turns)]
        wanted = {str(index) for index in range(len(turns))}
        try:
            marked = self._render(marks)
            if wanted <= set(_MARK.findall(marked)):
                return marked, True
        except QuestionError:
            if all(turn.role != "system" for turn in turns):
                raise
        marked = self._render(_folded(marks))
        if missing := wanted - set(_MARK.findall(marked)):
            index = min(map(int, missing))
            raise QuestionError(
                f"the model's chat template leaves out message {index + 1}, of the role {turns[index].role!r}; "
                "give its text in a message of the user"
            )
        return marked, False

    def _render(self, turns: list[_Turn]) -> str:
        try:
            return self._template.render([{"role": turn.role, "content": turn.content} for turn in turns])
        except TemplateError as error:
            roles = ", ".join(turn.role for turn in turns)
            raise QuestionError(
                f"the model's chat template refuses messages of the roles {roles} in this order: {error}"
            ) from error

    def _spells_special_tokens(self, contents: list[str]) -> bool:
        return any(self._any_special.search(content) for content in contents)

    def _joined(self, pieces: list[str], contents: list[str]) -> tuple[int, ...]:
        """Ids of a template's pieces with a content after each but the last.

        What stands between two special tokens is tokenised in one piece, as a tokenizer itself does.

        Args:
            pieces: text of the template.
            contents: text that holds no special tokens, whatever it spells.
        """
        ids = [*self._template.formatted("")]
        run, strip_next = "", False
        for piece, content in zip(pieces, (*contents, ""), strict=True):
            start = 0
            for found in self._any_special.finditer(piece):
                token = self._special[found.group()]
                run += piece[start : found.start()]
                run = run.lstrip() if strip_next else run
                ids += self._template.encode(run.rstrip() if token.lstrip else run)
                ids.append(self._ids[token.content])
                run, strip_next, start = "", token.rstrip, found.end()
            run += piece[start:] + content
        ids += self._template.encode(run.lstrip() if strip_next else run)
        return tuple(ids)


_MARK = re.compile("@@ragcache:message:([0-9]+)@@")


def _mark(index: int) -> str:
    """What stands for a content while the template is rendered; nothing that a template touches."""
    return f"@@ragcache:message:{index}@@"


def _as_rendered(rendered: str, pieces: list[str], contents: list[str]) -> list[str]:
    """Contents in the order in which a template has them, without the white space at their ends that it strips.

    Args:
        rendered: the prompt.
        pieces: text of the template and indices of contents, in turn.
        contents: as they were given.
    """
    found, position = [], len(pieces[0])
    for index, after in zip(pieces[1::2], pieces[2::2], strict=True):
        content = contents[int(index)]
        variants = (content, content.rstrip(), content.lstrip(), content.strip())
        # A template that does anything else to a content is given it as it is.
        kept = next((it for it in variants if rendered.startswith(it + after, position)), content)
        found.append(kept)
        position += len(kept) + len(after)
    return found


def _turns(messages: Sequence[ChatMessage]) -> list[_Turn]:
    if not messages:
        raise QuestionError("there are no messages; give at least one")
    return [_turn(index, message) for index, message in enumerate(messages, 1)]


def _turn(index: int, message: ChatMessage) -> _Turn:
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise QuestionError(f"message {index} holds a block of {block.block_type}; the model reads text only")
    content = message.content or ""
    if not is_unicode(content):
        raise QuestionError(f"message {index} holds half a surrogate pair; send valid Unicode")
    return _Turn(ROLES.get(message.role, message.role.value), content)


def _folded(turns: list[_Turn]) -> list[_Turn]:
    """Turns without a system's, whose text opens the user's first."""
    system = "\n\n".join(turn.content for turn in turns if turn.role == "system")
    others = [turn for turn in turns if turn.role != "system"]
    for index, turn in enumerate(others):
        if turn.role == "user":
            return [
                *others[:index],
                _Turn("user", f"{system}\n\n{turn.content}" if system else turn.content),
                *others[index + 1 :],
            ]
    return [_Turn("user", system), *others] if system else others
