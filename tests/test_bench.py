"""`ragcache bench restore`, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache.bench import measure_restore
from ragcache.model.language_model import LanguageModel
from ragcache.settings import CodecName, StatesName


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_measured(tiny_model: Callable[[str], LanguageModel], tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    kinds: list[tuple[StatesName, CodecName]] = [("hidden", "raw"), ("pre-rope-kv", "int8")]
    found = [
        measure_restore(model, states, codec, tokens, threads=2, folder=tmp_path)
        for states, codec in kinds
        for tokens in (700, 1500)
    ]
    assert [(it.states, it.codec, it.tokens) for it in found] == [
        ("hidden", "raw", 700),
        ("hidden", "raw", 1500),
        ("pre-rope-kv", "int8", 700),
        ("pre-rope-kv", "int8", 1500),
    ]
    windowed = any(layer.window is not None for layer in model.decoder.layers)
    for it in found:
        assert it.warm_ms > 0
        assert it.cold_ms > 0
        assert it.floor_ms > 0
        assert it.ratio == it.warm_ms / it.floor_ms
        # Token ids are stored, but not with the layers.
        ids = it.tokens * 4 / 1e6
        assert (it.read_megabytes < 0.9 * it.stored_megabytes) == windowed
        assert windowed or it.read_megabytes == pytest.approx(it.stored_megabytes - ids)
    assert not list(tmp_path.iterdir())


def test_the_command(
    tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache.cli import main

    options = ["--model", str(tiny_folder("llama")), "--dtype", "float32", "--device", "cpu", "--tokens", "130,600"]
    monkeypatch.setattr("sys.argv", ["ragcache", "bench", "restore", *options, "--json"])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert [(it["states"], it["codec"], it["tokens"]) for it in found["restores"]] == [
        (states, codec, tokens)
        for states in ("hidden", "pre-rope-kv")
        for codec in ("raw", "int8")
        for tokens in (130, 600)
    ]
    assert all(it["rates"]["memory"] > 0 and it["rates"]["products"] > 0 for it in found["restores"])

    monkeypatch.setattr("sys.argv", ["ragcache", "bench", "restore", "--tokens", "many"])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 2
    assert "--tokens 'many'" in capsys.readouterr().err


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ragcache.cli import main

    monkeypatch.setattr("sys.argv", ["ragcache", "bench", "restore", "--folder", "/nowhere"])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 2
    assert "--folder /nowhere is no folder" in capsys.readouterr().err
