"""What restoring is made of, and the measurements behind docs/decisions.md, on random states.

python benchmarks/restore_breakdown.py --tokens 4096
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ragcache.model.capture import prefill
from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.restore import restorer as restorer_module
from ragcache.restore.project import state_format, to_states
from ragcache.restore.restorer import Placement, Restorer
from ragcache.settings import CodecName, StatesName, load_settings
from ragcache.states.form import Form, LayerFormat, StateFormat
from ragcache.states.key import state_key
from ragcache.states.records import StoredStates
from ragcache.states.shard import Container, ShardEntry, ShardOrigin, ShardWriter

QUESTION_TOKENS = 20
CHUNK_TOKENS = 512
PREFIX = tuple(range(30))
FORMATS: tuple[tuple[StatesName, CodecName], ...] = (
    ("hidden", "raw"),
    ("hidden", "int8"),
    ("hidden", "int4"),
    ("pre-rope-kv", "raw"),
    ("pre-rope-kv", "int8"),
    ("pre-rope-kv", "int4"),
)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median of some runs, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        clock = time.perf_counter()
        run()
        times.append((time.perf_counter() - clock) * 1e3)
    return statistics.median(times[2:])


def steps(model: LanguageModel, tokens: int) -> None:
    """Each step of a middle layer, and times the number of layers."""
    layer = model.decoder.layers[len(model.decoder.layers) // 2]
    hidden = torch.randn(tokens, model.decoder.hidden_size, dtype=model.dtype, device=model.device)
    tables = model.decoder.rotary.tables(torch.arange(tokens, device=model.device))
    keys, values = layer.project(hidden)
    cache = model.new_cache(tokens)
    slots = cache.keys[layer.index].transpose(0, 1), cache.values[layer.index].transpose(0, 1)
    times = {
        "project": milliseconds(lambda: layer.project(hidden), 30),
        "rotate": milliseconds(lambda: model.decoder.rotary.rotate(keys, tables, out=slots[0]), 30),
        "copy values": milliseconds(lambda: slots[1].copy_(values), 30),
    }
    for form in (Form.HIDDEN, Form.PRE_ROPE_KV):
        states = to_states(form, layer, hidden[:CHUNK_TOKENS])
        for codec in ("int8", "int4"):
            format = StateFormat(model.fingerprint.dtype, (LayerFormat(form, states.shape[2], codec),))
            data, decoded = format.encode(0, states), torch.empty_like(states)
            decode_ms = milliseconds(partial(format.decode, 0, data, decoded), 30)
            times[f"decode {form} {codec}"] = decode_ms * tokens / CHUNK_TOKENS
    print(f"\none layer, and all {len(model.decoder.layers)}")
    for name, time_ms in times.items():
        print(f"  {name:<26} {time_ms:8.2f} ms {time_ms * len(model.decoder.layers):8.1f} ms")
    operations = 4 * hidden.numel() * layer.kv_heads * layer.head_dim
    print(f"  projection runs at {operations / times['project'] / 1e9:.2f} TFLOP/s")


class Bench:
    """Random states of some chunks in a shard, restored as a request does it."""

    def __init__(self, model: LanguageModel, folder: Path, tokens: int, states: StatesName, codec: CodecName) -> None:
        self.model = model
        self.format = state_format(model, states, codec)
        self.prefix = prefill(model, PREFIX)
        chunks = [tuple(range(start, start + CHUNK_TOKENS)) for start in range(0, tokens, CHUNK_TOKENS)]
        digest = model.fingerprint.digest
        writer = ShardWriter(
            folder,
            1,
            self.format,
            Container.ARROW,
            ShardOrigin("bench", model.fingerprint.to_json(), digest, PREFIX),
        )
        for token_ids in chunks:
            writer.add(ShardEntry(state_key(digest, PREFIX, (), token_ids), token_ids, self._encoded(len(token_ids))))
        shard = writer.close()
        self.placements = [
            Placement(
                str(index),
                token_ids,
                len(PREFIX) + index * CHUNK_TOKENS,
                StoredStates(states.key, shard.path, shard.format, states.ranges),
            )
            for index, (token_ids, states) in enumerate(zip(chunks, shard.states, strict=True))
        ]
        self.cache = self.new_cache()

    def new_cache(self) -> KVCache:
        """With room for all chunks."""
        return self.model.new_cache(self.placements[-1].span.stop)

    def restorer(self, *, verify: bool = True) -> Restorer:
        """As the engine makes it."""
        return Restorer(self.model, self.prefix, PREFIX, threads=2, verify=verify)

    def restore(self, restorer: Restorer, cache: KVCache | None = None) -> None:
        """One request's share."""
        cache = cache or self.cache
        cache.length = 0
        cache.copy_prefix(self.prefix)
        report = restorer.restore(self.placements, self.format, cache)
        if report.misses:
            raise RuntimeError(report.misses[0].detail)

    def _encoded(self, tokens: int) -> dict[int, Tensor]:
        layers = {}
        for index in self.format.stored_layers:
            it = self.format.layers[index]
            states = torch.randn(len(it.form.parts), tokens, it.width).to(self.model.dtype)
            layers[index] = self.format.encode(index, states)
        return layers


