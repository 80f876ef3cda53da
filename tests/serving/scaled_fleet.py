"""A deployment that the scaling loop can look at and act on, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence

from baton.control.autoscaling.autoscaler import Override
from baton.control.autoscaling.observer import Observer
from baton.domain.demand import CoordinatorReport, DemandTotals, PoolReport
from baton.domain.fleet import Role
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.loop import ScalingLoop
from baton.serving.scaling.plan import ScalingPlan
from baton.serving.scaling.ports import Reports, TickInputs

STATIC_POLICY = "baton.policy.scaling.fixed:Static"
"""A policy of the user's own: as many replicas as the bounds start with."""
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


def plan(
    *,
    policy: str = STATIC_POLICY,
    dry_run: bool = False,
    configured: bool = True,
    **initial_replicas: int,
) -> ScalingPlan:
    bounds = {
        name: PoolBounds(min=0, initial=initial_replicas.get(name, 2), max=8) for name in ROLES
    }
    options = AutoscalerOptions(interval_s=2.0, dry_run=dry_run, bounds=bounds)
    return ScalingPlan(rule=policy, options=options, roles=ROLES, is_configured=configured)


class Clock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


class FakeFleet:
    """Pools that have at once what they are told to have, and one ingress that sees them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.targets = dict.fromkeys(ROLES, 2)
        self.roles: dict[str, Role] = {}
        """Of replicas that play another role than their pool's."""
        self.calls: list[tuple[str, object]] = []
        self.unresponsive: tuple[str, ...] = ()
        self.serve_error: Exception | None = None
        self.action_error: Exception | None = None
        self.requests = 0

    async def states(self) -> Mapping[str, DeploymentState]:
        if self.serve_error is not None:
            raise self.serve_error
        return {
            name: DeploymentState(name=name, target=target, running=target)
            for name, target in self.targets.items()
        }

    async def reports(self) -> Reports:
        if self.unresponsive:
            return (), self.unresponsive
        return (self.report(),), ()

    def report(self) -> CoordinatorReport:
        self.requests += 1
        pools = []
        for name, target in self.targets.items():
            roles = {
                f"{name}-{n}": self.roles.get(f"{name}-{n}", ROLES[name]) for n in range(target)
            }
            counts = {str(role): list(roles.values()).count(role) for role in Role}
            pools.append(PoolReport(name, roles=tuple(roles.items()), **counts))
        return CoordinatorReport(
            coordinator_id="ingress-1",
            at_s=self._clock.at_s,
            demand=DemandTotals(requests=self.requests),
            pools=tuple(pools),
        )

    async def scale(self, pool: str, replicas: int) -> None:
        self.calls.append((pool, replicas))
        if self.action_error is not None:
            raise self.action_error
        self.targets[pool] = replicas

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        self.calls.append((pool, (tuple(replica_ids), role)))
        if self.action_error is not None:
            raise self.action_error
        self.roles |= dict.fromkeys(replica_ids, role)


class FakeStore:
    """A store that several loops may share."""

    def __init__(self) -> None:
        self.owner: object = None
        self.overrides: dict[str, Override] = {}
        self.saves = 0
        self.error: Exception | None = None
        self.save_error: Exception | None = None
        self.queried = asyncio.Semaphore(0)
        """Released once a turn."""

    def for_owner(self, owner: object) -> OwnedStore:
        return OwnedStore(self, owner)


class OwnedStore:
    """The store as one loop has it."""

    def __init__(self, store: FakeStore, owner: object) -> None:
        self._store, self._owner = store, owner

    async def claim(self) -> bool:
        previous_owner, self._store.owner = self._store.owner, self._owner
        return previous_owner not in {None, self._owner}

    async def is_owner(self) -> bool:
        self._store.queried.release()
        if self._store.error is not None:
            raise self._store.error
        return self._store.owner == self._owner

    async def load(self) -> dict[str, Override]:
        return dict(self._store.overrides)

    async def save(self, overrides: Mapping[str, Override]) -> None:
        if self._store.save_error is not None:
            raise self._store.save_error
        self._store.saves += 1
        self._store.overrides = dict(overrides)


class InputsReader:
    def __init__(self) -> None:
        self.inputs: list[TickInputs] = []
        self.received = asyncio.Semaphore(0)
        self.is_failing = False

    async def on_tick(self, inputs: TickInputs) -> None:
        self.inputs.append(inputs)
        self.received.release()
        if self.is_failing:
            raise RuntimeError("no")


class ScalingWorld:
    """A loop and everything around it; `turn` lets two seconds pass and takes a turn."""

    def __init__(self, rules: ScalingPlan | None = None) -> None:
        self.clock = Clock()
        self.fleet = FakeFleet(self.clock)
        self.store = FakeStore()
        self.reader = InputsReader()
        self.loop = self.restart_loop(rules or plan())

    def restart_loop(self, rules: ScalingPlan) -> ScalingLoop:
        """As a controller that starts again has it."""
        self.store.owner = owner = object()
        self.loop = ScalingLoop(
            rules,
            fleet=self.fleet,
            observer=Observer(),
            store=self.store.for_owner(owner),
            clock=self.clock,
            listeners=(self.reader,),
        )
        return self.loop

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.at_s += 2.0
            await self.loop.run_tick()

    async def settle(self) -> None:
        """Rates need two reports."""
        await self.tick(2)
        self.fleet.calls.clear()

    async def override(self, replicas: int, *, for_s: float | None) -> None:
        """An operator sets the size of pool decode."""
        await self._carried_out(self.loop.override("decode", replicas, for_s=for_s))

    async def release(self) -> None:
        """An operator leaves pool decode to the autoscaler."""
        await self._carried_out(self.loop.release("decode"))

    async def _carried_out(self, order: Coroutine[object, None, None]) -> None:
        """Carry out an order by a turn of a running loop."""
        waiting = asyncio.create_task(order)
        self.loop.start()
        try:
            await waiting
        finally:
            await self.loop.stop()
