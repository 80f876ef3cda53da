"""Scale-downs in virtual time: however long the streams, nothing is lost and the replica goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.scenario import SimulationResult, Stop, StopReplica, simulate
from tests.simulator.fleets import JOINED_S, ReceivedTokens, fleet, requests
from tests.simulator.scenes import pool, scenario, simultaneous_trace, trace

SOON = CoordinatorLimits(drain_timeout_s=1.0, max_drain_migrations=4)


def stopped_at_s(run: SimulationResult, name: str, replicas: int) -> float:
    """When the replica that was stopped was gone, from what its pool cost."""
    return run.replica_seconds[name] - (replicas - 1) * run.ended_at_s


@pytest.mark.parametrize("disaggregate", [Disaggregate.NEVER, Disaggregate.ALWAYS])
def test_long_streams_leave_a_replica_that_is_stopped_and_all_of_them_end(
    disaggregate: Disaggregate,
) -> None:
    pools = (pool(Role.PREFILL, 1), pool(Role.DECODE, 2))
    made = scenario(
        *pools,
        disaggregate=disaggregate,
        limits=SOON,
        scheduled_events=(StopReplica(at_s=1.0, replica_id="decode-1"),),
    )
    run = simulate(made, simultaneous_trace(12, prompt_tokens=200, output_tokens=1000))
    assert [outcome.output_tokens for outcome in run.outcomes] == [1000] * 12
    assert all(outcome.ok for outcome in run.outcomes)
    assert 0 < run.resumes <= 12, "nobody is moved twice"
    assert stopped_at_s(run, "decode", 2) < 3.5 < run.ended_at_s - 1.0


def test_with_more_patience_than_streams_need_nobody_is_moved() -> None:
    patient = replace(SOON, drain_timeout_s=60.0)
    stop = StopReplica(at_s=1.0, replica_id="mixed-1")
    made = scenario(pool(Role.MIXED, 2), limits=patient, scheduled_events=(stop,))
    run = simulate(made, simultaneous_trace(12, prompt_tokens=200, output_tokens=1000))
    assert (run.resumes, sum(outcome.ok for outcome in run.outcomes)) == (0, 12)
    assert stopped_at_s(run, "mixed", 2) > 5.0


def test_scale_downs_one_after_the_other_under_load_lose_nothing() -> None:
    stops = tuple(Stop(at_s=1.0 + 1.5 * number, pool="mixed") for number in range(4))
    made = scenario(pool(Role.MIXED, 6), limits=SOON, scheduled_events=stops, coordinators=2)
    run = simulate(made, trace(250, rate_per_s=30.0))
    assert sum(outcome.ok for outcome in run.outcomes) == 250


def test_streams_that_were_moved_have_the_tokens_that_they_would_have_had() -> None:
    def told(*stopped: str) -> tuple[dict[str, tuple[int, ...]], int]:
        tokens, resumes = ReceivedTokens(), Counter[str]()
        placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.NEVER))
        brain = Coordinator(limits=replace(SOON, drain_timeout_s=0.2), placer=placer)
        made = fleet(replicas={Role.MIXED: 2}, coordinators=[brain], tokens=tokens)
        made.add_end_listener(lambda record: resumes.update({record.request_id: record.resumes}))
        for request in requests(6, max_tokens=200):
            made.send(request)
        made.run(until_s=JOINED_S + 0.5)
        for replica_id in stopped:
            made.retire(replica_id)
        made.run(until_s=JOINED_S + 60.0)
        assert set(stopped).isdisjoint(brain.fleet(0.0).replicas)
        return dict(tokens.by_request), resumes.total()

    whole, _ = told()
    moved, resumes = told("mixed-0")
    assert resumes > 0
    assert moved == whole
    assert {len(tokens) for tokens in moved.values()} == {200}
