"""The embedding model, through LlamaIndex's HuggingFaceEmbedding."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import UnsupportedModelError, VectorsError
from ragcache.model.digest import file_digest
from ragcache.model.quiet import no_progress_bars
from ragcache.model.resolve import resolve, weight_files

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

Vectors = NDArray[np.float32]

SAME = 0.98
"""Least cosine of a text's vectors of one model; on other devices and in other precisions they differ a little."""


class Embedder:
    """Texts to unit vectors.

    Attributes:
        name: what the user called the model.
        digest: sha256 over its weights; vectors of different models do not compare.
        dimension: length of a vector.
    """

    def __init__(self, name: str, device: str, cache_folder: Path, batch_size: int = 32) -> None:
        """Load the model.

        Raises:
            ModelNotFoundError: nothing of that name.
            UnsupportedModelError: it is no embedding model.
        """
        # Imported here: it takes seconds, and the command line has things to say before that.
        from llama_index.core.node_parser import SentenceSplitter
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding

        logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
        folder = resolve(name)
        if folder.is_file():
            raise UnsupportedModelError(
                f"{name} cannot embed; give a folder or hub id of a sentence-transformers model"
            )
        try:
            with no_progress_bars():
                self._model = HuggingFaceEmbedding(
                    model_name=str(folder), device=device, embed_batch_size=batch_size, normalize=True
                )
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UnsupportedModelError(f"{name} cannot be loaded as an embedding model: {reason}") from error
        # Without padding and truncation, as far as the model itself reads; two places go to special tokens.
        tokenizer = self._model._model.tokenizer
        self._window_splitter = SentenceSplitter(
            chunk_size=self._model.max_length - 2,
            chunk_overlap=0,
            tokenizer=lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        )
        self.name = name
        weights = "\n".join(file_digest(file, cache_folder) for file in weight_files(folder))
        self.digest = hashlib.sha256(weights.encode()).hexdigest()
        self.dimension = len(self._model.get_text_embedding("dimension"))

    def passages(self, texts: Sequence[str]) -> tuple[list[int], Vectors]:
        """Embed passages; a long one gets several vectors.

        An embedding model silently cuts off what is beyond its window, 256 word pieces for all-MiniLM-L6-v2, which is
        half a chunk. So a text is embedded window by window, and is found by whichever fits a question best.

        Returns:
            For each vector the index of its text, and the vectors, `[vectors, dimension]`.
        """
        windows = [self._windows(text) for text in texts]
        owners = [index for index, parts in enumerate(windows) for _ in parts]
        vectors = self._model.get_text_embedding_batch([part for parts in windows for part in parts])
        return owners, np.asarray(vectors, dtype=np.float32).reshape(len(owners), self.dimension)

    @property
    def llama_index(self) -> BaseEmbedding:
        """The same model for LlamaIndex."""
        model: BaseEmbedding = self._model
        return model

    def check_same(self, text: str, vector: Sequence[float]) -> None:
        """Make sure that a vector of a text is this model's.

        Raises:
            VectorsError: it is not.
        """
        own = np.asarray(self._model.get_text_embedding(text), dtype=np.float32)
        given = np.asarray(vector, dtype=np.float32)
        alike = given.shape == own.shape and np.dot(own, given) > SAME * np.linalg.norm(own) * np.linalg.norm(given)
        if not alike:
            raise VectorsError(
                f"the vectors given are not those of {self.name}, which the store embeds with; embed with the same "
                "model: embed_model of the vector store, or open the store with that embedding_model"
            )

    def question(self, question: str) -> Vectors:
        """Embed a question, `[1, dimension]`; some models put an instruction in front of it."""
        return np.asarray([self._model.get_query_embedding(question)], dtype=np.float32)

    def _windows(self, text: str) -> list[str]:
        return self._window_splitter.split_text(text) or [text]
