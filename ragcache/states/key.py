"""The identity of stored states: which model, after what, of which tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

CONTEXT_END = -1
"""Stands between the token ids of several contexts; no token has it."""


def context_digest(token_ids: Sequence[int]) -> str:
    """What stands for a context in keys: sha256 of its token ids (int32), as 64 hexadecimal digits.

    Args:
        token_ids: between the prompt's prefix and the chunk, those of several contexts with `CONTEXT_END` between them;
            `""` stands for none.
    """
    return hashlib.sha256(_as_bytes(token_ids)).hexdigest() if token_ids else ""


def state_key(fingerprint: str, prefix: Sequence[int], context: str, token_ids: Sequence[int]) -> str:
    """sha256 over everything a chunk's states depend on, as 64 hexadecimal digits.

    Args:
        fingerprint: digest of the model's fingerprint.
        prefix: token ids of the prompt's prefix the chunk was encoded after.
        context: digest of the token ids between prefix and chunk; empty when the chunk was encoded alone.
        token_ids: the chunk's own.
    """
    digest = hashlib.sha256(fingerprint.encode())
    for count, part in (
        (len(prefix), _as_bytes(prefix)),
        (len(context) // 2, bytes.fromhex(context)),
        (len(token_ids), _as_bytes(token_ids)),
    ):
        digest.update(count.to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()
