"""The command: checks, then timings, then one JSON file; it is written again after each part, so nothing is lost.

Exit codes: 0 all variants agree with their twins; 1 some do not; 2 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

import torch

from ragcache.restore.backend import Implementation
from ragcache.restore.gpu_check.correctness import check, variants
from ragcache.restore.gpu_check.pipeline import check_pipeline
from ragcache.restore.gpu_check.report import Report
from ragcache.restore.gpu_check.shapes import FAMILIES, Attention, Rotation
from ragcache.restore.gpu_check.timing import measure_rates, time_layer
from ragcache.states.form import Form

TIMED = ("SmolLM2-135M", "Llama-3.1-8B", "Qwen2.5-7B")
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
CODECS = ("int8", "int4", "raw")


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(prog="python -m ragcache.restore.gpu_check", description="Kernels on a real GPU.")
    folder = Path(os.environ.get("OUT", "."))
    parser.add_argument("--output", type=Path, default=folder / "gpu-check.json", help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=420, help="start nothing new after that time")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="tiny shapes in Triton's interpreter")
    options = parser.parse_args(arguments)
    if options.dry_run_on_cpu:
        # Before anything imports the kernels: that decides it for good.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        _say("no CUDA device here; nothing was checked")
        return 2
    report = Report(options.output, time.monotonic() + options.seconds)
    _run(report, torch.device("cpu" if options.dry_run_on_cpu else "cuda"), dry=options.dry_run_on_cpu)
    checked, failures = len(report.content["correctness"]), len(report.failures)
    _say(f"{checked} variants checked, {failures} failures; written to {options.output}")
    return 1 if failures or not checked else 0


def _run(report: Report, device: torch.device, dry: bool) -> None:
    import triton

    from ragcache.restore import kernels
    from ragcache.restore.twins import Twins

    pair = Twins(), cast(Implementation, kernels)
    report.content |= {
        "device": platform.machine() if dry else torch.cuda.get_device_name(device),
        "capability": None if dry else torch.cuda.get_device_capability(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for variant in islice(variants(), 0, None, 20) if dry else variants():
        attention = _tiny(FAMILIES[variant.family]) if dry else FAMILIES[variant.family]
        report.add("correctness", variant.name, partial(check, variant, attention, device, *pair))
    for family in TIMED[:1] if dry else TIMED:
        attention = _tiny(FAMILIES[family]) if dry else FAMILIES[family]
        tokens, layers = (70, 10) if dry else (4096, 64)
        run = partial(check_pipeline, attention, tokens, layers, device, *pair)
        report.add("pipeline", {"family": family, "tokens": tokens}, run)
    report.write()

    rates = measure_rates(device)
    report.content["rates"] = asdict(rates)
    for tokens in (96,) if dry else TOKENS:
        for family in TIMED[:1] if dry else TIMED:
            attention = _tiny(FAMILIES[family]) if dry else FAMILIES[family]
            for form in (Form.HIDDEN, Form.PRE_ROPE_KV):
                for codec in CODECS[:1] if dry else CODECS:
                    name: dict[str, object] = {"family": family, "form": form, "codec": codec, "tokens": tokens}
                    run = partial(time_layer, form, attention, codec, tokens, device, rates, *pair)
                    report.add("timings", name, run)
        report.write()


def _tiny(attention: Attention) -> Attention:
    """The same kind of layer, small enough for the interpreter."""
    rotation = attention.rotation and Rotation(attention.rotation.interleaved, 16)
    return replace(attention, hidden_size=64, kv_heads=2, head_dim=32, rotation=rotation)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
