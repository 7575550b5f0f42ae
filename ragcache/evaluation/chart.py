"""A small scatter plot as SVG: settings by time and fidelity, and the line of those that no other one beats in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 16, 48
TICKS = 5


@dataclass(frozen=True)
class Point:
    """A setting in the plot.

    Attributes:
        label: short, written beside the point.
        description: shown when the pointer rests on it, and read aloud.
        x, y: finite.
        low, high: of the interval of y.
    """

    label: str
    description: str
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Axis:
    """What one direction of the plot means.

    Attributes:
        title: with its unit.
        start, stop: values at its ends.
    """

    title: str
    start: float
    stop: float

    @property
    def ticks(self) -> list[float]:
        """Round values between the ends."""
        step = 10 ** math.floor(math.log10((self.stop - self.start) / TICKS))
        step = next(step * it for it in (1, 2, 5, 10) if (self.stop - self.start) / (step * it) <= TICKS)
        first = math.ceil(self.start / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.stop / step + 1e-9) + 1)]


def axis(title: str, values: Sequence[float], *, floor: float | None = None, ceiling: float | None = None) -> Axis:
    """An axis with some room around the values.

    Args:
        title: with its unit.
        values: that are to be seen.
        floor: where it starts at the lowest.
        ceiling: where it ends at the highest.
    """
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    start, stop = low - room, high + room
    return Axis(title, start if floor is None else max(start, floor), stop if ceiling is None else min(stop, ceiling))


def frontier(points: Sequence[Point], *, higher_is_better: bool) -> list[Point]:
    """Points for which no other one has both a smaller x and a better y, by x."""
    sign = -1 if higher_is_better else 1
    best: list[Point] = []
    for point in sorted(points, key=lambda it: (it.x, sign * it.y)):
        if not best or sign * point.y < sign * best[-1].y:
            best.append(point)
    return best


STYLE = """
rect { fill: #fff; } text { font: 12px system-ui, sans-serif; fill: #1b1f24; } .grid { stroke: #d7dbe0; }
.frontier { fill: none; stroke: #0a5fb4; stroke-width: 1.5; } .interval { stroke: #667; }
.best circle { fill: #0a5fb4; } .other circle { fill: #667; }
"""
"""Of a plot outside the page."""


def standalone(plot: str) -> str:
    """A plot as a file of its own, with colours of its own."""
    start, rest = plot.split(">", 1)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}"/>'
    return f"{start} {size}><style>{STYLE}</style>{ground}{rest}\n"


def scatter(name: str, points: Sequence[Point], x: Axis, y: Axis, *, higher_is_better: bool) -> str:
    """The plot as an SVG element; colours come from the page's style sheet.

    Args:
        name: of the plot, read aloud.
        points: at least one.
        x, y: axes.
        higher_is_better: whether a high y is good.
    """

    def across(value: float) -> float:
        return LEFT + (value - x.start) / (x.stop - x.start) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        within = min(max(value, y.start), y.stop)
        return HEIGHT - BOTTOM - (within - y.start) / (y.stop - y.start) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">']
    for tick in x.ticks:
        at = across(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks:
        at = down(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{round(tick, 9):g}</text>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.title)}</text>')
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y.title)}</text>')
    best = frontier(points, higher_is_better=higher_is_better)
    line = " ".join(f"{across(it.x):.1f},{down(it.y):.1f}" for it in best)
    parts.append(f'<polyline class="frontier" points="{line}"/>')
    for point in points:
        across_, down_ = across(point.x), down(point.y)
        kind = "best" if point in best else "other"
        parts.append(
            f'<g class="{kind}"><title>{escape(point.description)}</title>'
            f'<line class="interval" x1="{across_:.1f}" y1="{down(point.low):.1f}" x2="{across_:.1f}" '
            f'y2="{down(point.high):.1f}"/>'
            f'<circle cx="{across_:.1f}" cy="{down_:.1f}" r="5"/>'
            f'<text x="{across_ + 8:.1f}" y="{down_ - 6:.1f}">{escape(point.label)}</text></g>'
        )
    return "".join(parts) + "</svg>"
