"""`ragcache plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragcache.cli.app import (
    Adapter,
    AsJson,
    Device,
    Dtype,
    Model,
    Store,
    TrustRemoteCode,
    app,
    remark,
    say,
    to_stderr,
    to_stdout,
)
from ragcache.errors import SettingsError
from ragcache.settings import load_settings
from ragcache.states.store import StateStore

if TYPE_CHECKING:
    from ragcache.restore.forecast import Forecast
    from ragcache.restore.profile import Profile


@app.command()
def plan(
    store: Store,
    model: Model = None,
    profile: Annotated[
        Path | None, typer.Option(help="File with the rates of a machine, instead of this one's.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    codec: Annotated[str | None, typer.Option(help="int8, int4, bf16, fp16, or raw: as computed.")] = None,
    state_folder: Annotated[
        list[Path] | None, typer.Option(help="Where shards go; give it again for each further disk.")
    ] = None,
    as_json: AsJson = False,
    dtype: Dtype = None,
    device: Device = None,
    adapter: Adapter = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Show which form each layer is best stored in on this machine, and how long restoring takes."""
    if profile is not None and measure:
        raise SettingsError("give either --profile or --measure, not both")
    settings = load_settings(
        store,
        model=model,
        codec=codec,
        state_folders=tuple(state_folder) if state_folder else None,
        dtype=dtype,
        device=device,
        adapter=adapter,
        trust_remote_code=trust_remote_code,
    )
    opened = StateStore.open(store) if StateStore.exists(store) else None

    from ragcache.console import loading
    from ragcache.restore.measure import RememberedProfile
    from ragcache.restore.profile import Profile

    given = RememberedProfile(Profile.load(profile), profile) if profile else None
    with loading(to_stderr) as on_stage:
        from ragcache.model.loading import load_language_model
        from ragcache.restore.choice import latest_format, settings_profile
        from ragcache.restore.forecast import forecast
        from ragcache.restore.formats import state_format

        loaded = load_language_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            adapter=settings.adapter,
            cache_folder=settings.cache_folder,
            trust_remote_code=settings.trust_remote_code,
            on_stage=on_stage,
        )
        remembered = given or settings_profile(loaded, settings, store, measure=measure, on_stage=on_stage)
    rates = remembered.profile
    planned = state_format(loaded, "auto", settings.codec, rates)
    stored = latest_format(loaded, opened) if opened else None
    found = forecast(loaded, rates, settings.codec, settings.chunk_tokens, planned, stored)
    if as_json:
        about = {
            "model": settings.model,
            "codec": settings.codec,
            "profile": asdict(rates),
            "profile_file": str(remembered.path),
        }
        typer.echo(
            json.dumps(about | {"stored_as_planned": stored == planned if stored else None} | asdict(found), indent=2)
        )
        return
    _print_rates(rates, remembered.path)
    _print_layers(found)
    _print_times(found)
    if stored is not None and stored != planned:
        say("the store's states are in another format, and auto keeps to it; to change it, name --states or index anew")
    if rates.fingerprint != loaded.fingerprint.digest or rates.codec != settings.codec:
        remark("the rates were measured with another model or codec")
    if found.times[-1].tokens > loaded.context_window:
        remark(f"prompts beyond the model's context window of {loaded.context_window:,} tokens are extrapolated")


def _print_rates(rates: Profile, path: Path) -> None:
    say(f"{rates.machine} ({rates.device}), measured {rates.date.astimezone(UTC):%Y-%m-%d %H:%M} UTC, kept in {path}")
    table = Table(show_header=False, box=None)
    table.add_row("disk", _gigabytes(rates.read_rate))
    table.add_row(
        "to the device", "decoded in place" if rates.transfer_rate is None else _gigabytes(rates.transfer_rate)
    )
    table.add_row("projection", _teraflops(rates.projection_rate))
    table.add_row("prefill", _teraflops(rates.prefill_rate))
    table.add_row("decoding and placing", _gigabytes(rates.placement_rate))
    to_stdout.print(table)


def _print_layers(found: Forecast) -> None:
    from ragcache.restore.formats import PLANNED_TOKENS

    table = Table(box=None)
    for name in ("layers", "form", "bytes/token", "read", "compute"):
        table.add_column(name, justify="left" if name in ("layers", "form") else "right")
    for it in found.groups:
        layers = f"{it.first}-{it.last}" if it.last > it.first else str(it.first)
        table.add_row(layers, it.form.value, f"{it.bytes_per_token:,.0f}", _time(it.read_ms), _time(it.compute_ms))
    read, compute = sum(it.read_ms for it in found.groups), sum(it.compute_ms for it in found.groups)
    table.add_row("all", "", f"{found.bytes_per_token:,.0f}", _time(read), _time(compute))
    say(f"\nplanned forms; times for {PLANNED_TOKENS:,} tokens")
    to_stdout.print(table)


def _print_times(found: Forecast) -> None:
    columns = {
        "tokens": [f"{it.tokens:,}" for it in found.times],
        "planned": [_time(it.planned) for it in found.times],
        "as stored": [_time(it.stored) for it in found.times if it.stored is not None],
        "all hidden": [_time(it.hidden) for it in found.times],
        "all pre_rope_kv": [_time(it.pre_rope_kv) for it in found.times],
        "prefill": [_time(it.prefill) for it in found.times],
    }
    shown = {name: cells for name, cells in columns.items() if cells}
    table = Table(*shown, box=None)
    for column in table.columns:
        column.justify = "right"
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    say("\npredicted time to restore")
    to_stdout.print(table)


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.2f} GB/s"


def _teraflops(rate: float) -> str:
    return f"{rate / 1e12:,.2f} TFLOP/s"


def _time(milliseconds: float) -> str:
    return f"{milliseconds:,.1f} ms" if milliseconds < 10_000 else f"{milliseconds / 1e3:,.1f} s"
