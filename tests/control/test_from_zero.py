"""Requests to a fleet that has no replica, and gets one because they wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.control.queue.pending import ColdStartWait
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.demand import ColdStart
from baton.domain.errors import Evicted, NoCapacity, QueueFull, Rejected
from baton.domain.events import ColdStartReported
from baton.domain.fleet import Role
from baton.domain.request import FinishReason, Phase
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from tests.control.world import World, request
from tests.fakes.timings import LinearTiming

LIMITS = CoordinatorLimits(
    max_requests=64,
    max_queued_requests=8,
    queue_timeout_s=2.0,
    cold_start_timeout_s=120.0,
    first_token_timeout_s=10.0,
)
TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.001, per_stream_s=0.0001)
CHAT = ServiceRules(slos=SloClasses(classes={"default": Slo(name="default", ttft_s=1.0)}))
MEASURED = ColdStart(duration_s=30.0, is_measured=True)


def world(limits: CoordinatorLimits = LIMITS, rules: ServiceRules | None = CHAT) -> World:
    """A fleet at zero."""
    placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.AUTO))
    return World(limits, policy=placer, rules=rules, priors={"mixed": TIMING})


def ask(at: World, name: str, tokens: int = 400) -> None:
    item = request(name, prompt_tokens=tokens, max_tokens=2, arrived_at_s=at.now_s)
    own = 10_000 * (len(at.requests) + 1)  # prompts that have nothing in common
    at.arrive(evolve(item, prompt_token_ids=tuple(range(own, own + tokens))))


def told(at: World, start: ColdStart) -> None:
    at.handle(ColdStartReported(cold_start=start))


def refusal(at: World, name: str) -> Rejected:
    error = at.errors[name]
    assert isinstance(error, Rejected)
    return error


def run(at: World, name: str) -> None:
    """Have its leg run to its end."""
    for _ in range(2):
        (leg_id,) = (leg_id for leg_id, (_, leg) in at.legs.items() if leg.request_id == name)
        at.step(leg_id)
    at.advance(0.01)


def wait(at: World, seconds: float) -> None:
    for _ in range(round(seconds)):
        at.advance(1.0)


@pytest.mark.parametrize("rules", [None, CHAT])
def test_the_request_that_wakes_a_fleet_waits_for_the_cold_start_and_is_served(
    rules: ServiceRules | None,
) -> None:
    at = world(rules=rules)
    told(at, MEASURED)
    ask(at, "r0")
    wait(at, 30.0)
    at.join("m0", Role.MIXED)
    run(at, "r0")
    assert at.records["r0"].outcome is Phase.FINISHED


def test_a_start_that_was_never_measured_is_waited_for_too() -> None:
    at = world()
    ask(at, "r0")
    wait(at, 100.0)
    assert at.coordinator.phases() == {"r0": Phase.QUEUED}


def test_a_request_that_waited_for_a_replica_is_served_before_newer_ones() -> None:
    at = world()
    for name in ("r0", "r1", "r2"):
        ask(at, name)
    wait(at, 20.0)
    at.join("m0", Role.MIXED)
    ask(at, "late")
    served = []
    while at.legs:
        name = next(leg.request_id for _, leg in at.legs.values())
        served.append(name)
        run(at, name)
    assert served[:3] == ["r0", "r1", "r2"]
    assert not {"r0", "r1", "r2"} & at.errors.keys()


def test_a_wait_for_a_fleet_that_lost_its_last_replica_is_not_evaluated() -> None:
    at = world(limits=replace(LIMITS, cold_start_timeout_s=None, queue_timeout_s=60.0))
    ask(at, "r0")
    wait(at, 20.0)
    at.join("m0", Role.MIXED)
    run(at, "r0")
    assert at.records["r0"].outcome is Phase.FINISHED


def test_without_a_wake_up_a_fleet_rejects_within_the_queue_timeout() -> None:
    at = world(limits=replace(LIMITS, cold_start_timeout_s=None))
    ask(at, "r0")
    wait(at, 3.0)
    assert isinstance(at.errors["r0"], NoCapacity)
    assert not at.coordinator.can_serve()


def test_a_start_that_takes_longer_than_is_waited_ends_with_when_it_is_expected() -> None:
    at = world()
    told(at, MEASURED)
    ask(at, "r0")
    wait(at, 119.0)
    assert "r0" not in at.errors
    told(at, MEASURED._replace(duration_s=200.0, remaining_s=80.0))
    wait(at, 2.0)
    assert isinstance(refusal(at, "r0"), NoCapacity)
    assert refusal(at, "r0").retry_after_s >= 79.0 - 1.0


def test_a_start_that_is_known_to_take_longer_than_one_waits_is_said_so_soon() -> None:
    at = world()
    told(at, ColdStart(duration_s=600.0, is_measured=True))
    ask(at, "r0")
    wait(at, 3.0)
    assert refusal(at, "r0").retry_after_s >= 590.0
    assert at.coordinator.can_serve(), "a request that comes has a replica started all the same"


def test_a_pool_held_at_zero_by_an_operator_is_not_waited_for() -> None:
    at = world()
    ask(at, "r0")
    wait(at, 5.0)
    told(at, ColdStart(can_start=False))
    at.advance(0.1)
    assert isinstance(at.errors["r0"], NoCapacity)
    assert not at.coordinator.can_serve()


def test_where_the_queue_is_full_clients_come_back_when_there_is_a_replica() -> None:
    at = world()
    told(at, MEASURED)
    for number in range(LIMITS.max_queued_requests):
        ask(at, f"r{number}")
    wait(at, 10.0)
    told(at, MEASURED._replace(remaining_s=25.0))
    ask(at, "more")
    assert isinstance(at.errors["more"], QueueFull)
    assert refusal(at, "more").retry_after_s >= 25.0
    before = at.coordinator.rejection(now_s=at.now_s + 5.0)
    assert before is not None
    assert 20.0 <= before.retry_after_s < 25.0


def test_an_overdue_start_is_not_said_to_be_there_at_once() -> None:
    wait_for = ColdStartWait(120.0)
    wait_for.on_cold_start(ColdStart(duration_s=30.0, is_measured=True, remaining_s=5.0), 0.0)
    assert wait_for.remaining_s(1.0) == 4.0
    assert wait_for.remaining_s(60.0) == 3.0


def test_a_start_counts_from_the_first_request_until_it_is_reported() -> None:
    wait_for = ColdStartWait(120.0)
    wait_for.on_cold_start(MEASURED, 0.0)
    assert wait_for.remaining_s(50.0) == 30.0
    wait_for.on_request_queued(50.0)
    wait_for.on_request_queued(60.0)
    assert wait_for.remaining_s(60.0) == 20.0
    wait_for.on_replica_ready()
    assert wait_for.remaining_s(99.0) == 30.0


def test_a_measured_start_is_not_replaced_by_a_guess() -> None:
    wait_for = ColdStartWait(120.0)
    wait_for.on_cold_start(ColdStart(duration_s=100.0, is_measured=True), 0.0)
    wait_for.on_cold_start(ColdStart(duration_s=60.0), 1.0)
    assert wait_for.remaining_s(1.0) == 100.0


def test_a_client_that_leaves_while_it_waits_takes_its_place_along() -> None:
    at = world()
    ask(at, "r0")
    wait(at, 10.0)
    at.cancel("r0")
    at.coordinator.check_integrity()
    assert at.records["r0"].outcome is Phase.CANCELLED
    at.join("m0", Role.MIXED)
    assert not at.legs


def test_a_request_that_comes_while_the_last_replica_drains_waits_for_the_next() -> None:
    at = world()
    at.join("m0", Role.MIXED)
    at.drain("m0")
    assert at.coordinator.can_serve()
    ask(at, "r0")
    wait(at, 20.0)
    at.disconnect("m0")
    wait(at, 20.0)
    at.join("m1", Role.MIXED)
    run(at, "r0")
    assert at.records["r0"].outcome is Phase.FINISHED


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_with_one_pool_at_zero_the_other_serves_at_once(role: Role) -> None:
    at = world()
    at.join("one", role)
    ask(at, "r0")
    assert [leg.request_id for _, leg in at.legs.values()] == ["r0"]


def test_a_fleet_at_rest_is_healthy_and_one_that_starts_for_the_first_time_is_not() -> None:
    at = world()
    assert not at.coordinator.can_serve()
    told(at, MEASURED._replace(remaining_s=20.0))
    assert not at.coordinator.can_serve()
    at.join("m0", Role.MIXED)
    assert at.coordinator.can_serve()
    at.disconnect("m0")
    assert at.coordinator.can_serve()
    told(at, MEASURED._replace(remaining_s=20.0))
    assert at.coordinator.can_serve(), "while it wakes, too"


def test_an_ingress_that_starts_at_zero_replicas_becomes_healthy() -> None:
    at = world()
    told(at, MEASURED)
    assert at.coordinator.can_serve()


def test_a_request_that_waits_for_a_replica_has_a_deadline() -> None:
    at = world(limits=replace(LIMITS, total_timeout_s=50.0))
    ask(at, "r0")
    wait(at, 51.0)
    assert at.records["r0"].outcome is Phase.FAILED


def test_a_burst_that_cannot_meet_the_slo_after_a_start_is_rejected() -> None:
    at = world()
    for number in range(LIMITS.max_queued_requests):
        ask(at, f"r{number}", tokens=4000)  # four seconds each, ten of which are waited
    wait(at, 20.0)
    at.join("m0", Role.MIXED)
    wait(at, 12.0)
    refused = [error for error in at.errors.values() if isinstance(error, Evicted)]
    assert refused


def test_a_stream_that_ended_well_leaves_nothing_behind() -> None:
    at = world()
    ask(at, "r0")
    wait(at, 5.0)
    at.join("m0", Role.MIXED)
    (leg_id,) = at.legs
    at.step(leg_id, finish=FinishReason.STOP)
    assert at.records["r0"].outcome is Phase.FINISHED
    at.coordinator.check_integrity()
