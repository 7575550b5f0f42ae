"""The application that commands are added to, where they print, and the options that several of them have."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ragcache {version('ragcache')}")
        raise typer.Exit


app = typer.Typer(
    help="RAG without prefilling the documents: KV caches rebuilt from stored states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
to_stderr = Console(stderr=True, highlight=False, emoji=False)
to_stdout = Console(highlight=False, emoji=False)

Store = Annotated[Path, typer.Option("--store", help="Folder of the state store.")]
Model = Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or alias (smollm2-135m).")]
Adapter = Annotated[str | None, typer.Option(help="Hub id or local folder of a LoRA adapter for the language model.")]
EmbeddingModel = Annotated[str | None, typer.Option(help="Hub id, local folder or alias (all-minilm-l6-v2).")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float32 or float16.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
TrustRemoteCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Let a model folder run its own Python code.")
]
TopK = Annotated[int | None, typer.Option(help="Chunks to retrieve.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for another process that is writing to the store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of no command in particular."""


def say(line: str) -> None:
    """A result, on stdout."""
    from ragcache.console import printable

    to_stdout.print(printable(line), markup=False, soft_wrap=True)


def remark(line: str) -> None:
    """What is not the result, on stderr."""
    from ragcache.console import printable

    to_stderr.print(printable(line), markup=False, soft_wrap=True)
