"""Rates of a machine: as JSON, measured for real, remembered for a while."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ragcache import RagCache
from ragcache.errors import ProfileError, SettingsError
from ragcache.model.language_model import LanguageModel
from ragcache.restore import measure
from ragcache.restore.formats import state_format
from ragcache.restore.measure import machine_profile, measure_profile
from ragcache.restore.profile import Profile
from ragcache.retriever.embedding import Embedder
from ragcache.settings import load_settings
from ragcache.states.form import Form
from tests.conftest import make_document
from tests.restore.test_plan import MACHINE


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the same things on less."""
    monkeypatch.setattr(measure, "FILE_BYTES", 4 * 2**20)
    monkeypatch.setattr(measure, "COMPUTE_SECONDS", 0.0)


class TestJson:
    def test_there_and_back(self) -> None:
        for profile in (MACHINE, replace(MACHINE, transfer_rate=24.8e9)):
            assert Profile.from_json(profile.to_json()) == profile

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"read_rate": 0}, "read_rate"),
            ({"projection_rate": 1e-300}, "projection_rate"),
            ({"placement_rate": 1e300}, "placement_rate"),
            ({"read_rate": -1.0}, "read_rate"),
            ({"read_rate": float("inf")}, "read_rate"),
            ({"read_rate": float("nan")}, "read_rate"),
            ({"read_rate": None}, "read_rate"),
            ({"prefill_rate": "fast"}, "prefill_rate"),
            ({"projection_rate": True}, "projection_rate"),
            ({"transfer_rate": 0}, "transfer_rate"),
            ({"machine": ""}, "machine"),
            ({"codec": 8}, "codec"),
            ({"measured": "yesterday"}, "measured"),
            ({"measured": "2026-11-30T12:00:00"}, "measured"),
            ({"disks": 4}, "disks"),
        ],
    )
    def test_a_field_that_cannot_be(self, change: dict[str, Any], field: str) -> None:
        with pytest.raises(ProfileError, match=f"not a profile: '{field}'"):
            Profile.from_json(json.dumps(asdict(MACHINE) | change))

    def test_a_field_that_is_missing(self) -> None:
        fields = asdict(MACHINE)
        for name in fields:
            with pytest.raises(ProfileError, match=f"'{name}'"):
                Profile.from_json(json.dumps({key: value for key, value in fields.items() if key != name}))

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"3"])
    def test_no_profile_at_all(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=r"profile\.json is not a profile") as caught:
            Profile.load(path)
        assert len(str(caught.value).splitlines()) == 1

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError, match="cannot be read"):
            Profile.load(tmp_path / "none.json")

    def test_the_slower_of_disk_and_link_decides(self) -> None:
        assert replace(MACHINE, read_rate=3.0, transfer_rate=None).input_rate == 3.0
        assert replace(MACHINE, read_rate=3.0, transfer_rate=2.0).input_rate == 2.0
        assert replace(MACHINE, read_rate=3.0, transfer_rate=4.0).input_rate == 3.0


@pytest.mark.usefixtures("quick")
class TestMeasuring:
    def test_measures_and_leaves_nothing(self, tiny_model: Callable[[str], LanguageModel], tmp_path: Path) -> None:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        model = tiny_model("llama")
        profile = measure_profile(model, folders, "int8", 2)
        assert Profile.from_json(profile.to_json()) == profile
        assert (profile.device, profile.transfer_rate, profile.codec) == ("cpu", None, "int8")
        assert profile.fingerprint == model.fingerprint.digest
        assert abs(datetime.now(UTC) - profile.date) < timedelta(minutes=5)
        assert not [path for folder in folders for path in folder.iterdir()]

    def test_a_folder_that_takes_no_files(self, tiny_model: Callable[[str], LanguageModel]) -> None:
        with pytest.raises(ProfileError, match="reading from /proc cannot be measured"):
            measure_profile(tiny_model("llama"), [Path("/proc")], "int8", 2)

    def test_remembered_for_a_while(self, tiny_model: Callable[[str], LanguageModel], tmp_path: Path) -> None:
        cache, times = tmp_path / "cache", []

        def profile(family: str = "llama", codec: str = "int8", threads: int = 2, **options: Any) -> Profile:
            found = machine_profile(
                tiny_model(family),
                [tmp_path / "not/yet"],
                codec,
                threads,
                cache,
                on_measure=lambda: times.append(0),
                **options,
            )
            assert Profile.load(found.path) == found.profile
            path.append(found.path)
            return found.profile

        path: list[Path] = []
        first = profile()
        assert (profile(), len(times)) == (first, 1)
        profile(measure=True)
        assert len(times) == 2
        for again, age in ((False, timedelta(days=29)), (True, timedelta(days=31)), (True, -timedelta(days=1))):
            count, measured = len(times), (datetime.now(UTC) - age).isoformat(timespec="seconds")
            path[0].write_text(replace(first, measured=measured).to_json())
            assert (profile().measured == measured, len(times) - count) == (not again, int(again))
        path[0].write_text("{}")
        count = len(times)
        profile()
        for other in ({"family": "qwen2"}, {"codec": "int4"}, {"threads": 3}):
            profile(**other)
            assert path[-1] != path[0]
        assert len(times) == count + 4

    def test_a_cache_folder_that_cannot_be_used(
        self, tiny_model: Callable[[str], LanguageModel], tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SettingsError, match="cache folder"):
            machine_profile(tiny_model("llama"), [tmp_path], "int8", 2, tmp_path / "file")


