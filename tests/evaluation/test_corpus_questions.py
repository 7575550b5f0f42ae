"""Questions from the corpus: the same each time, and on what is special about a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache import Document, RagCache
from ragcache.errors import EvaluationError
from ragcache.evaluation.corpus_questions import corpus_questions
from ragcache.prompt.validity import check_question
from tests.conftest import make_document

PLAIN = "The boats in the harbour go out in the morning and the people of the town see them. "


@pytest.fixture
def towns(open_tiny: Callable[..., RagCache]) -> RagCache:
    cache = open_tiny()
    special = ["copper weathervane", "drowned orchard", "bishop's ledger", "salt auction", "glass organ", "tar kiln"]
    cache.index([Document(f"town-{i}", PLAIN + f"They know the {it}. " + PLAIN) for i, it in enumerate(special)])
    return cache


def test_they_name_what_no_other_document_has(towns: RagCache) -> None:
    texts = {it.text for it in corpus_questions(towns.store.catalog, 6, seed=0)}
    assert 'What does "town-0" say about copper weathervane?' in texts
    assert """What does "town-2" say about bishop's ledger?""" in texts
    assert len(texts) == 6


def test_the_same_seed_gives_the_same_questions(towns: RagCache) -> None:
    catalog = towns.store.catalog
    assert corpus_questions(catalog, 3, seed=1) == corpus_questions(catalog, 3, seed=1)
    assert len({corpus_questions(catalog, 3, seed=seed)[0] for seed in range(9)}) > 1


def test_documents_take_turns(cache: RagCache) -> None:
    # Every sentence of these is in every document, so nothing stands out but their titles.
    questions = corpus_questions(cache.store.catalog, 50, seed=0)
    assert {it.text for it in questions[:3]} == {f'What is "Harbour {number}" about?' for number in range(3)}
    for question in questions:
        check_question(question.text)


def test_of_nothing_no_question_is_made(open_tiny: Callable[..., RagCache], tmp_path: Path) -> None:
    cache = open_tiny()
    cache.index([make_document(0)])
    cache.delete("doc-0")
    with pytest.raises(EvaluationError, match="no texts"):
        corpus_questions(cache.store.catalog, 5, seed=0)
