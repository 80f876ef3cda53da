"""Results of ended requests by replica, by which a rollout compares generations.

Bounded: beyond `capacity` replicas, the least recently updated one is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from baton.control.autoscaling.rollout import NO_COUNTS, RolloutCounts
from baton.domain.commands import RequestRecord
from baton.domain.leg_record import LegOutcome
from baton.telemetry.requests.error_budget import verdict

_SLO_VERDICTS = frozenset({"good", "missed"})
_COUNTED_OUTCOMES = frozenset({LegOutcome.COMPLETED, LegOutcome.FAILED, LegOutcome.TIMED_OUT})
"""Leg outcomes for which the replica is responsible."""


class ReplicaOutcomes:
    """Totals by replica since the start. Satisfies `ports.Recorder`."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._tallies: OrderedDict[str, RolloutCounts] = OrderedDict()

    def record(self, record: RequestRecord) -> None:
        """Count a request for every replica that had a leg of it."""
        slo_verdict = verdict(record)
        evaluated, good = int(slo_verdict in _SLO_VERDICTS), int(slo_verdict == "good")
        counted_replicas: set[str] = set()
        for leg in record.legs:
            if leg.outcome not in _COUNTED_OUTCOMES:
                continue
            failed = int(leg.outcome is not LegOutcome.COMPLETED)
            is_first_leg = leg.replica_id not in counted_replicas
            counted_replicas.add(leg.replica_id)
            self._add(
                leg.replica_id,
                RolloutCounts(
                    legs=1,
                    failed_legs=failed,
                    evaluated=evaluated if is_first_leg else 0,
                    good=good if is_first_leg else 0,
                ),
            )

    def tallies(self) -> Mapping[str, RolloutCounts]:
        """Totals by replica."""
        return dict(self._tallies)

    def _add(self, replica_id: str, tally: RolloutCounts) -> None:
        self._tallies[replica_id] = self._tallies.get(replica_id, NO_COUNTS).add(tally)
        self._tallies.move_to_end(replica_id)
        if len(self._tallies) > self._capacity:
            self._tallies.popitem(last=False)
