from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.states.arrangement import decode
from ragcache.states.codec import (
    Codec,
    FloatCodec,
    Int4Codec,
    Part,
    bytes_per_token,
    codec_named,
    encoded_size,
)

STATES = ["float32", "bfloat16", "float16"]
CODECS = ["raw", "bf16", "fp16", "int8", "int4"]
OUT = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 129, 200]))
WIDTHS = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 63, 64, 65, 96, 200]))

BFLOAT16_ROUNDING = 2**-8
"""Largest relative error of rounding to bfloat16."""


def random_values(tokens: int, width: int, dtype: str, seed: int, outlier: float = 1.0) -> Tensor:
    """Some channels, some tokens and one single value apart from the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, width, generator=generator)
    values[:, ::17] *= outlier
    values[::13] += outlier
    values[-1, -1] = 10 * outlier
    return values.to(getattr(torch, dtype))


def decoded(codec: Codec, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """There and back; everything of what is written to has been written."""
    out = torch.full(values.shape, torch.nan, dtype=dtype)
    decode(codec, codec.encode(values), out)
    return out


def bfloat16_at(data: bytes, offset: int) -> float:
    """bfloat16 is the upper half of a float32."""
    number: float = struct.unpack("<f", b"\0\0" + data[offset : offset + 2])[0]
    return number


def aligned(size: int) -> int:
    return (size + 63) // 64 * 64


def raw_bytes(data: Tensor) -> bytes:
    return bytes(data.tolist())


# --- Every codec, for every part


@settings(deadline=None)
@given(
    name=st.sampled_from(CODECS), part=st.sampled_from(Part), dtype=st.sampled_from(STATES), tokens=TOKENS, width=WIDTHS
)
def test_the_size_follows_from_the_shape(name: str, part: Part, dtype: str, tokens: int, width: int) -> None:
    codec = codec_named(name, dtype, part)
    data = codec.encode(random_values(tokens, width, dtype, 0))
    assert data.shape == (encoded_size(codec, tokens, width),)
    assert data.dtype == torch.uint8
    assert data.is_contiguous()


@given(name=st.sampled_from(CODECS), part=st.sampled_from(Part), dtype=st.sampled_from(STATES), width=WIDTHS)
def test_bytes_per_token_are_those_of_one_among_many(name: str, part: Part, dtype: str, width: int) -> None:
    codec, many = codec_named(name, dtype, part), 1 << 20
    assert encoded_size(codec, many, width) / many == pytest.approx(bytes_per_token(codec, width), abs=1e-3)


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize(("name", "bits"), [("raw", 16), ("bf16", 16), ("fp16", 16), ("int8", 8.5), ("int4", 5)])
def test_bits_of_a_value(name: str, bits: float, part: Part) -> None:
    assert bytes_per_token(codec_named(name, "bfloat16", part), 576) * 8 / 576 <= bits


@settings(deadline=None)
@given(
    name=st.sampled_from(CODECS),
    part=st.sampled_from(Part),
    dtype=st.sampled_from(STATES),
    tokens=TOKENS,
    width=WIDTHS,
    constant=st.sampled_from([0.0, 1.0, -3.5, 1024.0]),
)
def test_a_constant_stays_what_it_is(
    name: str, part: Part, dtype: str, tokens: int, width: int, constant: float
) -> None:
    values = torch.full((tokens, width), constant, dtype=getattr(torch, dtype))
    out = decoded(codec_named(name, dtype, part), values)
    # int8 rounds the scale; int4 keeps the minimum itself.
    torch.testing.assert_close(out, values.float(), rtol=BFLOAT16_ROUNDING if name == "int8" else 0, atol=0)


@settings(deadline=None)
@given(
    name=st.sampled_from(CODECS),
    part=st.sampled_from(Part),
    dtype=st.sampled_from(OUT),
    tokens=TOKENS,
    width=WIDTHS,
    seed=st.integers(0, 99),
)
def test_any_precision_can_be_decoded_into(
    name: str, part: Part, dtype: torch.dtype, tokens: int, width: int, seed: int
) -> None:
    codec, values = codec_named(name, "bfloat16", part), random_values(tokens, width, "bfloat16", seed, 30.0)
    wide, narrow = decoded(codec, values), decoded(codec, values, dtype)
    assert narrow.dtype == dtype
    # Sums of a minimum and a product may be rounded once or twice; small scales are subnormal in float16.
    torch.testing.assert_close(narrow.float(), wide, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("name", CODECS)
def test_parts_lie_anywhere_in_what_is_decoded(name: str, part: Part) -> None:
    """A layer's parts are encoded one after the other, so bytes and values start where the part before ends."""
    codec, values = codec_named(name, "bfloat16", part), random_values(37, 53, "bfloat16", 0)
    data = torch.cat([codec.encode(values + 1), codec.encode(values)])
    out = torch.full((2, 37, 53), torch.nan)
    decode(codec, data[encoded_size(codec, 37, 53) :], out[1])
    assert torch.equal(out[1], decoded(codec, values))
    assert out[0].isnan().all()


