"""Progress on a terminal: while models load, while documents are encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ragcache.indexer.report import ENCODING

if TYPE_CHECKING:
    from ragcache.answer import Answer
    from ragcache.model.loading import OnStage
    from ragcache.stream import AnswerStream

CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})

PLAIN_INTERVAL = 10
"""Seconds between progress lines where there is no terminal to draw a bar on."""

LOADING_STAGES = 5
"""Stages that opening a store reports when nothing has to be converted."""


@contextmanager
def loading(console: Console) -> Iterator[OnStage]:
    """A bar that moves on with every stage of loading."""
    _quiet_libraries()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("importing libraries", total=LOADING_STAGES)

        def on_stage(words: str) -> None:
            progress.update(task, description=words, advance=1)

        yield on_stage


class IndexingProgress:
    """Documents done, chunks, tokens per second, time left: a bar on a terminal, else a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("documents, {task.fields[chunks]} chunks, {task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(ENCODING, start=False, visible=False, total=0, chunks=0, rate=0.0)

    def __enter__(self) -> IndexingProgress:
        self._progress.__enter__()
        return self

    def __exit__(self, *exit_arguments: object) -> None:
        self._progress.stop()

    def start(self, documents: int, words: str = ENCODING) -> None:
        """A pass begins; its bar takes the place of the one before."""
        self._progress.reset(self._task, total=documents, visible=True, description=words, chunks=0, rate=0.0)
        self._chunks = self._tokens = 0
        self._next_line = PLAIN_INTERVAL
        if documents:
            self._progress.start()
        else:
            self._progress.stop()

    def advance(self, documents: int, chunks: int, tokens: int) -> None:
        """So many more documents are gone through, chunks encoded and tokens run."""
        self._chunks += chunks
        self._tokens += tokens
        elapsed = self._progress.tasks[self._task].elapsed or 0.0
        rate = self._tokens / elapsed if elapsed else 0.0
        self._progress.update(self._task, advance=documents, chunks=self._chunks, rate=rate)
        if not self._console.is_terminal and elapsed > self._next_line:
            self._next_line = int(elapsed) + PLAIN_INTERVAL
            task = self._progress.tasks[self._task]
            self._console.print(
                f"{task.description}: {task.completed:.0f} of {task.total:.0f} documents, {self._chunks} chunks, "
                f"{rate:,.0f} tokens/s, {elapsed:.0f} s",
                soft_wrap=True,
            )


class EvaluationProgress:
    """Answers measured and time left: a bar on a terminal, else a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_line = PLAIN_INTERVAL
        self._progress = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("answers"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> EvaluationProgress:
        self._progress.__enter__()
        return self

    def __exit__(self, *exit_arguments: object) -> None:
        self._progress.stop()

    def start(self, measurements: int) -> None:
        """The run begins; so many questions times settings are to be measured."""
        self._task = self._progress.add_task("", total=measurements)

    def advance(self) -> None:
        """One of them is done."""
        self._progress.advance(self._task)
        task = self._progress.tasks[self._task]
        if not self._console.is_terminal and (task.elapsed or 0.0) > self._next_line:
            self._next_line = int(task.elapsed or 0.0) + PLAIN_INTERVAL
            self._console.print(
                f"measuring: {task.completed:.0f} of {task.total:.0f} answers, {task.elapsed:.0f} s", soft_wrap=True
            )


@contextmanager
def reading(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes that are read."""
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _quiet_libraries() -> None:
    """Bars of other libraries would write over ours, and what torchao says of itself when it is found is no news."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def printable(text: str) -> str:
    """Text of a model or of a document, without what would steer the terminal."""
    return text.translate(CONTROL_CHARACTERS)


def print_answer(console: Console, stream: AnswerStream) -> Answer:
    """Print an answer as it comes, then its sources, counts and times."""
    for piece in stream:
        console.print(printable(piece), end="", markup=False, soft_wrap=True)
    answer = stream.answer
    tokens, times = answer.tokens, answer.timings_ms
    console.print()
    for source in answer.sources:
        console.print(f"  {source.score:.2f}  {printable(source.chunk_id)}", markup=False, style="dim", soft_wrap=True)
    for miss in answer.misses:
        line = printable(f"  recomputed {miss.chunk_id}: {miss.detail} ({miss.reason})")
        console.print(line, markup=False, style="yellow", soft_wrap=True)
    for chunk_id in answer.dropped:
        line = printable(f"  dropped {chunk_id}: no room in the context window")
        console.print(line, markup=False, style="yellow", soft_wrap=True)
    repaired = f"{tokens.repaired:,} of them repaired, " if tokens.repaired or times.repair else ""
    repair = f"repair {times.repair:.0f}, " if repaired else ""
    console.print(
        f"  {tokens.restored:,} tokens restored, {repaired}{tokens.prefilled:,} prefilled, "
        f"{tokens.generated} generated; "
        f"TTFT {times.ttft:.0f} ms (retrieve {times.retrieve:.0f}, read {times.read:.0f}, restore {times.restore:.0f}, "
        f"{repair}prefill {times.prefill:.0f})",
        style="dim",
        soft_wrap=True,
    )
    return answer
