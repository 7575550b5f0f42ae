"""The settings that are compared: encodings x order x repair x ratio x codec."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ragcache.errors import EvaluationError
from ragcache.settings import CodecName, EncodingName, Order, QueryOptions, Repair

RATIO = 0.15
"""Of the default grid, where none is given."""


class Setting(BaseModel):
    """How answers are composed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    encodings: tuple[EncodingName, ...] = Field(min_length=1)
    order: Order
    repair: Repair = "off"
    repair_ratio: float = Field(RATIO, ge=0.0, le=1.0)
    repair_ms: float | None = Field(None, gt=0)
    codec: CodecName | None = Field(None, description="Of the states; as they are stored when there is none")

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, values: Any) -> Any:
        """What says nothing is always the same: without repair how much of it, beside a time the ratio."""
        if not isinstance(values, Mapping):
            return values
        if isinstance(names := values.get("encodings"), list | tuple) and set(names) <= set(get_args(EncodingName)):
            # Which of them a chunk takes is not a matter of their order.
            values = {**values, "encodings": tuple(it for it in get_args(EncodingName) if it in names)}
        if values.get("repair", "off") == "off":
            return {**values, "repair_ratio": 0.0, "repair_ms": None}
        return {**values, "repair_ratio": 0.0} if values.get("repair_ms") is not None else values

    @property
    def label(self) -> str:
        """For people; no two settings of a grid have the same."""
        amount = f"{self.repair_ratio * 100:g}%" if self.repair_ms is None else f"{self.repair_ms:g} ms"
        repair = "no repair" if self.repair == "off" else f"{self.repair} {amount}"
        codec = f", {self.codec}" if self.codec is not None else ""
        return f"{'+'.join(self.encodings)}, {self.order}, {repair}{codec}"

    def query(self, max_tokens: int) -> QueryOptions:
        """As options of a query with a greedy answer of so many tokens."""
        return QueryOptions(**self.model_dump(exclude={"codec"}), max_tokens=max_tokens)


def distinct(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Each setting once, where it comes first."""
    return tuple(dict.fromkeys(settings))


@dataclass(frozen=True)
class Axes:
    """Values along each axis of a grid."""

    encodings: Sequence[tuple[EncodingName, ...]]
    orders: Sequence[Order]
    repairs: Sequence[Repair]
    ratios: Sequence[float]
    codecs: Sequence[CodecName | None] = (None,)

    def settings(self) -> tuple[Setting, ...]:
        """Their product, each setting once."""
        return distinct(
            Setting(encodings=encodings, order=order, repair=repair, repair_ratio=ratio, codec=codec)
            for encodings, order, repair, ratio, codec in itertools.product(
                self.encodings, self.orders, self.repairs, self.ratios, self.codecs
            )
        )


PLAIN = Setting(encodings=("alone",), order="score")
"""Chunks encoded apart and put one after the other: what every other setting is to improve on."""

DEFAULT_GRID = (
    PLAIN,
    Setting(encodings=("alone",), order="score", repair="query", repair_ratio=RATIO),
    *Axes([("alone", "context")], ["score", "document", "conditioned"], ["off"], [0.0]).settings(),
    *Axes([("alone", "context")], ["conditioned"], ["query", "boundary", "deviation"], [RATIO]).settings(),
)
FULL_GRID = Axes(
    [("alone",), ("context",), ("alone", "context")],
    ["conditioned", "score", "score-last", "document"],
    ["off", "query", "boundary", "deviation"],
    [0.05, RATIO, 0.3],
).settings()


def setting_of(options: QueryOptions) -> Setting:
    """What queries are answered with when nothing else is asked for."""
    return Setting(
        encodings=options.encodings,
        order=options.order,
        repair=options.repair,
        repair_ratio=options.repair_ratio,
        repair_ms=options.repair_ms,
    )


def chosen_grid(
    file: Path | None,
    *,
    full: bool,
    current: Setting,
    encodings: str | None,
    order: str | None,
    repair: str | None,
    ratio: str | None,
    codec: str | None,
) -> tuple[Setting, ...]:
    """The grid that a user asks for.

    Args:
        file: with a grid (`read_grid`).
        full: the large one, not the small one.
        current: the store's present setting; compared as well in the small and the large one.
        encodings, order, repair, ratio, codec: values along axes (`axes`).

    Raises:
        EvaluationError: more than one of these is given, or one of them cannot be used.
    """
    along = (encodings, order, repair, ratio, codec)
    on_axes = any(it is not None for it in along)
    if (file is not None) + full + on_axes > 1:
        raise EvaluationError("give --grid, or --full-grid, or values for --encodings, --order, --repair and --codec")
    if file is not None:
        return read_grid(file)
    if on_axes:
        return axes(*along)
    return distinct((*(FULL_GRID if full else DEFAULT_GRID), current))


def axes(
    encodings: str | None, order: str | None, repair: str | None, ratio: str | None, codec: str | None
) -> tuple[Setting, ...]:
    """The grid of values given as texts.

    Args:
        encodings: sets of encodings with commas between them, such as `alone,alone+context`; both of these when `None`.
        order: names with commas between them; `score` and `conditioned` when `None`.
        repair: names with commas between them; `off` and `query` when `None`.
        ratio: numbers with commas between them; 0.15 when `None`.
        codec: names with commas between them; as the states are stored when `None`.

    Raises:
        EvaluationError: one of them cannot be used.
    """
    return Axes(
        [
            tuple(_one_of("--encodings", EncodingName, part) for part in it.split("+"))
            for it in _parts(encodings or "alone,alone+context")
        ],
        [_one_of("--order", Order, it) for it in _parts(order or "score,conditioned")],
        [_one_of("--repair", Repair, it) for it in _parts(repair or "off,query")],
        [_ratio(it) for it in _parts(ratio or str(RATIO))],
        [_one_of("--codec", CodecName, it) for it in _parts(codec)] if codec else (None,),
    ).settings()


_READER = TypeAdapter(list[Setting])


def read_grid(path: Path) -> tuple[Setting, ...]:
    """Settings of a JSON file: a list of objects, each a `Setting`.

    Raises:
        EvaluationError: it cannot be read, or holds something else.
    """
    try:
        settings = _READER.validate_json(path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"the grid {path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        # What is unknown first: the word that is missing is often the one that is misspelt.
        first = min(error.errors(), key=lambda it: it["type"] != "extra_forbidden")
        place = " of setting ".join(str(part) for part in reversed(first["loc"]))
        raise EvaluationError(f"{path} is no grid: {f'{place}: ' if place else ''}{first['msg']}") from error
    if not settings:
        raise EvaluationError(f"{path} holds no settings; give objects such as {json.dumps(PLAIN.model_dump())}")
    return distinct(settings)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _one_of(option: str, kind: Any, name: str) -> Any:
    known = get_args(kind)
    if name not in known:
        raise EvaluationError(f"{option} has no {name!r}; known: {', '.join(known)}")
    return name


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise EvaluationError(f"--repair-ratio has no {text!r}; give numbers from 0 to 1, separated by commas")
    return ratio
