"""The rates of this machine, measured by doing what restoring does, and remembered with their date."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import torch
from torch.nn.functional import linear

from ragcache.errors import ProfileError
from ragcache.model.capture import prefill
from ragcache.model.digest import cache_folder_in_use
from ragcache.model.language_model import LanguageModel
from ragcache.restore.backend import implementation
from ragcache.restore.costs import prefill_flops, projection_flops, written_bytes
from ragcache.restore.profile import Profile
from ragcache.restore.project import write_kv
from ragcache.restore.workspace import Workspace
from ragcache.states.encoded import Moves, Run
from ragcache.states.form import Form, LayerFormat, StateFormat

PROFILE_DAYS = 30
"""Age at which rates are measured again: disks fill and are replaced."""

FILE_BYTES = 256 * 2**20
"""Written and read back over all folders together: enough to outlast what a disk buffers."""

BLOCK_BYTES = 2**20
"""Read at once; a layer of a chunk takes from some hundred kilobytes to some megabytes."""

WRITE_SECONDS, READ_SECONDS, COMPUTE_SECONDS = 5.0, 3.0, 0.3
"""Most that each measurement takes. A slow disk gets a smaller file."""

PROJECTED_TOKENS = 2048
"""As many as are restored at once."""

PREFILLED_TOKENS = 512
TRANSFER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RememberedProfile:
    """A profile, and where it is kept.

    Attributes:
        profile: the rates.
        path: file in the cache folder.
    """

    profile: Profile
    path: Path


def machine_profile(
    model: LanguageModel,
    folders: Sequence[Path],
    codec: str,
    threads: int,
    cache_folder: Path,
    *,
    measure: bool = False,
    on_measure: Callable[[], None] = lambda: None,
) -> RememberedProfile:
    """The rates of this machine: measured not long ago, else measured now.

    Args:
        model: the model to restore.
        folders: where its states are, or will be.
        codec: that they are stored in.
        threads: that read.
        cache_folder: where profiles are kept.
        measure: measure now, whatever is remembered.
        on_measure: called before a measurement, which takes some seconds.

    Raises:
        ProfileError: a folder cannot be written to, so that reading from it cannot be measured.
        SettingsError: the cache folder cannot be used.
    """
    folders = [_existing(folder) for folder in folders]
    path = cache_folder / "profiles" / f"{_key(model, folders, codec, threads)}.json"
    if not measure and (known := _recent(path)) is not None:
        return RememberedProfile(known, path)
    on_measure()
    profile = measure_profile(model, folders, codec, threads)
    with cache_folder_in_use(cache_folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".profile-")
        with os.fdopen(descriptor, "w") as file:
            file.write(profile.to_json())
        Path(temporary).replace(path)
    return RememberedProfile(profile, path)


def measure_profile(model: LanguageModel, folders: Sequence[Path], codec: str, threads: int) -> Profile:
    """Measure the rates of this machine, in some seconds.

    Reading: a nameless temporary file in each folder, of random bytes, is written, synced and dropped from the page
    cache (`posix_fadvise` with `DONTNEED`, which works on synced pages only), then read from several threads in blocks
    in random order, as the restorer reads. Where a file system lives in memory, the rate is that of memory. Computing:
    the product of the last layer's fused K and V projection, a prefill of 512 tokens, and decoding, rotating and
    placing keys and values of one layer; the median of some runs each.

    Args:
        model: the model to restore.
        folders: where its states are.
        codec: that they are stored in.
        threads: that read.

    Raises:
        ProfileError: a folder cannot be written to.
    """
    return Profile(
        read_rate=_read_rate(folders, threads),
        transfer_rate=_transfer_rate(model.device) if model.device.type == "cuda" else None,
        projection_rate=_projection_rate(model),
        prefill_rate=_prefill_rate(model),
        placement_rate=_placement_rate(model, codec),
        codec=codec,
        device=model.device.type,
        machine=processor_name(model.device),
        fingerprint=model.fingerprint.digest,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _recent(path: Path) -> Profile | None:
    """A profile that was measured not long ago."""
    with suppress(ProfileError):
        profile = Profile.load(path)
        if timedelta() <= datetime.now(UTC) - profile.date < timedelta(days=PROFILE_DAYS):
            return profile
    return None


def _key(model: LanguageModel, folders: Sequence[Path], codec: str, threads: int) -> str:
    """What rates depend on. Folders count by their file system: stores on one disk share a profile."""
    disks = sorted({folder.stat().st_dev for folder in folders})
    parts = [model.fingerprint.digest, str(model.device), processor_name(model.device), codec, threads, disks]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _existing(folder: Path) -> Path:
    """A folder, or the one in which it is going to be."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def processor_name(device: torch.device) -> str:
    """The processor that computes, and how many threads of it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _read_rate(folders: Sequence[Path], threads: int) -> float:
    """Bytes per second read from all folders at once, past the page cache."""
    with ExitStack() as files, ThreadPoolExecutor(threads) as pool:
        blocks: list[tuple[int, int]] = []
        for folder in folders:
            try:
                file = files.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                count = _write_blocks(file, FILE_BYTES // len(folders) // BLOCK_BYTES)
            except OSError as error:
                raise ProfileError(
                    f"reading from {folder} cannot be measured: {error.strerror or error}; "
                    "see to its permissions and space, or give --profile FILE"
                ) from error
            blocks += [(file.fileno(), block * BLOCK_BYTES) for block in range(count)]
        random.Random(0).shuffle(blocks)
        clock = time.perf_counter()

        def read(share: list[tuple[int, int]]) -> int:
            buffer, done = bytearray(BLOCK_BYTES), 0
            for descriptor, offset in share:
                if time.perf_counter() - clock < READ_SECONDS:
                    done += os.preadv(descriptor, [buffer], offset)
            return done

        done = sum(pool.map(read, [blocks[thread::threads] for thread in range(threads)]))
        return done / (time.perf_counter() - clock)


def _write_blocks(file: IO[bytes], count: int) -> int:
    """Write up to so many blocks to disk, at least one, and drop them from memory; returns how many."""
    clock, written = time.perf_counter(), 0
    while written == 0 or (written < count and time.perf_counter() - clock < WRITE_SECONDS):
        # Random, since some file systems compress.
        for _ in range(min(16, count - written) or 1):
            file.write(os.urandom(BLOCK_BYTES))
            written += 1
        os.fdatasync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return written


def _transfer_rate(device: torch.device) -> float:
    """Bytes per second from pinned memory to the device."""
    source = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, device=device)
    return TRANSFER_BYTES / _seconds(device, lambda: target.copy_(source, non_blocking=True))


@torch.inference_mode()
def _projection_rate(model: LanguageModel) -> float:
    """FLOP/s of the product that projects hidden states of the last layer to keys and values."""
    layer, width = model.decoder.layers[-1], model.decoder.hidden_size
    hidden = torch.randn(PROJECTED_TOKENS, width, dtype=model.dtype, device=model.device)
    weight = torch.randn(2 * layer.kv_heads * layer.head_dim, width, dtype=model.dtype, device=model.device)
    return PROJECTED_TOKENS * projection_flops(layer, width) / _seconds(model.device, lambda: linear(hidden, weight))


def _prefill_rate(model: LanguageModel) -> float:
    """FLOP/s of all layers in a prefill."""
    tokens = min(PREFILLED_TOKENS, model.context_window)
    vocabulary = model.decoder.embedding.weight.shape[0]
    token_ids = [index % vocabulary for index in range(tokens)]
    return prefill_flops(model, tokens) / _seconds(model.device, lambda: prefill(model, token_ids))


@torch.inference_mode()
def _placement_rate(model: LanguageModel, codec: str) -> float:
    """Bytes per second written while keys and values of all layers are decoded, rotated and placed.

    All layers, so that each is written to memory that is in no cache of the processor, as when a prompt is restored.
    """
    tokens, dtype, layers = min(PROJECTED_TOKENS, model.context_window), model.fingerprint.dtype, model.decoder.layers
    stored = tuple(LayerFormat(Form.PRE_ROPE_KV, it.kv_heads * it.head_dim, codec) for it in layers)
    format = StateFormat(dtype, stored)
    parts = {}
    for index, it in enumerate(stored):
        if it.width not in parts:
            states = torch.randn(2, tokens, it.width, dtype=model.dtype, device=model.device)
            parts[it.width] = format.arrange(index, [tokens]).loaded([format.encode(index, states)])
    rows = next(iter(parts.values()))[0].rows
    moves = Moves.of([Run(0, 0, tokens)], rows, model.device)
    tables = model.decoder.tables(torch.arange(tokens, device=model.device))
    cache, restorer = model.new_cache(tokens), implementation(model.device, Workspace())

    def restore() -> None:
        for layer, it in zip(layers, stored, strict=True):
            keys, values = cache.keys[layer.index], cache.values[layer.index]
            write_kv(it.form, layer, parts[it.width], tables[layer.index], moves, keys, values, restorer)

    written = sum(written_bytes(layer, it, dtype) for layer, it in zip(layers, stored, strict=True))
    return tokens * written / _seconds(model.device, restore)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of some runs, after one to warm up; at least three of them, however long they take."""
    times: list[float] = []
    while len(times) < 4 or sum(times) < COMPUTE_SECONDS:
        _synchronise(device)
        clock = time.perf_counter()
        run()
        _synchronise(device)
        times.append(time.perf_counter() - clock)
    return statistics.median(times[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
