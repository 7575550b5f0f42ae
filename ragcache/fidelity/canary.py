"""A sample of answers is checked against a full prefill of the same prompt, after the reply and beside the requests."""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ragcache.errors import RagCacheError
from ragcache.fidelity.continuation import along
from ragcache.fidelity.divergence import Divergence, divergence
from ragcache.generate.engine import PreparedPrompt
from ragcache.generate.pool import CachePool
from ragcache.model.forward import Segment, forward
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.memory import memory_for
from ragcache.states.canary_report import CanaryReport

WAITING = 2
"""Answers that wait for their check at most; each keeps its prompt's KV cache for so long."""


@dataclass(frozen=True)
class _Drawn:
    """An answer to be checked."""

    prompt: PreparedPrompt = field(repr=False)
    answer: tuple[int, ...]


class Canary:
    """Checks a share of answers, one at a time, in a thread of its own.

    A check costs about what a full prefill does, and a request that arrives meanwhile shares the machine with it; so
    the share should be small.

    Attributes:
        on_finding: told what each answer that was drawn adds to the report, in whatever thread that is found.
    """

    def __init__(self, model: LanguageModel, pool: CachePool, rate: float, seed: int | None = None) -> None:
        """Start the thread, unless nothing is ever to be checked.

        Args:
            model: the model that answers.
            pool: where caches come from and go back to.
            rate: share of answers to check.
            seed: makes the choice of answers repeatable.
        """
        self.on_finding: Callable[[CanaryReport], None] = lambda _: None
        self._model = model
        self._pool = pool
        self._rate = rate
        self._draw = random.Random(seed)
        # `close` may be called by the garbage collector, in any thread and amid any statement of this class.
        self._lock = threading.RLock()
        self._report = CanaryReport()
        self._waiting: queue.Queue[_Drawn | None] = queue.Queue()
        self._open = rate > 0
        self._thread = threading.Thread(target=self._run, name="ragcache-canary", daemon=True)
        if self._open:
            self._thread.start()

    @property
    def report(self) -> CanaryReport:
        """What was found so far."""
        with self._lock:
            return self._report

    def offer(self, prompt: PreparedPrompt, answer: Sequence[int]) -> bool:
        """Leave an answer to be checked, if it is drawn and there is room; returns at once.

        Args:
            prompt: what it was decoded from.
            answer: its token ids.

        Returns:
            Whether the prompt's cache is the canary's from now on.
        """
        with self._lock:
            if not self._open or not answer or self._draw.random() >= self._rate:
                return False
            if self._waiting.qsize() >= WAITING:
                self._add(CanaryReport(skipped=1))
                return False
            self._waiting.put(_Drawn(prompt, tuple(answer)))
            return True

    def wait(self) -> None:
        """Until all that was drawn is checked."""
        self._waiting.join()

    def close(self) -> None:
        """End the thread, once the check that it is at is done; what still waits is skipped."""
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._waiting.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        while (drawn := self._waiting.get()) is not None:
            try:
                self._handle(drawn)
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

    def _handle(self, drawn: _Drawn) -> None:
        if not self._open:
            self._pool.give_back(drawn.prompt.cache)
            self._add(CanaryReport(skipped=1))
            return
        try:
            with memory_for("the check of an answer"):
                finding = _report_of(self._compare(drawn))
            if not math.isfinite(finding.kl_sum):
                # One such sum would hide all that is found before and after, and no database takes it.
                logging.getLogger(__name__).warning("an answer could not be checked: its logits are not finite")
                finding = CanaryReport(failed=1)
        except (RagCacheError, RuntimeError) as error:
            # No request is concerned.
            logging.getLogger(__name__).warning("an answer could not be checked: %s", error)
            finding = CanaryReport(failed=1)
        except Exception:  # whatever it is, the next check may succeed, and those who wait must not wait for ever
            logging.getLogger(__name__).exception("an answer could not be checked")
            finding = CanaryReport(failed=1)
        self._add(finding)

    def _compare(self, drawn: _Drawn) -> Divergence:
        """Distributions along the answer after the prompt as it was, against those after a full prefill of it."""
        given = self._along(drawn.prompt.cache, drawn.prompt.logits, drawn)
        token_ids = drawn.prompt.layout.token_ids
        cache = self._pool.take(len(token_ids) + len(drawn.answer))
        logits = forward(self._model, [Segment(self._model.tensor(token_ids), cache)])[0]
        return divergence(self._along(cache, logits, drawn), given)

    def _along(self, cache: KVCache, logits: Tensor, drawn: _Drawn) -> Tensor:
        # What was decoded lies behind the prompt.
        cache.length = len(drawn.prompt.layout.token_ids)
        try:
            return along(self._model, cache, logits, drawn.answer).logits
        finally:
            self._pool.give_back(cache)

    def _add(self, finding: CanaryReport) -> None:
        with self._lock:
            self._report = self._report.plus(finding)
        self.on_finding(finding)


def _report_of(found: Divergence) -> CanaryReport:
    """With one answer."""
    return CanaryReport(
        checked=1,
        tokens=len(found.kl),
        agreeing_tokens=sum(found.agrees),
        kl_sum=float(sum(found.kl)),
        worst_kl=float(found.worst_kl),
    )
