"""Kill jobs on a store at many points, look at what is left, and do them again.

    python -m tests.torture.crash --points 200
    python -m tests.torture.crash --only index:17

Each job runs once to count the points it passes: before, within and after each write, fsync, rename, unlink, statement
and commit, and each write of SQLite's own. Some are chosen, and for each a forked process does the job on a fresh copy
of the store and dies there by SIGKILL; at those of odd number the power goes as well, and with it all that no fsync has
made durable. Everything is forked from one process that has loaded the models.
"""

from __future__ import annotations

import os

# Before anything starts a thread: forked processes would hang.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tests.torture.examination import QUESTIONS, Examination, Findings, Reference, refer
from tests.torture.oracle import Expected
from tests.torture.points import Kind, Point, Points, instrument
from tests.torture.scenarios import SCENARIOS, Scenario, all_documents
from tests.torture.workshop import ForkError, Workshop, in_a_fork

T = TypeVar("T")

LEAST = 20
"""Points of each scenario, when there are enough for that."""


@dataclass
class Bench:
    """One scenario: its stores before and after, and the points that its job passes.

    Attributes:
        name: of the scenario.
        scenario: what is done.
        workshop: models.
        folder: for stores; `before` holds the one that is copied for each point.
        expected: logits computed so far, for whatever scenario.
        points: that the job passes.
    """

    name: str
    scenario: Scenario
    workshop: Workshop
    folder: Path
    expected: Expected
    points: list[Point] = field(init=False)

    def __post_init__(self) -> None:
        original = self.folder / "before"
        in_a_fork(lambda: self.scenario.prepare(self.workshop, original))
        self._before = self._reference(original)
        whole = self._copy("whole")
        self.points = _unless_killed(in_a_fork(lambda: self._run_watched(whole, Points())))
        self._after = self._reference(whole)

    def kill_at(self, number: int) -> list[str]:
        """Do the job in a process that dies at a point, and everything that follows; what is wrong, a line each."""
        killed = self._copy("killed")
        points = Points(fatal=number, power_cut=number % 2 == 1)
        try:
            passed = in_a_fork(lambda: self._run_watched(killed, points))
            if passed is not None:
                return [f"the job came to its end after {len(passed)} points; at first it was {len(self.points)}"]
            examined, lost = self._copy("examined", killed), self._copy("lost", killed)

            def look(it: Examination) -> None:
                it.after_kill(examined)
                it.without_catalog(lost)

            def complete(it: Examination) -> None:
                # On the very store that was killed: nobody has opened it since.
                self.scenario.job(self.workshop, killed)
                it.after_completion(killed)

            return self._examine(look) + self._examine(complete)
        except ForkError as error:
            return [str(error).strip().replace("\n", "\n    ")]
        finally:
            for name in ("killed", "examined", "lost"):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _run_watched(self, path: Path, points: Points) -> list[Point]:
        instrument(points)
        self.scenario.job(self.workshop, path)
        return points.passed

    def _reference(self, path: Path) -> Reference:
        copy = self._copy("reference", path)
        found = _unless_killed(in_a_fork(lambda: refer(self.workshop, copy)))
        shutil.rmtree(copy, ignore_errors=True)
        return found

    def _examine(self, look: Callable[[Examination], None]) -> list[str]:
        def examine() -> Findings:
            findings = Findings(dict(self.expected))
            look(Examination(self.workshop, self.scenario, self._before, self._after, findings))
            findings.expected = {key: it for key, it in findings.expected.items() if key not in self.expected}
            return findings

        findings = _unless_killed(in_a_fork(examine))
        self.expected.update(findings.expected)
        return findings.failures

    def _copy(self, name: str, original: Path | None = None) -> Path:
        original = original or self.folder / "before"
        copy = self.folder / name
        if original.exists():
            shutil.copytree(original, copy)
        return copy


def _unless_killed(outcome: T | None) -> T:
    if outcome is None:
        raise ForkError("somebody else killed a process of this test")
    return outcome


def share_out(sizes: dict[str, int], count: int) -> dict[str, int]:
    """How many points of each scenario: in proportion to what there are, but a least number of each."""
    least = min(LEAST, count // len(sizes))
    total = sum(sizes.values())
    shares = {name: min(size, max(least, count * size // total)) for name, size in sizes.items()}
    while sum(shares.values()) > count:
        shares[max(shares, key=lambda name: shares[name])] -= 1
    while sum(shares.values()) < min(count, total):
        shares[max(shares, key=lambda name: sizes[name] - shares[name])] += 1
    return shares


def choose(points: list[Point], count: int, chance: random.Random) -> list[int]:
    """Numbers of some points: as many of each kind, as far as there are, and those spread evenly over the job.

    Taken from all points alike, most would be within SQLite's writes and few at a rename or a commit.
    """
    kinds: dict[Kind, list[int]] = {}
    for number, point in enumerate(points):
        kinds.setdefault(point.kind, []).append(number)
    wanted = dict.fromkeys(chance.sample(sorted(kinds), len(kinds)), 0)
    for _ in range(min(count, len(points))):
        kind = min((kind for kind in wanted if wanted[kind] < len(kinds[kind])), key=lambda kind: wanted[kind])
        wanted[kind] += 1
    chosen: list[int] = []
    for kind, number in wanted.items():
        start = chance.random()
        chosen += [kinds[kind][int((start + i) * len(kinds[kind]) / number)] for i in range(number)]
    return sorted(chosen)


def main() -> int:
    """Run what the command line asks for; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description="Kill jobs on a store at many points.")
    parser.add_argument("--points", type=int, default=200, help="how many, over all scenarios")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", help="SCENARIO, or SCENARIO:POINT for a single one")
    arguments = parser.parse_args()
    only, _, point = (arguments.only or "").partition(":")
    if only not in ("", *SCENARIOS):
        parser.error(f"there is no scenario {only!r}; there are {', '.join(SCENARIOS)}")
    chance = random.Random(arguments.seed)
    clock = time.perf_counter()
    workshop = Workshop.load()
    workshop.warm_up(all_documents(), QUESTIONS)
    candidates: Counter[Kind] = Counter()
    killed: Counter[Kind] = Counter()
    expected: Expected = {}
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        benches = {}
        for name, scenario in SCENARIOS.items():
            if only in ("", name):
                (place := Path(folder, name)).mkdir()
                benches[name] = Bench(name, scenario, replace(workshop, given=scenario.settings), place, expected)
        sizes = {name: len(bench.points) for name, bench in benches.items()}
        shares = share_out(sizes, arguments.points)
        for name, bench in benches.items():
            candidates.update(it.kind for it in bench.points)
            _say(f"{name}: {shares[name]} of {sizes[name]} points")
            for number in [int(point)] if point else choose(bench.points, shares[name], chance):
                killed[bench.points[number].kind] += 1
                if found := bench.kill_at(number):
                    failures += 1
                    _say(f"FAILED {name}:{number} ({bench.points[number]}): {'; '.join(found)}")
    _say("killed at: " + ", ".join(f"{killed[kind]} of {candidates[kind]} {kind}" for kind in Kind))
    _say(f"{killed.total()} points, {failures} failures, {time.perf_counter() - clock:.0f} s")
    return 1 if failures else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
