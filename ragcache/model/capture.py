"""Run a prefill and collect the states that its KV cache can be rebuilt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ragcache.errors import EncodingError
from ragcache.model.attention import Decoder
from ragcache.model.forward import Capture, PackedBatch, Segment, forward
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
            if packed is not None and packed.capture is not None:
                packed.capture(index, (args[0] if args else kwargs["hidden_states"])[0])

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


def capture_states(model: LanguageModel, prefix: KVCache, chunks: Sequence[Sequence[int]], receive: Capture) -> None:
    """Encode chunks, each after the prefix and apart from the others, in one forward pass.

    Args:
        model: the model to run.
        prefix: KV cache of what precedes each chunk.
        chunks: token ids of each chunk; none of them empty.
        receive: called once per layer, in order, with the hidden states of all chunks one after the other,
            `[tokens of all chunks, hidden_size]`. Valid only during the call.

    Raises:
        EncodingError: a state is NaN or infinite, as happens when a model overflows its precision.
    """

    def checked(layer: int, hidden: Tensor) -> None:
        if not torch.isfinite(hidden).all():
            raise EncodingError(
                f"layer {layer} of {model.name} gives NaN or infinity in {model.fingerprint.dtype}; "
                "use another dtype (--dtype bfloat16 or float32)"
            )
        receive(layer, hidden)

    segments = []
    for token_ids in chunks:
        cache = model.new_cache(prefix.length + len(token_ids))
        cache.copy_prefix(prefix)
        segments.append(Segment(model.tensor(list(token_ids)), cache))
    forward(model, segments, checked)
