"""docs/models.md says of every family what the tests measure, no more and no less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache.model.language_model import LanguageModel
from tests.model import families_table
from tests.model.families import FAMILIES, REFUSED_FAMILIES, UNCERTIFIED_FAMILIES


def test_the_committed_table_is_what_is_measured(
    tiny_model: Callable[[str], LanguageModel], smollm: LanguageModel, cache_folder: Path
) -> None:
    """If not, and the change is meant: `python -m tests.model.families_table`."""
    measured = families_table.document(tiny_model, cache_folder, smollm.tokenizer)
    assert families_table.DOCUMENT.read_text() == measured


def test_the_table_has_every_family() -> None:
    assert families_table.TITLES.keys() == FAMILIES.keys()
    assert families_table.REFUSED_TITLES.keys() == REFUSED_FAMILIES.keys() | UNCERTIFIED_FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(tiny_model: Callable[[str], LanguageModel], family: str) -> None:
    measured = families_table.measure(tiny_model(family))
    assert max(measured.own_position, measured.shifted, measured.ragged) < families_table.EXACT
    assert (measured.sliding_tail or 0.0) < families_table.EXACT


@pytest.mark.parametrize(
    ("error", "cell"), [(None, "no window"), (9e-5, "yes"), (2e-4, "1e-03"), (0.05, "1e-01"), (1.4, "1e+01")]
)
def test_cells(error: float | None, cell: str) -> None:
    assert families_table.cell(error) == cell
