"""One question: the full prefill, and the same token ids composed with each setting."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ragcache.evaluation.grid import Setting
from ragcache.evaluation.passages import Asked, content_digest, encodings_of
from ragcache.evaluation.record import Record
from ragcache.evaluation.versions import computing_versions
from ragcache.fidelity.continuation import Continuation, along, greedy, parted
from ragcache.fidelity.divergence import divergence
from ragcache.generate.engine import PreparedPrompt
from ragcache.pipeline import RagCache
from ragcache.prompt.layout import Layout
from ragcache.restore.measure import processor_name
from ragcache.stream import milliseconds_since

FIGURES = 3
"""Raised when figures come to mean something else, so that older ones are not taken for them."""


@dataclass(frozen=True)
class Reference:
    """What a full prefill of some token ids leads to.

    Attributes:
        answer: greedy, with its distributions.
        prefill_ms: from the token ids to the first token.
    """

    answer: Continuation
    prefill_ms: float


class Measurement:
    """Measures settings on one opened store."""

    def __init__(self, cache: RagCache, max_tokens: int) -> None:
        """Set up.

        Args:
            cache: the store with its models.
            max_tokens: of an answer.
        """
        self._cache = cache
        self._max_tokens = max_tokens

    def key(self, asked: Asked, setting: Setting) -> str:
        """Digest of all that the figures depend on (sha256, hexadecimal).

        Times depend on what computes, and are reported together with it.
        """
        device = self._cache.model.device
        parts = [
            FIGURES,
            [device.type, processor_name(device), computing_versions()],
            self._cache.model.fingerprint.digest,
            self._cache.template.prefix,
            asked.question.text,
            content_digest(asked.chunks, setting.encodings),
            # A passage without states is encoded as the store's settings say.
            None if all(map(encodings_of, asked.chunks)) else self._cache.engine.format.to_json(),
            setting.model_dump(),
            self._max_tokens,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def records(self, ways: Iterable[tuple[Asked, Setting]]) -> Iterator[Record]:
        """Measure a question with some settings, one after the other.

        Every order of the passages is a prompt of its own, so it has its own full prefill to be compared with, which
        is timed between the composed ones.

        Args:
            ways: settings, each with the question and the passages that it is measured on.
        """
        references: dict[tuple[int, ...], Reference] = {}
        for asked, setting in ways:
            # Whatever comes for the first time reads from the disk; times are those of a warm server.
            self._give_back(self._composed(asked, setting)[1])
            clock = time.perf_counter()
            layout, prompt = self._composed(asked, setting)
            composed_ms = _until_first_token(prompt, clock)
            try:
                token_ids = tuple(layout.token_ids)
                if token_ids not in references:
                    references[token_ids] = self._reference(layout)
                yield self._record(asked, setting, layout, prompt, composed_ms, references[token_ids])
            finally:
                self._give_back(prompt)

    def warm_up(self, asked: Asked) -> None:
        """Run a full prefill as long as those to come, so that the first one is not slower than the others."""
        layout = self._cache.answering.lay_out(asked.question.text, asked.chunks, self._max_tokens)
        self._reference(layout)

    def _composed(self, asked: Asked, setting: Setting) -> tuple[Layout, PreparedPrompt]:
        return self._cache.answering.prepare(asked.question.text, asked.chunks, setting.query(self._max_tokens))

    def _reference(self, layout: Layout) -> Reference:
        whole = Layout((), (), (), (), (), tuple(layout.token_ids), layout.answer_room)
        clock = time.perf_counter()
        prompt = self._cache.engine.prepare(whole, [], "none")
        prefill_ms = _until_first_token(prompt, clock)
        try:
            answer = greedy(self._cache.model, prompt.cache, prompt.logits, layout.answer_room)
        finally:
            self._give_back(prompt)
        return Reference(answer, prefill_ms)

    def _record(
        self,
        asked: Asked,
        setting: Setting,
        layout: Layout,
        prompt: PreparedPrompt,
        composed_ms: float,
        reference: Reference,
    ) -> Record:
        model, report = self._cache.model, prompt.report
        given = along(model, prompt.cache, prompt.logits, reference.answer.token_ids)
        found = divergence(reference.answer.logits, given.logits)
        answer = parted(model, prompt.cache, given, layout.answer_room)
        return Record(
            key=self.key(asked, setting),
            question=asked.question.text,
            setting=setting,
            chunk_ids=tuple(asked.chunks[index].chunk_id for index in layout.kept),
            dropped=tuple(asked.chunks[index].chunk_id for index in layout.dropped),
            prompt_tokens=len(layout.token_ids),
            restored_tokens=report.restored_tokens,
            prefilled_tokens=report.prefilled_tokens,
            repaired_tokens=report.repaired_tokens,
            repair_ms=report.repair_ms,
            misses=tuple(miss.reason for miss in report.misses),
            retrieve_ms=asked.retrieve_ms,
            ttft_ms=asked.retrieve_ms + composed_ms,
            full_ttft_ms=asked.retrieve_ms + reference.prefill_ms,
            kl=found.kl,
            agrees=found.agrees,
            answer=self._text(answer),
            full_answer=self._text(reference.answer.token_ids),
        )

    def _text(self, token_ids: tuple[int, ...]) -> str:
        return str(self._cache.model.tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()

    def _give_back(self, prompt: PreparedPrompt) -> None:
        self._cache.engine.pool.give_back(prompt.cache)


def _until_first_token(prompt: PreparedPrompt, clock: float) -> float:
    """Milliseconds until the first token of the answer is known."""
    int(prompt.logits.argmax())
    return milliseconds_since(clock)
