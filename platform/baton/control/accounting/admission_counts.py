"""What became of requests at a coordinator's door: let in, at once or not, or why they were not.

Counted when it is decided, as totals since the start, in rows by class; classes come from the
configuration, outcomes and reasons from enumerations.
"""

from __future__ import annotations

from collections import Counter

from baton.domain.demand import AdmissionCount, AdmissionOutcome, AdmissionPath
from baton.domain.errors import Cause
from baton.domain.request import Phase

_OUTCOMES = {
    Phase.SHED: AdmissionOutcome.SHED,
    Phase.EVICTED: AdmissionOutcome.EVICTED,
    Phase.FAILED: AdmissionOutcome.FAILED,
    Phase.CANCELLED: AdmissionOutcome.CANCELLED,
}


class AdmissionCounts:
    """Counts every request once; see the module."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, AdmissionOutcome, AdmissionPath | Cause]] = Counter()

    def admitted(self, slo_class: str, *, was_queued: bool) -> None:
        """A request was placed for the first time, after it was held here or not."""
        reason = AdmissionPath.QUEUED if was_queued else AdmissionPath.IMMEDIATE
        self._counts[slo_class, AdmissionOutcome.ADMITTED, reason] += 1

    def rejected(
        self,
        slo_class: str,
        outcome: Phase,
        cause: Cause,
        *,
        is_client_error: bool,
        requests: int = 1,
    ) -> None:
        """Requests have ended without ever having been placed."""
        admission_outcome = AdmissionOutcome.CLIENT_ERROR if is_client_error else _OUTCOMES[outcome]
        self._counts[slo_class, admission_outcome, cause] += requests

    def rows(self) -> tuple[AdmissionCount, ...]:
        """One for each class, outcome and reason that was seen."""
        return tuple(AdmissionCount(*key, requests) for key, requests in self._counts.items())
