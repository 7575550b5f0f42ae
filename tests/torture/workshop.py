"""Models loaded once, stores opened at will, and work done in forked processes."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import faiss
import numpy as np
import torch
from transformers import AutoTokenizer

import ragcache.pipeline
from ragcache import Document, RagCache
from ragcache.indexer.splitting import Splitter
from ragcache.model.gguf import convert
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.model.resolve import resolve
from ragcache.prompt.template import PromptTemplate
from ragcache.retriever.embedding import Embedder, Vectors
from ragcache.settings import Settings, load_settings
from ragcache.states.locked import LockedStore
from tests.conftest import save_tiny_model

CHILD_SECONDS = 120
"""After which a forked process that hangs is ended."""

T = TypeVar("T")


class RememberingEmbedder(Embedder):
    """Embeds each text once, so that a forked process need not do again what its parent did before the fork."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._passages: dict[str, Vectors] = {}
        self._questions: dict[str, Vectors] = {}

    def passages(self, texts: Sequence[str]) -> tuple[list[int], Vectors]:
        """As of any embedder."""
        for text in texts:
            if text not in self._passages:
                self._passages[text] = super().passages([text])[1]
        owners = [index for index, text in enumerate(texts) for _ in self._passages[text]]
        found = [self._passages[text] for text in texts]
        return owners, np.concatenate(found) if found else np.empty((0, self.dimension), dtype=np.float32)

    def question(self, question: str) -> Vectors:
        """As of any embedder."""
        if question not in self._questions:
            self._questions[question] = super().question(question)
        return self._questions[question]


@dataclass(frozen=True)
class Workshop:
    """What every process needs, loaded before the first fork.

    Attributes:
        model: a tiny random Llama.
        embedder: the default one.
        given: settings of stores, besides or instead of those that all have.
    """

    model: LanguageModel
    embedder: Embedder
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Workshop:
        """Load the models; from now on this process runs on one thread, as forked ones must."""
        torch.set_num_threads(1)
        faiss.omp_set_num_threads(1)
        folder = load_settings().cache_folder
        tokenizer = AutoTokenizer.from_pretrained(convert(resolve("smollm2-135m"), "float32", folder))
        with tempfile.TemporaryDirectory() as tiny:
            save_tiny_model("llama", Path(tiny), tokenizer)
            model = load_language_model(tiny, dtype="float32", device="cpu", cache_folder=folder)
        # Making one copies the tokenizer; they hold nothing that a job could change.
        remembered: Any = functools.cache(PromptTemplate)
        mock.patch.object(ragcache.pipeline, "PromptTemplate", remembered).start()
        return cls(model, RememberingEmbedder("all-minilm-l6-v2", "cpu", folder))

    def warm_up(self, documents: Iterable[Document], questions: Iterable[str]) -> None:
        """Do before the first fork what every forked process would have to do: embed, import, fill caches."""
        with tempfile.TemporaryDirectory() as folder:
            settings = self.settings(Path(folder))
            splitter = Splitter(self.open(Path(folder)).template, settings.chunk_tokens, settings.chunk_overlap)
        self.embedder.passages([piece.text for document in documents for piece in splitter.split(document)])
        for question in questions:
            self.embedder.question(question)
        gc.collect()
        gc.freeze()

    def settings(self, path: Path) -> Settings:
        """Settings of a store of small chunks and raw states, best chunk first; of one encoding unless given."""
        given: dict[str, Any] = {"model": "tiny", "dtype": "float32", "codec": "raw", "chunk_tokens": 64}
        given |= {"encodings": ("alone",), "order": "score", "batch_tokens": 128, "free_megabytes": 0, "max_tokens": 4}
        return load_settings(path, **given | dict(self.given))

    def open(self, path: Path) -> RagCache:
        """Open a store, or prepare to make one."""
        return RagCache(path, self.settings(path), self.model, self.embedder)


@contextmanager
def limits(shard_bytes: int, budget_bytes: int = 0) -> Iterator[None]:
    """Smaller shards and budgets than settings allow, so that little text makes many commits."""

    enter = LockedStore.__enter__

    def enter_with_limits(locked: LockedStore) -> LockedStore:
        locked.options = replace(locked.options, shard_bytes=shard_bytes, budget_bytes=budget_bytes)
        return enter(locked)

    with mock.patch.object(LockedStore, "__enter__", enter_with_limits):
        yield


class ForkError(Exception):
    """A forked process failed; the message is its traceback."""


def in_a_fork(work: Callable[[], T]) -> T | None:
    """Do something in a forked process.

    Returns:
        What it gave back; `None` when the process was killed.

    Raises:
        ForkError: it raised an exception, or was ended because it hung.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        signal.alarm(CHILD_SECONDS)
        try:
            outcome = pickle.dumps((work(), None))
        except BaseException:  # noqa: BLE001
            outcome = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(outcome)
        # Neither clean-up nor buffers of the parent's concern this process.
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGKILL:
            return None
        raise ForkError(f"ended by signal {os.WTERMSIG(status)}")
    result, error = pickle.loads(content)  # noqa: S301
    if error is not None:
        raise ForkError(error)
    return result  # type: ignore[no-any-return]
