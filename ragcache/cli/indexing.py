"""`ragcache index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli.app import (
    Adapter,
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
)
from ragcache.settings import load_settings
from ragcache.states.store import StateStore, hold_lock


@app.command()
def index(
    source: Annotated[str, typer.Argument(help="Folder of text or Markdown files, a .jsonl file, or pydoc:topics.")],
    store: Store,
    model: Model = None,
    adapter: Adapter = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    states: Annotated[str | None, typer.Option(help="auto, hidden or pre-rope-kv.")] = None,
    codec: Annotated[str | None, typer.Option(help="int8, int4, bf16, fp16, or raw: as computed.")] = None,
    shard_format: Annotated[str | None, typer.Option("--format", help="Of shard files: arrow or parquet.")] = None,
    state_folder: Annotated[
        list[Path] | None, typer.Option(help="Where shards go; give it again for each further disk.")
    ] = None,
    budget_mb: Annotated[
        int | None, typer.Option(help="Most megabytes that shards may take; 0 is without limit.")
    ] = None,
    free_mb: Annotated[int | None, typer.Option(help="Megabytes that stay free on the disk.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Largest chunk, in tokens.")] = None,
    encodings: Annotated[
        str | None, typer.Option(help="What chunks are encoded after: alone, context, or alone,context.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Text of a context: document or neighbours.")] = None,
    context_tokens: Annotated[int | None, typer.Option(help="Length of a context, in tokens.")] = None,
    contexts: Annotated[int | None, typer.Option(help="Contexts of a chunk, whose states are the mean.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Start of every prompt; states depend on it.")] = None,
    trust_remote_code: TrustRemoteCode = None,
    wait: Wait = False,
) -> None:
    """Bring documents into a store; only what changed since the last run is encoded."""
    from ragcache.indexer.documents import checked
    from ragcache.indexer.sources import open_source

    settings = {
        "model": model,
        "adapter": adapter,
        "embedding_model": embedding_model,
        "dtype": dtype,
        "device": device,
        "states": states,
        "codec": codec,
        "shard_format": shard_format,
        "state_folders": tuple(state_folder) if state_folder else None,
        "budget_megabytes": budget_mb,
        "free_megabytes": free_mb,
        "chunk_tokens": chunk_tokens,
        "encodings": encodings,
        "context": context,
        "context_tokens": context_tokens,
        "contexts": contexts,
        "system_prompt": system_prompt,
        "trust_remote_code": trust_remote_code,
    }
    # All that can be wrong with arguments and documents shows before models are loaded.
    if StateStore.exists(store) and not wait:
        with hold_lock(store):
            pass
    load_settings(store, **settings)
    opened = open_source(source)
    for _ in checked(opened, opened.name):
        pass

    from ragcache.console import IndexingProgress, loading

    with loading(to_stderr) as on_stage:
        from ragcache.pipeline import RagCache

        cache = RagCache.open(store, on_stage=on_stage, **settings)
    with IndexingProgress(to_stderr) as progress:
        report = cache.index(opened, source=opened.name, remove_missing=True, progress=progress, wait=wait)
    cache.close()
    in_context = f"{report.in_context} encoded in context, " if report.in_context else ""
    say(
        f"{report.added} added, {report.updated} updated, {report.unchanged} unchanged, {report.removed} removed; "
        f"{report.chunks} chunks, {in_context}{report.encoded_tokens:,} tokens encoded in {report.seconds:.1f} s"
    )
    if report.reembedded:
        remark(f"the vector index was missing or damaged: {report.reembedded} chunks were embedded again")
    if report.without_states:
        remark(
            f"space is short: {report.without_states} encodings of chunks have no states and are recomputed when "
            "wanted; see --budget-mb and --free-mb"
        )
    if report.readmitted:
        remark(f"{report.readmitted} encodings that had been given up for lack of space have states again")
    if report.empty:
        remark(f"without any text: {', '.join(report.empty)}")
