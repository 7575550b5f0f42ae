"""Which form each layer is stored in, so that reading and computing take equally long.

The bubble-free restoration scheduler of HCache (EuroSys'25, section 4.1): while one layer is computed the next ones are
read, so restoring takes the larger of total read time and total compute time, and layers are divided between hidden
states and a complement that needs more of the idle resource: KV where the disk is idle, tokens where the processor is.
There all layers are alike and a formula gives the number of each; here layers may differ, there are three forms, and
the best division is searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ragcache.restore.costs import Cost, LayerCosts
from ragcache.restore.profile import Profile
from ragcache.states.form import Form

STORED_FORMS = (Form.HIDDEN, Form.PRE_ROPE_KV)
"""In the order in which layers have them: what needs no computing comes last, where nothing is left to overlap with."""

PICOSECOND = 1e-12


@dataclass(frozen=True)
class Plan:
    """A form for each layer, and what restoring a prompt takes with it.

    Attributes:
        forms: of all layers; `tokens` only before any other.
        bytes: read from disk, all layers together.
        read_seconds: time to read them and bring them to the device.
        compute_seconds: time to decode, project, rotate and recompute.
        fill_seconds: time to read the first stored layer, while nothing can be computed from it yet.
    """

    forms: tuple[Form, ...]
    bytes: int
    read_seconds: float
    compute_seconds: float
    fill_seconds: float

    @property
    def balanced_seconds(self) -> float:
        """What a plan minimises: the larger of read and compute time."""
        return max(self.read_seconds, self.compute_seconds)

    @property
    def seconds(self) -> float:
        """Predicted time to restore: the larger of read and compute time, and the filling of the pipeline before."""
        return self.balanced_seconds + self.fill_seconds


def assess(costs: Sequence[LayerCosts], forms: Sequence[Form], profile: Profile) -> Plan:
    """What restoring takes with given forms.

    Args:
        costs: of each layer, for the whole prompt.
        forms: one for each layer.
        profile: rates of the machine.
    """
    chosen = [layer[form] for layer, form in zip(costs, forms, strict=True)]
    total = sum(cost.bytes for cost in chosen)
    first = next((cost.bytes for cost in chosen if cost.bytes), 0)
    return Plan(
        forms=tuple(forms),
        bytes=total,
        read_seconds=total / profile.input_rate,
        compute_seconds=sum(cost.seconds for cost in chosen),
        fill_seconds=first / profile.input_rate,
    )


def plan(costs: Sequence[LayerCosts], profile: Profile) -> Plan:
    """The forms with the smallest `balanced_seconds`; of equals those of fewer bytes.

    Exact: of all divisions of the layers behind the recomputed ones those are kept that no other one beats in both
    bytes and compute time, a layer at a time, and the best is among them. Their number is the product over the kinds
    of layers of (layers of that kind + 1), a few thousand for models whose layers are of two kinds.

    Args:
        costs: of each layer, for the whole prompt. Every layer has a stored form, or it and all before it `tokens`.
        profile: rates of the machine.

    Raises:
        ValueError: there is no division that restores every layer.
    """
    fronts = _fronts(costs)
    recomputed = list(accumulate((_weighed(it[Form.TOKENS]) for it in _leading(costs)), _sum, initial=(0, 0)))
    candidates = [
        (_sum(before, (division.bytes, division.picoseconds)), count, division)
        for count, before in enumerate(recomputed)
        for division in fronts[count]
    ]
    if not candidates:
        raise ValueError("some layer has no form that it can be restored from")

    def rank(candidate: tuple[tuple[int, int], int, _Division]) -> tuple[float, int, int, int]:
        (size, picoseconds), count, _ = candidate
        return max(size / profile.input_rate, picoseconds * PICOSECOND), size, picoseconds, count

    _, count, division = min(candidates, key=rank)
    return assess(costs, [Form.TOKENS] * count + division.forms(), profile)


@dataclass(frozen=True)
class _Division:
    """Stored forms of all layers from one on.

    Attributes:
        bytes: they take.
        picoseconds: of computing. Whole numbers, so that sums do not depend on the order of their terms.
        form: of the first of the layers.
        rest: of the layers behind it.
    """

    bytes: int
    picoseconds: int
    form: Form | None = None
    rest: _Division | None = None

    def forms(self) -> list[Form]:
        """Of all these layers."""
        found, division = [], self
        while division.form is not None and division.rest is not None:
            found.append(division.form)
            division = division.rest
        return found


def _leading(costs: Sequence[LayerCosts]) -> list[LayerCosts]:
    """The first layers, as far as they may be recomputed."""
    count = next((index for index, layer in enumerate(costs) if Form.TOKENS not in layer), len(costs))
    return list(costs[:count])


def _weighed(cost: Cost) -> tuple[int, int]:
    return cost.bytes, round(cost.seconds / PICOSECOND)


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _fronts(costs: Sequence[LayerCosts]) -> list[list[_Division]]:
    """For each number of recomputed layers, the divisions of those behind that no other one beats."""
    fronts = [[_Division(0, 0)]]
    for layer in reversed(costs):
        options = [(form, *_weighed(layer[form])) for form in STORED_FORMS if form in layer]
        divisions = [
            _Division(size + rest.bytes, picoseconds + rest.picoseconds, form, rest)
            for form, size, picoseconds in options
            for rest in fronts[-1]
        ]
        fronts.append(_unbeaten(divisions))
    return fronts[::-1]


def _unbeaten(divisions: list[_Division]) -> list[_Division]:
    """Divisions that have fewer bytes or less to compute than any other; of equals the first."""
    kept: list[_Division] = []
    for division in sorted(divisions, key=lambda it: (it.bytes, it.picoseconds)):
        if not kept or division.picoseconds < kept[-1].picoseconds:
            kept.append(division)
    return kept
