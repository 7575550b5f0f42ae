from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.states.codec import Int8Codec, RawCodec, codec_named

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_states(rows: int, width: int, dtype: torch.dtype, seed: int, outlier: float = 1.0) -> torch.Tensor:
    states = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    states[:, ::17] *= outlier
    return states.to(dtype)


@given(rows=st.integers(1, 9), width=st.integers(1, 200), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_raw_gives_back_every_bit(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    codec, states = RawCodec(dtype), random_states(rows, width, dtype, seed)
    encoded = codec.encode(states)
    assert encoded.shape == (rows, codec.row_bytes(width))
    decoded = torch.empty_like(states)
    codec.decode(encoded, decoded)
    assert torch.equal(decoded, states)


def test_raw_never_reinterprets() -> None:
    with pytest.raises(TypeError):
        RawCodec(torch.float16).encode(torch.zeros(2, 4, dtype=torch.bfloat16))
    states = random_states(3, 8, torch.float16, 0)
    decoded = torch.empty(3, 8, dtype=torch.bfloat16)
    RawCodec(torch.float16).decode(RawCodec(torch.float16).encode(states), decoded)
    assert torch.equal(decoded, states.to(torch.bfloat16))


@settings(deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    outlier=st.sampled_from([1e-6, 1.0, 300.0]),
)
def test_int8_errs_by_at_most_half_a_step(rows: int, width: int, dtype: torch.dtype, seed: int, outlier: float) -> None:
    codec, states = Int8Codec(), random_states(rows, width, dtype, seed, outlier)
    encoded = codec.encode(states)
    assert encoded.shape == (rows, codec.row_bytes(width))
    assert encoded.is_contiguous()
    decoded = torch.empty(rows, width, dtype=torch.float32)
    codec.decode(encoded, decoded)
    for start in range(0, width, 64):
        group, back = states[:, start : start + 64].float(), decoded[:, start : start + 64]
        largest = group.abs().amax(1, keepdim=True)
        # Half a step, and up to another half at the largest value, whose scale was rounded to bfloat16.
        assert ((group - back).abs() <= largest / 127 * 1.01).all()


def test_int8_layout() -> None:
    """What docs and other readers rely on: integers first, then one bfloat16 scale per group of 64."""
    states = torch.zeros(1, 70)
    states[0, 0], states[0, 69] = 127.0, -2 * 127.0
    row = Int8Codec().encode(states)[0]
    assert len(row) == 70 + 2 * 2
    assert row[:70].view(torch.int8)[[0, 69]].tolist() == [127, -127]
    assert row[70:].clone().view(torch.bfloat16).tolist() == [1.0, 2.0]


def test_int8_of_zeros_is_zeros() -> None:
    decoded = torch.ones(2, 64)
    Int8Codec().decode(Int8Codec().encode(torch.zeros(2, 64)), decoded)
    assert torch.equal(decoded, torch.zeros(2, 64))


def test_unknown_codec() -> None:
    with pytest.raises(ValueError, match="int5"):
        codec_named("int5", "bfloat16")
