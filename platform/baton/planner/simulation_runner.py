"""How a planner has its simulations run: by whoever called it, in this process or in others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class RunAll(Protocol):
    """Applies a function to all arguments, in order: `map`, or a pool of processes' own."""

    def __call__(self, function: Callable[[A], B], arguments: Iterable[A], /) -> Iterable[B]:
        """The results, in the order of the arguments."""
        ...


class Progress(NamedTuple):
    """How far a plan is."""

    stage: str
    done: int
    of: int


class Work:
    """Runs simulations and says how far they are."""

    def __init__(self, run_all: RunAll, on_progress: Callable[[Progress], None] | None) -> None:
        self._run_all = run_all
        self._tell = on_progress or (lambda _progress: None)

    def all(self, stage: str, function: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
        """The results of a stage."""
        results: list[B] = []
        self._tell(Progress(stage, 0, len(arguments)))
        for result in self._run_all(function, arguments):
            results.append(result)
            self._tell(Progress(stage, len(results), len(arguments)))
        return results