# --- Floating point


@given(tokens=TOKENS, width=WIDTHS, dtype=st.sampled_from(STATES), part=st.sampled_from(Part), seed=st.integers(0, 99))
def test_raw_gives_back_every_bit(tokens: int, width: int, dtype: str, part: Part, seed: int) -> None:
    codec, values = codec_named("raw", dtype, part), random_values(tokens, width, dtype, seed)
    assert torch.equal(decoded(codec, values, values.dtype), values)


@pytest.mark.parametrize("dtype", STATES)
def test_what_is_exact(dtype: str) -> None:
    exact = {name: codec_named(name, dtype, Part.HIDDEN).exact for name in CODECS}
    assert exact == {
        "raw": True,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "int8": False,
        "int4": False,
    }
    for name, is_exact in exact.items():
        values = random_values(65, 33, dtype, 0, 1e-3)
        back = decoded(codec_named(name, dtype, Part.HIDDEN), values, values.dtype)
        assert torch.equal(back, values) == is_exact


def test_bytes_are_never_taken_for_those_of_another_dtype() -> None:
    values = random_values(3, 8, "float16", 0)
    assert torch.equal(decoded(FloatCodec(torch.float16, torch.float16), values, torch.bfloat16), values.bfloat16())


def test_beyond_the_range_of_fp16_is_its_largest_number() -> None:
    values = torch.tensor([[1e6, -1e6, 65504.0, 3e38, 1.5]], dtype=torch.bfloat16)
    assert decoded(codec_named("fp16", "bfloat16", Part.HIDDEN), values).tolist() == [
        [65504.0, -65504.0, 65504.0, 65504.0, 1.5]
    ]


def test_fp32_just_below_its_limit_is_finite_in_bf16() -> None:
    limit = torch.finfo(torch.float32).max
    out = decoded(codec_named("bf16", "float32", Part.HIDDEN), torch.tensor([[limit, -limit]]))
    assert out.tolist() == [[torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min]]


@pytest.mark.parametrize(
    ("name", "states", "data"),
    [
        ("raw", "float32", "0000803f 000000c0 00000000 0000003f"),
        ("raw", "bfloat16", "803f 00c0 0000 003f"),
        ("raw", "float16", "003c 00c0 0000 0038"),
        ("bf16", "float32", "803f 00c0 0000 003f"),
        ("fp16", "bfloat16", "003c 00c0 0000 0038"),
    ],
)
def test_floating_point_layout(name: str, states: str, data: str) -> None:
    """Little-endian numbers, token after token."""
    values = torch.tensor([[1.0, -2.0], [0.0, 0.5]], dtype=getattr(torch, states))
    assert raw_bytes(codec_named(name, states, Part.KEYS).encode(values)) == bytes.fromhex(data)


# --- int8


def tile8(part: Part) -> tuple[int, int]:
    """Tokens and width of what shares a scale."""
    return {Part.HIDDEN: (64, 1), Part.KEYS: (32, 1), Part.VALUES: (1, 64)}[part]


@settings(deadline=None)
@given(
    part=st.sampled_from(Part),
    tokens=TOKENS,
    width=WIDTHS,
    dtype=st.sampled_from(STATES),
    seed=st.integers(0, 99),
    outlier=st.sampled_from([1e-6, 1.0, 300.0]),
)
def test_int8_errs_by_at_most_half_a_step(
    part: Part, tokens: int, width: int, dtype: str, seed: int, outlier: float
) -> None:
    values = random_values(tokens, width, dtype, seed, outlier)
    out = decoded(codec_named("int8", dtype, part), values)
    high, wide = tile8(part)
    for top in range(0, tokens, high):
        for left in range(0, width, wide):
            of_tile = slice(top, top + high), slice(left, left + wide)
            tile, back = values[of_tile].float(), out[of_tile]
            step = tile.abs().amax() / 127
            # Rounding the scale to bfloat16 may move the largest value by as much, never both.
            assert ((tile - back).abs() <= 0.51 * step + 1e-37).all()


