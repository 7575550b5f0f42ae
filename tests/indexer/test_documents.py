"""Documents that come split: each passage is one chunk as it is, and what makes no sense is refused before anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ragcache import Document, RagCache
from ragcache.errors import SourceError
from ragcache.indexer.documents import MOST_NESTING, Passage, checked
from ragcache.indexer.encoder import StateEncoder
from ragcache.states.records import ChunkRecord

OpenTiny = Callable[..., RagCache]

PASSAGES = (
    Passage("p-1", "The ferry leaves at seven.", "Timetable\nThe ferry leaves at seven.", metadata={"page": 1}),
    Passage("p-2", "In winter it does not.", embedding_text="The ferry does not leave in winter."),
)
DOCUMENT = Document("timetable", "", metadata={"port": "north"}, passages=PASSAGES)


def chunks(cache: RagCache) -> list[ChunkRecord]:
    return [chunk for batch in cache.store.catalog.all_chunks() for chunk in batch]


def test_each_passage_is_one_chunk_as_it_is(open_tiny: OpenTiny) -> None:
    cache = open_tiny(chunk_tokens=32)
    long = Passage("p-3", "A very long passage. " * 60)
    report = cache.index([replace(DOCUMENT, passages=(*PASSAGES, long))])
    assert report.chunks == 3
    found = chunks(cache)
    assert [(it.chunk_id, it.ordinal, it.text, it.metadata) for it in found] == [
        ("p-1", 0, PASSAGES[0].text, {"port": "north", "page": 1}),
        ("p-2", 1, PASSAGES[1].text, {"port": "north"}),
        ("p-3", 2, long.text, {"port": "north"}),
    ]
    assert [it.token_ids for it in found] == [
        cache.template.passage(text) for text in (PASSAGES[0].prompt_text, PASSAGES[1].text, long.text)
    ]
    assert [it.embedded for it in found] == [PASSAGES[0].text, PASSAGES[1].embedding_text, long.text]
    assert cache.retrieve(PASSAGES[1].embedding_text, 1)[0].score == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "changed",
    [
        {"id": "p-9"},
        {"text": "It leaves at eight."},
        {"prompt_text": "It leaves at eight."},
        {"embedding_text": "Eight."},
        {"metadata": {"page": 2}},
    ],
)
def test_whatever_changes_in_a_passage_counts(open_tiny: OpenTiny, changed: dict[str, Any]) -> None:
    cache = open_tiny()
    cache.index([DOCUMENT])
    assert cache.index([DOCUMENT]).unchanged == 1
    passage = replace(PASSAGES[0], **changed)
    report = cache.index([replace(DOCUMENT, passages=(passage, PASSAGES[1]))])
    assert report.updated == 1
    assert (report.encoded_tokens > 0) == ("prompt_text" in changed)
    found = chunks(cache)[0]
    assert (found.chunk_id, found.text, found.own_metadata) == (passage.id, passage.text, passage.metadata)
    assert found.embedded == passage.embedding_text or passage.text


def test_passages_without_text_are_passed_over(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    report = cache.index([DOCUMENT, Document("blank", "", passages=(Passage("p-9", " \n"),))])
    assert report.empty == ("blank",)
    assert [it.chunk_id for it in chunks(cache)] == ["p-1", "p-2"]


def test_a_document_that_comes_to_be_without_passages_goes(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    none = replace(DOCUMENT, passages=())
    assert (cache.index([none, Document("a", "Text.")]).added, chunks(cache)[0].document_id) == (1, "a")
    cache.index([DOCUMENT])
    report = cache.index([none, Document("a", "Text.")], remove_missing=True)
    assert (report.removed, report.unchanged, report.updated, report.empty) == (1, 1, 0, ())
    assert set(cache.store.catalog.signatures()) == {"a"}
    assert [hit.chunk.document_id for hit in cache.retrieve("ferry", 9)] == ["a"]


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels - 1):
        value = [value]
    return {"deep": value}


BAD = {
    "has a text and passages": replace(DOCUMENT, text="A text."),
    "passage has an empty id": replace(DOCUMENT, passages=(Passage("", "Text."),)),
    "passage id 'p-1' comes twice": replace(DOCUMENT, passages=(PASSAGES[0], PASSAGES[0])),
    "'id' of passage 3": replace(DOCUMENT, passages=(Passage(3, "Text."),)),  # type: ignore[arg-type]
    "'text' of passage 'p-1'": replace(DOCUMENT, passages=(replace(PASSAGES[0], text=None),)),  # type: ignore[arg-type]
    "'prompt_text' of": replace(DOCUMENT, passages=(replace(PASSAGES[0], prompt_text=b""),)),  # type: ignore[arg-type]
    "'embedding_text' of": replace(DOCUMENT, passages=(replace(PASSAGES[0], embedding_text=1),)),  # type: ignore[arg-type]
    "passage 'p-1' of document 'timetable' holds half": replace(
        DOCUMENT, passages=(replace(PASSAGES[0], prompt_text="\ud800"),)
    ),
    "keys are texts": replace(DOCUMENT, passages=(replace(PASSAGES[0], metadata={1: 2}),)),  # type: ignore[dict-item]
    "must be an object": replace(DOCUMENT, passages=(replace(PASSAGES[0], metadata=[]),)),  # type: ignore[arg-type]
    "is not JSON": replace(DOCUMENT, passages=(replace(PASSAGES[0], metadata={"a": object()}),)),
    f"more than {MOST_NESTING} deep": replace(
        DOCUMENT, passages=(replace(PASSAGES[0], metadata=nested(MOST_NESTING + 1)),)
    ),
    r"takes \d+ tokens, and the model's context window": replace(
        DOCUMENT, passages=(PASSAGES[0], Passage("p-9", "ferry " * 5000))
    ),
    r"passage 'p-8' takes": replace(DOCUMENT, passages=(Passage("p-8", "Short.", prompt_text="ferry " * 5000),)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_makes_no_sense_is_refused_before_anything_is_encoded(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    cache = open_tiny()
    cache.index([Document("before", "What was there.")])

    def encode(self: StateEncoder, *arguments: object) -> None:
        pytest.fail("something was encoded")

    monkeypatch.setattr(StateEncoder, "encode", encode)
    with pytest.raises(SourceError, match=message):
        cache.index([Document("good", "A good document."), BAD[message]])
    assert set(cache.store.catalog.signatures()) == {"before"}


def test_the_deepest_metadata_and_the_longest_passage_are_taken(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    room = cache.model.context_window - len(cache.template.prefix)
    words = " ferry" * room
    while len(cache.template.passage(words)) >= room:
        words = words[: -len(" ferry")]
    passage = Passage("p-1", words, metadata=nested(MOST_NESTING))
    cache.index([replace(DOCUMENT, passages=(passage,))])
    assert len(chunks(cache)[0].token_ids) == room - 1
    assert chunks(cache)[0].own_metadata == passage.metadata
    with pytest.raises(SourceError, match="split it smaller"):
        cache.index([replace(DOCUMENT, passages=(Passage("p-2", f"{words} ferry"),))])


def test_ids_of_passages_are_unique_in_the_store(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index([DOCUMENT])
    with pytest.raises(SourceError, match=r"'p-1' of document 'other' is in the store already.*'timetable'"):
        cache.index([Document("other", "", passages=(Passage("p-1", "Another text."),))])
    assert [it.document_id for it in chunks(cache)] == ["timetable", "timetable"]
    # Within one run likewise.
    with pytest.raises(SourceError, match="comes twice"):
        list(checked([DOCUMENT, replace(DOCUMENT, id="other")], "here"))


def test_a_file_whose_chunks_have_ids_of_passages_is_refused(open_tiny: OpenTiny) -> None:
    cache = open_tiny()
    cache.index([Document("other", "", passages=(Passage("a.md#0", "A passage."),))])
    with pytest.raises(SourceError, match=r"'a\.md#0'"):
        cache.index([Document("a.md", "The text of a file.")])
    assert [it.text for it in chunks(cache)] == ["A passage."]
    assert cache.retrieve("passage", 3)[0].chunk.text == "A passage."
