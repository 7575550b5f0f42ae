"""The identity of stored states: which model, after what, of which tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def state_key(fingerprint: str, prefix: Sequence[int], context: Sequence[int], token_ids: Sequence[int]) -> str:
    """sha256 over everything a chunk's states depend on, as 64 hexadecimal digits.

    Args:
        fingerprint: digest of the model's fingerprint.
        prefix: token ids of the prompt's prefix the chunk was encoded after.
        context: token ids between prefix and chunk; empty when the chunk was encoded alone.
        token_ids: the chunk's own.
    """
    digest = hashlib.sha256(fingerprint.encode())
    for part in (prefix, context, token_ids):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(np.asarray(part, dtype="<i4").tobytes())
    return digest.hexdigest()
