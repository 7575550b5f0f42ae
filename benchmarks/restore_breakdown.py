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

from ragcache.bench import RestoreBench
from ragcache.model.language_model import LanguageModel
from ragcache.model.loading import load_language_model
from ragcache.restore.formats import state_format
from ragcache.restore.project import to_states
from ragcache.settings import CodecName, StatesName, load_settings
from ragcache.states.encoded import Encoded
from ragcache.states.form import Form, LayerFormat, StateFormat

QUESTION_TOKENS = 20
CHUNK_TOKENS = 512
THREADS = 2
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
    tables = model.decoder.tables(torch.arange(tokens, device=model.device))[layer.index]
    keys, values = layer.project(hidden)
    cache = model.new_cache(tokens)
    slots = cache.keys[layer.index], cache.values[layer.index]
    times = {
        "project": milliseconds(lambda: layer.project(hidden), 30),
        "rotate and write": milliseconds(lambda: layer.place(keys, values, tables, *slots), 30),
    }
    for form in (Form.HIDDEN, Form.PRE_ROPE_KV):
        states = to_states(form, layer, hidden[:CHUNK_TOKENS])
        for codec in ("int8", "int4"):
            format = StateFormat(model.fingerprint.dtype, (LayerFormat(form, states.shape[2], codec),))
            count = tokens // CHUNK_TOKENS
            encoded = format.arrange(0, [CHUNK_TOKENS] * count).loaded([format.encode(0, states)] * count)
            targets = [torch.empty(part.rows, part.width, dtype=model.dtype) for part in encoded]
            times[f"decode {form} {codec}"] = milliseconds(partial(_decode, encoded, targets), 30)
    print(f"\none layer, and all {len(model.decoder.layers)}")
    for name, time_ms in times.items():
        print(f"  {name:<26} {time_ms:8.2f} ms {time_ms * len(model.decoder.layers):8.1f} ms")
    operations = 4 * hidden.numel() * layer.kv_heads * layer.head_dim
    print(f"  projection runs at {operations / times['project'] / 1e9:.2f} TFLOP/s")


def _decode(encoded: list[Encoded], targets: list[Tensor]) -> None:
    for part, target in zip(encoded, targets, strict=True):
        part.decode(target)


def whole_restores(model: LanguageModel, folder: Path, tokens: int) -> None:
    """Read, check, decode and place all layers, for each form and codec, with and without checksums."""
    print("\nrestore of all layers from the page cache; without comparing checksums")
    for states, codec in FORMATS:
        format = state_format(model, states, codec)
        benches = [RestoreBench(model, folder, tokens, format, THREADS, verify=verify) for verify in (True, False)]
        with_ms, without_ms = (milliseconds(it.restore) for it in benches)
        size = benches[0].stored_bytes / 1e6
        print(f"  {states + ' ' + codec:<26} {with_ms:8.1f} ms {without_ms:8.1f} ms {size:8.1f} MB")


def fresh_buffers(model: LanguageModel, folder: Path, tokens: int) -> None:
    """Into a used KV cache, and into one whose pages have never been touched."""
    bench = RestoreBench(model, folder, tokens, state_format(model, "hidden", "int8"), THREADS)
    print("\nrestore of hidden int8")
    print(f"  {'used KV buffers':<26} {milliseconds(bench.restore):8.1f} ms")
    print(f"  {'fresh KV buffers':<26} {milliseconds(lambda: bench.restore(bench.new_cache())):8.1f} ms")


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
        fresh_buffers(model, Path(folder), arguments.tokens)
    question_attention(model, arguments.tokens)


if __name__ == "__main__":
    main()
