"""Proof, at load time, that KV restored from hidden states equal the KV of a prefill.

Restoring leans on how a family is built: where it norms, projects and rotates. A wrong guess gives fluent
nonsense, so no list of names is trusted. A probe is captured at positions 0.. and its KV are restored there and at
a far offset. In every layer they have to match those that the pass itself computed, and those of prefills of the same
probe at both places by transformers alone, with its own attention, masks and cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.errors import CertificationError, UnsupportedModelError
from ragcache.model.forward import CUT_OFF, Segment, forward
from ragcache.model.language_model import LanguageModel

PROBE_TOKENS = 64
"""Tokens that are compared at another position."""

PROBE_OFFSET = 1000

LONGEST_PROBE = 640
"""In place the probe is longer than the model's sliding windows by `PROBE_TOKENS`, so that they bound what its tokens
see, but not longer than this: some seconds where a processor computes. Of windows beyond that, certification sees only
that the family's attention and mask agree on them (`ragcache.model.packed_attention`)."""

CAPTURED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Against the pass that the states are of, which has the same input in every layer: only a product is rounded."""

PREFILL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Against another pass. In 16 bits a model differs from itself where RoPE rounds otherwise, at another position, or
attention does, in another order of sums, and the difference grows with depth (0.033 after 30 layers in bfloat16).
A rotation done wrong gives errors around 1."""

KV = Sequence[tuple[Tensor, Tensor]]
"""For each layer keys and values, `[kv_heads, tokens, head_dim]`."""


@dataclass(frozen=True)
class Certificate:
    """Largest relative error (norm of the difference over norm of the reference) of any layer's keys or values.

    Attributes:
        captured: against those of the pass that the hidden states were captured in.
        in_place: against a transformers prefill at the same place.
        shifted: restored at another offset, against a transformers prefill there.
    """

    captured: float
    in_place: float
    shifted: float


def certify(model: LanguageModel) -> Certificate:
    """Compare restored KV with a prefill's.

    Raises:
        CertificationError: some layer differs by more than the dtype's tolerance; names the layer and the error.
        UnsupportedModelError: a packed batch does not reach the model's attention.
    """
    token_ids = _probe(model)
    hidden: list[Tensor] = []
    cache = model.new_cache(len(token_ids))
    forward(model, [Segment(model.tensor(token_ids), cache)], lambda _, states: hidden.append(states.clone()))
    if len(hidden) != len(model.decoder.layers):
        raise UnsupportedModelError(CUT_OFF)
    # What a token is given does not depend on later ones, so the probe's start is a probe.
    start = token_ids[:PROBE_TOKENS]
    offset = min(PROBE_OFFSET, model.context_window - len(start))
    here, there = _restore(model, hidden, 0), _restore(model, [it[: len(start)] for it in hidden], offset)
    captured = list(zip(cache.keys, cache.values, strict=True))
    tolerance = PREFILL_TOLERANCE[model.dtype]
    return Certificate(
        captured=_worst_error(
            model, here, captured, "those of the pass they were captured in", CAPTURED_TOLERANCE[model.dtype]
        ),
        in_place=_worst_error(model, here, reference_kv(model, token_ids, 0), "a prefill's", tolerance),
        shifted=_worst_error(
            model, there, reference_kv(model, start, offset), f"a prefill's at position {offset}", tolerance
        ),
    )


def _worst_error(model: LanguageModel, restored: KV, reference: KV, whose: str, tolerance: float) -> float:
    worst = 0.0
    for layer, (ours, theirs) in enumerate(zip(restored, reference, strict=True)):
        for kind, our_part, their_part in zip(("keys", "values"), ours, theirs, strict=True):
            error = relative_error(our_part[:, -their_part.shape[1] :], their_part)
            if not error <= tolerance:
                raise CertificationError(
                    f"{model.name} cannot be used: {kind} restored in layer {layer} differ from {whose} by "
                    f"{error:.2e} (tolerance {tolerance:.0e} in {model.fingerprint.dtype}); "
                    f"model type {model.module.config.model_type!r} needs an entry in ragcache/model/families.py"
                )
            worst = max(worst, error)
    return worst


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference, computed in float32."""
    difference = (ours.float() - reference.float()).norm()
    return float(difference / reference.float().norm().clamp_min(torch.finfo(torch.float32).tiny))


@torch.inference_mode()
def reference_kv(model: LanguageModel, token_ids: list[int], offset: int) -> KV:
    """KV of a prefill by transformers alone.

    Args:
        model: the model; nothing else may run it meanwhile.
        token_ids: at least one.
        offset: position of the first.

    Returns:
        Of a layer with a sliding window only the newest tokens, which are all that transformers keeps.
    """
    positions = torch.arange(offset, offset + len(token_ids), device=model.device)
    with own_attention(model):
        output = model.module(
            input_ids=model.tensor(token_ids)[None],
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=1,
        )
    return [(layer.keys[0], layer.values[0]) for layer in output.cache.layers]


@contextmanager
def own_attention(model: LanguageModel) -> Iterator[None]:
    """Have a model use transformers' attention for a while: `sdpa`, or `eager` where a family needs that."""
    ours = model.module.config._attn_implementation
    # In 16 bits the two differ by up to a few hundredths in deep layers, so the one that rounds as ours does.
    model.module.set_attn_implementation("sdpa" if model.module._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.module.set_attn_implementation(ours)


def _probe(model: LanguageModel) -> list[int]:
    vocabulary = model.decoder.embedding.weight.shape[0]
    windows = [layer.window for layer in model.decoder.layers if layer.window is not None]
    longest = max((window for window in windows if window + PROBE_TOKENS <= LONGEST_PROBE), default=0)
    length = min(longest + PROBE_TOKENS, model.context_window - 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


@torch.inference_mode()
def _restore(model: LanguageModel, hidden: list[Tensor], offset: int) -> KV:
    length = len(hidden[0])
    tables = model.decoder.tables(torch.arange(offset, offset + length, device=model.device))
    cache = model.new_cache(length)
    for i, layer in enumerate(model.decoder.layers):
        layer.restore(hidden[i], tables[i], cache.keys[i], cache.values[i])
    return list(zip(cache.keys, cache.values, strict=True))
