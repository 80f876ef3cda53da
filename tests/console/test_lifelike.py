"""The scripted fleet speaks as a real one does: every report has the keys of the real report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.control.autoscaling.observer import Observer
from baton.domain.commands import RecordSelection
from baton.domain.fleet import FleetView, ReplicaView, Role
from baton.domain.slo import Slo
from baton.policy.links.estimates import LinkRow, LinkState
from baton.policy.scaling.actions import AutoscalerTick, ScalingDecision
from baton.policy.scaling.desired import ScalingReason
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.reports import class_rows, demand_row, pool_rows, tick_rows
from baton.serving.shared.reports import fleet_report, link_report
from tests.console.demo_feed import DemoFeed
from tests.fakes.facts import replica_facts

POOL = PoolObservation(name="d", role=Role.DECODE)
SEEN = Observation(at_s=0.0, window_s=1.0, pools={"d": POOL})


def feed() -> DemoFeed:
    return DemoFeed(clock=lambda: 1000.0)


async def overview() -> Mapping[str, Any]:
    return await feed().overview()


def keys(row: object) -> set[str]:
    assert isinstance(row, Mapping)
    return set(row)


async def test_pools_are_told_as_the_controller_tells_them() -> None:
    (real,) = pool_rows(SEEN, {"d": DeploymentState(name="d", target=1, running=1)})
    assert keys((await overview())["pools"][0]) == keys(real)


async def test_classes_are_told_as_the_controller_tells_them() -> None:
    (real,) = class_rows({"default": Slo()}, Observer(), 0.0)
    assert keys((await overview())["classes"][0]) == keys(real)


async def test_demand_is_told_as_the_controller_tells_it() -> None:
    assert keys((await overview())["demand"]) == keys(demand_row(SEEN))


async def test_replicas_are_told_as_ingresses_tell_them() -> None:
    view = ReplicaView(facts=replica_facts("a"), load_received_at_s=0.0)
    fleet = FleetView(at_s=0.0, replicas={"a": view})
    (real,) = fleet_report(fleet, caches={"a": {}}, leases={})
    assert keys((await overview())["ingresses"][0]["replicas"][0]) == keys(real)


async def test_pairs_are_told_as_ingresses_tell_them() -> None:
    row = LinkRow("a", "b", LinkState.OK, "", "tcp", 1.0, 0.0, None, None, 0, 0, 0, 0, 0, 1.0, None)
    (real,) = link_report([row])
    assert keys((await feed().links())[0]) == keys(real)


async def test_ticks_are_told_as_the_controller_tells_them() -> None:
    decision = ScalingDecision(
        pool="d",
        current_replicas=1,
        target_replicas=1,
        desired_replicas=1,
        reason=ScalingReason.STEADY,
    )
    (real,) = tick_rows([AutoscalerTick(at_s=0.0, policy="slo", decisions=(decision,))], 0.0)
    (scripted,) = await feed().ticks(1)
    assert keys(scripted) == keys(real)
    pools: Any = scripted["pools"]
    real_pools: Any = real["pools"]
    assert keys(pools[0]) == keys(real_pools[0])


async def test_orders_are_kept() -> None:
    scripted = feed()
    latest = await scripted.requests(10, RecordSelection.LATEST)
    slowest = await scripted.requests(10, RecordSelection.SLOWEST)
    assert len(latest) == len(slowest) == 10
    ages: list[Any] = [row["age_s"] for row in latest]
    slowness: list[Any] = [row["slowness"] for row in slowest]
    assert ages == sorted(ages)
    assert slowness == sorted(slowness, reverse=True)
    assert all(row["missed"] for row in await scripted.requests(10, RecordSelection.MISSED))
