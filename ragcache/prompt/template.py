"""The prompt's parts as token ids.

    prefix    BOS, system prompt, start of the user turn           the same for every question
    chunk     [title] and text of a passage                        wherever it was retrieved
    question  the question, end of the user turn, start of answer

The model's own chat template is rendered once with marks where chunks and question go, and cut there. Each part is
tokenised alone and the parts are joined as ids, so a chunk has the same ids wherever it stands, and nothing searches
for separators in text. Special tokens come from the template only: a document that spells out `<|im_end|>` contains
the characters, not the token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from ragcache.errors import QuestionError, SettingsError, UnsupportedModelError
from ragcache.settings import DEFAULT_USER_PROMPT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Frame:
    """What stands around the passages of one prompt.

    Attributes:
        prefix: ids before them.
        question: ids after them, the question among them.
    """

    prefix: tuple[int, ...]
    question: tuple[int, ...]


class PromptTemplate:
    """Turns texts into the ids of a prompt's parts.

    Attributes:
        prefix: ids of the prefix.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str, user_prompt: str = DEFAULT_USER_PROMPT
    ) -> None:
        """Render the chat template and cut it.

        Args:
            tokenizer: of the language model.
            system_prompt: message that comes first; none when empty.
            user_prompt: message after it, with `{passages}` and `{question}` behind.

        Raises:
            UnsupportedModelError: the template changes or drops the user's message.
        """
        self._tokenizer = tokenizer
        # Whether special tokens are looked for is a state of a tokenizer, which every call sets: two threads sharing
        # one would now and then take the template's special tokens for text. So texts have a tokenizer of their own.
        self._text_tokenizer = copy.deepcopy(tokenizer)
        # Those that only a chat template writes have no name, and are not among all_special_tokens.
        added = {it.content for it in tokenizer.added_tokens_decoder.values() if it.special}
        self._special_tokens = added.union(tokenizer.all_special_tokens)
        written = system_prompt + user_prompt
        chunks_mark, question_mark = _mark("chunks", written), _mark("question", written)
        user_turn = user_prompt.replace("{passages}", chunks_mark).replace("{question}", question_mark)
        rendered = _render(tokenizer, system_prompt, user_turn)
        before, _, rest = rendered.partition(chunks_mark)
        self._before_question, _, after_question = rest.partition(question_mark)
        if rendered.count(chunks_mark) != 1 or rest.count(question_mark) != 1:
            raise UnsupportedModelError("the model's chat template does not keep the user's message in one piece")
        self.prefix = (*_leading_bos(tokenizer), *self._with_special_tokens(before))
        self._after_question = self._with_special_tokens(after_question)

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        """Ids of a passage: its title, never its place, so they do not depend on where it stands."""
        # LlamaIndex shows metadata, which titles of its nodes are, without space around them.
        title = title.strip()
        return self.passage(f"[{title}]\n{text}" if title else text)

    def passage(self, text: str) -> tuple[int, ...]:
        """Ids of a passage as it is; what is between it and the next one included."""
        return self._plain(f"{text}\n\n")

    def question(self, question: str) -> tuple[int, ...]:
        """Ids from the question to where the answer starts."""
        return self._plain(self._before_question + question) + self._after_question

    def frame(self, question: str) -> Frame:
        """What stands around the passages when a question is asked about them."""
        return Frame(self.prefix, self.question(question))

    def frame_of(self, rendered: Callable[[str, str], str], question: str) -> Frame:
        """The same of a prompt that someone else words.

        A template may do what it likes with the question: cut it, look examples up by it, say more to long ones.
        Passages it must take as they are.

        Args:
            rendered: a whole prompt with its special tokens as text, such as from `render`, given what stands for the
                passages and for the question in it.
            question: what is asked; of this alone special tokens are only characters.

        Raises:
            SettingsError: the passages do not come in exactly once and unchanged.
            QuestionError: the question spells a special token, and the prompt holds something else made of it.
        """
        # Two paragraphs, as passages are several, so that a prompt that words each of them is told from others.
        passages_mark = "\n\n".join([_mark("chunks", question)] * 2)
        asked = rendered(passages_mark, question.strip())
        question_mark = _mark("question", question + asked)
        prompt = rendered(passages_mark, question_mark)
        # Chat templates may strip the ends of messages, and with them a question's, but not a mark.
        if prompt.replace(question_mark, question.strip()) != asked:
            if spelt := [it for it in self._special_tokens if it in question]:
                raise QuestionError(
                    f"the question spells {min(spelt)!r}, and the prompt template changes questions or adds to them by "
                    "what they say, so the model could take it for its own mark; word the question otherwise"
                )
            prompt = rendered(passages_mark, question)
        before, _, after = prompt.partition(passages_mark)
        if prompt.count(passages_mark) != 1 or _mark("chunks", question) in before + after:
            raise SettingsError("a prompt template must hold the passages exactly once, as they are")
        prefix = (*_leading_bos(self._tokenizer), *self._with_question(before.split(question_mark), question))
        return Frame(prefix, self._with_question(after.split(question_mark), question))

    def encode(self, text: str) -> list[int]:
        """Ids of a text by itself, for splitters that count."""
        return list(self._plain(text))

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation as the model's chat template writes it, up to where the answer starts.

        Args:
            messages: each with `role` and `content`. A model without a template gets the contents one after the other.
        """
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages)
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def formatted(self, text: str) -> tuple[int, ...]:
        """Ids of a whole prompt that already has its special tokens as text, such as from `render`."""
        return (*_leading_bos(self._tokenizer), *self._with_special_tokens(text))

    def _with_question(self, texts: list[str], question: str) -> tuple[int, ...]:
        """Ids of texts of a template with the question between them, which forms tokens with what is around it."""
        ids: tuple[int, ...] = ()
        for text in texts[:-1]:
            start = max((text.rfind(it) + len(it) for it in self._special_tokens if it in text), default=0)
            ids += self._with_special_tokens(text[:start]) + self._plain(text[start:] + question)
        return ids + self._with_special_tokens(texts[-1])

    def _plain(self, text: str) -> tuple[int, ...]:
        ids = self._text_tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        return tuple(ids)

    def _with_special_tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _mark(name: str, system_prompt: str) -> str:
    """A text that the system prompt does not hold, of characters no template touches.

    It has no whitespace at its ends, for templates that strip messages.
    """
    mark = f"@@ragcache:{name}@@"
    while mark in system_prompt:
        mark = f"@{mark}@"
    return mark


def _render(tokenizer: PreTrainedTokenizerBase, system_prompt: str, user_turn: str) -> str:
    if not tokenizer.chat_template:
        return "\n\n".join(filter(None, (system_prompt, f"{user_turn}\nAnswer:")))
    with_system = [{"role": "system", "content": system_prompt}, {"role": "user", "content": user_turn}]
    # Some families have no system role (Gemma, early Mistral) and say so by raising; the instruction then opens the
    # user's turn, as their own documentation has it.
    without_system = [{"role": "user", "content": f"{system_prompt}\n\n{user_turn}"}]
    for messages in (with_system, without_system) if system_prompt else ([with_system[1]],):
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError:
            continue
        if system_prompt.strip() in rendered:
            return str(rendered)
    raise UnsupportedModelError("the model's chat template takes neither a system prompt nor a user message")


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """A base model has no template to write BOS, but its tokenizer may add one to every text."""
    if tokenizer.chat_template or tokenizer.bos_token_id is None:
        return ()
    added = tokenizer("", verbose=False)["input_ids"]
    return (tokenizer.bos_token_id,) if tokenizer.bos_token_id in added[:1] else ()
