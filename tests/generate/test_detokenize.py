from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.generate.detokenize import TextStream

if TYPE_CHECKING:
    from ragcache.model.language_model import LanguageModel

WORDS = ["the ", "Zürich", "漢字", "👩‍👩‍👧‍👦", " \n", "naïve", "…", "ab", "cab", "🇨🇭", "\t", "x" * 9, "1234", "é"]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join)


def stream(model: LanguageModel, text: str, stop: list[str]) -> tuple[list[str], TextStream]:
    pieces, stream = [], TextStream(model.tokenizer, stop)
    for token_id in model.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_pieces_add_up_and_hold_no_half_character(smollm: LanguageModel, text: str) -> None:
    pieces, _ = stream(smollm, text, [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(text=texts, stop=st.lists(st.sampled_from([*WORDS, "ca", "abc", "h", "Zürich漢"]), max_size=3))
def test_nothing_of_a_stop_string_comes_out(smollm: LanguageModel, text: str, stop: list[str]) -> None:
    pieces, out = stream(smollm, text, stop)
    ends = [text.find(word) for word in stop if word in text]
    assert "".join(pieces) == (text[: min(ends)] if ends else text)
    assert out.stopped == bool(ends)


def test_an_answer_cut_within_a_character_drops_the_half(smollm: LanguageModel) -> None:
    ids = smollm.tokenizer("a👩", add_special_tokens=False)["input_ids"]
    assert len(ids) > 2
    out = TextStream(smollm.tokenizer, [])
    pieces = [out.push(token_id) for token_id in ids[:-1]]
    assert "".join([*pieces, out.finish()]) == "a"


def test_special_tokens_are_no_text(smollm: LanguageModel) -> None:
    out = TextStream(smollm.tokenizer, [])
    ids = smollm.tokenizer("Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    assert "".join([out.push(i) for i in ids]) + out.finish() == "Hi"
