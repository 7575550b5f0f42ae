"""The command line. Every error of ragcache is one line on stderr and exit code 2; results go to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli import asking, benchmarks, evaluating, indexing, planning, upkeep
from ragcache.cli.app import app, to_stderr, to_stdout
from ragcache.errors import RagCacheError

__all__ = ["app", "asking", "benchmarks", "evaluating", "indexing", "main", "planning", "upkeep"]


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
