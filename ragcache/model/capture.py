"""Run a prefill and collect the states that its KV cache can be rebuilt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ragcache.errors import EncodingError
from ragcache.model.attention import Decoder
from ragcache.model.forward import Capture, PackedBatch, Segment, forward, run_layers
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel


def install_hooks(decoder: Decoder) -> None:
    """Have every attention hand its input to the packed batch it is called with, if that wants it.

    The hooks stay: whether anything is captured is decided by each call's own batch, so a capture never sees the
    tokens of a query that runs at the same time.
    """

    def hook_for(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            packed: PackedBatch | None = kwargs.get("packed")
            if packed is not None:
                packed.receive(index, (args[0] if args else kwargs["hidden_states"])[0])

        return hook

    for layer in decoder.layers:
        layer.module.register_forward_pre_hook(hook_for(layer.index), with_kwargs=True)


def prefill(model: LanguageModel, token_ids: Sequence[int], capacity: int | None = None) -> KVCache:
    """The KV cache of a token sequence, such as the prompt's prefix, from scratch.

    Args:
        model: the model to run.
        token_ids: at least one.
        capacity: tokens the cache has room for; as many as there are by default.
    """
    cache = model.new_cache(capacity or len(token_ids))
    forward(model, [Segment(model.tensor(list(token_ids)), cache)])
    return cache


def capture_states(
    model: LanguageModel,
    prefix: KVCache,
    chunks: Sequence[Sequence[int]],
    receive: Capture,
    *,
    contexts: Sequence[Sequence[int]] = (),
    layers: int | None = None,
) -> None:
    """Encode chunks, each after the prefix and its context and apart from the others, in one forward pass.

    Args:
        model: the model to run.
        prefix: KV cache of what precedes each chunk.
        chunks: token ids of each chunk; none of them empty.
        receive: called once per layer, in order, with the hidden states of all chunks one after the other,
            `[tokens of all chunks, hidden_size]`, contexts left out. Valid only during the call.
        contexts: token ids that stand between the prefix and each chunk; none by default.
        layers: of how many of the model's first layers; all by default. Of the first one alone no layer is run, its
            input being little more than the embedding.

    Raises:
        EncodingError: a state is NaN or infinite, as happens when a model overflows its precision.
    """

    def checked(layer: int, hidden: Tensor) -> None:
        if not torch.isfinite(hidden).all():
            raise EncodingError(
                f"layer {layer} of {model.name} gives NaN or infinity in {model.fingerprint.dtype}; "
                "use another dtype (--dtype bfloat16 or float32)"
            )
        receive(layer, hidden if kept is None else hidden[kept])

    layers = len(model.decoder.layers) if layers is None else layers
    # The last layer only receives its input; nothing is written to its cache.
    run = slice(layers - 1)
    past = KVCache(prefix.keys[run], prefix.values[run], prefix.length)
    segments = []
    for context, chunk in zip(contexts or [()] * len(chunks), chunks, strict=True):
        token_ids = [*context, *chunk]
        cache = KVCache.allocate(model.decoder.layers[run], prefix.length + len(token_ids), model.dtype, model.device)
        cache.copy_prefix(past)
        segments.append(Segment(model.tensor(token_ids), cache))
    kept = _chunks_alone(contexts, chunks, model.device) if any(contexts) else None
    run_layers(model, segments, checked, layers)


def _chunks_alone(contexts: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Where the chunks' own tokens lie in the row of all contexts and chunks, `[tokens of all chunks]`."""
    kept, start = [], 0
    for context, chunk in zip(contexts, chunks, strict=True):
        start += len(context)
        kept.append(torch.arange(start, start + len(chunk), device=device))
        start += len(chunk)
    return torch.cat(kept)
