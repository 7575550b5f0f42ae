"""Chunks to encoded states, many chunks a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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

    def encode(self, chunks: Sequence[Sequence[int]]) -> list[dict[int, Tensor]]:
        """States of some chunks.

        Args:
            chunks: token ids of each chunk; they go through the model in one pass, packed.

        Returns:
            For each chunk its stored layers, each a run of uint8 on the CPU.

        Raises:
            EncodingError: the model gave NaN or infinity.
        """
        lengths = [len(chunk) for chunk in chunks]
        encoded: list[dict[int, Tensor]] = [{} for _ in chunks]
        stored = set(self.format.stored_layers)

        def receive(layer: int, hidden: Tensor) -> None:
            if layer not in stored:
                return
            states = to_states(self.format.layers[layer].form, self.model.decoder.layers[layer], hidden)
            for chunk, part in zip(encoded, states.split(lengths, dim=1), strict=True):
                chunk[layer] = self.format.encode(layer, part).cpu()

        capture_states(self.model, self.prefix, chunks, receive)
        return encoded

    def size(self, tokens: int) -> int:
        """Bytes that a chunk takes in a shard."""
        return entry_size(self.format, tokens)

    def cost(self, tokens: int) -> float:
        """FLOPs that encoding a chunk takes."""
        return self.model.prefill_flops(self.prefix.length, tokens)