def whole_restores(model: LanguageModel, folder: Path, tokens: int) -> None:
    """Read, check, decode and place all layers, for each form and codec, with and without checksums."""
    print("\nrestore of all layers from the page cache; without comparing checksums")
    for states, codec in FORMATS:
        bench = Bench(model, folder, tokens, states, codec)
        with_ms, without_ms = (
            milliseconds(partial(bench.restore, bench.restorer(verify=verify))) for verify in (True, False)
        )
        size = bench.format.bytes_per_token * tokens / 1e6
        print(f"  {states + ' ' + codec:<26} {with_ms:8.1f} ms {without_ms:8.1f} ms {size:8.1f} MB")


def blocks_and_buffers(model: LanguageModel, folder: Path, tokens: int) -> None:
    """Block sizes into a used buffer, and one block size into a fresh one."""
    bench = Bench(model, folder, tokens, "hidden", "int8")
    chosen = restorer_module.BLOCK_TOKENS
    print("\nrestore of hidden int8, by tokens in a block")
    for block in (tokens, 2048, 1024, 512):
        restorer_module.BLOCK_TOKENS = block
        time_ms = milliseconds(partial(bench.restore, bench.restorer()))
        print(f"  {block:<26} {time_ms:8.1f} ms")
    restorer_module.BLOCK_TOKENS = chosen
    fresh_ms = milliseconds(lambda: bench.restore(bench.restorer(), bench.new_cache()))
    print(f"  {f'{chosen}, fresh KV buffers':<26} {fresh_ms:8.1f} ms")


def question_attention(model: LanguageModel, tokens: int) -> None:
    """One layer's attention of a question to everything restored, three ways."""
    layer = model.decoder.layers[0]
    group = model.module.config.num_attention_heads // layer.kv_heads
    shape = (layer.kv_heads, group * QUESTION_TOKENS, layer.head_dim)
    queries = torch.randn(shape, dtype=model.dtype, device=model.device) * 2
    keys, values = (
        torch.randn(layer.kv_heads, tokens, layer.head_dim, dtype=model.dtype, device=model.device) for _ in range(2)
    )
    scale = layer.head_dim**-0.5

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(queries[None], keys[None], values[None], scale=scale)[0]

    def products() -> Tensor:
        return torch.softmax(queries @ keys.transpose(1, 2) * scale, -1) @ values

    exact = torch.softmax(queries.double() @ keys.double().transpose(1, 2) * scale, -1) @ values.double()
    print(f"\nattention of {QUESTION_TOKENS} tokens to {tokens}, one layer, and the error against float64")
    for name, run in (("sdpa", sdpa), ("matrix products", products)):
        error = (run().double() - exact).norm() / exact.norm()
        print(f"  {name:<22} {milliseconds(run, 30):8.2f} ms {float(error):8.2%}")


@torch.inference_mode()
def main() -> None:
    """Run all of them in one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    settings = load_settings(model=arguments.model, dtype=arguments.dtype)
    model = load_language_model(
        settings.model, dtype=settings.dtype, device=settings.device, cache_folder=settings.cache_folder
    )
    print(f"{settings.model}, {settings.dtype}, {arguments.tokens} tokens, {torch.get_num_threads()} threads")
    steps(model, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        whole_restores(model, Path(folder), arguments.tokens)
        blocks_and_buffers(model, Path(folder), arguments.tokens)
    question_attention(model, arguments.tokens)


if __name__ == "__main__":
    main()
