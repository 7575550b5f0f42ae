"""Running out of memory, as an error with a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ragcache.errors import NotEnoughMemoryError

EXHAUSTED = ("can't allocate memory", "can't start new thread")
"""In the message of the RuntimeError that PyTorch's CPU allocator raises, or Python without memory for a stack."""


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Name what memory is needed for.

    Raises:
        NotEnoughMemoryError: there was not enough within the block.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        exhausted = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            words in str(error) for words in EXHAUSTED
        )
        if not exhausted:
            raise
        raise NotEnoughMemoryError(
            f"not enough memory for {what}; ask for fewer chunks (--top-k) or shorter answers, or answer fewer "
            "questions at a time"
        ) from error
