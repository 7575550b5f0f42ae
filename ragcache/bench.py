"""`ragcache bench restore`: what restoring takes on this machine, and what memory and processor need for it.

The floor is what they need at rates measured right before and after, were nothing wasted and nothing overlapped: every
stored byte is copied out of the page cache and read once to be decoded, every byte of KV is written once, and hidden
states are projected. Decoding hidden states to memory and back is not in it, neither are checksums. Few tokens fit in
the processor's caches and may take less.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ragcache.model.capture import prefill
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.restore.formats import state_format
from ragcache.restore.placement import Placement
from ragcache.restore.restoration import needed_chunks
from ragcache.restore.restorer import Restorer
from ragcache.settings import CodecName, StatesName
from ragcache.states.form import Form, StateFormat
from ragcache.states.key import state_key
from ragcache.states.records import Encoding, StoredStates
from ragcache.states.shard import Container, ShardEntry, ShardOrigin, ShardWriter

CHUNK_TOKENS = 512
PREFIX = tuple(range(30))
COPIED_BYTES = 128 << 20
"""Beyond the size of the processor's caches."""


@dataclass(frozen=True)
class MachineRates:
    """What the floor is computed from.

    Attributes:
        memory: bytes per second, read and written ones both counted, of a copy.
        products: FLOP/s of the projection of 4,096 tokens.
    """

    memory: float
    products: float


@dataclass(frozen=True)
class Measurement:
    """Restoring some tokens.

    Attributes:
        states: form that was asked for.
        codec: of the states.
        tokens: restored.
        stored_megabytes: of the tokens' states.
        read_megabytes: of these, what was read; layers with a sliding window need the last tokens only.
        warm_ms: median with the states in the page cache.
        cold_ms: median with the states dropped from it.
        floor_ms: what memory and processor need for it.
        rates: what they achieved.
    """

    states: StatesName
    codec: CodecName
    tokens: int
    stored_megabytes: float
    read_megabytes: float
    warm_ms: float
    cold_ms: float
    floor_ms: float
    rates: MachineRates

    @property
    def ratio(self) -> float:
        """How many times the floor."""
        return self.warm_ms / self.floor_ms

    @property
    def tokens_per_second(self) -> float:
        """Of the warm restore."""
        return self.tokens / self.warm_ms * 1e3


@torch.inference_mode()
def measure_rates(model: LanguageModel) -> MachineRates:
    """Memory bandwidth and rate of the projection, on the model's device."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=model.device)
    target = torch.ones_like(source)
    copy_ms = milliseconds(model.device, lambda: target.copy_(source))
    layer = model.decoder.layers[-1]
    hidden = torch.randn(4096, model.decoder.hidden_size, device=model.device).to(model.dtype)
    product = hidden @ layer.weight.t()
    product_ms = milliseconds(model.device, lambda: torch.mm(hidden, layer.weight.t(), out=product))
    return MachineRates(2 * COPIED_BYTES / copy_ms * 1e3, 2 * hidden.numel() * len(layer.weight) / product_ms * 1e3)


def measure_restore(
    model: LanguageModel,
    states: StatesName,
    codec: CodecName,
    tokens: int,
    *,
    threads: int,
    folder: Path | None = None,
    repeats: int = 7,
) -> Measurement:
    """Restore random states of chunks of 512 tokens.

    Args:
        model: whose KV are restored.
        states: form.
        codec: of the states.
        tokens: how many.
        threads: that read.
        folder: where the states are written for a while; on the disk that is to be measured.
        repeats: measurements of which the median is taken.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="ragcache-bench-") as temporary:
        bench = RestoreBench(model, Path(temporary), tokens, state_format(model, states, codec), threads)
        before = measure_rates(model)
        warm_ms = milliseconds(model.device, bench.restore, repeats)
        after = measure_rates(model)
        # What the machine was able to do at least once; others may have been busy on it meanwhile.
        rates = MachineRates(max(before.memory, after.memory), max(before.products, after.products))
        cold_ms = milliseconds(model.device, bench.restore, min(repeats, 5), before=bench.drop_page_cache)
        stored, read = bench.stored_bytes / 1e6, bench.read_bytes / 1e6
        return Measurement(states, codec, tokens, stored, read, warm_ms, cold_ms, bench.floor_ms(rates), rates)


