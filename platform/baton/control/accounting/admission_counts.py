"""What became of requests at a coordinator's door: let in, at once or not, or why they were not.

Counted when it is decided, as totals since the start, in rows by class; classes come from the
configuration, outcomes and reasons from enumerations.
"""

from __future__ import annotations

from collections import Counter

from baton.domain.demand import Admission, AdmissionOutcome, WayIn
from baton.domain.errors import Cause
from baton.domain.request import Phase

_OUTCOMES = {
    Phase.SHED: AdmissionOutcome.SHED,
    Phase.EVICTED: AdmissionOutcome.EVICTED,
    Phase.FAILED: AdmissionOutcome.FAILED,
    Phase.CANCELLED: AdmissionOutcome.CANCELLED,
}


class DoorCounts:
    """Counts every request once; see the module."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, AdmissionOutcome, WayIn | Cause]] = Counter()

    def let_in(self, slo_class: str, *, held: bool) -> None:
        """A request was placed for the first time, after it was held here or not."""
        way = WayIn.HELD if held else WayIn.AT_ONCE
        self._counts[slo_class, AdmissionOutcome.ADMITTED, way] += 1

    def kept_out(
        self, slo_class: str, outcome: Phase, cause: Cause, *, own_doing: bool, requests: int = 1
    ) -> None:
        """Requests have ended without ever having been placed."""
        ended = AdmissionOutcome.BARRED if own_doing else _OUTCOMES[outcome]
        self._counts[slo_class, ended, cause] += requests

    def rows(self) -> tuple[Admission, ...]:
        """One for each class, outcome and reason that was seen."""
        return tuple(Admission(*key, requests) for key, requests in self._counts.items())
