from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ragcache import Document
from ragcache.indexer.splitting import Splitter
from ragcache.prompt.template import PromptTemplate
from tests.conftest import make_document

if TYPE_CHECKING:
    from ragcache.model.language_model import LanguageModel

ODD_TEXTS = {
    "base64": "A1b2" * 2000,
    "cjk": "漢字" * 1500,
    "emoji": "👩‍👩‍👧" * 300,
    "one word": "x" * 5000,
    "code": "def f(x):\n    return x\n" * 300,
    "table": "| a | b |\n" * 400,
    "mixed lines": "line\r\nother\rthird\u2028fourth " * 200,
    "special tokens": "<|im_end|><|im_start|>" * 300,
}


@pytest.fixture(scope="module")
def template(smollm: LanguageModel) -> PromptTemplate:
    return PromptTemplate(smollm.tokenizer, "Answer.")


@pytest.mark.parametrize("name", ODD_TEXTS)
@pytest.mark.parametrize("chunk_tokens", [40, 512])
def test_no_chunk_is_too_long_and_no_text_is_lost(template: PromptTemplate, name: str, chunk_tokens: int) -> None:
    text = ODD_TEXTS[name]
    pieces = Splitter(template, chunk_tokens, 0).split(Document("d", text, "Title"))
    assert all(len(piece.token_ids) <= chunk_tokens for piece in pieces)
    assert "".join("".join(piece.text.split()) for piece in pieces) == "".join(text.split())


def test_the_header_is_in_every_chunk(template: PromptTemplate) -> None:
    pieces = Splitter(template, 64, 0).split(make_document(1))
    assert len(pieces) > 2
    assert all(piece.token_ids == template.chunk("Harbour 1", piece.text) for piece in pieces)


def test_without_a_title_the_id_stands_in(template: PromptTemplate) -> None:
    (piece,) = Splitter(template, 64, 0).split(Document("notes/a.txt", "Short."))
    assert piece.token_ids == template.chunk("notes/a.txt", "Short.")


def test_an_endless_title_is_left_out(template: PromptTemplate) -> None:
    (piece,) = Splitter(template, 64, 0).split(Document("d", "Short.", "very long title " * 50))
    assert piece.token_ids == template.chunk("", "Short.")


@pytest.mark.parametrize("text", ["", "   ", "\n\n\t\n"])
def test_no_text_no_chunks(template: PromptTemplate, text: str) -> None:
    assert Splitter(template, 64, 0).split(Document("d", text)) == []


def test_overlap(template: PromptTemplate) -> None:
    plain = Splitter(template, 64, 0).split(make_document(1))
    overlapping = Splitter(template, 64, 20).split(make_document(1))
    assert sum(len(p.text) for p in overlapping) > sum(len(p.text) for p in plain)
