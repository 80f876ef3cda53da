"""What each replica has done for requests that have ended."""

from __future__ import annotations

from baton.control.autoscaling.rollout import RolloutCounts
from baton.domain.handoff import LegKind
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.slo import SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.outcomes import ReplicaOutcomes
from tests.telemetry.test_error_budget import RECORD, leg

BAD = SloResult(was_served=True, ttft_met=False, tpot_met=True, itl_met=True)


def of(replica_id: str, end: LegOutcome = LegOutcome.COMPLETED) -> LegRecord:
    return leg(LegKind.LOCAL, 0.0, 1.0, replica_id=replica_id, outcome=end)


def test_legs_count_where_they_ran_and_requests_for_all_their_replicas() -> None:
    outcomes = ReplicaOutcomes()
    outcomes.record(evolve(RECORD, legs=(of("p"), of("d"))))
    outcomes.record(evolve(RECORD, legs=(of("d"),), slo_result=BAD))
    assert outcomes.tallies() == {"p": RolloutCounts(1, 0, 1, 1), "d": RolloutCounts(2, 0, 2, 1)}


def test_failed_and_timed_out_legs_count_for_their_replica_and_migrated_ones_do_not() -> None:
    outcomes = ReplicaOutcomes()
    ends = (
        LegOutcome.FAILED,
        LegOutcome.TIMED_OUT,
        LegOutcome.MIGRATED,
        LegOutcome.CANCELLED,
        LegOutcome.COMPLETED,
    )
    outcomes.record(evolve(RECORD, legs=tuple(of("d", end) for end in ends)))
    outcomes.record(evolve(RECORD, legs=(of("m", LegOutcome.MIGRATED),)))
    assert outcomes.tallies() == {"d": RolloutCounts(3, 2, 1, 1)}


def test_the_oldest_entries_are_forgotten() -> None:
    outcomes = ReplicaOutcomes(capacity=2)
    for replica_id in ("a", "b", "a", "c"):
        outcomes.record(evolve(RECORD, legs=(of(replica_id),)))
    assert outcomes.tallies().keys() == {"a", "c"}
