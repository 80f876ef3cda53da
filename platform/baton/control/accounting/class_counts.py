"""Requests that have ended, counted by class: tenants, models and pools together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from baton.domain.demand import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCounts:
    """Requests of one class that have ended."""

    ended: int = 0
    evaluated: int = 0
    good: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    itl_met: int = 0
    refused: int = 0
    """Shed and evicted, of the evaluated."""
    failed: int = 0
    client_errors: int = 0

    @property
    def attainment(self) -> float | None:
        """The share that met every objective; None when none was evaluated."""
        return self.share(self.good)

    def share(self, met: int) -> float | None:
        """The share of `met` requests in those that were evaluated; None when none was."""
        return min(1.0, met / self.evaluated) if self.evaluated > 0 else None

    def __add__(self, other: ClassCounts) -> ClassCounts:
        """Both together."""
        return ClassCounts(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})

    def __sub__(self, other: ClassCounts) -> ClassCounts:
        """The difference since `other`."""
        return ClassCounts(**{name: getattr(self, name) - getattr(other, name) for name in _COUNTS})


_COUNTS = tuple(field.name for field in fields(ClassCounts))
_ZERO = ClassCounts()


def by_class(tallies: Iterable[Tally]) -> dict[str, ClassCounts]:
    """Tallies of all tenants, models and pools, by class."""
    counts_by_class: dict[str, ClassCounts] = {}
    for row in tallies:
        counts = ClassCounts(
            ended=row.evaluated + row.excluded + row.client_errors,
            evaluated=row.evaluated,
            good=row.good,
            ttft_met=row.ttft_met,
            tpot_met=row.tpot_met,
            itl_met=row.itl_met,
            refused=row.shed + row.evicted,
            failed=row.failed,
            client_errors=row.client_errors,
        )
        counts_by_class[row.slo_class] = counts_by_class.get(row.slo_class, _ZERO) + counts
    return counts_by_class


def sum_classes(classes: Mapping[str, ClassCounts]) -> ClassCounts:
    """All classes together."""
    total = ClassCounts()
    for counts in classes.values():
        total += counts
    return total
