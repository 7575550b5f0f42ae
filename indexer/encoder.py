"""Chunks to encoded states, many chunks a forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.indexer.contexts import Block, P, Run, joined, pack
from ragcache.model.capture import capture_states
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.project import to_states
from ragcache.states.form import StateFormat
from ragcache.states.shard import entry_size


@dataclass(frozen=True)
class StateEncoder:
    """Runs chunks through the language model and encodes the states of each layer as they come by.

    Attributes:
        model: the model to run.
        prefix: KV cache of the prompt's prefix, which every chunk is encoded after.
        format: form and codec of each layer.
    """

    model: LanguageModel
    prefix: KVCache
    format: StateFormat

    def encode(self, blocks: Sequence[Block[P]], pass_tokens: int | None = None) -> list[dict[int, Tensor]]:
        """States of the chunks of some blocks.

        Args:
            blocks: they go through the model packed, and do not see each other.
            pass_tokens: most tokens in one forward pass, unless one sequence takes more; all in one pass by default.

        Returns:
            For each chunk, block by block, its stored layers, each a run of uint8 on the CPU. Of a chunk with several
            contexts the mean of its states in each is stored.

        Raises:
            EncodingError: the model gave NaN or infinity.
        """
        sequences = [sequence for block in blocks for sequence in block.sequences]
        gathered = _Gathered(self.format, [len(block.chunks) for block in blocks], [it.others for it in blocks])
        for together in pack(sequences, pass_tokens) if pass_tokens else [sequences]:
            self._run(together, gathered)
        return gathered.encoded

    def _run(self, sequences: Sequence[Run[P]], gathered: _Gathered) -> None:
        """One forward pass."""
        lengths = [len(chunk.token_ids) for it in sequences for chunk in it.chunks]
        stored = set(self.format.stored_layers)

        def receive(layer: int, hidden: Tensor) -> None:
            if layer in stored:
                states = to_states(self.format.layers[layer].form, self.model.decoder.layers[layer], hidden)
                gathered.add(layer, states.split(lengths, dim=1))

        capture_states(
            self.model,
            self.prefix,
            [joined(it.chunks) for it in sequences],
            receive,
            contexts=[joined(it.context) for it in sequences],
        )
        gathered.passed(len(lengths))

    def size(self, tokens: int, context_tokens: int = 0) -> int:
        """Bytes that a chunk takes in a shard."""
        return entry_size(self.format, tokens, context_tokens)

    def cost(self, tokens: int, context_tokens: int = 0) -> float:
        """FLOPs that computing a chunk's states takes once its context is there.

        Those of the context are left out: chunks that follow each other share them, and an answer that lacks the states
        recomputes the chunk alone.
        """
        return self.model.prefill_flops(self.prefix.length + context_tokens, tokens)


class _Gathered:
    """States of chunks as passes give them, encoded as soon as a chunk's are complete.

    Attributes:
        encoded: for each chunk its layers.
    """

    def __init__(
        self, format: StateFormat, chunks: Sequence[int], others: Sequence[Sequence[Sequence[object]]]
    ) -> None:
        """Wait for the chunks of some blocks.

        Args:
            format: what they are encoded to.
            chunks: of each block, how many.
            others: of each block and chunk the further contexts.
        """
        self._format = format
        self._owners: list[int] = []
        """Of whatever is run, in its order, the chunk."""
        first = 0
        for number, further in zip(chunks, others, strict=True):
            own = range(first, first + number)
            self._owners += own
            self._owners += [owner for owner, contexts in zip(own, further, strict=False) for _ in contexts]
            first += number
        self._needed = Counter(self._owners)
        self._waiting: dict[tuple[int, int], list[Tensor]] = {}
        self._done = 0
        self.encoded: list[dict[int, Tensor]] = [{} for _ in range(first)]

    def add(self, layer: int, parts: Sequence[Tensor]) -> None:
        """Take a layer's states `[parts, tokens, width]` of all that is run in a pass."""
        owners = self._owners[self._done : self._done + len(parts)]
        for owner in dict.fromkeys(owners):
            states = self._waiting.pop((owner, layer), [])
            states += [part for other, part in zip(owners, parts, strict=True) if other == owner]
            if len(states) == self._needed[owner]:
                self.encoded[owner][layer] = self._format.encode(layer, _mean(states)).cpu()
            else:
                # Those of the whole model would take room that the next pass needs.
                self._waiting[owner, layer] = [part.to("cpu", copy=True) for part in states]

    def passed(self, runs: int) -> None:
        """A pass over so many chunks is through."""
        self._done += runs


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Of states `[parts, tokens, width]`, summed up in float32, where the last of them is."""
    *_, last = parts
    if len(parts) == 1:
        return last
    return torch.stack([part.to(last.device, torch.float32) for part in parts]).mean(0).to(last.dtype)
