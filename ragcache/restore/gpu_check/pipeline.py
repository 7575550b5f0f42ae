"""The way of many layers through few buffers: from pinned memory over the copy stream to the kernels.

Layers differ in every number, so one that was overwritten before it was decoded, or decoded before it had come, is
found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.restore.backend import Implementation
from ragcache.restore.gpu_check.shapes import Attention
from ragcache.restore.transfer import transfer_to
from ragcache.restore.workspace import Workspace
from ragcache.states.arrangement import Arrangement
from ragcache.states.codec import Part, codec_named
from ragcache.states.encoded import Moves, Run

SLOTS = 4
"""As in `ragcache.restore.reader`."""

KINDS = 9
"""Different layers. It shares no factor with the number of slots, so every slot holds every one of them in turn."""


def check_pipeline(
    attention: Attention,
    tokens: int,
    layers: int,
    device: torch.device,
    twins: Implementation,
    kernels: Implementation,
) -> dict[str, object]:
    """Restore layers of int8 keys and values from the host, and compare each with what it should be.

    Returns:
        A row of the report: whether all agree, and bytes per second from the host to the KV cache.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16
    codecs = [codec_named("int8", "bfloat16", part) for part in (Part.KEYS, Part.VALUES)]
    arrangement = Arrangement(codecs, attention.width, [tokens])
    sources = [
        torch.cat([codec.encode(torch.randn(tokens, attention.width).to(dtype)) for codec in codecs])
        for _ in range(KINDS)
    ]
    moves = Moves.of([Run(0, 0, tokens)], arrangement.rows, device)
    rotation = attention.rotation
    tables: tuple[Tensor, Tensor] | None = None
    if rotation is not None:
        angles = torch.randn(tokens, rotation.rotary_dim // 2, device=device)
        tables = angles.cos().to(dtype), angles.sin().to(dtype)

    def restored(implementation: Implementation, buffer: Tensor) -> tuple[Tensor, Tensor]:
        shape = (attention.kv_heads, tokens, attention.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        stored_keys, stored_values = arrangement.encoded(buffer)
        implementation.restore_pre_rope_kv(stored_keys, stored_values, rotation, tables, moves, keys, values)
        return keys, values

    expected = [restored(twins, _filled(arrangement, source).to(device)) for source in sources]
    transfer = transfer_to(device, SLOTS, arrangement.size, Workspace(), "check")
    caches = []
    clock = time.perf_counter()
    for layer in range(layers):
        slot = layer % SLOTS
        _fill(transfer.host(slot), arrangement, sources[layer % len(sources)])
        caches.append(restored(kernels, transfer.device(slot)))
        transfer.done(slot)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - clock
    wrong = 0
    for layer, cache in enumerate(caches):
        pairs = zip(cache, expected[layer % len(sources)], strict=True)
        wrong += not all(torch.allclose(ours, theirs, rtol=6e-2, atol=6e-2) for ours, theirs in pairs)
    return {
        "layers": layers,
        "wrong_layers": wrong,
        "bytes_per_second": layers * arrangement.size / seconds,
        "passed": wrong == 0,
    }


def _filled(arrangement: Arrangement, source: Tensor) -> Tensor:
    buffer = torch.zeros(arrangement.size, dtype=torch.uint8)
    _fill(buffer, arrangement, source)
    return buffer


def _fill(buffer: Tensor, arrangement: Arrangement, source: Tensor) -> None:
    """What a positioned read does."""
    places: Sequence[slice] = arrangement.places[0]
    for place, piece in zip(places, source.split([it.stop - it.start for it in places]), strict=True):
        buffer[place] = piece
