"""The one way the model is run: a forward over packed new tokens.

The new tokens of one or several sequences lie in one row, so the linear layers see a single large matrix and
nothing is padded. Each sequence's keys and values go into its own `KVCache`, and its queries attend to that
alone. Encoding chunks at index time, prefilling a question, computing tokens amid a prompt again and decoding are all
calls of `forward`.

transformers is told through three of its own doors: a `Cache` whose `update` writes into the sequences' buffers,
an attention function (`ragcache.model.packed_attention`), and a 4-dimensional attention mask that makes its mask
code step aside. The packed batch itself travels as a keyword argument, so nothing global changes and several
threads may run the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ragcache.errors import UnsupportedModelError
from ragcache.model.attention_mass import AttentionMass
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.masks import CausalMasks, Positions, as_positions, to_tensor

CUT_OFF = "a model whose layers do not hand keyword arguments on to their attention is not supported"

Capture = Callable[[int, Tensor], None]
"""Called with a layer's index and its attention's input, `[tokens of all segments, hidden_size]`."""


class EnoughLayersError(Exception):
    """Ends a forward pass from within; never leaves `run_layers`."""


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence.

    Attributes:
        token_ids: `[tokens]`.
        cache: the sequence's cache.
        before_layer: called with a layer's index before the new tokens are written to the cache there and attend to
            it, so that its past may come into being layer by layer.
        slots: positions of the new tokens, ascending. What the cache holds there is replaced; those behind its length
            leave no gap. `None` for the positions from `cache.length` on.
        mass: gathers how much the new tokens attend to each slot.
    """

    token_ids: Tensor
    cache: KVCache
    before_layer: Callable[[int], None] | None = None
    slots: tuple[int, ...] | None = None
    mass: AttentionMass | None = None

    @property
    def positions(self) -> Positions:
        """Of the new tokens, as long as the pass has not made the cache longer."""
        if self.slots is not None:
            return as_positions(self.slots)
        return range(self.cache.length, self.cache.length + len(self.token_ids))


@dataclass(frozen=True)
class PackedBatch:
    """Segments laid in one row.

    Attributes:
        segments: at least one.
        windows: sliding window of each of the model's layers.
        capture: receives each layer's input, if there is one.
        layers: after how many layers' inputs the pass ends; `None` for the whole pass.
    """

    segments: Sequence[Segment]
    windows: Sequence[int | None]
    capture: Capture | None = None
    layers: int | None = None

    @cached_property
    def masks(self) -> CausalMasks:
        """Of its attention."""
        return CausalMasks()

    @cached_property
    def positions(self) -> list[Tensor]:
        """Of each segment's tokens, `[tokens]`."""
        return [to_tensor(segment.positions, segment.token_ids.device) for segment in self.segments]

    @cached_property
    def spans(self) -> list[slice]:
        """Where each segment lies in the row."""
        ends = list(accumulate(len(segment.token_ids) for segment in self.segments))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def receive(self, layer: int, hidden: Tensor) -> None:
        """Take the input of a layer's attention, `[tokens, hidden_size]`.

        Raises:
            EnoughLayersError: it was the last that is wanted.
        """
        if self.capture is not None:
            self.capture(layer, hidden)
        if self.layers == layer + 1:
            raise EnoughLayersError


class PackedCache(Cache):
    """What transformers writes new keys and values to; they go to the segments' own caches."""

    def __init__(self, batch: PackedBatch) -> None:
        super().__init__(layers=[])
        self.batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[1, kv_heads, tokens, head_dim]` of one layer to each segment's slots."""
        batch = self.batch
        for segment, span, slots in zip(batch.segments, batch.spans, batch.positions, strict=True):
            if segment.before_layer is not None:
                segment.before_layer(layer_idx)
            keys, values, positions = segment.cache.keys[layer_idx], segment.cache.values[layer_idx], segment.positions
            if isinstance(positions, range):
                keys[:, positions.start : positions.stop] = key_states[0, :, span]
                values[:, positions.start : positions.stop] = value_states[0, :, span]
            else:
                keys.index_copy_(1, slots, key_states[0, :, span])
                values.index_copy_(1, slots, value_states[0, :, span])
        return key_states, value_states


@torch.inference_mode()
def forward(model: LanguageModel, segments: Sequence[Segment], capture: Capture | None = None) -> Tensor:
    """Run new tokens through the model; their keys and values go to their sequences' caches.

    Args:
        model: the model to run.
        segments: at least one, none of them empty, each with room left in its cache.
        capture: receives each layer's hidden states as they come by.

    Returns:
        Logits after the last token of each segment, `[segments, vocabulary]`, float32.
    """
    logits = _run(model, PackedBatch(segments, _windows(model), capture))
    for segment in segments:
        segment.cache.length = max(segment.cache.length, segment.positions[-1] + 1)
    return logits


@torch.inference_mode()
def run_layers(model: LanguageModel, segments: Sequence[Segment], capture: Capture, layers: int) -> None:
    """Run new tokens up to what enters the attention of layer `layers - 1`, and no further.

    The caches are as long afterwards as they were; what lies in them behind that length is not defined.

    Args:
        model: the model to run.
        segments: at least one, none of them empty. Their caches need room in the layers before the last one only.
        capture: receives the hidden states of each of the layers.
        layers: at least 1, at most as many as the model has.

    Raises:
        UnsupportedModelError: the batch does not reach the model's attention.
    """
    try:
        _run(model, PackedBatch(segments, _windows(model), capture, layers))
    except EnoughLayersError:
        return
    raise UnsupportedModelError(CUT_OFF)


@torch.inference_mode()
def all_logits(model: LanguageModel, segment: Segment) -> Tensor:
    """Run new tokens through the model and append them to their sequence's cache, as `forward` does.

    Args:
        model: the model to run.
        segment: not empty, with room left in its cache.

    Returns:
        Logits after every one of the tokens, `[tokens, vocabulary]`, float32.
    """
    batch = PackedBatch([segment], _windows(model))
    logits = _run(model, batch, torch.arange(len(segment.token_ids), device=model.device))
    segment.cache.length += len(segment.token_ids)
    return logits


def _run(model: LanguageModel, batch: PackedBatch, logits_of: Tensor | None = None) -> Tensor:
    """Run a batch; logits after those tokens of the row, or after the last one of each segment."""
    segments = batch.segments
    if logits_of is None:
        logits_of = torch.tensor([span.stop - 1 for span in batch.spans], device=model.device)
    output = model.module(
        input_ids=torch.cat([segment.token_ids for segment in segments])[None],
        position_ids=torch.cat(batch.positions)[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=model.device),
        cache=PackedCache(batch),
        use_cache=True,
        logits_to_keep=logits_of,
        packed=batch,
    )
    logits: Tensor = output.logits[0].float()
    return logits


def _windows(model: LanguageModel) -> list[int | None]:
    return [layer.window for layer in model.decoder.layers]
