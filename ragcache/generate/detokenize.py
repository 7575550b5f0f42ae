"""Text from tokens as they come: never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one answer's tokens into pieces of text.

    Attributes:
        stopped: a stop string was seen; nothing comes after it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._ids: list[int] = []
        # Ids before `_start` are given out; those from `_start` to `_end` are too, but are decoded along with what
        # follows, because many tokenizers strip or add a space at the start of a text.
        self._start = 0
        self._end = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._end])
        text = self._decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start, self._end = self._end, len(self._ids)
        return self._release(text[len(before) :], final=False)

    def finish(self) -> str:
        """The rest, when no more tokens come; bytes that did not become a character are dropped."""
        before = self._decode(self._ids[self._start : self._end])
        rest = self._decode(self._ids[self._start :])[len(before) :]
        return self._release(rest.rstrip(REPLACEMENT), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        """Hold back what may be the start of a stop string; cut at the first whole one."""
        if self.stopped:
            return ""
        self._held += text
        found = [position for stop in self._stop if (position := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            released, self._held = self._held[: min(found)], ""
            return released
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    return max(
        (size for size in range(1, min(len(text), len(stop) - 1) + 1) if text.endswith(stop[:size])),
        default=0,
    )
