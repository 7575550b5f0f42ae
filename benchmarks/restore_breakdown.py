"""What restoring is made of, and the measurements behind docs/decisions.md, on random states.

python benchmarks/restore_breakdown.py --tokens 4096
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ragcache.model.kv_cache import KVCache
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.settings import load_settings
from ragcache.states.codec import Codec, codec_named

QUESTION_TOKENS = 20


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median of some runs, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        clock = time.perf_counter()
        run()
        times.append((time.perf_counter() - clock) * 1e3)
    return statistics.median(times[2:])


def steps(model: LanguageModel, codec: Codec, hidden: Tensor) -> None:
    """Each step of a middle layer, and times the number of layers."""
    layer = model.decoder.layers[len(model.decoder.layers) // 2]
    rows, decoded = codec.encode(hidden), torch.empty_like(hidden)
    tables = model.decoder.rotary.tables(torch.arange(len(hidden), device=model.device))
    keys, values = layer.project(hidden)
    cache = model.new_cache(len(hidden))
    slots = cache.keys[layer.index].transpose(0, 1), cache.values[layer.index].transpose(0, 1)
    times = {
        "decode int8": milliseconds(lambda: codec.decode(rows, decoded), 30),
        "project": milliseconds(lambda: layer.project(hidden), 30),
        "rotate": milliseconds(lambda: model.decoder.rotary.rotate(keys, tables, out=slots[0]), 30),
        "copy values": milliseconds(lambda: slots[1].copy_(values), 30),
    }
    print(f"\none layer, and all {len(model.decoder.layers)}")
    for name, time_ms in times.items():
        print(f"  {name:<22} {time_ms:8.2f} ms {time_ms * len(model.decoder.layers):8.1f} ms")
    operations = 4 * hidden.numel() * layer.kv_heads * layer.head_dim
    print(f"  projection runs at {operations / times['project'] / 1e9:.2f} TFLOP/s")


def restore(model: LanguageModel, codec: Codec, rows: Tensor, cache: KVCache, block: int) -> None:
    """All layers, `block` tokens at a time, as `ragcache.restore.restorer` does it."""
    hidden = torch.empty(block, model.decoder.hidden_size, dtype=model.dtype, device=model.device)
    starts = range(0, len(rows), block)
    tables = [
        model.decoder.rotary.tables(torch.arange(start, min(start + block, len(rows)), device=model.device))
        for start in starts
    ]
    for layer in model.decoder.layers:
        for start, table in zip(starts, tables, strict=True):
            part = slice(start, min(start + block, len(rows)))
            decoded = hidden[: part.stop - start]
            codec.decode(rows[part], decoded)
            layer.restore(decoded, table, cache.keys[layer.index][:, part], cache.values[layer.index][:, part])


def blocks_and_buffers(model: LanguageModel, codec: Codec, rows: Tensor) -> None:
    """Block sizes into a used buffer, and one block size into a fresh one."""
    used = model.new_cache(len(rows))
    print("\nrestore of all layers, by tokens in a block")
    for block in (len(rows), 2048, 1024, 512, 256):
        time_ms = milliseconds(partial(restore, model, codec, rows, used, block))
        print(f"  {block:<22} {time_ms:8.1f} ms")
    fresh_ms = milliseconds(lambda: restore(model, codec, rows, model.new_cache(len(rows)), 2048))
    print(f"  {'2048, fresh KV buffers':<22} {fresh_ms:8.1f} ms")


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
    codec = codec_named("int8", settings.dtype)
    hidden = torch.randn(arguments.tokens, model.decoder.hidden_size, dtype=model.dtype, device=model.device)
    print(f"{settings.model}, {settings.dtype}, {arguments.tokens} tokens, {torch.get_num_threads()} threads")
    steps(model, codec, hidden)
    blocks_and_buffers(model, codec, codec.encode(hidden))
    question_attention(model, arguments.tokens)


if __name__ == "__main__":
    main()
