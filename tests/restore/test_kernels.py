"""Kernels compute what their twins do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")


def test_kernels_agree_with_their_twins() -> None:
    """In a process of its own: `triton.jit` decides when a kernel is defined whether it will be interpreted, and other
    tests of this session compile the same kernels for real."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", INTERPRETED],
        cwd=INTERPRETED.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_on_a_cpu_nobody_waits_for_triton() -> None:
    code = """
import sys, torch
from ragcache.restore.backend import implementation
from ragcache.restore.twins import Twins
from ragcache.restore.workspace import Workspace
assert isinstance(implementation(torch.device("cpu"), Workspace()), Twins)
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
