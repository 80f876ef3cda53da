"""What each replica has done for ended requests: what a rollout compares generations by.

A few additions for each request when it ends; nothing for each token. Bounded: of more replicas
than that, those that were heard of longest ago are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from baton.control.autoscaling.rollout import NOTHING, Tally
from baton.domain.commands import RequestRecord
from baton.domain.leg_record import LegEnd
from baton.telemetry.requests.error_budget import verdict

_JUDGED = frozenset({"good", "missed"})
_COUNTED = frozenset({LegEnd.DONE, LegEnd.BROKEN, LegEnd.GIVEN_UP})
"""Ends of legs that say something of their replica: not those moved, cancelled or refused."""


class ReplicaOutcomes:
    """Totals by replica since the start. Satisfies `ports.Recorder`."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._tallies: OrderedDict[str, Tally] = OrderedDict()

    def record(self, record: RequestRecord) -> None:
        """Add what became of a request to every replica that had a leg of it."""
        said = verdict(record)
        judged, good = int(said in _JUDGED), int(said == "good")
        took_part: set[str] = set()
        for leg in record.legs:
            if leg.end not in _COUNTED:
                continue
            broken = int(leg.end is not LegEnd.DONE)
            first = leg.replica_id not in took_part
            took_part.add(leg.replica_id)
            self._add(
                leg.replica_id, Tally(1, broken, judged if first else 0, good if first else 0)
            )

    def tallies(self) -> Mapping[str, Tally]:
        """By replica."""
        return dict(self._tallies)

    def _add(self, replica_id: str, more: Tally) -> None:
        self._tallies[replica_id] = self._tallies.get(replica_id, NOTHING).plus(more)
        self._tallies.move_to_end(replica_id)
        if len(self._tallies) > self._capacity:
            self._tallies.popitem(last=False)
