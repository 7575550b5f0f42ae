"""States brought into another codec are those that indexing with that codec writes."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ragcache import RagCache
from ragcache.errors import EvaluationError
from ragcache.evaluation.grid import PLAIN, Setting
from ragcache.evaluation.job import JOURNAL, REPORT, RESULT, EvaluationOptions, evaluate
from ragcache.evaluation.measure import Measurement
from ragcache.evaluation.passages import Asked, find_passages
from ragcache.evaluation.questions import Question
from ragcache.evaluation.transcoding import PREFIX, UntranscodableError, transcoded
from ragcache.settings import CodecName
from ragcache.states.reading import read_states
from ragcache.states.shard import ShardWriter
from tests.conftest import make_document
from tests.evaluation.test_run import Counting

OpenTiny = Callable[..., RagCache]
BOTH = ("alone", "context")
QUESTION = Question("Which ships passed?")
FILES = (JOURNAL, REPORT, RESULT, "agreement.svg", "kl.svg")
CODECS_THAT_LOSE: list[CodecName] = ["int8", "int4", "bf16"]


def fill(open_store: OpenTiny, path: Path, codec: CodecName) -> RagCache:
    cache = open_store(path, codec=codec, encodings=BOTH, context_tokens=60, contexts=2)
    cache.index([make_document(number) for number in range(3)])
    return cache


def with_codec(setting: Setting, codec: CodecName | None) -> Setting:
    return setting.model_copy(update={"codec": codec})


@pytest.fixture
def raw(open_tiny: OpenTiny, tmp_path: Path) -> RagCache:
    return fill(open_tiny, tmp_path / "raw", "raw")


@pytest.fixture
def asked(raw: RagCache) -> Asked:
    return find_passages(raw, QUESTION, top_k=3)


@pytest.mark.parametrize("codec", CODECS_THAT_LOSE)
def test_bytes_are_those_of_a_store_of_that_codec(
    raw: RagCache, asked: Asked, open_tiny: OpenTiny, tmp_path: Path, codec: CodecName
) -> None:
    (found,) = transcoded(raw, [asked], codec, tmp_path)
    other = find_passages(fill(open_tiny, tmp_path / codec, codec), QUESTION, top_k=3)
    compared = 0
    for mine, theirs in zip(found.chunks, other.chunks, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert [it.name for it in mine.encodings] == list(BOTH)
        for ours, expected in zip(mine.encodings, theirs.encodings, strict=True):
            assert ours.states is not None
            assert expected.states is not None
            assert (ours.key, ours.states.format) == (expected.key, expected.states.format)
            read, wanted = (
                read_states(it.states, it.context, mine.token_ids) for it in (ours, expected) if it.states is not None
            )
            assert read.context_ids == wanted.context_ids
            for layer, data in wanted.layers.items():
                assert torch.equal(read.layers[layer], data)
                compared += 1
    assert compared


def test_they_are_measured_like_a_store_of_that_codec(
    raw: RagCache, asked: Asked, open_tiny: OpenTiny, tmp_path: Path
) -> None:
    setting = Setting(encodings=BOTH, order="conditioned", repair="query", repair_ratio=0.2)
    (found,) = transcoded(raw, [asked], "int4", tmp_path)
    exact, record = Measurement(raw, 4).records([(asked, setting), (found, with_codec(setting, "int4"))])
    other = fill(open_tiny, tmp_path / "int4", "int4")
    [expected] = Measurement(other, 4).records([(find_passages(other, QUESTION, 3), setting)])
    assert record.misses == expected.misses == ()
    assert record.kl == expected.kl != exact.kl
    assert record.answer == expected.answer
    assert record.repaired_tokens == exact.repaired_tokens > 0


def test_the_codec_that_they_have_needs_nothing(raw: RagCache, asked: Asked, tmp_path: Path) -> None:
    folder = tmp_path / "codecs"
    assert transcoded(raw, [asked], "raw", folder) == [asked]
    assert not folder.exists()


def test_what_lost_something_is_not_transcoded(open_tiny: OpenTiny, tmp_path: Path) -> None:
    cache = fill(open_tiny, tmp_path / "store", "int8")
    with pytest.raises(UntranscodableError):
        transcoded(cache, [find_passages(cache, QUESTION, 3)], "int4", tmp_path)


def test_passages_without_states_would_be_in_the_codec_of_the_store(raw: RagCache, tmp_path: Path) -> None:
    with sqlite3.connect(raw.path / "catalog.sqlite") as connection:
        connection.execute("UPDATE encodings SET states = NULL, evicted = 1")
    told = list[str]()
    settings = [PLAIN, with_codec(PLAIN, "int4")]
    options = EvaluationOptions(max_tokens=2, top_k=3)
    with pytest.raises(EvaluationError):
        evaluate(raw, [QUESTION], settings[1:], tmp_path / "out", options, Counting(), told.append)
    with pytest.raises(UntranscodableError, match="has no states"):
        transcoded(raw, [find_passages(raw, QUESTION, 3)], "int4", tmp_path)


def test_states_that_cannot_be_read_stay_a_miss(raw: RagCache, asked: Asked, tmp_path: Path) -> None:
    shard = next(it.states.shard for chunk in asked.chunks for it in chunk.encodings if it.states is not None)
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    (found,) = transcoded(raw, [asked], "int8", tmp_path)
    [record] = Measurement(raw, 2).records([(found, with_codec(PLAIN, "int8"))])
    assert "truncated" in record.misses


def test_an_evaluation_of_codecs(raw: RagCache, tmp_path: Path) -> None:
    out, settings = tmp_path / "out", [PLAIN, *(with_codec(PLAIN, codec) for codec in CODECS_THAT_LOSE)]
    (out / f"{PREFIX}of-a-run-that-was-killed" / "shard").mkdir(parents=True)
    (out / "codecs" / "mine").mkdir(parents=True)
    options = EvaluationOptions(max_tokens=4, top_k=3)
    found = evaluate(raw, [QUESTION], settings, out, options, Counting())
    assert [it.setting.label for it in found.summaries] == [
        "alone, score, no repair",
        *(f"alone, score, no repair, {codec}" for codec in CODECS_THAT_LOSE),
    ]
    assert len({it.kl.mean for it in found.summaries}) == 4
    assert {it.name for it in out.iterdir()} == {"codecs", *FILES}
    plain_in_codec = evaluate(raw, [QUESTION], settings[1:2], tmp_path / "other", options, Counting()).plain
    assert plain_in_codec is not None
    assert plain_in_codec.setting.codec == CODECS_THAT_LOSE[0]
    # A second run finds it all measured.
    progress = Counting()
    again = evaluate(raw, [QUESTION], settings, out, options, progress)
    assert (progress.started, again.summaries) == (0, found.summaries)
    assert [it["setting"]["codec"] for it in json.loads(found.to_json())["settings"]] == [None, *CODECS_THAT_LOSE]


def test_a_full_disk_is_an_error_with_a_name(raw: RagCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "add", full)
    with pytest.raises(EvaluationError, match=r"cannot write to .*No space left"):
        evaluate(raw, [QUESTION], [with_codec(PLAIN, "int8")], tmp_path, EvaluationOptions(2, 3), Counting())
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_an_evaluation_that_cannot_compare_codecs_says_so(open_tiny: OpenTiny, tmp_path: Path) -> None:
    cache, told = fill(open_tiny, tmp_path / "store", "int8"), list[str]()
    settings = [PLAIN, with_codec(PLAIN, "int8"), with_codec(PLAIN, "int4")]
    options = EvaluationOptions(max_tokens=2, top_k=3)
    found = evaluate(cache, [QUESTION], settings, tmp_path / "out", options, Counting(), told.append)
    assert [it.setting.codec for it in found.summaries] == [None, "int8"]
    assert told == ["left out: 1 setting: states are stored in a codec that loses something; index with --codec raw"]
