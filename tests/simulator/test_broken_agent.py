"""A decode replica whose transfer agent breaks is replaced, and nobody's request fails."""

from __future__ import annotations

from functools import partial

import pytest

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.fleet.fleet import VirtualFleet
from tests.simulator.fleets import ENGINE, fleet, requests

BOUND_S = 180.0
"""From the fault until its replica is told: its pairs' probes, and those that prove its sources."""


def probing(seed: int) -> Coordinator:
    options = PredictedOptions(disaggregate=Disaggregate.ALWAYS)
    return Coordinator(
        limits=CoordinatorLimits(),
        placer=PredictedPlacer(options, seed=seed),
        probing=ProbeOptions(),
        seed=seed,
    )


class Replacing:
    """Does what Ray Serve does with a replica that says that it is broken."""

    def __init__(self, virtual: VirtualFleet) -> None:
        self._virtual = virtual
        self.replaced: list[tuple[float, str]] = []

    def __call__(self, replica_id: str) -> None:
        self.replaced.append((self._virtual.timeline.now_s, replica_id))
        self._virtual.retire(replica_id)
        self._virtual.add_replica(f"{replica_id}-next", ENGINE, role=Role.DECODE, pool="decode")


@pytest.mark.parametrize("busy", [True, False])
def test_one_broken_agent_among_well_ones_is_replaced_and_no_request_fails(*, busy: bool) -> None:
    virtual = fleet(
        replicas={Role.PREFILL: 2, Role.DECODE: 4}, coordinators=[probing(0), probing(1)]
    )
    virtual.on_replica_broken = replacing = Replacing(virtual)
    virtual.run(until_s=20.0)
    broken_at_s = virtual.timeline.now_s
    virtual.replicas["decode-2"].break_agent()
    sent = requests(400 if busy else 10)
    spacing_s = 400.0 / len(sent)
    for number, request in enumerate(sent):
        virtual.timeline.call_later(number * spacing_s, partial(virtual.send, request, number % 2))
    virtual.run(until_s=broken_at_s + 500.0)
    assert [replica_id for _, replica_id in replacing.replaced] == ["decode-2"]
    assert replacing.replaced[0][0] - broken_at_s < BOUND_S
    assert len(virtual.records) == len(sent)
    assert {record.outcome for record in virtual.records} == {Phase.FINISHED}
    assert "decode-2" not in virtual.replicas
    virtual.check_idle()


def test_where_every_agent_breaks_none_is_replaced() -> None:
    virtual = fleet(replicas={Role.PREFILL: 2, Role.DECODE: 4}, coordinators=[probing(0)])
    virtual.on_replica_broken = replacing = Replacing(virtual)
    virtual.run(until_s=20.0)
    for number in range(4):
        virtual.replicas[f"decode-{number}"].break_agent()
    virtual.run(until_s=600.0)
    assert not replacing.replaced
