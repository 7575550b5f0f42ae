"""Chunks to encoded states, many chunks a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from ragcache.indexer.contexts import Block, P, joined
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

    def encode(self, blocks: Sequence[Block[P]]) -> list[dict[int, Tensor]]:
        """States of the chunks of some blocks.

        Args:
            blocks: they go through the model in one pass, packed, and do not see each other.

        Returns:
            For each chunk, block by block, its stored layers, each a run of uint8 on the CPU. Of a chunk with several
            contexts the mean of its states in each is stored.

        Raises:
            EncodingError: the model gave NaN or infinity.
        """
        sequences = [sequence for block in blocks for sequence in block.sequences]
        lengths = [len(chunk.token_ids) for _, chunks in sequences for chunk in chunks]
        places = [place for block_places in _places(blocks) for place in block_places]
        encoded: list[dict[int, Tensor]] = [{} for _ in places]
        stored = set(self.format.stored_layers)

        def receive(layer: int, hidden: Tensor) -> None:
            if layer not in stored:
                return
            states = to_states(self.format.layers[layer].form, self.model.decoder.layers[layer], hidden)
            parts = states.split(lengths, dim=1)
            for chunk, mine in zip(encoded, places, strict=True):
                chunk[layer] = self.format.encode(layer, _mean([parts[place] for place in mine])).cpu()

        capture_states(
            self.model,
            self.prefix,
            [joined(chunks) for _, chunks in sequences],
            receive,
            contexts=[joined(context) for context, _ in sequences],
        )
        return encoded

    def size(self, tokens: int, context_tokens: int = 0) -> int:
        """Bytes that a chunk takes in a shard."""
        return entry_size(self.format, tokens, context_tokens)

    def cost(self, tokens: int, context_tokens: int = 0) -> float:
        """FLOPs that computing a chunk's states takes once its context is there.

        Those of the context are left out: chunks that follow each other share them, and an answer that lacks the states
        recomputes the chunk alone.
        """
        return self.model.prefill_flops(self.prefix.length + context_tokens, tokens)


def _places(blocks: Sequence[Block[P]]) -> list[list[list[int]]]:
    """For each block and chunk of it, which of the chunks that are run it is: once in each of its contexts."""
    number = count()
    found = []
    for block in blocks:
        places = [[next(number)] for _ in block.chunks]
        for mine, contexts in zip(places, block.others, strict=False):
            mine += [next(number) for _ in contexts]
        found.append(places)
    return found


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Of states `[parts, tokens, width]`, summed up in float32."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.float() for part in parts]).mean(0).to(parts[0].dtype)
