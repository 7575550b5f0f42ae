"""Looking after a store: `ragcache stats`, `delete`, `compact`, `verify` and `rebuild`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragcache.cli.app import (
    Adapter,
    AsJson,
    Device,
    Dtype,
    EmbeddingModel,
    Model,
    Store,
    TrustRemoteCode,
    Wait,
    app,
    remark,
    say,
    to_stderr,
    to_stdout,
)
from ragcache.errors import SettingsError
from ragcache.settings import Settings, load_settings
from ragcache.states.canary_report import CanaryReport
from ragcache.states.store import StateStore

if TYPE_CHECKING:
    from ragcache.retriever.embedding import Embedder
    from ragcache.states.verify import VerifyReport

FAULTS_FOUND = 1
"""Exit code of `verify` when something is not what was written."""


@app.command()
def stats(store: Store, as_json: AsJson = False) -> None:
    """Show what a store holds, and how often its states were used."""
    from ragcache.maintenance import store_stats

    opened = StateStore.open(store)
    found = store_stats(opened)
    fingerprint = json.loads(opened.identity().fingerprint)
    settings = load_settings(store)
    if as_json:
        about = {"model": settings.model, "codec": settings.codec, "fingerprint": fingerprint}
        canary = asdict(found.canary) | {"mean_kl": found.canary.mean_kl, "agreement": found.canary.agreement}
        typer.echo(json.dumps(asdict(found) | about | {"canary": canary}, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name in ("documents", "chunks", "tokens", "shards"):
        table.add_row(name, f"{getattr(found, name):,}")
    table.add_row("bytes on disk", f"{found.shard_bytes:,}")
    table.add_row("bytes in use", f"{found.state_bytes:,}")
    table.add_row("dead bytes", f"{found.dead_bytes:,}")
    if found.evicted_chunks:
        table.add_row("without states", f"{found.evicted_chunks:,} chunks, for lack of space")
    table.add_row("model", f"{settings.model} ({fingerprint['dtype']}, weights {fingerprint['weights'][:12]})")
    for it in found.models:
        name = f"{it['form']}, {it['codec']}"
        table.add_row(name, f"{it['bytes']:,} bytes, {it['states']:,} chunks, fingerprint {it['fingerprint'][:12]}")
    for it in found.encodings:
        table.add_row(f"encoded {it['encoding']}", f"{it['bytes']:,} bytes, {it['chunks']:,} chunks")
    for it in found.largest_documents[:3]:
        table.add_row("largest document", f"{it['bytes']:,} bytes, {it['chunks']} chunks, {it['document']}")
    table.add_row("hits", f"{found.hits:,}")
    table.add_row("misses", ", ".join(f"{count:,} {reason}" for reason, count in found.misses.items()) or "0")
    if found.canary != CanaryReport():
        table.add_row("canary", _canary_line(found.canary))
    to_stdout.print(table)


def _canary_line(found: CanaryReport) -> str:
    figures = f"{found.checked:,} answers checked"
    if found.tokens:
        figures += f", agreement {found.agreement:.3f}, KL {found.mean_kl:.4f} nats, at worst {found.worst_kl:.2f}"
    return f"{figures}; {found.skipped:,} skipped, {found.failed:,} failed"


@app.command()
def delete(
    store: Store,
    document: Annotated[list[str] | None, typer.Argument(help="Ids of documents.")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the metadata; documents that match all given.")
    ] = None,
    states_of: Annotated[
        str | None, typer.Option("--model", help="Fingerprint of a model: its states only, texts stay.")
    ] = None,
    wait: Wait = False,
) -> None:
    """Take documents out of a store, or the states of a model."""
    from ragcache.maintenance import delete_documents, delete_model, write_options

    opened, settings = StateStore.open(store), load_settings(store)
    options = write_options(settings, wait=wait)
    if states_of is not None:
        if document or where:
            raise SettingsError("give either documents or --model, not both")
        say(f"{delete_model(opened, states_of, options)} chunks' states removed")
        return
    if not document and not where:
        raise SettingsError("nothing to delete; give ids of documents, --where KEY=VALUE or --model FINGERPRINT")
    metadata = dict(_metadata(it) for it in where or [])
    removed = delete_documents(opened, document or [], metadata, options, _embedder(settings))
    say(f"{len(removed)} removed; ragcache compact gives back the space of their states")


@app.command()
def compact(
    store: Store,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of dead bytes worth copying a shard.")
    ] = 0.3,
    budget_mb: Annotated[int | None, typer.Option(min=0, help="Evict down to so many megabytes of shards.")] = None,
    wait: Wait = False,
) -> None:
    """Give back the space of states that nothing uses; readers go on meanwhile."""
    from ragcache.maintenance import compact_store, write_options

    opened = StateStore.open(store)
    options = write_options(load_settings(store, budget_megabytes=budget_mb), wait=wait)
    report = compact_store(opened, threshold, options)
    say(f"{report.rewritten} shards copied, {report.freed_bytes:,} bytes given back, {report.evicted} chunks evicted")
    for miss in report.damaged:
        remark(f"{miss.chunk_id}: {miss.detail} ({miss.reason}); index its source again to encode it again")


@app.command()
def verify(
    store: Store,
    repair: Annotated[bool, typer.Option("--repair", help="Encode and embed again what is damaged.")] = False,
    as_json: AsJson = False,
    model: Model = None,
    adapter: Adapter = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = None,
    wait: Wait = False,
) -> None:
    """Read everything in a store and name what is damaged; exit code 1 if something is."""
    settings = {
        "model": model,
        "adapter": adapter,
        "embedding_model": embedding_model,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    StateStore.open(store)
    load_settings(store, **settings)

    from ragcache.console import loading, reading

    if repair:
        with loading(to_stderr) as on_stage:
            from ragcache.pipeline import RagCache

            cache = RagCache.open(store, on_stage=on_stage, **settings)
        with reading(to_stderr) as progress:
            report = cache.verify(repair=True, wait=wait, progress=progress)
    else:
        from ragcache.maintenance import verify_store

        with reading(to_stderr) as progress:
            report = verify_store(StateStore.open(store), progress)
    _print_faults(report, repaired=repair, as_json=as_json)
    if report.faults and not repair:
        raise typer.Exit(FAULTS_FOUND)


def _print_faults(report: VerifyReport, *, repaired: bool, as_json: bool) -> None:
    if as_json:
        found: dict[str, Any] = {"states": report.states, "bytes": report.bytes, "repaired": repaired}
        found["faults"] = [asdict(fault) for fault in report.faults]
        found["given_up"] = [asdict(miss) for miss in report.given_up]
        typer.echo(json.dumps(found, indent=2))
        return
    for fault in report.faults:
        say(f"{fault.part} {fault.name}: {fault.detail} ({fault.reason})")
    if not report.faults:
        outcome = "everything is as it was written"
    elif repaired:
        outcome = f"{len(report.faults)} faults repaired"
    else:
        outcome = f"{len(report.faults)} faults; put them right with --repair"
    for miss in report.given_up:
        remark(f"{miss.chunk_id}: {miss.detail}; index its source again for another")
    say(f"{report.states:,} chunks' states, {report.bytes:,} bytes read: {outcome}")


@app.command()
def rebuild(
    store: Store,
    state_folder: Annotated[
        list[Path] | None, typer.Option(help="Where shards are if not in the store; the same as for index.")
    ] = None,
    wait: Wait = False,
) -> None:
    """Make the catalog of a store anew from its shards, after it was deleted or damaged."""
    from ragcache.maintenance import rebuild_store

    settings = load_settings(store, state_folders=tuple(state_folder) if state_folder else None)
    report, embedded = rebuild_store(store, settings, _embedder(settings), wait=wait)
    say(f"{report.documents} documents, {report.chunks} chunks, {report.with_states} of them with states")
    if report.with_states < report.chunks:
        remark(
            f"{report.chunks - report.with_states} chunks have no states: given up, or their shards are elsewhere "
            "(--state-folder)"
        )
    if embedded:
        remark(f"the vector index was missing or damaged: {embedded} chunks were embedded again")
    for path, detail in report.faults:
        remark(f"{path}: {detail}; index the sources again to get back what is missing")
    if report.replaced:
        remark(f"the old catalog is kept in {report.replaced}")


def _embedder(settings: Settings) -> Callable[[], Embedder]:
    """Loads the embedding model only when texts have to be embedded again."""

    def load() -> Embedder:
        from ragcache.retriever.embedding import Embedder

        return Embedder(settings.embedding_model, "cpu", settings.cache_folder)

    return load


def _metadata(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`; a value that is JSON is taken as such, anything else as a text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise SettingsError(f"--where {text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
