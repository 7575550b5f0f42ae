"""Shard files in both containers: other tools open them, and exact byte ranges hold the states."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ragcache.states.durable import TEMPORARY_PREFIX, file_checksum
from ragcache.states.form import Form, LayerFormat, StateFormat
from ragcache.states.key import context_digest, state_key
from ragcache.states.miss import MissReason, UnusableStatesError
from ragcache.states.reading import read_states
from ragcache.states.records import NewShard, NewStates, StoredStates, pack_token_ids
from ragcache.states.shard import SCHEMA_KEY, Container, ShardEntry, ShardOrigin, ShardWriter, read_shard
from tests.formats import hidden_format, mixed_format

FORMAT = mixed_format("int8", "bfloat16")
ORIGIN = ShardOrigin("store", '{"weights": "abc"}', "digest", (1, 2, 3))


def entry(number: int, tokens: int) -> ShardEntry:
    layers = {
        layer: torch.randint(256, (FORMAT.size(layer, tokens),), dtype=torch.uint8) for layer in FORMAT.stored_layers
    }
    ids = tuple(range(number, number + tokens))
    context_ids = tuple(range(1000, 1000 + number * 3))
    return ShardEntry(
        f"key{number}",
        ids,
        layers,
        "context" if context_ids else "alone",
        context_ids,
        2.5,
        f"d#{number}",
        "d",
        number,
        "Title",
        "naïve text ☃",
    )


@pytest.fixture
def entries() -> list[ShardEntry]:
    return [entry(number, tokens) for number, tokens in enumerate([5, 1, 512, 33])]


@pytest.fixture(params=Container)
def container(request: pytest.FixtureRequest) -> Container:
    chosen: Container = request.param
    return chosen


def write(folder: Path, entries: list[ShardEntry], container: Container) -> NewShard:
    writer = ShardWriter(folder, 7, FORMAT, container, ORIGIN)
    for item in entries:
        writer.add(item)
    return writer.close()


def stored(shard: NewShard, states: NewStates) -> StoredStates:
    return StoredStates(states.key, shard.path, shard.format, states.ranges, states.context_ids)


def test_byte_ranges_hold_the_columns(tmp_path: Path, entries: list[ShardEntry], container: Container) -> None:
    shard = write(tmp_path, entries, container)
    content = shard.path.read_bytes()
    for item, states in zip(entries, shard.states, strict=True):
        expected = [pack_token_ids(item.token_ids)]
        expected += [item.layers[layer].numpy().tobytes() for layer in FORMAT.stored_layers]
        assert (states.key, states.cost, states.tokens) == (item.key, 2.5, len(item.token_ids))
        for wanted, column in zip(expected, states.ranges, strict=True):
            assert content[column.offset : column.offset + column.length] == wanted
            assert column.checksum == xxhash.xxh3_64_intdigest(wanted)
        found = read_states(stored(shard, states), context_digest(item.context_ids), item.token_ids)
        assert found.context_ids == item.context_ids
        assert all(torch.equal(found.layers[layer], item.layers[layer]) for layer in FORMAT.stored_layers)
    assert shard.bytes == shard.path.stat().st_size
    assert shard.checksum == file_checksum(shard.path)


def check_table(table: pa.Table, entries: list[ShardEntry]) -> None:
    about = json.loads(table.schema.metadata[SCHEMA_KEY])
    assert (about["version"], about["store"], about["sequence"]) == (3, "store", 7)
    assert about["fingerprint"] == {"weights": "abc"}
    assert about["prefix"] == [1, 2, 3]
    assert StateFormat.from_json(json.dumps(about["format"])) == FORMAT
    assert table.column("token_ids").to_pylist() == [list(item.token_ids) for item in entries]
    assert table.column("context_ids").to_pylist() == [list(item.context_ids) for item in entries]
    assert table.column("encoding").to_pylist() == [item.encoding for item in entries]
    assert table.column("text").to_pylist() == ["naïve text ☃"] * len(entries)
    assert table.column("layer_001").to_pylist() == [item.layers[1].numpy().tobytes() for item in entries]
    assert table.column("xxh3").to_pylist()[2][1] == xxhash.xxh3_64_intdigest(pack_token_ids(entries[2].token_ids))


def test_pyarrow_pandas_and_duckdb_open_an_arrow_shard(tmp_path: Path, entries: list[ShardEntry]) -> None:
    shard = write(tmp_path, entries, Container.ARROW)
    with pa.ipc.open_file(shard.path) as reader:
        assert reader.num_record_batches == len(entries)
    table = pa.ipc.open_file(shard.path).read_all()
    check_table(table, entries)
    assert list(pd.read_feather(shard.path)["chunk_id"]) == [item.chunk_id for item in entries]
    rows = duckdb.from_arrow(table).aggregate("count(*), sum(octet_length(layer_001))").fetchall()
    assert rows == [(len(entries), sum(FORMAT.size(1, len(item.token_ids)) for item in entries))]


def test_pyarrow_pandas_and_duckdb_open_a_parquet_shard(tmp_path: Path, entries: list[ShardEntry]) -> None:
    shard = write(tmp_path, entries, Container.PARQUET)
    metadata = pq.read_metadata(shard.path)
    assert metadata.num_row_groups == len(entries)
    payload = metadata.row_group(0).column(metadata.num_columns - 1)
    assert (payload.compression, payload.has_dictionary_page, payload.statistics) == ("UNCOMPRESSED", False, None)
    check_table(pq.read_table(shard.path), entries)
    assert list(pd.read_parquet(shard.path)["chunk_id"]) == [item.chunk_id for item in entries]
    query = f"SELECT count(*), sum(octet_length(layer_001)), sum(len(token_ids)) FROM '{shard.path}'"  # noqa: S608
    tokens = [len(item.token_ids) for item in entries]
    assert duckdb.execute(query).fetchall() == [(4, sum(FORMAT.size(1, it) for it in tokens), sum(tokens))]


def test_nothing_has_its_final_name_before_it_is_whole(
    tmp_path: Path, entries: list[ShardEntry], container: Container
) -> None:
    writer = ShardWriter(tmp_path, 7, FORMAT, container, ORIGIN)
    writer.add(entries[0])
    (unfinished,) = tmp_path.iterdir()
    assert unfinished.name.startswith(TEMPORARY_PREFIX)
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_a_shard_tells_what_its_writer_told(tmp_path: Path, entries: list[ShardEntry], container: Container) -> None:
    shard = write(tmp_path, entries, container)
    content = read_shard(shard.path, container)
    assert content.states == shard.states
    assert content.format == FORMAT


def test_a_shard_of_another_version_is_not_read(
    tmp_path: Path, entries: list[ShardEntry], container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.states.shard.SHARD_VERSION", 4)
    shard = write(tmp_path, entries, container)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 4"):
        read_shard(shard.path, container)


@given(data=st.data())
def test_whatever_is_changed_states_are_right_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    container = data.draw(st.sampled_from(Container))
    items = [entry(number, tokens) for number, tokens in enumerate([5, 33])]
    shard = write(tmp_path_factory.mktemp("shard"), items, container)
    content = bytearray(shard.path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(1, len(content)) | st.none())
    shard.path.write_bytes(content[:cut])
    hit = 0
    for item, states in zip(items, shard.states, strict=True):
        try:
            found = read_states(stored(shard, states), context_digest(item.context_ids), item.token_ids)
            assert found.context_ids == item.context_ids
            assert all(torch.equal(found.layers[layer], item.layers[layer]) for layer in FORMAT.stored_layers)
        except UnusableStatesError as fault:
            hit += fault.reason in (MissReason.CHECKSUM, MissReason.TRUNCATED)
    ranges = [it for states in shard.states for it in (*states.ranges, states.context_ids)]
    inside = [it.offset <= place < it.offset + it.length for it in ranges]
    assert hit or not any(inside)


def test_formats_survive_json() -> None:
    assert StateFormat.from_json(FORMAT.to_json()) == FORMAT
    assert hidden_format(3, 70, "int8", "bfloat16").layers[0] == LayerFormat(Form.TOKENS, 0, "int8")
    for nonsense in ("{}", "[]", '{"dtype": "x", "layers": [{"form": "unheard of", "width": 1, "codec": "raw"}]}'):
        with pytest.raises(ValueError, match=r"state format|not a valid Form"):
            StateFormat.from_json(nonsense)


def test_keys_tell_apart_what_states_depend_on() -> None:
    one, two = context_digest((1,)), context_digest((2,))
    keys = {
        state_key("model", (1,), "", (2, 3)),
        state_key("other", (1,), "", (2, 3)),
        state_key("model", (), one, (2, 3)),
        state_key("model", (1, 2), "", (3,)),
        state_key("model", (1,), one, (3,)),
        state_key("model", (1,), two, (3,)),
        state_key("model", (1,), "", (3, 2)),
    }
    assert len(keys) == 7
    assert context_digest(()) == ""
    # Keys must not change between versions, or every stored state goes stale.
    assert state_key("f", (1, 2), "", (3,)) == "6823b55d524fbdd9166d084aab458013a2f96bd91abe255274915f61f791d052"
    assert context_digest((7, 8)) == hashlib.sha256(bytes([7, 0, 0, 0, 8, 0, 0, 0])).hexdigest()
