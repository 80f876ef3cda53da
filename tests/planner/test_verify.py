"""Whole fleets at one rate: how much of it is simulated, and that too much is seen as such."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.domain.fleet import Role
from baton.planner.problem import SearchEffort, SloClass
from baton.planner.rates.arrivals import TrafficSampler
from baton.planner.rates.closed_form import MeanRequest, steady_rate
from baton.planner.rates.measure import InstanceTask, measure_instance, run_shortened
from baton.planner.rates.measure import run_instance as run_alone
from baton.planner.rates.shortlist import shortlist_shapes
from baton.planner.sensitivity import run_at_guess
from baton.planner.shapes.fleets import FleetKind, PlannedFleet, PlannedPool
from baton.planner.shapes.space import Duty, EngineShape, ShapeCatalogue
from baton.planner.verify import FleetTask, measure_fleet, run_fleet, run_whole
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.planner.shapes import instance
from tests.planner.shapes import question as asked
from tests.planner.test_rates import PAUSED

HELD = Objectives(ttft_s=1.0, tpot_s=0.05)
EFFORT = SearchEffort(
    min_requests=20, confirmation_requests=60, precision=0.2, max_simulated_replicas=2
)
STEADY = TrafficSampler(
    Trace(name="steady", requests=tuple(TraceRequest(0.05 * at, 1000, 20) for at in range(400)))
)


def task(replicas: int) -> FleetTask:
    """Each replica takes at least 50 ms for a prompt: 20 a second are more than it carries."""
    return FleetTask(
        fleet=PlannedFleet(
            kind=FleetKind.COLOCATED,
            pools=(PlannedPool(role=Role.MIXED, engine_shape=instance(2048), replicas=replicas),),
        ),
        traffic=STEADY,
        classes=(SloClass(objectives=HELD),),
        placement_objectives=HELD,
        effort=EFFORT,
        guess_per_s=10.0 * replicas,
        residence_s=1.0,
    )


@pytest.mark.parametrize("replicas", [1, 2, 4, 16])
def test_each_replica_of_a_large_fleet_has_as_many_requests_as_one_of_a_small(
    replicas: int,
) -> None:
    trial = run_fleet(task(replicas), 20.0 * replicas)
    assert trial.requests == pytest.approx(2 / 3 * 3 * 20 * replicas, rel=0.2)


@pytest.mark.parametrize("replicas", [1, 8])
def test_no_rate_is_found_that_replicas_have_no_time_for(replicas: int) -> None:
    found = measure_fleet(task(replicas))
    assert 0.4 * 20 * replicas < found.rate_per_s < 20 * replicas
    assert found.lowest_failed_trial is not None


LONG_ANSWERS = TrafficSampler(
    Trace(name="long", requests=tuple(TraceRequest(0.05 * at, 100, 500) for at in range(400)))
)
"""Two ranks of 128 places with steps of 23 ms end 22 of these a second; a run of 60 fits in."""


def group() -> EngineShape:
    """Of two ranks, with the places and the timing of a plain engine."""
    plain = instance(1024)
    rank = replace(plain.settings, kv_blocks=10_000, max_running_requests=128)
    return replace(plain, dp=2, ep=True, settings=rank.for_ranks(2))


def plain() -> EngineShape:
    """With the places of both ranks, in one engine."""
    engine = instance(1024)
    settings = replace(engine.settings, kv_blocks=20_000, max_running_requests=256)
    return replace(engine, settings=settings)


@pytest.mark.parametrize("shape", [group(), plain()], ids=["a group", "a plain engine"])
def test_no_rate_holds_at_which_more_streams_come_than_a_batch_has_places(
    shape: EngineShape,
) -> None:
    one, two = (
        PlannedFleet(
            kind=FleetKind.COLOCATED,
            pools=(PlannedPool(role=Role.MIXED, engine_shape=shape, replicas=replicas),),
        )
        for replicas in (1, 2)
    )
    crowded = replace(task(1), traffic=LONG_ANSWERS, residence_s=12.0, fleet=one)

    assert run_fleet(crowded, 20.0).holds
    assert run_fleet(crowded, 30.0).wait_grows
    assert run_fleet(replace(crowded, fleet=two), 30.0).holds


def test_no_rate_holds_at_which_the_replicas_of_a_hybrid_have_no_places_for_its_streams() -> None:
    pools = tuple(
        PlannedPool(role=role, engine_shape=plain(), replicas=1)
        for role in (Role.PREFILL, Role.DECODE)
    )
    hybrid = PlannedFleet(kind=FleetKind.HYBRID, pools=pools)
    crowded = replace(task(1), traffic=LONG_ANSWERS, residence_s=12.0, fleet=hybrid)

    assert run_fleet(crowded, 20.0).holds
    assert not run_fleet(crowded, 30.0).holds
    # The places are for 34 a second, which a run that does not fill them does not show.
    brief = replace(crowded, residence_s=0.5)
    assert run_fleet(brief, 30.0).holds
    assert run_fleet(brief, 40.0).margin > 0
    assert not run_fleet(brief, 40.0).holds


def bursty(bursts: int = 20) -> Trace:
    """60 requests at 4 a second, then 40 at 16 a second, and so on."""
    draw = random.Random(1)
    at_s, requests = 0.0, []
    for rate_per_s, count in [(4.0, 60), (16.0, 40)] * bursts:
        for _ in range(count):
            at_s += draw.expovariate(rate_per_s)
            requests.append(TraceRequest(at_s, 1000, 20))
    return Trace(name="bursts", requests=tuple(requests))


def test_a_rate_does_not_depend_on_the_burst_in_which_a_run_begins() -> None:
    effort = replace(EFFORT, precision=0.05, confirmation_requests=600)
    rates = [
        measure_fleet(
            replace(task(1), traffic=TrafficSampler(bursty(), seed), effort=effort)
        ).rate_per_s
        for seed in range(5)
    ]

    assert max(rates) < 1.5 * min(rates)


def test_a_burst_at_the_beginning_of_runs_does_not_lower_the_rate() -> None:
    """These runs meet the burst in their first quarter, which alone fails from 8 a second on."""
    draw = random.Random(1)
    at_s, requests = 0.0, []
    for rate_per_s, count in [(16.0, 150), (4.0, 1650)]:
        for _ in range(count):
            at_s += draw.expovariate(rate_per_s)
            requests.append(TraceRequest(at_s, 1000, 20))
    traffic = TrafficSampler(Trace(name="one burst", requests=tuple(requests)), seed=15)
    begun = replace(
        task(1), traffic=traffic, effort=replace(EFFORT, precision=0.05, confirmation_requests=1600)
    )

    found = measure_fleet(begun)

    assert run_fleet(begun, 10.0, 1600).margin < -0.15
    assert run_whole(begun, 10.0).holds
    assert run_at_guess(replace(begun, guess_per_s=10.0)).holds
    assert found.rate_per_s > 10.0
    assert found.lowest_failed_trial is not None
    assert not found.lowest_failed_trial.is_shortened


def test_a_group_alone_is_not_simulated_with_more_streams_than_it_has_places() -> None:
    question = asked(LONG_ANSWERS.trace, ttft_s=1.0, tpot_s=0.05)
    mix = MeanRequest(prompt_tokens=100, output_tokens=500)
    catalogue = ShapeCatalogue(shapes_by_duty={Duty.DECODE: (group(),)})
    (decode,) = shortlist_shapes(question, catalogue, mix)
    steady = steady_rate(decode.engine_shape.settings, mix, 0.05)
    found = measure_instance(replace(decode, effort=EFFORT))

    assert 0.6 * steady < found.rate_per_s <= steady
    assert max(trial.rate_per_s for trial in found.trials) <= steady


def test_a_run_that_no_request_arrives_in_does_not_hold() -> None:
    paused = TrafficSampler(PAUSED)
    alone = InstanceTask(
        engine_shape=instance(2048),
        duty=Duty.BOTH,
        traffic=paused,
        classes=(SloClass(objectives=HELD),),
        effort=EFFORT,
        guess_per_s=0.1,
        residence_s=1.0,
    )

    for empty in (run_alone(alone, 0.1), run_fleet(replace(task(1), traffic=paused), 0.1)):
        assert not empty.requests
        assert not empty.holds


def test_a_short_run_without_requests_does_not_stand_for_the_long_one() -> None:
    seen = run_fleet(task(1), 2.0)
    empty = replace(seen, requests=0, margin=-1.0)

    assert run_shortened(lambda count: seen if count == 2_000 else empty, 2_000) is seen


def test_a_fleet_that_is_given_far_too_much_fails() -> None:
    assert not run_fleet(replace(task(8), residence_s=0.1), 2000.0).holds
