"""What it takes to restore each layer of a prompt in each form: bytes to read, and time to compute.

HCache (EuroSys'25, section 3.2) compares the same quantities for hidden states, KV and recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache.model.attention import AttentionLayer
from ragcache.model.language_model import LanguageModel
from ragcache.restore.profile import Profile
from ragcache.states.codec import DTYPES
from ragcache.states.form import Form, LayerFormat, StateFormat


@dataclass(frozen=True)
class Cost:
    """What one layer of a prompt takes in one form.

    Attributes:
        bytes: read from disk.
        seconds: of computing.
    """

    bytes: int
    seconds: float


LayerCosts = Mapping[Form, Cost]
"""The forms that a layer may have, with their costs."""


def layer_costs(
    model: LanguageModel,
    candidates: Sequence[Sequence[LayerFormat]],
    profile: Profile,
    tokens: int,
    chunk_tokens: int,
) -> list[LayerCosts]:
    """Costs of all layers.

    Args:
        model: whose layers they are.
        candidates: for each layer the ways in which it may be stored.
        profile: rates of the machine.
        tokens: of all chunks of the prompt.
        chunk_tokens: of one chunk; recomputed tokens attend to their own chunk only.
    """
    return [
        {it.form: _cost(model, index, it, profile, tokens, chunk_tokens) for it in layer}
        for index, layer in enumerate(candidates)
    ]


def prefill_seconds(model: LanguageModel, profile: Profile, tokens: int) -> float:
    """Time of a plain prefill of the whole prompt, in which every token attends to all before it."""
    return prefill_flops(model, tokens) / profile.prefill_rate


def prefill_flops(model: LanguageModel, tokens: int) -> float:
    """Floating-point operations of all layers in a prefill of so many tokens."""
    return sum(
        model.layer_flops(layer.index, tokens, mean_attended(tokens, window(layer))) for layer in model.decoder.layers
    )


def mean_attended(tokens: int, window: int | None) -> float:
    """Tokens that a token of a causal prefill attends to, in the mean."""
    if window is None or window >= tokens:
        return tokens / 2
    return window - window**2 / (2 * tokens)


def window(layer: AttentionLayer) -> int | None:
    """Sliding window of a layer; `None` where it attends to everything."""
    size: int | None = layer.window
    return size


def projection_flops(layer: AttentionLayer, hidden_size: int) -> int:
    """Floating-point operations of a layer's K and V projections, for one token."""
    return 2 * hidden_size * 2 * layer.kv_heads * layer.head_dim


def written_bytes(layer: AttentionLayer, format: LayerFormat, dtype: str) -> int:
    """Bytes written for one token while a layer is restored: its decoded states, and its KV."""
    kv_width = 2 * layer.kv_heads * layer.head_dim
    return DTYPES[dtype].itemsize * (len(format.form.parts) * format.width + kv_width)


def _cost(
    model: LanguageModel, index: int, format: LayerFormat, profile: Profile, tokens: int, chunk_tokens: int
) -> Cost:
    layer = model.decoder.layers[index]
    dtype = model.fingerprint.dtype
    # Nobody looks at older tokens of a layer with a window, so only its last ones are read and restored.
    restored = min(tokens, window(layer) or tokens)
    bytes_per_token = StateFormat(dtype, (format,)).bytes_per_token
    seconds = restored * written_bytes(layer, format, dtype) / profile.placement_rate
    if format.form is Form.HIDDEN or (format.form is Form.TOKENS and index == 0):
        seconds += restored * projection_flops(layer, model.decoder.hidden_size) / profile.projection_rate
    elif format.form is Form.TOKENS:
        # The layer before must be run in full, for all tokens, to have this one's input. Its K and V were counted with
        # itself, this one's take as much.
        attended = mean_attended(min(tokens, chunk_tokens), window(model.decoder.layers[index - 1]))
        seconds += model.layer_flops(index - 1, tokens, attended) / profile.prefill_rate
    return Cost(round(restored * bytes_per_token), seconds)
