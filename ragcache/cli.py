"""The command line. Every error of ragcache is one line on stderr and exit code 2; results go to stdout."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ragcache.errors import RagCacheError
from ragcache.settings import load_settings
from ragcache.states.store import StateStore


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ragcache {version('ragcache')}")
        raise typer.Exit


app = typer.Typer(
    help="RAG without prefilling the documents: KV caches rebuilt from stored hidden states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
to_stderr = Console(stderr=True, highlight=False, emoji=False)
to_stdout = Console(highlight=False, emoji=False)

Store = Annotated[Path, typer.Option("--store", help="Folder of the state store.")]
Model = Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or alias (smollm2-135m).")]
EmbeddingModel = Annotated[str | None, typer.Option(help="Hub id, local folder or alias (all-minilm-l6-v2).")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float32 or float16.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
TrustRemoteCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Let a model folder run its own Python code.")
]
TopK = Annotated[int | None, typer.Option(help="Chunks to retrieve.")]


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of no command in particular."""


@app.command()
def index(
    source: Annotated[str, typer.Argument(help="Folder of text or Markdown files, a .jsonl file, or pydoc:topics.")],
    store: Store,
    model: Model = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    codec: Annotated[str | None, typer.Option(help="int8, or raw for the model's own precision.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Largest chunk, in tokens.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Start of every prompt; states depend on it.")] = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Bring documents into a store; only what changed since the last run is encoded."""
    from ragcache.indexer.sources import checked, open_source

    settings = {
        "model": model,
        "embedding_model": embedding_model,
        "dtype": dtype,
        "device": device,
        "codec": codec,
        "chunk_tokens": chunk_tokens,
        "system_prompt": system_prompt,
        "trust_remote_code": trust_remote_code,
    }
    # All that can be wrong with arguments and documents shows before models are loaded.
    StateStore.exists(store)
    load_settings(store, **settings)
    opened = open_source(source)
    for _ in checked(opened, opened.name):
        pass

    from ragcache.console import IndexingProgress, loading, printable

    with loading(to_stderr) as on_stage:
        from ragcache.pipeline import RagCache

        cache = RagCache.open(store, on_stage=on_stage, **settings)
    with IndexingProgress(to_stderr) as progress:
        report = cache.index(opened, source=opened.name, remove_missing=True, progress=progress)
    to_stdout.print(
        f"{report.added} added, {report.updated} updated, {report.unchanged} unchanged, {report.removed} removed; "
        f"{report.chunks} chunks, {report.encoded_tokens:,} tokens encoded in {report.seconds:.1f} s",
        soft_wrap=True,
    )
    if report.reembedded:
        line = f"the vector index was missing or damaged: {report.reembedded} chunks were embedded again"
        to_stderr.print(line, soft_wrap=True)
    if report.empty:
        to_stderr.print(f"without any text: {printable(', '.join(report.empty))}", markup=False, soft_wrap=True)


@app.command()
def query(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    store: Store,
    top_k: TopK = None,
    reuse: Annotated[str | None, typer.Option(help="composed, exact or none.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    model: Model = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Answer a question from a store."""
    settings = {
        "model": model,
        "embedding_model": embedding_model,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "top_k": top_k,
        "reuse": reuse,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    StateStore.open(store)
    load_settings(store, **settings)

    from ragcache.console import loading

    with loading(to_stderr) as on_stage:
        from ragcache.pipeline import RagCache

        cache = RagCache.open(store, on_stage=on_stage, **settings)
    stream = cache.stream(question)
    if as_json:
        typer.echo(stream.answer.model_dump_json(indent=2))
        return

    from ragcache.console import print_answer

    print_answer(to_stdout, stream)


@app.command()
def stats(
    store: Store, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show what a store holds."""
    opened = StateStore.open(store)
    counts = opened.catalog.counts() | opened.catalog.sizes()
    fingerprint = json.loads(opened.identity().fingerprint)
    settings = load_settings(store)
    if as_json:
        report = {**counts, "model": settings.model, "codec": settings.codec, "fingerprint": fingerprint}
        typer.echo(json.dumps(report, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name in ("documents", "chunks", "tokens", "shards"):
        table.add_row(name, f"{counts[name]:,}")
    table.add_row("bytes on disk", f"{counts['shard_bytes']:,}")
    table.add_row("bytes in use", f"{counts['state_bytes']:,}")
    table.add_row("model", f"{settings.model} ({fingerprint['dtype']}, weights {fingerprint['weights'][:12]})")
    table.add_row("codec", settings.codec)
    to_stdout.print(table)


@app.command()
def serve(
    store: Store,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Answer questions over REST: POST /v1/query, GET /health."""
    StateStore.open(store)

    from ragcache.console import loading

    with loading(to_stderr) as on_stage:
        from ragcache.pipeline import RagCache

        cache = RagCache.open(store, on_stage=on_stage, device=device, trust_remote_code=trust_remote_code)

    from ragcache.server.run import run

    run(cache, host, port)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo keeps its store and its result.")] = Path(".demo"),
) -> None:
    """Index the Python language reference, ask three questions, compare with a full prefill."""
    from ragcache.demo import run_demo

    run_demo(folder, to_stdout, to_stderr)


def main() -> None:
    """Entry point: run a command, turn errors into one line and exit code 2."""
    try:
        app()
    except RagCacheError as error:
        from ragcache.console import printable

        to_stderr.print(f"error: {printable(' '.join(str(error).split()))}", markup=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        # Such as a full disk under stdout; everything else of the kind has a name by now.
        to_stderr.print(f"error: {error.strerror or error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        to_stderr.print("interrupted; what was committed before is intact")
        sys.exit(130)
