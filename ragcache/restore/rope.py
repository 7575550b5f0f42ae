"""What restoring has to know of a layer's RoPE beside the cosines and sines themselves."""

from __future__ import annotations

from typing import Protocol


class RopeShape(Protocol):
    """Which values of a head are rotated with which (RoFormer, arXiv 2104.09864, section 3.4.2)."""

    @property
    def interleaved(self) -> bool:
        """True: pairs (2i, 2i + 1), as in the paper; False: pairs (i, i + rotary_dim / 2), as in Llama."""

    @property
    def rotary_dim(self) -> int:
        """Leading values of a head that are rotated; the others pass through."""