def milliseconds(
    device: torch.device, run: Callable[[], object], repeats: int = 7, before: Callable[[], object] = lambda: None
) -> float:
    """Median of some runs, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        before()
        with _complete(device):
            clock = time.perf_counter()
            run()
        times.append((time.perf_counter() - clock) * 1e3)
    return statistics.median(times[2:])


@contextmanager
def _complete(device: torch.device) -> Iterator[None]:
    """Nothing is queued on the device when the block begins, nor when it ends."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RestoreBench:
    """Random states of some chunks in a shard, restored as a request does it."""

    def __init__(
        self, model: LanguageModel, folder: Path, tokens: int, format: StateFormat, threads: int, *, verify: bool = True
    ) -> None:
        self.model = model
        self.format = format
        self._prefix = prefill(model, PREFIX)
        self._restorer = Restorer(model, self._prefix, PREFIX, threads, verify=verify)
        vocabulary = model.decoder.embedding.weight.shape[0]
        chunks = [
            tuple(token % vocabulary for token in range(start, min(start + CHUNK_TOKENS, tokens)))
            for start in range(0, tokens, CHUNK_TOKENS)
        ]
        digest = model.fingerprint.digest
        origin = ShardOrigin("bench", model.fingerprint.to_json(), digest, PREFIX)
        writer = ShardWriter(folder, 1, format, Container.ARROW, origin)
        for token_ids in chunks:
            writer.add(ShardEntry(state_key(digest, PREFIX, "", token_ids), token_ids, self._encoded(len(token_ids))))
        shard = writer.close()
        self._shard = shard.path
        self.placements = [
            Placement(
                str(index),
                token_ids,
                len(PREFIX) + index * CHUNK_TOKENS,
                Encoding("alone", states.key, states=StoredStates(states.key, shard.path, shard.format, states.ranges)),
            )
            for index, (token_ids, states) in enumerate(zip(chunks, shard.states, strict=True))
        ]
        self.stored_bytes = sum(it.length for states in shard.states for it in states.ranges)
        self.read_bytes = 0
        self.cache = self.new_cache()

    def new_cache(self) -> KVCache:
        """With room for all chunks."""
        return self.model.new_cache(self.placements[-1].span.stop)

    def restore(self, cache: KVCache | None = None) -> None:
        """One request's share."""
        cache = cache or self.cache
        cache.length = 0
        cache.copy_prefix(self._prefix)
        report = self._restorer.restore(self.placements, self.format, cache)
        if report.misses:
            raise RuntimeError(report.misses[0].detail)
        self.read_bytes = report.read_bytes

    def drop_page_cache(self) -> None:
        """Have the operating system forget what it holds of the shard; a file system in memory cannot."""
        descriptor = os.open(self._shard, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def floor_ms(self, rates: MachineRates) -> float:
        """See the module's documentation; after a restore, which tells what was read."""
        needed = needed_chunks(self.model, self.placements, self.placements[-1].span.stop)
        moved, operations = 3 * self.read_bytes, 0
        for layer, stored in zip(self.model.decoder.layers, self.format.layers, strict=True):
            tokens = sum(len(self.placements[chunk].token_ids) for chunk in needed(layer.index))
            moved += tokens * 2 * layer.kv_heads * layer.head_dim * self.model.dtype.itemsize
            if stored.form is not Form.PRE_ROPE_KV:
                operations += tokens * 2 * layer.weight.numel()
        return (moved / rates.memory + operations / rates.products) * 1e3

    def _encoded(self, tokens: int) -> dict[int, torch.Tensor]:
        layers = {}
        for index in self.format.stored_layers:
            it = self.format.layers[index]
            states = torch.randn(len(it.form.parts), tokens, it.width).to(self.model.dtype)
            layers[index] = self.format.encode(index, states)
        return layers
