"""LlamaIndex's metadata filters, on one chunk's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn


def matches(filters: MetadataFilters | None, metadata: Mapping[str, Any]) -> bool:
    """Whether metadata satisfy filters, which may be nested.

    A value of a kind that an operator cannot compare with the filter's does not match.
    """
    if filters is None or not filters.filters:
        return True
    found = (
        matches(it, metadata) if isinstance(it, MetadataFilters) else _matches(it, metadata) for it in filters.filters
    )
    if filters.condition == FilterCondition.OR:
        return any(found)
    if filters.condition == FilterCondition.NOT:
        return not any(found)
    return all(found)


def _matches(filter: MetadataFilter, metadata: Mapping[str, Any]) -> bool:
    # LlamaIndex's own reading of its operators; it refuses nested filters.
    try:
        return build_metadata_filter_fn(lambda _: metadata, MetadataFilters(filters=[filter]))("")
    except TypeError:
        return False
