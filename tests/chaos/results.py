"""What came of the cases: kept in one JSON file, by case, with the runs that missed.

A new run takes the place of the last one, with two exceptions. One that was shortened and passed
does not stand for a case that has been run in full. And runs that missed are kept beside what came
after them, the latest few: a report without them would be of good days only.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from tests.chaos.case import Bound, Case, Engines, Figure, Verdict

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILE = FOLDER / "reliability.json"
MUTATIONS = FOLDER / "mutations.json"
_MISSES_KEPT = 3
_POLL_S = 0.5


class AnotherRunError(RuntimeError):
    """Somebody else runs cases on this machine now: both would measure each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one case."""

    verdict: Verdict
    bounds: tuple[Bound, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""
    began_at: str
    """UTC, to the second."""
    took_s: float
    revision: str
    """Of the code; ends in `+` where it was changed since."""
    command: str

    @property
    def shortened(self) -> bool:
        """Whether it ran for less than its case asks for; see `case.minutes_asked`."""
        ran, full = self.figures.get("minutes"), self.figures.get("minutes_in_full")
        return isinstance(ran, int | float) and isinstance(full, int | float) and ran < full

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """As it was written."""
        bounds = tuple(Bound(**one) for one in found["bounds"])
        return cls(**{**found, "verdict": Verdict(found["verdict"]), "bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One case: what it is, and its runs, the oldest first."""

    title: str
    engines: Engines
    minutes: float
    runs: tuple[Run, ...] = ()

    @property
    def standing(self) -> Run | None:
        """The run that the case is judged by; None when there was none."""
        if not self.runs:
            return None
        last = self.runs[-1]
        in_full = [run for run in self.runs if not run.shortened]
        if last.shortened and last.verdict is Verdict.PASSED and in_full:
            return in_full[-1]
        return last

    @property
    def missed_before(self) -> tuple[Run, ...]:
        """Runs that missed, other than the one that stands."""
        return tuple(
            run for run in self.runs if run.verdict is Verdict.MISSED and run is not self.standing
        )

    def after(self, run: Run) -> Line:
        """With one more run; of those before, what is still worth knowing."""
        whole = replace(self, runs=(*self.runs, run))
        misses = whole.missed_before[-_MISSES_KEPT:]
        kept = [one for one in whole.runs if one is whole.standing or one is run or one in misses]
        return replace(self, runs=tuple(kept))


Lines = dict[str, Line]


def read(file: Path = FILE) -> Lines:
    """Every case that was known when it was written, by key; nothing where there is no file."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["cases"]
    return {
        key: Line(
            title=one["title"],
            engines=Engines(one["engines"]),
            minutes=one["minutes"],
            runs=tuple(Run.read(run) for run in one["runs"]),
        )
        for key, one in found.items()
    }


def write(lines: Lines, file: Path = FILE) -> None:
    """All of it; whoever reads meanwhile gets what was there before."""
    cases = {key: asdict(lines[key]) for key in sorted(lines, key=in_order)}
    write_whole(file, json.dumps({"cases": cases}, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file so that there is never half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(file)


def with_declared(lines: Lines, cases: Mapping[str, Case]) -> Lines:
    """With a line for each case that there is; those that there are no more are left out."""
    return {
        key: Line(
            title=case.title,
            engines=case.engines,
            minutes=case.minutes,
            runs=lines[key].runs if key in lines else (),
        )
        for key, case in cases.items()
    }


def merged(lines: Lines, others: Lines) -> Lines:
    """With the runs of others, in the order in which all began."""
    whole = dict(lines)
    for key, other in others.items():
        known = whole.get(key, replace(other, runs=()))
        runs = {run.began_at: run for run in (*known.runs, *other.runs)}
        line = replace(known, runs=())
        for began_at in sorted(runs):
            line = line.after(runs[began_at])
        whole[key] = line
    return whole


def noted(line: Line, text: str) -> Line:
    """With a remark to its last run: the cause of a miss is often found afterwards."""
    *before, last = line.runs
    note = f"{last.note}\n{text}".strip()
    return replace(line, runs=(*before, replace(last, note=note)))


def in_order(key: str) -> tuple[str, int, str]:
    """Sorts `F2` before `F10`, and `F2-real` after `F2`."""
    first, _, rest = key.partition("-")
    letters = first.rstrip("0123456789")
    return letters, int(first[len(letters) :] or 0), rest


class Catch(StrEnum):
    """What tests made of a protection that was taken away."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    """Nothing failed: nothing guards it."""
    BROKE = "broke"
    """The tests do not pass without it either, or could not run at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A protection that was taken away, and what its tests said."""

    what: str
    file: str
    catch: Catch
    by: str
    """The test that failed first; else why there was none."""
    tests: str
    """What was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removals:
    """All of them."""

    rows: tuple[Removal, ...] = ()
    began_at: str = ""
    revision: str = ""
    untried: int = 0
    """Rows of the table of which nothing was found yet."""


def read_removals(file: Path = MUTATIONS) -> Removals:
    """What was found last; nothing where there is no file."""
    if not file.exists():
        return Removals()
    found = json.loads(file.read_text())
    rows = tuple(Removal(**one | {"catch": Catch(one["catch"])}) for one in found["rows"])
    return Removals(**found | {"rows": rows})


def write_removals(found: Removals, file: Path = MUTATIONS) -> None:
    """All of it."""
    write_whole(file, json.dumps(asdict(found), indent=1) + "\n")


@contextmanager
def only_one(folder: Path = FOLDER, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the place of the one who runs cases.

    Raises:
        AnotherRunError: somebody else still had it after `wait_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)  # a folder can be locked, and nothing is left of it
    until_s = time.monotonic() + wait_s
    try:
        while not _locked(held):
            if time.monotonic() >= until_s:
                raise AnotherRunError(
                    f"cases are run already with results in {folder}: wait for its end (--wait)"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(held)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
