"""Versions of what computes."""

from __future__ import annotations

from importlib.metadata import version


def computing_versions() -> dict[str, str]:
    """Of ragcache and of what runs the model."""
    return {name: version(name) for name in ("ragcache", "torch", "transformers")}
