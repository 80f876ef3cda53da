"""The live driver and the simulator make the same of the same arrivals: one brain, two bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits, RecoveryOptions
from baton.domain.commands import (
    AbortLegs,
    CheckSideChannel,
    Command,
    Deliver,
    FailRequest,
    ReleaseLease,
    ReportFailedAgent,
    StoreRequestRecord,
    SubmitLeg,
    SyncCache,
)
from baton.domain.events import Event, RequestsCancelled
from baton.domain.fleet import Role
from baton.domain.retry_reasons import RetryReason
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.resilience.circuit_breakers import BreakerOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions
from baton.simulator.fleet.engines import EngineSettings
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.simulator.fleet.ingress import VirtualIngress
from tests.fakes.virtual_driver import LiveIngress
from tests.simulator.fleets import ENGINE as EXACT
from tests.simulator.scenes import ENGINE as COUNTED
from tests.simulator.scenes import trace

HASTY = CoordinatorLimits(
    max_queued_requests=5,
    queue_timeout_s=0.2,
    resume_timeout_s=0.6,
    first_token_timeout_s=0.25,
    transfer_deadline_s=0.02,
    stall_timeout_s=0.15,
    total_timeout_s=1.5,
    retry_s=0.03,
    recovery=RecoveryOptions(
        heartbeat_timeout_s=0.6,
        circuit_breaker=BreakerOptions(failure_threshold=2, open_duration_s=0.1),
        retry_budget=RetryOptions(ratio=0.3, min_retries=4),
        hedging=HedgeOptions(latency_multiple=1.5, min_delay_s=0.05),
    ),
)
"""So that every deadline passes now and then."""
CALM = replace(HASTY, first_token_timeout_s=3.0, stall_timeout_s=3.0, total_timeout_s=4.0)
"""So that silence is noticed before streams stall."""
BEGIN_S = 0.5
Said = tuple[float, str, object]


class Watched(Coordinator):
    """A coordinator that writes down what it orders."""

    def __init__(self, limits: CoordinatorLimits, disaggregate: Disaggregate, seed: int) -> None:
        super().__init__(
            limits=limits,
            placer=PredictedPlacer(PredictedOptions(disaggregate=disaggregate), seed=seed),
            probing=ProbeOptions(),
            seed=seed,
        )
        self.said: list[Said] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = super().handle(event, now_s)
        self.said += [
            (round(now_s, 9), type(command).__name__, gist(command)) for command in commands
        ]
        return commands


def gist(command: Command) -> object:
    """What a command says, but for times: of a timer they may differ by a rounding."""
    match command:
        case SubmitLeg() | AbortLegs() | SyncCache() | CheckSideChannel() | Deliver():
            return command
        case ReleaseLease():
            return command.lease.kv_handle, command.via_replica_id
        case ReportFailedAgent():
            return command.replica_id
        case FailRequest():
            return command.request_id, type(command.error), command.error.args[0]
        case StoreRequestRecord():
            record = command.record
            return record.request_id, record.outcome, record.routes, record.output_tokens
        case _:
            assert_never(command)


Body = Callable[[Coordinator, VirtualFleet], VirtualIngress | LiveIngress]


def simulated(coordinator: Coordinator, fleet: VirtualFleet) -> VirtualIngress:
    return VirtualIngress(coordinator, fleet.timeline, on_end=lambda _: None)


def told(  # noqa: PLR0913 - all that a story is made of
    body: Body,
    engine: EngineSettings,
    disaggregate: Disaggregate,
    seed: int,
    *,
    kills: list[float],
    freezes: list[float],
    limits: CoordinatorLimits = HASTY,
) -> list[Said]:
    """What a coordinator orders in this body, while replicas die and freeze and clients go."""
    fleet = VirtualFleet(FleetOptions(seed=seed))
    brain = Watched(limits, disaggregate, seed)
    ingress = body(brain, fleet)
    fleet.ingresses.append(ingress)  # type: ignore[arg-type]  # it is like one

    at = fleet.timeline.call_at
    for role in (Role.PREFILL, Role.DECODE):
        for number in range(2):
            join(fleet, engine, role, number)
    fleet.run(until_s=BEGIN_S)
    for turn, at_s in enumerate(sorted(kills)):
        role, number = (Role.DECODE, Role.PREFILL)[turn % 2], turn // 2 % 2
        at(at_s, partial(die, fleet, role, number))
        at(at_s + 0.3, partial(join, fleet, engine, role, number))
    for turn, at_s in enumerate(sorted(freezes)):
        at(at_s, partial(freeze, fleet, (Role.DECODE, Role.PREFILL)[turn % 2], turn // 2 % 2))
    sent = trace(40, rate_per_s=40, seed=seed, groups=3).to_requests(start_s=BEGIN_S)
    for number, request in enumerate(sent):
        at(request.arrived_at_s, partial(ingress.send, request))
        if number % 7 == 3:
            at(request.arrived_at_s + 0.05, partial(give_up, ingress, request.request_id))
    fleet.run(until_s=5.0)
    brain.check_integrity()
    return brain.said


def join(fleet: VirtualFleet, engine: EngineSettings, role: Role, number: int) -> None:
    if f"{role}-{number}" not in fleet.replicas:
        fleet.add_replica(f"{role}-{number}", engine, role=role, pool=str(role))


def die(fleet: VirtualFleet, role: Role, number: int) -> None:
    if f"{role}-{number}" in fleet.replicas:
        fleet.kill(f"{role}-{number}")


def freeze(fleet: VirtualFleet, role: Role, number: int) -> None:
    if f"{role}-{number}" in fleet.replicas:
        fleet.freeze(f"{role}-{number}", 0.9, heartbeat_timeout_s=0.8)


def give_up(ingress: VirtualIngress | LiveIngress, request_id: str) -> None:
    match ingress:
        case LiveIngress():
            ingress.driver.on_abort((request_id,))
        case VirtualIngress():
            ingress.on_event(RequestsCancelled(request_ids=(request_id,)))


@settings(max_examples=12)
@given(
    st.sampled_from([EXACT, COUNTED]),
    st.sampled_from([Disaggregate.AUTO, Disaggregate.ALWAYS]),
    st.integers(0, 99),
    st.lists(st.floats(0.6, 1.8), max_size=4),
    st.tuples(st.lists(st.floats(0.6, 1.8), max_size=3), st.sampled_from([HASTY, CALM])),
)
def test_the_live_driver_and_the_simulator_give_the_same_orders(
    engine: EngineSettings,
    disaggregate: Disaggregate,
    seed: int,
    kills: list[float],
    frozen: tuple[list[float], CoordinatorLimits],
) -> None:
    freezes, limits = frozen
    story = partial(told, kills=kills, freezes=freezes, limits=limits)
    live = story(LiveIngress, engine, disaggregate, seed)
    virtual = story(simulated, engine, disaggregate, seed)
    for key, other in zip(live, virtual, strict=False):
        assert key == other
    assert len(live) == len(virtual)


def test_the_compared_runs_contain_every_command() -> None:
    kills = [0.52, 0.53, 0.54, 0.55]
    said = told(LiveIngress, COUNTED, Disaggregate.ALWAYS, 1, kills=kills, freezes=[])
    kills = [0.65, 0.75, 0.9]
    said += told(LiveIngress, COUNTED, Disaggregate.ALWAYS, 1, kills=kills, freezes=[])
    assert {kind for _, kind, _ in said} >= {
        "SubmitLeg",
        "AbortLegs",
        "ReleaseLease",
        "CheckSideChannel",
        "Deliver",
        "FailRequest",
        "StoreRequestRecord",
    }


def test_such_sequences_have_retries_after_heartbeat_timeouts() -> None:
    brains: list[Coordinator] = []

    def noted(coordinator: Coordinator, fleet: VirtualFleet) -> VirtualIngress:
        brains.append(coordinator)
        return simulated(coordinator, fleet)

    told(noted, COUNTED, Disaggregate.AUTO, 1, kills=[], freezes=[0.8], limits=CALM)
    assert dict(brains[0].retry_totals().retries)[RetryReason.UNRESPONSIVE] > 0
