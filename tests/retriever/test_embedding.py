from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ragcache.errors import ModelNotFoundError, UnsupportedModelError
from ragcache.retriever.embedding import Embedder


def test_related_texts_are_near(embedder: Embedder) -> None:
    owners, texts = embedder.passages(
        ["Cats sleep all day.", "The bank raised interest rates.", "A kitten naps on the sofa."]
    )
    assert owners == [0, 1, 2]
    assert texts.shape == (3, embedder.dimension)
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1, atol=1e-5)
    question = embedder.question("What do cats do?")
    scores = (texts @ question.T)[:, 0]
    assert scores[1] < scores[2] < scores[0]


def test_the_end_of_a_long_text_is_found_as_its_start_is(embedder: Embedder) -> None:
    """Beyond 256 word pieces all-MiniLM-L6-v2 reads nothing."""
    filler = "The committee met again and adjourned without a result. " * 40
    text = f"Cats sleep all day. {filler} The lighthouse was lit in 1871."
    owners, vectors = embedder.passages(["Something else entirely.", text, ""])
    assert owners[0] == 0
    assert owners[-1] == 2
    assert set(owners[1:-1]) == {1}
    assert len(owners) == 4
    for question, window in (("What do cats do?", 1), ("When was the lighthouse lit?", 2)):
        scores = (vectors @ embedder.question(question).T)[:, 0]
        assert scores.argmax() == window
        assert scores[window] > np.delete(scores, window).max() + 0.1


def test_the_digest_is_of_the_weights(embedder: Embedder, cache_folder: Path) -> None:
    assert len(embedder.digest) == 64
    assert Embedder("all-minilm-l6-v2", "cpu", cache_folder).digest == embedder.digest


def test_no_such_model(cache_folder: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        Embedder("nobody/no-such-embedder", "cpu", cache_folder)


def test_a_gguf_file_cannot_embed(cache_folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot embed"):
        Embedder("smollm2-135m", "cpu", cache_folder)
