"""Stored states in other codecs, so that codecs can be compared without encoding documents again.

From states that decode exactly the same bytes come out as indexing with the other codec would have written. They go
into a shard of their own, which is read like any other, so times are those of the codec, too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ragcache.errors import EvaluationError
from ragcache.evaluation.passages import Asked, encodings_of
from ragcache.pipeline import RagCache
from ragcache.settings import CodecName
from ragcache.states.form import StateFormat
from ragcache.states.miss import UnusableStatesError
from ragcache.states.reading import read_states
from ragcache.states.records import Encoding, StoredStates
from ragcache.states.shard import Container, ShardEntry, ShardOrigin, ShardWriter
from ragcache.stream import ContextChunk

PREFIX = ".transcoded-"
"""Of the names of folders of shards: nobody else has such."""


class UntranscodableError(Exception):
    """What another codec would have made of states is not known; says why."""


@contextmanager
def in_codecs(
    cache: RagCache, asked: Sequence[Asked], codecs: Iterable[CodecName | None], folder: Path
) -> Iterator[tuple[dict[CodecName | None, Sequence[Asked]], dict[CodecName, str]]]:
    """Passages with states in several codecs, for as long as the context lasts.

    Args:
        cache: the store that they come from.
        asked: questions with their passages.
        codecs: that are wanted.
        folder: for a folder of shards, taken away in the end; one that a run has left there that was killed goes, too.

    Yields:
        For each codec the questions, those of `None` as they were given; and why they cannot be had in the others.

    Raises:
        EvaluationError: the folder cannot be written to.
    """
    found: dict[CodecName | None, Sequence[Asked]] = {None: asked}
    reasons: dict[CodecName, str] = {}
    for left in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as shards:
        for codec in codecs:
            if codec is not None:
                try:
                    found[codec] = transcoded(cache, asked, codec, Path(shards))
                except UntranscodableError as error:
                    reasons[codec] = str(error)
                except OSError as error:
                    raise EvaluationError(f"cannot write to {folder}: {error.strerror or error}") from error
        yield found, reasons


def transcoded(cache: RagCache, asked: Sequence[Asked], codec: CodecName, folder: Path) -> list[Asked]:
    """The same passages with their states in another codec.

    Args:
        cache: the store that they come from.
        asked: questions with their passages.
        codec: of the states wanted.
        folder: for shards; whoever made it takes it away when the passages are done with.

    Returns:
        The same questions. States that cannot be read are left as they are, and so is the reason of their miss.

    Raises:
        UntranscodableError: states do not decode exactly, or a passage has none.
    """
    lacking = [chunk.chunk_id for it in asked for chunk in it.chunks if not encodings_of(chunk)]
    if lacking:
        raise UntranscodableError(f"{lacking[0]} has no states, and would be encoded in the store's codec")
    stored = {
        it.states.key: _Stored(chunk, it, it.states)
        for question in asked
        for chunk in question.chunks
        for it in chunk.encodings
        if it.states is not None
    }
    by_format: dict[str, list[_Stored]] = {}
    for it in stored.values():
        by_format.setdefault(it.states.format, []).append(it)
    identity = cache.store.identity()
    # The shard belongs to no store: whoever opens one would take it for an orphan.
    origin = ShardOrigin("", identity.fingerprint, identity.digest, identity.prefix)
    found: dict[str, StoredStates] = {}
    for text, rows in by_format.items():
        found |= _write(rows, StateFormat.from_json(text), codec, folder, origin)
    return [replace(it, chunks=tuple(_with(chunk, found) for chunk in it.chunks)) for it in asked]


@dataclass(frozen=True)
class _Stored:
    """States of a passage."""

    chunk: ContextChunk
    encoding: Encoding
    states: StoredStates


def _write(
    rows: Sequence[_Stored], format: StateFormat, codec: CodecName, folder: Path, origin: ShardOrigin
) -> dict[str, StoredStates]:
    """Put states of one format into a shard of another codec; where they are there, by key."""
    wanted = replace(format, layers=tuple(replace(layer, codec=codec) for layer in format.layers))
    if wanted == format:
        return {}
    if not format.exact:
        raise UntranscodableError("states are stored in a codec that loses something; index with --codec raw")
    writer = ShardWriter(folder, 0, wanted, Container.ARROW, origin)
    try:
        for row in rows:
            with suppress(UnusableStatesError):
                writer.add(_entry(row, format, wanted))
        shard = writer.close()
    except BaseException:
        writer.abort()
        raise
    return {it.key: StoredStates(it.key, shard.path, shard.format, it.ranges, it.context_ids) for it in shard.states}


def _entry(row: _Stored, format: StateFormat, wanted: StateFormat) -> ShardEntry:
    chunk, encoding = row.chunk, row.encoding
    read = read_states(row.states, encoding.context, chunk.token_ids)
    layers = {}
    for layer, data in read.layers.items():
        shape = len(format.layers[layer].form.parts), len(chunk.token_ids), format.layers[layer].width
        states = torch.empty(shape, dtype=getattr(torch, format.dtype))
        format.decode(layer, data, states)
        layers[layer] = wanted.encode(layer, states)
    return ShardEntry(encoding.key, chunk.token_ids, layers, encoding.name, read.context_ids)


def _with(chunk: ContextChunk, found: Mapping[str, StoredStates]) -> ContextChunk:
    encodings = (
        it if it.states is None else replace(it, states=found.get(it.states.key, it.states)) for it in chunk.encodings
    )
    return replace(chunk, encodings=tuple(encodings))
