"""Kernels compiled for A100 and H100, without any GPU: Triton brings all the tools but the driver.

What is compiled is what would be launched (`Launch`), with the same hints about arguments that Triton takes from real
ones. The machine code is judged by what makes kernels slow or keeps them from starting.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ragcache.restore.gpu_check.shapes import FAMILIES, Attention, Rotation
from ragcache.states.arrangement import Arrangement
from ragcache.states.codec import Part, codec_named
from ragcache.states.encoded import Encoded, Moves

pytest.importorskip("triton")

from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragcache.restore.kernels import hidden, pre_rope_kv
from ragcache.restore.kernels.launch import Gpu, Launch

A100, L4, H100 = Gpu(163 * 1024, 108), Gpu(99 * 1024, 58), Gpu(227 * 1024, 132)
CAPABILITY = {A100: 80, L4: 89, H100: 90}
GPUS = pytest.mark.parametrize("gpu", [A100, H100], ids=["A100", "H100"])

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
ROWS = 16384
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel."""

    ptx: str
    shared_memory: int
    spilled: int


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def compiled(launch: Launch, gpu: Gpu) -> Compiled:
    """Compile a launch as Triton would at its first run."""
    kernel = launch.kernel
    signature, constants, hints = {}, dict(launch.constants), {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        value = launch.arguments.get(name)
        match value:
            case Tensor():
                signature[name], hints[(place,)] = POINTERS[value.dtype], ALIGNED
            case float():
                signature[name] = "fp32"
            case int() if value != 1 or parameter.do_not_specialize:
                signature[name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    hints[(place,)] = ALIGNED
            case _:
                signature[name] = "constexpr"
                constants.setdefault(name, value)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    target = GPUTarget("cuda", CAPABILITY[gpu], 32)
    result = compile_kernel(ASTSource(kernel, signature, constants, hints), target=target, options=options)
    ptx = result.asm["ptx"]
    return Compiled(ptx, result.metadata.shared, spilled_bytes(ptx, gpu))


def spilled_bytes(ptx: str, gpu: Gpu) -> int:
    """Bytes of registers that a thread has to put aside in memory."""
    architecture = f"sm_{CAPABILITY[gpu]}" + ("a" if gpu is H100 else "")
    command = [knobs.nvidia.ptxas.path, "-v", "--regAllocOptLevel=2", f"--gpu-name={architecture}", "-o", "/dev/null"]
    run = subprocess.run([*command, "/dev/stdin"], input=ptx, capture_output=True, text=True, check=True)
    spills = re.findall(r"(\d+) bytes spill stores", run.stderr)
    assert len(spills) == 1
    return int(spills[0])


def on_meta(attention: Attention, dtype: torch.dtype, rows: int) -> tuple[tuple[Tensor, Tensor] | None, Moves, Tensor]:
    """Tables, moves and a layer of a KV cache, without memory."""
    tables = None
    if attention.rotation is not None:
        table = torch.empty(rows, attention.rotation.rotary_dim // 2, dtype=dtype, device="meta")
        tables = table, table
    numbers = torch.empty(rows, dtype=torch.int32, device="meta")
    cache = torch.empty(attention.kv_heads, rows + 64, attention.head_dim, dtype=dtype, device="meta")
    return tables, Moves(numbers, numbers, numbers, None, None), cache


def encoded(codec: str, dtype: torch.dtype, part: Part, rows: int, width: int) -> Encoded:
    coder = codec_named(codec, str(dtype).removeprefix("torch."), part)
    arrangement = Arrangement([coder], width, [rows])
    return arrangement.encoded(torch.empty(arrangement.size, dtype=torch.uint8))[0]


def hidden_launches(
    attention: Attention, codec: str, gpu: Gpu, dtype: torch.dtype = torch.bfloat16, rows: int = ROWS
) -> Sequence[Launch]:
    tables, moves, cache = on_meta(attention, dtype, rows)
    columns = 2 * attention.kv_heads * attention.head_dim
    return hidden.launches(
        encoded(codec, dtype, Part.HIDDEN, rows, attention.hidden_size),
        torch.empty(columns, attention.hidden_size, dtype=dtype, device="meta"),
        torch.empty(columns, dtype=dtype, device="meta") if attention.bias else None,
        attention.random_key_norm(torch.device("meta")),
        attention.rotation,
        tables,
        moves,
        cache,
        cache,
        gpu,
    )


def assert_fast_projection(kernel: Compiled, gpu: Gpu) -> None:
    """Matrix instructions of that GPU, fed by copies that run ahead; nothing spilled; fits."""
    instruction = "wgmma.mma_async" if gpu is H100 else "mma.sync"
    assert instruction in kernel.ptx
    assert "cp.async" in kernel.ptx
    assert kernel.spilled == 0
    assert kernel.shared_memory <= gpu.shared_memory


@GPUS
@pytest.mark.parametrize("family", FAMILIES)
def test_projection_of_every_family(family: str, gpu: Gpu) -> None:
    project, *normalise = hidden_launches(FAMILIES[family], "int8", gpu)
    assert_fast_projection(compiled(project, gpu), gpu)
    assert len(normalise) == (FAMILIES[family].key_norm == "over heads")
    for launch in normalise:
        assert compiled(launch, gpu).spilled == 0


@GPUS
@pytest.mark.parametrize("codec", ["raw", "fp16", "int4"])
@pytest.mark.parametrize("family", ["Qwen3-8B", "Gemma-3-4B"])
def test_projection_of_every_codec(family: str, codec: str, gpu: Gpu) -> None:
    (launch,) = hidden_launches(FAMILIES[family], codec, gpu)
    assert_fast_projection(compiled(launch, gpu), gpu)


@GPUS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_projection_in_every_precision(dtype: torch.dtype, gpu: Gpu) -> None:
    (launch,) = hidden_launches(FAMILIES["Qwen3-8B"], "int8", gpu, dtype)
    assert_fast_projection(compiled(launch, gpu), gpu)


@GPUS
def test_projection_of_a_few_tokens_is_spread_over_more_programs(gpu: Gpu) -> None:
    (few,), (many,) = (hidden_launches(FAMILIES["Llama-3.1-8B"], "int8", gpu, rows=rows) for rows in (512, ROWS))
    assert_fast_projection(compiled(few, gpu), gpu)
    assert few.constants["HEADS"] == 1
    assert many.constants["HEADS"] == (2 if gpu is H100 else 1)


@GPUS
@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("family", ["SmolLM2-135M", "Llama-3.1-8B", "Gemma-2-9B", "Phi-2", "Command-R+"])
def test_keys_and_values_before_rope(family: str, codec: str, gpu: Gpu) -> None:
    attention, dtype = FAMILIES[family], torch.bfloat16
    tables, moves, cache = on_meta(attention, dtype, ROWS)
    width = attention.kv_heads * attention.head_dim
    keys, values = (encoded(codec, dtype, part, ROWS, width) for part in (Part.KEYS, Part.VALUES))
    kernel = compiled(pre_rope_kv.launch(keys, values, attention.rotation, tables, moves, cache, cache), gpu)
    assert kernel.spilled == 0
    # Whole 16-byte accesses, in and out; nothing narrower is ever written.
    assert "ld.global.v4.b32" in kernel.ptx
    assert set(re.findall(r"st\.global\.[\w.]+", kernel.ptx)) == {"st.global.v4.b32"}


@GPUS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_of_512_values_fit(dtype: torch.dtype, gpu: Gpu) -> None:
    attention = Attention(2560, 2, 512, Rotation(False, 512), key_norm="each head")
    (launch,) = hidden_launches(attention, "raw", gpu, dtype)
    assert compiled(launch, gpu).shared_memory <= gpu.shared_memory


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_projection_fits_smaller_gpus(codec: str) -> None:
    (launch,) = hidden_launches(FAMILIES["Gemma-3-4B"], codec, L4)
    assert_fast_projection(compiled(launch, L4), L4)


def test_what_kernels_cannot_take_is_refused() -> None:
    weight = torch.empty(96, 64, device="meta").T
    tables, moves, cache = on_meta(Attention(96, 1, 32, None), torch.float32, 64)
    states = encoded("raw", torch.float32, Part.HIDDEN, 64, 96)
    with pytest.raises(ValueError, match="contiguous"):
        hidden.launches(states, weight, None, None, None, tables, moves, cache, cache, A100)
    with pytest.raises(ValueError, match="in pairs"):
        hidden_launches(Attention(96, 1, 33, None), "raw", A100)
