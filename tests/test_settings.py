from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from ragcache.errors import SettingsError
from ragcache.settings import load_settings, query_options, stored_settings


def write(path: Path, **values: Any) -> None:
    (path / "store.toml").write_text(tomli_w.dumps(stored_settings(load_settings(**values))))


def test_argument_then_environment_then_store_then_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(tmp_path).chunk_tokens == 512
    write(tmp_path, chunk_tokens=100)
    assert load_settings(tmp_path).chunk_tokens == 100
    monkeypatch.setenv("RAGCACHE_CHUNK_TOKENS", "200")
    assert load_settings(tmp_path).chunk_tokens == 200
    assert load_settings(tmp_path, chunk_tokens=300).chunk_tokens == 300
    assert load_settings(tmp_path, chunk_tokens=None).chunk_tokens == 200


def test_a_store_keeps_what_its_content_depends_on(tmp_path: Path) -> None:
    write(tmp_path, model="m", codec="raw", system_prompt='Say "yes"\nor ☃.', top_k=9)
    settings = load_settings(tmp_path)
    assert (settings.model, settings.codec, settings.system_prompt) == ("m", "raw", 'Say "yes"\nor ☃.')
    assert settings.top_k == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codec", "int5"),
        ("chunk_tokens", 0),
        ("top_k", 0),
        ("temperature", -1),
        ("reuse", "some"),
        ("top_p", 0),
        ("dtype", "int8"),
        ("order", "random"),
        ("repair", "some"),
        ("repair_ratio", 1.5),
        ("repair_ms", 0),
    ],
)
def test_bad_values_are_named(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=f"setting '{name}' cannot be") as caught:
        load_settings(None, **{name: value})
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(f"RAGCACHE_{name.upper()}", str(value))
    with pytest.raises(SettingsError, match=name):
        load_settings()


def test_encodings_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_ENCODINGS", "context, alone")
    assert load_settings().encodings == ("context", "alone")
    assert load_settings(encodings=["alone", "alone"]).encodings == ("alone",)
    write(tmp_path, encodings="alone,context")
    monkeypatch.delenv("RAGCACHE_ENCODINGS")
    assert load_settings(tmp_path).encodings == ("alone", "context")
    wrongs: tuple[object, ...] = ("alone,together", "", [], 3, [["alone"]])
    for wrong in wrongs:
        with pytest.raises(SettingsError, match="encodings"):
            load_settings(encodings=wrong)


def test_unknown_settings() -> None:
    with pytest.raises(SettingsError, match="unknown setting 'chunk_size'"):
        load_settings(chunk_size=3)
    with pytest.raises(SettingsError, match="unknown query option 'topk'"):
        query_options(load_settings(), topk=3)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "store.toml").write_text("model = \n")
    with pytest.raises(SettingsError, match=r"store\.toml"):
        load_settings(tmp_path)


def test_query_options() -> None:
    settings = load_settings(top_k=7, temperature=0.5)
    options = query_options(settings, top_k=None, max_tokens=3, stop=["x"])
    assert (options.top_k, options.temperature, options.max_tokens, options.stop) == (7, 0.5, 3, ("x",))
    with pytest.raises(SettingsError, match="max_tokens"):
        query_options(settings, max_tokens=0)


def test_a_variable_that_is_no_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAGCACHE_TPO_K", "1")
    monkeypatch.setenv("RAGCACHE_TOP_K", "2")
    assert load_settings().top_k == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable RAGCACHE_TPO_K is not a setting of ragcache"
    ]


def test_texts_are_unicode() -> None:
    with pytest.raises(SettingsError, match="surrogate"):
        load_settings(system_prompt="half a pair: \udcff")
    with pytest.raises(SettingsError, match="surrogate"):
        query_options(load_settings(), stop=["fine", "\ud800"])


def test_a_store_may_say_where_it_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A device is chosen from what the machine has; nothing can be made to run by it."""
    (tmp_path / "store.toml").write_text('device = "cuda:7"\n')
    assert load_settings(tmp_path).device == "cuda:7"
    assert load_settings(tmp_path, device="cpu").device == "cpu"
    assert not caplog.records


def test_an_adapter_belongs_to_the_store_and_can_be_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(tmp_path).adapter == ""
    write(tmp_path, adapter="one")
    assert load_settings(tmp_path).adapter == "one"
    monkeypatch.setenv("RAGCACHE_ADAPTER", "other")
    assert load_settings(tmp_path).adapter == "other"
    assert load_settings(tmp_path, adapter="").adapter == ""