@pytest.mark.usefixtures("quick")
class TestStore:
    """`auto` in a store whose model leaves a choice."""

    @pytest.fixture
    def open_store(
        self, tiny_model: Callable[[str], LanguageModel], embedder: Embedder, tmp_path: Path
    ) -> Callable[..., RagCache]:
        def open_with(name: str = "store", family: str = "llama-multi-head", **settings: Any) -> RagCache:
            model = tiny_model(family)
            given = {"model": model.name, "dtype": "float32", "chunk_tokens": 64, "cache_folder": tmp_path / "cache"}
            given |= {"encodings": ("alone",)}
            stages: list[str] = []
            path = tmp_path / name
            cache = RagCache(path, load_settings(path, **given | settings), model, embedder, stages.append)
            self.stages = stages
            return cache

        return open_with

    def remember(self, tmp_path: Path, **rates: Any) -> None:
        """Change the remembered rates."""
        [path] = (tmp_path / "cache/profiles").iterdir()
        path.write_text(replace(Profile.load(path), **rates).to_json())

    def test_what_was_chosen_stays(self, open_store: Callable[..., RagCache], tmp_path: Path) -> None:
        cache = open_store()
        assert self.stages == ["measuring disk and processor (once)"]
        cache.index([make_document(0)])
        chosen = cache.engine.format
        form = chosen.layers[1].form
        # A machine on which the other form is better.
        rate = 1e3 if form is Form.PRE_ROPE_KV else 1e15
        self.remember(tmp_path, read_rate=rate)

        again = open_store()
        assert again.engine.format == chosen
        report = again.index([make_document(0), make_document(1)])
        assert (report.added, report.updated, report.unchanged) == (1, 0, 1)
        assert self.stages == []
        other = open_store("other").engine.format
        assert other.layers[1].form is not form
        # States in another codec are another matter.
        assert open_store(codec="raw").engine.format.layers[1].codec == "raw"
        answer = open_store().query("When was the wall rebuilt?", max_tokens=2)
        assert answer.tokens.restored > 0
        assert not answer.misses

    def test_nothing_is_measured_where_there_is_no_choice(
        self, open_store: Callable[..., RagCache], tmp_path: Path
    ) -> None:
        open_store(family="llama")
        open_store(states="hidden")
        assert not (tmp_path / "cache").exists()

    def test_what_was_chosen_on_another_machine_stays(self, open_store: Callable[..., RagCache]) -> None:
        cache = open_store()
        # A GPU with a slow disk: layer 1 is recomputed, which is not considered on a CPU.
        cache.engine.format = state_format(cache.model, "auto", "int8", replace(MACHINE, read_rate=1e5))
        assert cache.engine.format.layers[1].form is Form.TOKENS
        cache.index([make_document(0)])
        again = open_store()
        assert again.engine.format == cache.engine.format
        assert again.index([make_document(0)]).unchanged == 1

    def test_states_that_planning_would_not_choose_do_not_bind(self, open_store: Callable[..., RagCache]) -> None:
        open_store(family="llama", states="hidden").index([make_document(0)])
        cache = open_store(family="llama", states="auto")
        assert cache.engine.format.layers[1].form is Form.PRE_ROPE_KV
        assert cache.index([make_document(0)]).updated == 1
