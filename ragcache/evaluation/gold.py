"""Answers compared with gold answers as in SQuAD's evaluation (Rajpurkar et al., arXiv 1606.05250, section 6.1)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """In lower case, without punctuation and articles, with single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1 if the answer is one of the gold answers, else 0."""
    return float(any(normalised(answer) == normalised(it) for it in gold))


def token_f1(answer: str, gold: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the answer's words, against the gold answer it is nearest to.

    Args:
        answer: given.
        gold: at least one.
    """
    return max(_f1(normalised(answer).split(), normalised(it).split()) for it in gold)


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))
