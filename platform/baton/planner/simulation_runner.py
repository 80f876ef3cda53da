"""Runs the planner's simulations by the caller's `map`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class ParallelMap(Protocol):
    """Applies a function to all arguments, in order: `map`, or a process pool's."""

    def __call__(
        self, function: Callable[[Argument], Result], arguments: Iterable[Argument], /
    ) -> Iterable[Result]:
        """The results, in the order of the arguments."""
        ...


class Progress(NamedTuple):
    """Progress of a plan."""

    stage: str
    done: int
    total: int


class SimulationRunner:
    """Runs simulations and reports progress."""

    def __init__(
        self, parallel_map: ParallelMap, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self._map = parallel_map
        self._report_progress = on_progress or (lambda _progress: None)

    def run_stage(
        self, stage: str, function: Callable[[Argument], Result], arguments: Sequence[Argument]
    ) -> list[Result]:
        """The results of a stage."""
        results: list[Result] = []
        self._report_progress(Progress(stage, 0, len(arguments)))
        for result in self._map(function, arguments):
            results.append(result)
            self._report_progress(Progress(stage, len(results), len(arguments)))
        return results