def test_int8_layout_of_values() -> None:
    """Two planes: integers, then one bfloat16 scale for each 64 values of a token, at the next multiple of 64 bytes."""
    values = torch.zeros(2, 70)
    values[0, 0], values[0, 69] = 127.0, -2 * 127.0
    values[1, 1], values[1, 63] = 64 * 127.0, 64.0
    data = raw_bytes(codec_named("int8", "float32", Part.VALUES).encode(values))
    assert len(data) == 192 + 4 * 2
    integers = bytearray(192)
    integers[0], integers[69], integers[70 + 1], integers[70 + 63] = 127, 256 - 127, 127, 1
    assert data[:192] == bytes(integers)
    assert [bfloat16_at(data, 192 + 2 * index) for index in range(3)] == [1.0, 2.0, 64.0]


@pytest.mark.parametrize(("part", "high"), [(Part.HIDDEN, 64), (Part.KEYS, 32)])
def test_int8_layout_of_hidden_states_and_keys(part: Part, high: int) -> None:
    """Two planes: integers, then one bfloat16 scale for each channel of 64 tokens (keys: 32), at the next multiple of
    64 bytes."""
    last = high + 5
    values = torch.zeros(last + 1, 2)
    values[0, 0], values[last, 0] = 127.0, -2 * 127.0
    values[1, 1], values[high - 1, 1] = 64 * 127.0, 64.0
    data = raw_bytes(codec_named("int8", "float32", part).encode(values))
    plane = aligned(2 * (last + 1))
    assert len(data) == plane + 4 * 2
    integers = bytearray(plane)
    integers[0], integers[2 * last], integers[2 + 1], integers[2 * (high - 1) + 1] = 127, 256 - 127, 127, 1
    assert data[:plane] == bytes(integers)
    # First both channels of the first tile, then those of the tokens behind it.
    assert [bfloat16_at(data, plane + 2 * index) for index in range(3)] == [1.0, 64.0, 2.0]


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 64), (5, 70), (65, 33), (64, 128), (130, 3)])
def test_int8_can_be_read_from_its_description(part: Part, tokens: int, width: int) -> None:
    values = random_values(tokens, width, "float32", 1)
    codec = codec_named("int8", "float32", part)
    data, out = raw_bytes(codec.encode(values)), decoded(codec, values)
    high, wide = tile8(part)
    across = -(-width // wide)
    for token in range(tokens):
        for channel in range(width):
            integer = struct.unpack_from("<b", data, token * width + channel)[0]
            place = token // high * across + channel // wide
            assert out[token, channel] == integer * bfloat16_at(data, aligned(tokens * width) + 2 * place)


# --- int4


def tile(part: Part) -> tuple[int, int]:
    """Tokens and width of what shares a scale and a minimum."""
    return (1, 32) if part is Part.VALUES else (32, 1)


@settings(deadline=None)
@given(
    part=st.sampled_from(Part),
    tokens=TOKENS,
    width=WIDTHS,
    dtype=st.sampled_from(STATES),
    seed=st.integers(0, 99),
    outlier=st.sampled_from([1e-6, 1.0, 300.0]),
)
def test_int4_errs_by_at_most_half_a_step(
    part: Part, tokens: int, width: int, dtype: str, seed: int, outlier: float
) -> None:
    values = random_values(tokens, width, dtype, seed, outlier)
    out = decoded(codec_named("int4", dtype, part), values)
    high, wide = tile(part)
    for top in range(0, tokens, high):
        for left in range(0, width, wide):
            of_tile = slice(top, top + high), slice(left, left + wide)
            least, largest = values[of_tile].float().aminmax()
            # bfloat16 holds the minimum of wider numbers only roughly.
            shift = 0.0 if dtype == "bfloat16" else float(least.abs()) * BFLOAT16_ROUNDING
            bound = 0.51 * float(largest - least) / 15 + 1.1 * shift + 1e-37
            assert (values[of_tile].float() - out[of_tile]).abs().max() <= bound


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("dtype", STATES)
def test_int4_of_the_largest_numbers_is_finite(part: Part, dtype: str) -> None:
    """Their difference is not."""
    limit = torch.finfo(getattr(torch, dtype)).max
    values = torch.tensor([[limit, -limit], [-limit, limit]], dtype=getattr(torch, dtype)).repeat(3, 5)
    out = decoded(codec_named("int4", dtype, part), values)
    torch.testing.assert_close(out, values.float(), rtol=2 * BFLOAT16_ROUNDING, atol=0)


def test_int4_layout_of_keys_and_hidden_states() -> None:
    """Three planes from multiples of 64 bytes: pairs of tokens, scales, minima. A tile is 32 tokens of a channel."""
    values = torch.zeros(35, 4)
    values[:5, 0] = torch.tensor([0.0, 15.0, 5.0, 9.0, 12.0])
    values[:5, 1] = torch.tensor([-1.0, 29.0, -1.0, 1.0, 3.0])
    values[5:32, 1] = -1.0
    values[32:, 0] = torch.tensor([30.0, 0.0, 14.0])
    values[32:, 1] = torch.tensor([-4.0, 3.5, 1.0])
    values[:, 2:] = 7.0
    for part in (Part.KEYS, Part.HIDDEN):
        data = raw_bytes(codec_named("int4", "float32", part).encode(values))
        # 18 pairs of tokens by 4 channels fill 72 bytes; then 2 tiles by 4 channels.
        assert len(data) == 128 + 64 + 16
        first_tile = [0xF0, 0xF0, 0, 0, 0x95, 0x10, 0, 0, 0x0C, 0x02, 0, 0]
        second_tile = [0x0F, 0xF0, 0, 0, 0x07, 0x0A, 0, 0]
        assert data[:128] == bytes(first_tile) + bytes(64 - 12) + bytes(second_tile) + bytes(56)
        # The third and fourth channel are constant; whatever their scale, their integers are 0.
        scales, minima = ([bfloat16_at(data, plane + 2 * index) for index in range(8)] for plane in (128, 192))
        assert [scales[0], scales[1], scales[4], scales[5]] == [1.0, 2.0, 2.0, 0.5]
        assert minima == [0.0, -1.0, 7.0, 7.0, 0.0, -4.0, 7.0, 7.0]
        assert data[144:192] == bytes(48)


def test_int4_layout_of_values() -> None:
    """The same planes; a tile is 32 neighbouring values of a token."""
    values = torch.zeros(3, 33)
    values[0, :2], values[1, :2], values[2, 30:] = torch.tensor([15.0, 3.0]), torch.tensor([-30.0, -4.0]), 8.0
    data = raw_bytes(codec_named("int4", "float32", Part.VALUES).encode(values))
    # 2 pairs of tokens by 33 values fill 66 bytes; then 3 tokens by 2 tiles.
    assert len(data) == 128 + 64 + 12
    # The second token goes from -30 to 0 in steps of 2, so its zeros are 15.
    assert data[:4] == bytes([0x0F, 0xD3, 0xF0, 0xF0])
    assert data[33 + 29 : 33 + 33] == bytes([0x00, 0x0F, 0x0F, 0x00])
    scales = [bfloat16_at(data, 128 + 2 * index) for index in range(6)]
    assert [scales[index] for index in (0, 2)] == [1.0, 2.0]
    assert scales[4] == pytest.approx(8 / 15, rel=BFLOAT16_ROUNDING)
    assert [bfloat16_at(data, 192 + 2 * index) for index in range(6)] == [0.0, 0.0, -30.0, 0.0, 0.0, 8.0]


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2, 64), (5, 70), (65, 33), (129, 5)])
def test_int4_can_be_read_from_its_description(part: Part, tokens: int, width: int) -> None:
    values = random_values(tokens, width, "float32", 1)
    codec = codec_named("int4", "float32", part)
    data, out = raw_bytes(codec.encode(values)), decoded(codec, values)
    high, wide = tile(part)
    down, across = -(-tokens // high), -(-width // wide)
    scales = aligned((tokens + 1) // 2 * width)
    minima = scales + aligned(2 * down * across)
    for token in range(tokens):
        for channel in range(width):
            integer = data[token // 2 * width + channel] >> (4 * (token % 2)) & 15
            index = 2 * (token // high * across + channel // wide)
            expected = bfloat16_at(data, minima + index) + integer * bfloat16_at(data, scales + index)
            assert float(out[token, channel]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


# --- By name


def test_the_same_name_gives_the_same_codec() -> None:
    assert codec_named("int4", "bfloat16", Part.KEYS) is codec_named("int4", "bfloat16", Part.KEYS)
    assert isinstance(codec_named("int4", "bfloat16", Part.KEYS), Int4Codec)


@pytest.mark.parametrize(
    ("name", "dtype"), [("int5", "bfloat16"), ("", "float32"), ("raw", "float8"), ("int8", "int8")]
)
def test_what_is_not_known_is_refused(name: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"unknown (codec|dtype) '{name if dtype in STATES else dtype}'"):
        codec_named(name, dtype, Part.HIDDEN)
