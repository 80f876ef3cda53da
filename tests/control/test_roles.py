from __future__ import annotations

import pytest

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import CheckSideChannel, Command, Deliver, SubmitLeg
from baton.domain.events import (
    ReplicaDraining,
    ReplicaJoined,
    RequestArrived,
    RoleChanged,
    StepCompleted,
)
from baton.domain.fleet import Role
from baton.domain.handoff import LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.policy.placement.port import Disaggregate
from tests.control.world import request
from tests.fakes.facts import replica_facts
from tests.fakes.placers import placer


def coordinator(probing: ProbeOptions | None = None) -> Coordinator:
    return Coordinator(
        limits=CoordinatorLimits(), placer=placer(Disaggregate.ALWAYS), probing=probing
    )


def with_replicas(made: Coordinator, **roles: Role) -> list[Command]:
    said: list[Command] = []
    for name, role in roles.items():
        facts = replica_facts(name, role, side_channel=f"{name}:1")
        said += made.handle(ReplicaJoined(facts=facts), 0.0)
    return said


def submitted(commands: list[Command]) -> list[tuple[str, LegKind]]:
    return [
        (command.replica_id, command.leg.kind)
        for command in commands
        if isinstance(command, SubmitLeg)
    ]


def test_a_replica_with_a_new_role_gets_the_work_of_that_role() -> None:
    made = coordinator()
    with_replicas(made, a=Role.PREFILL, b=Role.DECODE)
    for name, role in (("a", Role.DECODE), ("b", Role.PREFILL)):
        made.handle(RoleChanged(replica_id=name, role=role), 0.0)
    made.check_integrity()
    said = made.handle(RequestArrived(request=request("r")), 0.0)
    assert submitted(said) == [("b", LegKind.PREFILL)]


def test_running_work_continues_when_a_replicas_role_changes() -> None:
    made = coordinator()
    with_replicas(made, a=Role.MIXED)
    (leg,) = [
        other.leg
        for other in made.handle(RequestArrived(request=request("r")), 0.0)
        if isinstance(other, SubmitLeg)
    ]
    assert made.handle(RoleChanged(replica_id="a", role=Role.PREFILL), 0.1) == []
    made.check_integrity()
    output = LegOutput(leg.leg_id, (7, 8), FinishReason.LENGTH)
    said = made.handle(StepCompleted(replica_id="a", outputs=(output,)), 0.2)
    assert [item.deliveries[0].token_ids for item in said if isinstance(item, Deliver)] == [(7, 8)]
    made.check_integrity()


def test_the_pairs_of_its_new_role_are_probed() -> None:
    made = coordinator(ProbeOptions())
    with_replicas(made, a=Role.DECODE, b=Role.DECODE)
    said = made.handle(RoleChanged(replica_id="a", role=Role.PREFILL), 0.0)
    checks = [channel for channel in said if isinstance(channel, CheckSideChannel)]
    assert [(check.source_id, check.replica_id) for check in checks] == [("a", "b")]
    made.check_integrity()


def test_a_draining_replica_is_not_probed_nor_used_for_its_new_role() -> None:
    made = coordinator(ProbeOptions())
    with_replicas(made, a=Role.DECODE, b=Role.DECODE)
    made.handle(ReplicaDraining(replica_id="a"), 0.0)
    said = made.handle(RoleChanged(replica_id="a", role=Role.PREFILL), 0.0)
    said += made.handle(RequestArrived(request=request("r")), 0.0)
    assert submitted(said) == [("b", LegKind.LOCAL)]
    assert not [channel for channel in said if isinstance(channel, CheckSideChannel)]


def test_a_role_of_an_unknown_replica_changes_nothing() -> None:
    made = coordinator()
    assert made.handle(RoleChanged(replica_id="nobody", role=Role.DECODE), 0.0) == []
    assert not made.fleet(0.0).replicas


@pytest.mark.parametrize("role", list(Role))
def test_the_fleet_shows_the_role(role: Role) -> None:
    made = coordinator()
    with_replicas(made, a=Role.PREFILL)
    made.handle(RoleChanged(replica_id="a", role=role), 0.0)
    assert made.fleet(0.0).replicas["a"].facts.role is role
    assert ("a" in made.fleet(0.0).eligible.prefill) == (role is Role.PREFILL)
