"""What a dashboard is, before anybody's format: rows of panels that ask and explain."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton.telemetry.dashboards.promql import Expr, legend_labels

COLUMNS: Final = 24
"""How wide a page is."""
_MOST_IDS = 1_000_000


class Unit(StrEnum):
    """What a panel's numbers are, by Grafana's names."""

    COUNT = "short"
    SECONDS = "s"
    FRACTION = "percentunit"
    REQUESTS_PER_S = "reqps"
    TOKENS_PER_S = "suffix: tok/s"
    BYTES_PER_S = "Bps"
    BYTES = "bytes"
    PER_S = "ops"
    RATIO = "suffix:x"
    GPUS = "suffix: GPU"
    MONEY_PER_HOUR = "suffix: /h"
    MONEY = "none"


class Shape(StrEnum):
    """How a panel shows what it asks."""

    LINES = "lines"
    STACK = "stack"
    """Lines on top of each other, filled: parts of a whole."""
    BARS = "bars"
    """Bars on top of each other: what happened."""
    NUMBERS = "numbers"
    """The latest value of each series, large."""
    LEVELS = "levels"
    """The latest value of each series as a bar."""
    TABLE = "table"
    MATRIX = "matrix"
    """The latest values by two labels, as a table."""
    HEAT = "heat"
    """A histogram over time."""


class Colour(StrEnum):
    """What a number means."""

    GOOD = "green"
    CARE = "orange"
    BAD = "red"
    PLAIN = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """From a number on, a colour; None: from the lowest on."""

    above: float | None
    colour: Colour


LOW_IS_BAD: Final = (
    Step(above=None, colour=Colour.BAD),
    Step(above=0.0, colour=Colour.CARE),
    Step(above=0.25, colour=Colour.GOOD),
)
"""For what is left of an error budget."""
NONE_IS_GOOD: Final = (Step(above=None, colour=Colour.GOOD), Step(above=1e-9, colour=Colour.BAD))
SOME_IS_CARE: Final = (Step(above=None, colour=Colour.GOOD), Step(above=1e-9, colour=Colour.CARE))
NONE_IS_BAD: Final = (Step(above=None, colour=Colour.BAD), Step(above=1.0, colour=Colour.GOOD))
NEGATIVE_IS_BAD: Final = (Step(above=None, colour=Colour.BAD), Step(above=0.0, colour=Colour.GOOD))
FULL_IS_BAD: Final = (
    Step(above=None, colour=Colour.GOOD),
    Step(above=0.8, colour=Colour.CARE),
    Step(above=0.95, colour=Colour.BAD),
)
PLAIN: Final = (Step(above=None, colour=Colour.PLAIN),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One thing that a panel asks."""

    expr: Expr
    legend: str = ""
    """What a series is called, with `{{label}}`; empty: by its labels."""
    promise: bool = False
    """Whether it is what was promised, and is drawn as a dashed line."""

    def __post_init__(self) -> None:
        if missing := legend_labels(self.legend) - self.expr.labels:
            raise ValueError(
                f"legend {self.legend!r} names {sorted(missing)}, the result of {self.expr.text}"
                f" has {sorted(self.expr.labels)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture with its question."""

    title: str
    about: str
    """What it shows, and what to do about it."""
    shape: Shape
    queries: tuple[Query, ...]
    unit: Unit
    width: int = 8
    height: int = 8
    lowest: float | None = 0.0
    highest: float | None = None
    steps: tuple[Step, ...] = PLAIN
    runbook: str | None = None
    """The page of `docs/operations/runbooks` to read when it looks bad."""
    magnitudes: bool = False
    """Whether the scale is logarithmic: for values that are far apart."""
    when_empty: str = "no data"
    """What it says when nothing comes back."""
    matrix: tuple[str, str] | None = None
    """The labels of a matrix' rows and columns."""

    def __post_init__(self) -> None:
        if (self.matrix is None) == (self.shape is Shape.MATRIX):
            raise ValueError(f"panel {self.title!r}: a matrix, and only that, has two labels")
        if not self.queries or not self.about:
            raise ValueError(f"panel {self.title!r}: asks nothing, or does not say what it shows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one question."""

    title: str
    panels: tuple[Panel, ...]
    open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A variable: what is shown can be narrowed to some values of a label."""

    name: str
    label: str
    """As people read it."""
    of: Expr
    """The series whose values there are."""
    values: str
    """The label whose values there are."""

    def __post_init__(self) -> None:
        if self.values not in self.of.labels:
            raise ValueError(f"variable {self.name!r}: {self.of.text} has no label {self.values!r}")

    @property
    def query(self) -> str:
        """As Grafana asks for the values."""
        return f"label_values({self.of.text}, {self.values})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    name: str
    """Its file is called so, and its uid is `baton-` and this."""
    title: str
    about: str
    choices: tuple[Choice, ...]
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        """What links to it say."""
        return f"baton-{self.name}"

    def panels(self) -> Iterator[Panel]:
        """All of them, in order."""
        for row in self.rows:
            yield from row.panels

    def id_of(self, title: str) -> int:
        """A number for a panel or row, the same as long as its title is: links to it stay good."""
        return zlib.crc32(f"{self.name}/{title}".encode()) % _MOST_IDS + 1
