"""Proof, at load time, that KV restored from hidden states equal the KV of a prefill.

Restoring leans on how a family is built: where it norms, projects and rotates. A wrong guess gives fluent
nonsense, so no list of names is trusted. A probe is captured at positions 0.. and its KV are restored there and at
a far offset; plain transformers prefills of the same probe at both places are what they have to match, in every
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.errors import CertificationError
from ragcache.model.capture import capture_states
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel

PROBE_TOKENS = 64
PROBE_OFFSET = 1000

IN_PLACE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}

SHIFTED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""At another position a 16-bit model's own prefill differs from itself: RoPE rounds otherwise there, and the
difference grows with depth (0.033 after 30 layers in bfloat16). A rotation done wrong gives errors around 1."""


@dataclass(frozen=True)
class Certificate:
    """Largest relative error (norm of the difference over norm of the reference) of any layer's keys or values.

    Attributes:
        in_place: restored where they were captured.
        shifted: restored at another offset.
    """

    in_place: float
    shifted: float


def certify(model: LanguageModel) -> Certificate:
    """Compare restored KV with a prefill's.

    Raises:
        CertificationError: some layer differs by more than the dtype's tolerance; names the layer and the error.
    """
    token_ids = _probe(model)
    hidden: list[Tensor] = []
    capture_states(model, model.new_cache(0), [token_ids], lambda _, states: hidden.append(states.clone()))
    if len(hidden) != len(model.decoder.layers):
        raise CertificationError(
            f"{model.name} cannot be used: its layers do not hand keyword arguments on to their attention"
        )
    hidden[0] = _first_layer_input(model, token_ids)
    offset = min(PROBE_OFFSET, model.context_window - len(token_ids))
    return Certificate(
        in_place=_worst_error(model, token_ids, hidden, 0, IN_PLACE_TOLERANCE[model.dtype]),
        shifted=_worst_error(model, token_ids, hidden, offset, SHIFTED_TOLERANCE[model.dtype]),
    )


def _worst_error(
    model: LanguageModel, token_ids: list[int], hidden: list[Tensor], offset: int, tolerance: float
) -> float:
    restored = _restore(model, hidden, offset)
    worst = 0.0
    for layer, (keys, values) in enumerate(_prefill(model, token_ids, offset)):
        for kind, ours, theirs in (
            ("keys", restored.keys[layer], keys),
            ("values", restored.values[layer], values),
        ):
            # A sliding-window layer of the reference keeps only the newest tokens.
            error = relative_error(ours[:, -theirs.shape[1] :], theirs)
            if not error <= tolerance:
                raise CertificationError(
                    f"{model.name} cannot be used: {kind} restored in layer {layer} at position {offset} differ "
                    f"from a prefill's by {error:.2e} (tolerance {tolerance:.0e} in {model.fingerprint.dtype}); "
                    "this model type needs support in ragcache/model/attention.py"
                )
            worst = max(worst, error)
    return worst


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference, computed in float32."""
    difference = (ours.float() - reference.float()).norm()
    return float(difference / reference.float().norm().clamp_min(torch.finfo(torch.float32).tiny))


def _probe(model: LanguageModel) -> list[int]:
    vocabulary = model.decoder.embedding.weight.shape[0]
    length = min(PROBE_TOKENS, model.context_window - 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


@torch.inference_mode()
def _first_layer_input(model: LanguageModel, token_ids: list[int]) -> Tensor:
    return model.decoder.first_layer_input(model.tensor(token_ids))


@torch.inference_mode()
def _restore(model: LanguageModel, hidden: list[Tensor], offset: int) -> KVCache:
    length = len(hidden[0])
    tables = model.decoder.rotary.tables(torch.arange(offset, offset + length, device=model.device))
    cache = model.new_cache(length)
    for layer in model.decoder.layers:
        layer.restore(hidden[layer.index], tables, cache.keys[layer.index], cache.values[layer.index])
    return cache


@torch.inference_mode()
def _prefill(model: LanguageModel, token_ids: list[int], offset: int) -> list[tuple[Tensor, Tensor]]:
    positions = torch.arange(offset, offset + len(token_ids), device=model.device)
    output = model.module(
        input_ids=model.tensor(token_ids)[None],
        position_ids=positions[None],
        use_cache=True,
        logits_to_keep=1,
    )
    return [(layer.keys[0], layer.values[0]) for layer in output.cache.layers]
