"""A few of the points that `make torture` kills jobs at."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.torture.points import Kind

ROOT = Path(__file__).parents[1]


def test_a_killed_job_leaves_the_store_as_it_was_and_can_be_done_again() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.torture.crash", "--points", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    *_, kinds, summary = run.stdout.splitlines()
    assert summary.startswith("12 points, 0 failures")
    candidates = {kind: int(count) for count, kind in re.findall(r"of (\d+) ([a-z ]+)", kinds)}
    assert set(candidates) == set(Kind)
    assert min(candidates.values()) > 0
