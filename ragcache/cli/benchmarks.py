"""Measuring this machine: `ragcache bench restore`."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli.app import (
    Adapter,
    AsJson,
    Device,
    Dtype,
    Model,
    TrustRemoteCode,
    app,
    remark,
    say,
    to_stderr,
)
from ragcache.errors import SettingsError
from ragcache.settings import CodecName, StatesName, load_settings

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

KINDS: tuple[tuple[StatesName, CodecName], ...] = (
    ("hidden", "raw"),
    ("hidden", "int8"),
    ("pre-rope-kv", "raw"),
    ("pre-rope-kv", "int8"),
)
LENGTHS = "512,1024,2048,4096,8192,16384"


@bench.command()
def restore(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = None,
    tokens: Annotated[str, typer.Option(help="How many tokens to restore, separated by commas.")] = LENGTHS,
    folder: Annotated[
        Path | None, typer.Option(help="Where states are written for a while: on the disk to be measured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time restoring hidden states and keys and values, raw and int8, beside what memory and processor need for it."""
    token_counts = _token_counts(tokens)
    if folder is not None and not folder.is_dir():
        raise SettingsError(f"--folder {folder} is no folder; create it or name another")
    settings = load_settings(
        model=model, dtype=dtype, device=device, adapter=adapter, trust_remote_code=trust_remote_code
    )
    from ragcache.console import loading

    # What is written for a while shall go when this is stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with loading(to_stderr) as on_stage:
        from ragcache.bench import Measurement, measure_restore
        from ragcache.model.loading import load_language_model

        language_model = load_language_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            adapter=settings.adapter,
            cache_folder=settings.cache_folder,
            trust_remote_code=settings.trust_remote_code,
            on_stage=on_stage,
        )
    if max(token_counts) > language_model.context_window:
        remark(
            f"prompts beyond the model's context window of {language_model.context_window:,} tokens are no use to it"
        )
    measured: list[Measurement] = []
    for states, codec in KINDS:
        for count in token_counts:
            remark(f"restoring {count:,} tokens: {states}, {codec}")
            it = measure_restore(language_model, states, codec, count, threads=settings.reader_threads, folder=folder)
            measured.append(it)
    if as_json:
        about = {"model": settings.model, "dtype": settings.dtype, "device": str(language_model.device)}
        rows = [asdict(it) | {"ratio": it.ratio, "tokens_per_second": it.tokens_per_second} for it in measured]
        typer.echo(json.dumps(about | {"restores": rows}, indent=2))
        return
    say(f"{settings.model}, {settings.dtype}, {language_model.device}")
    memory = max(it.rates.memory for it in measured) / 1e9
    products = max(it.rates.products for it in measured) / 1e12
    say(f"up to {memory:.1f} GB/s in memory, and {products:.2f} TFLOP/s in projections")
    say("form         codec  tokens  stored    read    warm  tokens/s   floor  ratio    cold")
    say("                            MB      MB      ms                ms             ms")
    for it in measured:
        say(
            f"{it.states:<11}  {it.codec:<5}  {it.tokens:6,}  {it.stored_megabytes:6.1f}  {it.read_megabytes:6.1f}  "
            f"{it.warm_ms:6.1f}  {it.tokens_per_second:8,.0f}  {it.floor_ms:6.1f}  {it.ratio:5.2f}  {it.cold_ms:6.1f}"
        )


def _token_counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise SettingsError(f"--tokens {text!r}: give whole numbers from 1 on, separated by commas, such as 512,4096")
    return counts
