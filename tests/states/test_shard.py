from __future__ import annotations

import json
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from ragcache.states.form import Form, LayerFormat, StateFormat, hidden_format
from ragcache.states.key import state_key
from ragcache.states.records import ByteRange
from ragcache.states.shard import BATCH_KEY, SCHEMA_KEY, TEMPORARY_PREFIX, ShardEntry, ShardWriter

FORMAT = hidden_format(3, 70, "int8", "bfloat16")


def entry(number: int, tokens: int) -> ShardEntry:
    layers = {
        layer: torch.randint(256, (tokens, FORMAT.row_bytes(layer)), dtype=torch.uint8)
        for layer in FORMAT.stored_layers
    }
    description = {"chunk_id": f"d#{number}", "text": "naïve text ☃", "metadata": {"page": number}}
    return ShardEntry(f"key{number}", tuple(range(number, number + tokens)), layers, description)


@pytest.fixture
def entries() -> list[ShardEntry]:
    return [entry(number, tokens) for number, tokens in enumerate([5, 1, 512, 33])]


def write(folder: Path, entries: list[ShardEntry]) -> tuple[Path, list[tuple[ByteRange, ...]]]:
    writer = ShardWriter(folder, FORMAT, {"fingerprint": {"weights": "abc"}})
    for item in entries:
        writer.add(item)
    ranges = writer.close()
    return folder / writer.name, ranges


def test_byte_ranges_hold_the_columns(tmp_path: Path, entries: list[ShardEntry]) -> None:
    path, ranges = write(tmp_path, entries)
    content = path.read_bytes()
    for item, columns in zip(entries, ranges, strict=True):
        expected = [np.asarray(item.token_ids, dtype="<i4").tobytes()]
        expected += [item.layers[layer].numpy().tobytes() for layer in FORMAT.stored_layers]
        for wanted, column in zip(expected, columns, strict=True):
            assert content[column.offset : column.offset + column.length] == wanted
            assert column.checksum == xxhash.xxh3_64_intdigest(wanted)


def test_pyarrow_opens_a_shard_and_it_explains_itself(tmp_path: Path, entries: list[ShardEntry]) -> None:
    path, _ = write(tmp_path, entries)
    with pa.ipc.open_file(path) as reader:
        about = json.loads(reader.schema.metadata[SCHEMA_KEY])
        assert about["fingerprint"] == {"weights": "abc"}
        assert StateFormat.from_json(json.dumps(about["format"])) == FORMAT
        assert reader.schema.names == ["token_id", "layer_001", "layer_002"]
        assert reader.num_record_batches == len(entries)
        for index, item in enumerate(entries):
            batch, metadata = reader.get_batch_with_custom_metadata(index)
            chunk = json.loads(metadata[BATCH_KEY])
            assert chunk["chunk_id"] == item.description["chunk_id"]
            assert chunk["text"] == "naïve text ☃"
            assert chunk["key"] == item.key
            assert batch.column("token_id").to_pylist() == list(item.token_ids)
            first = batch.column("layer_001")[0].as_py()
            assert first == item.layers[1][0].numpy().tobytes()
            assert chunk["xxh3"]["layer_002"] == xxhash.xxh3_64_intdigest(item.layers[2].numpy().data)


def test_duckdb_reads_a_shard(tmp_path: Path, entries: list[ShardEntry]) -> None:
    path, _ = write(tmp_path, entries)
    shard = pa.ipc.open_file(path).read_all()
    rows = duckdb.from_arrow(shard).aggregate("count(*), sum(octet_length(layer_001))").fetchall()
    tokens = sum(len(item.token_ids) for item in entries)
    assert rows == [(tokens, tokens * FORMAT.row_bytes(1))]


def test_nothing_has_its_final_name_before_it_is_whole(tmp_path: Path, entries: list[ShardEntry]) -> None:
    writer = ShardWriter(tmp_path, FORMAT, {})
    writer.add(entries[0])
    assert [path.name for path in tmp_path.iterdir()] == [TEMPORARY_PREFIX + writer.name]
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_formats_survive_json() -> None:
    assert StateFormat.from_json(FORMAT.to_json()) == FORMAT
    assert FORMAT.layers[0] == LayerFormat(Form.TOKENS, 0, "int8")
    for nonsense in ("{}", "[]", '{"dtype": "x", "layers": [{"form": "unheard of", "width": 1, "codec": "raw"}]}'):
        with pytest.raises(ValueError, match=r"state format|not a valid Form"):
            StateFormat.from_json(nonsense)


def test_keys_tell_apart_what_states_depend_on() -> None:
    keys = {
        state_key("model", (1,), (), (2, 3)),
        state_key("other", (1,), (), (2, 3)),
        state_key("model", (), (1,), (2, 3)),
        state_key("model", (1, 2), (), (3,)),
        state_key("model", (1,), (2,), (3,)),
        state_key("model", (1,), (), (3, 2)),
    }
    assert len(keys) == 6
    # Keys must not change between versions, or every stored state goes stale.
    assert state_key("f", (1, 2), (), (3,)) == "6823b55d524fbdd9166d084aab458013a2f96bd91abe255274915f61f791d052"
