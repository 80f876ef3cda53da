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
_MAX_KEPT_MISSES = 3
_POLL_S = 0.5


class AlreadyRunningError(RuntimeError):
    """Another process runs cases on this machine now: both would measure each other."""


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
    def is_shortened(self) -> bool:
        """Whether it ran for less than its case asks for; see `case.minutes_asked`."""
        ran, full = self.figures.get("minutes"), self.figures.get("minutes_in_full")
        return isinstance(ran, int | float) and isinstance(full, int | float) and ran < full

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """As it was written."""
        bounds = tuple(Bound(**item) for item in document["bounds"])
        return cls(**{**document, "verdict": Verdict(document["verdict"]), "bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResults:
    """One case: what it is, and its runs, the oldest first."""

    title: str
    engines: Engines
    minutes: float
    runs: tuple[Run, ...] = ()

    @property
    def current_run(self) -> Run | None:
        """The run that counts for the case; None when there was none."""
        if not self.runs:
            return None
        last = self.runs[-1]
        in_full = [run for run in self.runs if not run.is_shortened]
        if last.is_shortened and last.verdict is Verdict.PASSED and in_full:
            return in_full[-1]
        return last

    @property
    def earlier_misses(self) -> tuple[Run, ...]:
        """Runs that missed, other than the one that stands."""
        return tuple(
            run
            for run in self.runs
            if run.verdict is Verdict.MISSED and run is not self.current_run
        )

    def with_run(self, run: Run) -> CaseResults:
        """With one more run; of those before, what is still worth knowing."""
        extended = replace(self, runs=(*self.runs, run))
        misses = extended.earlier_misses[-_MAX_KEPT_MISSES:]
        kept_runs = [
            other
            for other in extended.runs
            if other is extended.current_run or other is run or other in misses
        ]
        return replace(self, runs=tuple(kept_runs))


ResultsByCase = dict[str, CaseResults]


def read(file: Path = FILE) -> ResultsByCase:
    """Every case that was known when it was written, by key; nothing where there is no file."""
    if not file.exists():
        return {}
    cases = json.loads(file.read_text())["cases"]
    return {
        key: CaseResults(
            title=value["title"],
            engines=Engines(value["engines"]),
            minutes=value["minutes"],
            runs=tuple(Run.read(run) for run in value["runs"]),
        )
        for key, value in cases.items()
    }


def write(lines: ResultsByCase, file: Path = FILE) -> None:
    """All of it; a concurrent reader gets what was there before."""
    cases = {key: asdict(lines[key]) for key in sorted(lines, key=sort_key)}
    write_atomically(file, json.dumps({"cases": cases}, indent=1) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that there is never half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(file)


def for_cases(lines: ResultsByCase, cases: Mapping[str, Case]) -> ResultsByCase:
    """With a line for each case that there is; those that there are no more are left out."""
    return {
        key: CaseResults(
            title=case.title,
            engines=case.engines,
            minutes=case.minutes,
            runs=lines[key].runs if key in lines else (),
        )
        for key, case in cases.items()
    }


def add_note(line: CaseResults, text: str) -> CaseResults:
    """With a remark to its last run: the cause of a miss is often found afterwards."""
    *before, last = line.runs
    note = f"{last.note}\n{text}".strip()
    return replace(line, runs=(*before, replace(last, note=note)))


def sort_key(key: str) -> tuple[str, int, str]:
    """Sorts `F2` before `F10`, and `F2-real` after `F2`."""
    first, _, rest = key.partition("-")
    letters = first.rstrip("0123456789")
    return letters, int(first[len(letters) :] or 0), rest


class MutationOutcome(StrEnum):
    """What tests made of a protection that was taken away."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    """Nothing failed: nothing guards it."""
    BROKE = "broke"
    """The tests do not pass without it either, or could not run at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationResult:
    """A protection that was taken away, and the result of its tests."""

    description: str
    file: str
    outcome: MutationOutcome
    detail: str
    """The test that failed first; else why there was none."""
    tests: str
    """What was run."""
    revision: str = ""
    """Of the code that it was tried with, as in `Run`; empty where that was not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationResults:
    """All of them."""

    rows: tuple[MutationResult, ...] = ()
    began_at: str = ""
    revision: str = ""
    untried: int = 0
    """Rows of the table of which nothing was found yet."""


def read_mutations(file: Path = MUTATIONS) -> MutationResults:
    """What was found last; nothing where there is no file."""
    if not file.exists():
        return MutationResults()
    document = json.loads(file.read_text())
    rows = tuple(
        MutationResult(**item | {"outcome": MutationOutcome(item["outcome"])})
        for item in document["rows"]
    )
    return MutationResults(**document | {"rows": rows})


def write_mutations(mutations: MutationResults, file: Path = MUTATIONS) -> None:
    """All of it."""
    write_atomically(file, json.dumps(asdict(mutations), indent=1) + "\n")


@contextmanager
def exclusive_lock(folder: Path = FOLDER, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the place of the one who runs cases.

    Raises:
        AlreadyRunningError: another process still had it after `wait_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # a folder can be locked, and nothing is left of it
    until_s = time.monotonic() + wait_s
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= until_s:
                raise AlreadyRunningError(
                    f"cases are run already with results in {folder}: wait for its end (--wait)"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
