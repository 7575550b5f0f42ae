from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.states.arrangement import Arrangement, decode
from ragcache.states.codec import PLANE_ALIGNMENT, Part, codec_named
from ragcache.states.encoded import ROW_ALIGNMENT
from ragcache.states.form import Form, LayerFormat, StateFormat

CODECS = st.sampled_from(["raw", "bf16", "fp16", "int8", "int4"])
LENGTHS = st.lists(st.integers(1, 130), min_size=1, max_size=4)
WIDTHS = st.sampled_from([1, 6, 31, 64, 65])
GARBAGE = 0xFF


def scattered(arrangement: Arrangement, runs: list[Tensor]) -> Tensor:
    """A buffer in which nothing but the chunks is defined, as when they are read from disk."""
    buffer = torch.full((arrangement.size,), GARBAGE, dtype=torch.uint8)
    for run, places in zip(runs, arrangement.places, strict=True):
        for place, piece in zip(places, run.split([it.stop - it.start for it in places]), strict=True):
            buffer[place] = piece
    return buffer


@settings(deadline=None)
@given(name=CODECS, form=st.sampled_from([Form.HIDDEN, Form.PRE_ROPE_KV]), lengths=LENGTHS, width=WIDTHS)
def test_chunks_side_by_side_decode_as_each_alone(name: str, form: Form, lengths: list[int], width: int) -> None:
    format = StateFormat("float32", (LayerFormat(form, width, name),))
    states = [torch.randn(len(form.parts), tokens, width) for tokens in lengths]
    runs = [format.encode(0, it) for it in states]
    arrangement = format.arrange(0, lengths)
    parts = arrangement.encoded(scattered(arrangement, runs))
    for index, (tokens, run) in enumerate(zip(lengths, runs, strict=True)):
        alone = torch.empty(len(parts), tokens, width)
        format.decode(0, run, alone)
        for part, expected in zip(parts, alone, strict=True):
            together = torch.empty(part.rows, part.width)
            part.decode(together)
            start = arrangement.starts[index]
            assert torch.equal(together[start : start + tokens], expected)


@given(name=CODECS, part=st.sampled_from(Part), lengths=LENGTHS, width=WIDTHS)
def test_pieces_are_the_whole_run_and_share_nothing(name: str, part: Part, lengths: list[int], width: int) -> None:
    codec = codec_named(name, "float32", part)
    arrangement = Arrangement([codec], width, lengths)
    assert arrangement.rows % ROW_ALIGNMENT == 0
    taken = torch.zeros(arrangement.size, dtype=torch.int64)
    for index, (tokens, places) in enumerate(zip(lengths, arrangement.places, strict=True)):
        assert sum(it.stop - it.start for it in places) == len(codec.encode(torch.zeros(tokens, width)))
        own = torch.zeros_like(taken)
        for place in places:
            own[place] += 1
        # What a chunk's planes are padded with on disk is thrown together, apart from what is of use.
        waste = slice(index * PLANE_ALIGNMENT, (index + 1) * PLANE_ALIGNMENT)
        own[waste].clamp_(max=1)
        taken += own
    assert taken.max() == 1


def test_one_chunk_of_one_part() -> None:
    codec, values = codec_named("int8", "float32", Part.VALUES), torch.tensor([[1.0, -2.0, 127.0]])
    out = torch.empty(1, 3)
    decode(codec, codec.encode(values), out)
    assert torch.equal(out, values)
