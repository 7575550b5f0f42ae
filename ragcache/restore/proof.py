"""Proof, before the first request, that what restores on this device gives what plain torch gives.

`ragcache.model.certify` proves that a model's KV follow from its hidden states, in plain torch. Kernels are compiled
for the GPU at hand, by the compiler at hand; so they are held against plain torch there, with the model's own matrices.
"""

from __future__ import annotations

import torch

from ragcache.errors import CertificationError
from ragcache.model.attention import AttentionLayer
from ragcache.model.certify import relative_error
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.backend import Implementation
from ragcache.restore.project import to_states, write_kv
from ragcache.restore.twins import Twins
from ragcache.settings import CodecName
from ragcache.states.encoded import Encoded, Moves, Run
from ragcache.states.form import Form, LayerFormat, StateFormat

CHUNKS = (70, 3)
"""Tokens; they fill no block."""

OFFSET = 500
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative, of all keys or values of a layer: a few roundings each."""


@torch.inference_mode()
def prove(model: LanguageModel, implementation: Implementation, codec: CodecName) -> None:
    """Restore the same states with an implementation and in plain torch, in every layer and form.

    Raises:
        CertificationError: some layer differs by more than rounding; names the layer and the error.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sum(CHUNKS), model.decoder.hidden_size, generator=generator).to(model.device, model.dtype)
    for layer in model.decoder.layers:
        for form in (Form.HIDDEN, Form.PRE_ROPE_KV):
            parts, moves = _encoded(model, layer, form, codec, hidden)
            tables = None if layer.rope is None else layer.rope.tables(moves.slots)
            written = []
            for each in (Twins(), implementation):
                cache = KVCache.allocate((layer,), OFFSET + sum(CHUNKS), model.dtype, model.device)
                write_kv(form, layer, parts, tables, moves, cache.keys[0], cache.values[0], each)
                written.append((cache.keys[0][:, OFFSET:], cache.values[0][:, OFFSET:]))
            for kind, expected, found in zip(("keys", "values"), *written, strict=True):
                error = relative_error(found, expected)
                if not error <= TOLERANCE[model.dtype]:
                    raise CertificationError(
                        f"{model.name} cannot be used on {model.device}: {kind} restored from {form} in layer "
                        f"{layer.index} differ from plain PyTorch's by {error:.2e} (tolerance "
                        f"{TOLERANCE[model.dtype]:.0e}); use --device cpu, and report it with what make gpu-check says"
                    )


def _encoded(
    model: LanguageModel, layer: AttentionLayer, form: Form, codec: CodecName, hidden: torch.Tensor
) -> tuple[list[Encoded], Moves]:
    """States of two chunks side by side, and where they go."""
    states = to_states(form, layer, hidden)
    format = StateFormat(model.fingerprint.dtype, (LayerFormat(form, states.shape[2], codec),))
    arrangement = format.arrange(0, CHUNKS)
    parts = arrangement.loaded([format.encode(0, it) for it in states.split(CHUNKS, dim=1)])
    slots = (OFFSET, OFFSET + CHUNKS[0])
    runs = [Run(row, slot, tokens) for row, slot, tokens in zip(arrangement.starts, slots, CHUNKS, strict=True)]
    return parts, Moves.of(runs, arrangement.rows, model.device)
