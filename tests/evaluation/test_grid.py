"""Grids: products, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragcache.errors import EvaluationError
from ragcache.evaluation.grid import DEFAULT_GRID, FULL_GRID, PLAIN, Setting, axes, chosen_grid, read_grid, setting_of
from ragcache.settings import QueryOptions

NOT_GIVEN: dict[str, Any] = {
    "full": False,
    "encodings": None,
    "order": None,
    "repair": None,
    "ratio": None,
    "codec": None,
}


def test_a_product_has_each_setting_once() -> None:
    found = axes("alone,alone+context", "score", "off,query", "0.1,0.2", None)
    assert [it.label for it in found] == [
        "alone, score, no repair",
        "alone, score, query 10%",
        "alone, score, query 20%",
        "alone+context, score, no repair",
        "alone+context, score, query 10%",
        "alone+context, score, query 20%",
    ]


def test_codecs_are_an_axis_too() -> None:
    found = axes("alone", "score", "off", None, "raw,int4")
    assert [it.label for it in found] == ["alone, score, no repair, raw", "alone, score, no repair, int4"]


@pytest.mark.parametrize("grid", [DEFAULT_GRID, FULL_GRID])
def test_grids_start_from_plain_concatenation_or_hold_it(grid: tuple[Setting, ...]) -> None:
    assert PLAIN in grid
    assert len(set(grid)) == len({it.label for it in grid}) == len(grid)


def test_a_setting_is_what_a_query_asks_for() -> None:
    setting = Setting(encodings=("alone", "context"), order="document", repair="boundary", repair_ratio=0.2)
    options = setting.query(max_tokens=5)
    assert (options.encodings, options.order, options.repair) == (("alone", "context"), "document", "boundary")
    assert (options.repair_ratio, options.repair_ms, options.max_tokens, options.reuse) == (0.2, None, 5, "composed")
    assert setting_of(options) == setting
    # Without repair a ratio says nothing.
    assert setting_of(QueryOptions(encodings=("alone",), order="score", repair="off", repair_ratio=0.9)) == PLAIN
    timed = QueryOptions(encodings=("alone",), order="score", repair="query", repair_ratio=0.9, repair_ms=80)
    assert setting_of(timed).label == "alone, score, query 80 ms"
    assert setting_of(timed).query(5).repair_ms == 80


def test_a_setting_has_one_form(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    plain = {"encodings": ["alone"], "order": "score"}
    path.write_text(
        json.dumps(
            [
                plain,
                plain | {"repair": "off", "repair_ratio": 0.3},
                plain | {"repair": "off", "repair_ms": 100},
                plain | {"repair": "query"},
                plain | {"repair": "query", "repair_ratio": 0.15},
                plain | {"repair": "query", "repair_ms": 80, "repair_ratio": 0.3},
                plain | {"repair": "query", "repair_ms": 80},
            ]
        )
    )
    assert [it.label for it in read_grid(path)] == [
        "alone, score, no repair",
        "alone, score, query 15%",
        "alone, score, query 80 ms",
    ]
    path.write_text(json.dumps([{"encodings": it, "order": "score"} for it in (["context", "alone"], ["alone"] * 2)]))
    assert [it.label for it in read_grid(path)] == ["alone+context, score, no repair", "alone, score, no repair"]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps([PLAIN.model_dump(), PLAIN.model_dump(), {"encodings": ["context"], "order": "score"}]))
    assert read_grid(path) == (PLAIN, Setting(encodings=("context",), order="score"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '[{"encodings": ["alone"], "order": "score"}, {"encodings": ["alone"], "order": "best"}]',
            "order of setting 1",
        ),
        ('[{"encodings": [], "order": "score"}]', "encodings of setting 0"),
        ('[{"encodings": ["alone"], "order": "score", "codec": "int3"}]', "codec of setting 0"),
        ('[{"encodngs": ["alone"], "order": "score"}]', "encodngs of setting 0"),
        ("[]", "holds no settings"),
        ("{", "is no grid"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "grid.json").write_text(content)
    with pytest.raises(EvaluationError) as raised:
        read_grid(tmp_path / "grid.json")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [
        ("near", None, None, None, None),
        (None, "best", None, None, None),
        (None, None, "all", None, None),
        (None, None, None, "2", None),
        (None, None, None, None, "int3"),
    ],
)
def test_values_that_are_none(values: tuple[str | None, str | None, str | None, str | None, str | None]) -> None:
    with pytest.raises(EvaluationError, match="has no"):
        axes(*values)


def test_what_the_store_does_now_is_compared_too(tmp_path: Path) -> None:
    current = Setting(encodings=("context",), order="document")
    assert chosen_grid(None, current=current, **NOT_GIVEN) == (*DEFAULT_GRID, current)
    assert chosen_grid(None, current=PLAIN, **NOT_GIVEN | {"full": True}) == FULL_GRID
    assert current not in chosen_grid(None, current=current, **NOT_GIVEN | {"order": "score"})
    with pytest.raises(EvaluationError, match="--grid, or --full-grid, or"):
        chosen_grid(tmp_path, current=current, **NOT_GIVEN | {"order": "score"})
