"""Filters mean what LlamaIndex's operators say, nested or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from ragcache.llama_index.filters import matches

MEANING: dict[FilterOperator, Callable[[Any, Any], bool]] = {
    FilterOperator.EQ: lambda mine, asked: mine == asked,
    FilterOperator.NE: lambda mine, asked: mine != asked,
    FilterOperator.GT: lambda mine, asked: mine > asked,
    FilterOperator.GTE: lambda mine, asked: mine >= asked,
    FilterOperator.LT: lambda mine, asked: mine < asked,
    FilterOperator.LTE: lambda mine, asked: mine <= asked,
    FilterOperator.IN: lambda mine, asked: mine in asked,
    FilterOperator.NIN: lambda mine, asked: mine not in asked,
    FilterOperator.ANY: lambda mine, asked: any(it in mine for it in asked),
    FilterOperator.ALL: lambda mine, asked: all(it in mine for it in asked),
    FilterOperator.CONTAINS: lambda mine, asked: asked in mine,
    FilterOperator.TEXT_MATCH: lambda mine, asked: asked + "" in mine + "",
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda mine, asked: asked.lower() + "" in mine.lower() + "",
    FilterOperator.IS_EMPTY: lambda mine, asked: mine in (None, "", []),
}
NEGATIVE = (FilterOperator.NE, FilterOperator.NIN)


def expected(filters: MetadataFilters | MetadataFilter, metadata: dict[str, Any]) -> bool:
    if isinstance(filters, MetadataFilters):
        if not filters.filters:
            return True
        found = [expected(it, metadata) for it in filters.filters]
        if filters.condition == FilterCondition.NOT:
            return not any(found)
        return any(found) if filters.condition == FilterCondition.OR else all(found)
    mine = metadata.get(filters.key)
    if filters.operator != FilterOperator.IS_EMPTY and mine is None:
        return filters.operator in NEGATIVE
    try:
        return MEANING[filters.operator](mine, filters.value)
    except (TypeError, AttributeError):
        return False


SCALARS = st.sampled_from([0, 1, 2, 1.5, "a", "ab", "B", ""])
LISTS = st.lists(st.sampled_from(["a", "ab", "B"]), max_size=2) | st.lists(st.integers(0, 2), max_size=2)
KEYS = st.sampled_from(["x", "y"])
FILTER = st.builds(
    MetadataFilter, key=KEYS, value=SCALARS | LISTS | st.none(), operator=st.sampled_from(FilterOperator)
)
CONDITION = st.sampled_from(FilterCondition) | st.none()
FILTERS = st.recursive(
    st.builds(MetadataFilters, filters=st.lists(FILTER, max_size=3), condition=CONDITION),
    lambda inner: st.builds(MetadataFilters, filters=st.lists(inner | FILTER, max_size=3), condition=CONDITION),
    max_leaves=5,
)
METADATA = st.dictionaries(KEYS, SCALARS | LISTS | st.none() | st.dictionaries(KEYS, SCALARS, max_size=1), max_size=2)


@settings(max_examples=1000, deadline=None)
@given(filters=FILTERS, metadata=METADATA)
def test_filters_of_any_kind(filters: MetadataFilters, metadata: dict[str, Any]) -> None:
    assert matches(filters, metadata) == expected(filters, metadata)


@settings(max_examples=300, deadline=None)
@given(filters=st.builds(MetadataFilters, filters=st.lists(FILTER, max_size=3), condition=CONDITION), metadata=METADATA)
def test_flat_ones_are_llamaindexs_own(filters: MetadataFilters, metadata: dict[str, Any]) -> None:
    try:
        own = build_metadata_filter_fn(lambda _: metadata, filters)("")
    except TypeError:
        return
    assert matches(filters, metadata) == own


def test_no_filters_match_everything() -> None:
    assert matches(None, {})
    assert matches(MetadataFilters(filters=[]), {"a": 1})


@pytest.mark.parametrize("operator", FilterOperator)
def test_each_operator_tells_some_from_others(operator: FilterOperator) -> None:
    """The reference above included."""
    asked: dict[FilterOperator, Any] = {
        FilterOperator.IN: [1, 2],
        FilterOperator.NIN: [1, 2],
        FilterOperator.ANY: ["a"],
        FilterOperator.ALL: ["a", "ab"],
        FilterOperator.CONTAINS: "a",
        FilterOperator.TEXT_MATCH: "b",
        FilterOperator.TEXT_MATCH_INSENSITIVE: "b",
    }
    filters = MetadataFilters(filters=[MetadataFilter(key="x", value=asked.get(operator, 1), operator=operator)])
    values = [0, 1, 2, "ab", "B", ["a", "ab"], None, ""]
    assert {matches(filters, {"x": value}) for value in values} == {True, False}
