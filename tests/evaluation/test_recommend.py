"""Which setting is recommended, what is said of it, and what `apply` changes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import StoreLockedError
from ragcache.evaluation.grid import PLAIN
from ragcache.evaluation.recommend import apply, recommend
from ragcache.settings import STORE_TOML
from ragcache.states.store import hold_lock
from tests.evaluation.samples import BETTER, REPAIRED, summary

PLAIN_FIGURES = summary(PLAIN, agreement=0.80, ttft_ms=100)
BETTER_FIGURES = summary(BETTER, agreement=0.95, ttft_ms=110)
REPAIRED_FIGURES = summary(REPAIRED, agreement=0.97, ttft_ms=150)
ALL = [PLAIN_FIGURES, REPAIRED_FIGURES, BETTER_FIGURES]


def test_the_fastest_that_is_good_enough() -> None:
    found = recommend(ALL, 0.95, PLAIN_FIGURES)
    assert found.met
    assert (found.summary, found.runner_up) == (BETTER_FIGURES, REPAIRED_FIGURES)
    said = "\n".join(found.lines)
    assert BETTER.label in said
    assert "9.1 times sooner than a full prefill" in said
    assert f"40 ms sooner than the next that meets it, {REPAIRED.label}" in said
    assert "interval begins below the target" in said
    assert f"now, {PLAIN.label}: agreement 0.800" in said


def test_a_higher_target_costs_time() -> None:
    found = recommend(ALL, 0.96)
    assert (found.summary, found.runner_up, found.met) == (REPAIRED_FIGURES, None, True)
    assert recommend(ALL, 0.0).summary is PLAIN_FIGURES


def test_nothing_is_good_enough() -> None:
    found = recommend([PLAIN_FIGURES, BETTER_FIGURES], 0.99)
    assert not found.met
    assert found.summary is BETTER_FIGURES
    assert "no setting has an agreement of 0.99" in found.lines[0]
    assert BETTER.label in found.lines[0]


def test_apply_changes_these_settings_and_no_others(cache: RagCache) -> None:
    path = cache.store.path / STORE_TOML
    before = tomllib.loads(path.read_text()) | {"mine": 1}
    path.write_text(path.read_text() + "mine = 1\n")
    apply(cache.store, REPAIRED)
    changed = {"encodings": ["alone", "context"], "order": "conditioned", "repair": "query", "repair_ratio": 0.15}
    assert tomllib.loads(path.read_text()) == before | changed
    # The ratio for those who ask for repair stays.
    apply(cache.store, PLAIN)
    assert tomllib.loads(path.read_text()) == before | changed | {
        "encodings": ["alone"],
        "order": "score",
        "repair": "off",
    }


def test_apply_puts_a_time_in_the_place_of_a_ratio_and_back(cache: RagCache) -> None:
    path = cache.store.path / STORE_TOML
    timed = REPAIRED.model_copy(update={"repair_ratio": 0.0, "repair_ms": 80.0})
    apply(cache.store, timed)
    assert tomllib.loads(path.read_text())["repair_ms"] == 80
    apply(cache.store, REPAIRED)
    assert "repair_ms" not in tomllib.loads(path.read_text())
    assert tomllib.loads(path.read_text())["repair_ratio"] == 0.15


def test_apply_of_a_codec_is_for_what_is_indexed_next(cache: RagCache) -> None:
    apply(cache.store, PLAIN.model_copy(update={"codec": "int4"}))
    path = cache.store.path / STORE_TOML
    assert tomllib.loads(path.read_text())["codec"] == "int4"
    apply(cache.store, PLAIN)
    assert tomllib.loads(path.read_text())["codec"] == "int4"


def test_apply_makes_nothing_else_of_the_environment_last(cache: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.store.path / STORE_TOML
    before = tomllib.loads(path.read_text())
    monkeypatch.setenv("RAGCACHE_CODEC", "int4")
    apply(cache.store, BETTER)
    assert tomllib.loads(path.read_text())["codec"] == before["codec"] == "raw"


def test_apply_waits_for_nobody(cache: RagCache, open_tiny: Callable[..., RagCache], tmp_path: Path) -> None:
    with hold_lock(cache.store.path), pytest.raises(StoreLockedError):
        apply(cache.store, BETTER)
