"""A fault, a load or an abuse that baton is measured by: what is done, its bound, what came of it.

Each file in `cases/` declares its own with `@case`; `python -m tests.chaos` runs them by name and
keeps what came of them, from which `docs/reliability.md` is written (`report`).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

Figure = float | int | str | bool | None

MINUTES = "BATON_CHAOS_MINUTES"
"""How long a case is to run that can run for longer or shorter; see `requested_minutes`."""


class Engines(StrEnum):
    """What computes in a case."""

    SIMULATED = "simulated"
    """The simulated engines, in real time, behind the whole of the rest: links, HTTP, maybe Ray."""
    REAL = "real"
    """vLLM on the CPU, with NIXL transfers."""
    VIRTUAL = "virtual"
    """The simulator: virtual time, the live decisions."""
    NONE = "none"
    """No engine takes part."""


class Verdict(StrEnum):
    """What came of a case."""

    PASSED = "passed"
    MISSED = "missed"
    """It ran to its end and a bound was not kept; `why` says which and by how much."""
    BROKE = "broke"
    """The case itself did not come to its end; it says nothing of baton yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One thing that must hold, and what was seen."""

    description: str
    """As a reader says it: `longest stall beyond detection, s`."""
    actual: Figure
    expected: str
    """`<= 0.5`, `== 0`, ..."""
    is_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case saw. It passes when every bound held, and there is one at least."""

    bounds: tuple[Bound, ...]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """What else is worth keeping: how many requests, how long, where."""
    note: str = ""
    """Why a bound was missed, or what a reader must know."""

    @property
    def verdict(self) -> Verdict:
        is_passed = bool(self.bounds) and all(bound.is_met for bound in self.bounds)
        return Verdict.PASSED if is_passed else Verdict.MISSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the report."""

    key: str
    """`F1`, `L4`, `B6`; with an end where one line needs several runs: `F1-real`."""
    title: str
    engines: Engines
    minutes: float
    """How long it takes, about."""
    run: Callable[[Path], Outcome]
    """Given an empty folder to write into; leaves nothing running."""


_CASES: dict[str, Case] = {}


def case(
    key: str, title: str, *, engines: Engines, minutes: float
) -> Callable[[Callable[[Path], Outcome]], Callable[[Path], Outcome]]:
    """Declare a function to be a case."""

    def declare(run: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
        if key in _CASES:
            raise ValueError(f"two cases are called {key!r}: {_CASES[key].title!r} and {title!r}")
        _CASES[key] = Case(key=key, title=title, engines=engines, minutes=minutes, run=run)
        return run

    return declare


def load_cases() -> Mapping[str, Case]:
    """Every case that a module in `cases/` declares, by key."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "cases")]):
        importlib.import_module(f"tests.chaos.cases.{module.name}")
    return dict(_CASES)


def at_most(description: str, actual: float, limit: float) -> Bound:
    """A bound from above."""
    return Bound(
        description=description, actual=actual, expected=f"<= {limit:g}", is_met=actual <= limit
    )


def at_least(description: str, actual: float, limit: float) -> Bound:
    """A bound from below."""
    return Bound(
        description=description, actual=actual, expected=f">= {limit:g}", is_met=actual >= limit
    )


def exactly(description: str, actual: Figure, expected: Figure) -> Bound:
    """The one value that it may have."""
    return Bound(
        description=description, actual=actual, expected=f"== {expected}", is_met=actual == expected
    )


def requested_minutes(full_minutes: float) -> dict[str, float]:
    """`minutes` to run for and `minutes_in_full`: figures of a case that can be shortened.

    `--minutes` of the runner says so; a run that is shorter than in full says that in the report.
    """
    return {
        "minutes": float(os.environ.get(MINUTES, full_minutes)),
        "minutes_in_full": full_minutes,
    }
