"""Questions and settings that no prompt can be made of."""

from __future__ import annotations

from ragcache.errors import QuestionError, SettingsError


def check_room(prefix: int, chunk: int, window: int) -> None:
    """Make sure that a chunk fits beside the prompt's prefix.

    Args:
        prefix: tokens of the prefix.
        chunk: tokens of the largest chunk.
        window: tokens of the model's context window.

    Raises:
        SettingsError: it does not.
    """
    if prefix >= window:
        raise SettingsError(
            f"the system prompt takes {prefix} tokens, and the model's context window is {window}; shorten it"
        )
    if prefix + chunk >= window:
        raise SettingsError(
            f"chunk_tokens is {chunk}, and beside the system prompt the model's context window of {window} has room "
            f"for {window - prefix}; choose a smaller chunk_tokens"
        )


def check_question(question: str) -> None:
    """Make sure that something is asked.

    Raises:
        QuestionError: nothing is, or it is no Unicode.
    """
    if not isinstance(question, str):
        raise QuestionError(f"the question is no text but {type(question).__name__}; give a str")
    if not question.strip():
        raise QuestionError("the question is empty; ask something")
    if not is_unicode(question):
        raise QuestionError("the question holds half a surrogate pair; send valid Unicode")


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
