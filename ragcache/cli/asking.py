"""`ragcache query` and `ragcache serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcache.cli.app import (
    Adapter,
    AsJson,
    Device,
    Dtype,
    EmbeddingModel,
    Model,
    Store,
    TopK,
    TrustRemoteCode,
    app,
    to_stderr,
    to_stdout,
)
from ragcache.settings import load_settings
from ragcache.states.store import StateStore


@app.command()
def query(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    store: Store,
    top_k: TopK = None,
    reuse: Annotated[str | None, typer.Option(help="composed, exact or none.")] = None,
    encodings: Annotated[str | None, typer.Option(help="Which encodings of chunks to use: alone, context.")] = None,
    order: Annotated[
        str | None, typer.Option(help="conditioned, score, score-last, document or given: how chunks stand.")
    ] = None,
    repair: Annotated[
        str | None, typer.Option(help="off, query, boundary or deviation: which tokens of chunks are computed again.")
    ] = None,
    repair_ratio: Annotated[float | None, typer.Option(help="Share of the chunks' tokens that is repaired.")] = None,
    repair_ms: Annotated[float | None, typer.Option(help="Time for repair; takes the place of the ratio.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    as_json: AsJson = False,
    model: Model = None,
    adapter: Adapter = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Answer a question from a store."""
    settings = {
        "model": model,
        "adapter": adapter,
        "embedding_model": embedding_model,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "top_k": top_k,
        "reuse": reuse,
        "encodings": encodings,
        "order": order,
        "repair": repair,
        "repair_ratio": repair_ratio,
        "repair_ms": repair_ms,
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
    with cache:
        stream = cache.stream(question)
        if as_json:
            typer.echo(stream.answer.model_dump_json(indent=2))
            return

        from ragcache.console import print_answer

        print_answer(to_stdout, stream)


@app.command()
def serve(
    store: Store,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    model: Model = None,
    adapter: Adapter = None,
    embedding_model: EmbeddingModel = None,
    dtype: Dtype = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = None,
) -> None:
    """Answer questions over REST: POST /v1/query, GET /health."""
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

    from ragcache.console import loading

    with loading(to_stderr) as on_stage:
        from ragcache.pipeline import RagCache

        cache = RagCache.open(store, on_stage=on_stage, **settings)

    from ragcache.server.run import run

    with cache:
        run(cache, host, port)
