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
from baton.serving.scaling.ports import Looks, Reports

AS_CONFIGURED = "baton.policy.scaling.fixed:Static"
"""A policy of the user's own: as many replicas as the bounds start with."""
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


def plan(
    *, rule: str = AS_CONFIGURED, dry_run: bool = False, configured: bool = True, **start: int
) -> ScalingPlan:
    bounds = {name: PoolBounds(min=0, start=start.get(name, 2), max=8) for name in ROLES}
    options = AutoscalerOptions(interval_s=2.0, dry_run=dry_run, bounds=bounds)
    return ScalingPlan(rule=rule, options=options, roles=ROLES, configured=configured)


class Clock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


class Fleet:
    """Pools that have at once what they are told to have, and one ingress that sees them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.targets = dict.fromkeys(ROLES, 2)
        self.roles: dict[str, Role] = {}
        """Of replicas that play another role than their pool's."""
        self.calls: list[tuple[str, object]] = []
        self.silent: tuple[str, ...] = ()
        self.serve_fails: Exception | None = None
        self.acting_fails: Exception | None = None
        self.requests = 0

    async def states(self) -> Mapping[str, DeploymentState]:
        if self.serve_fails is not None:
            raise self.serve_fails
        return {
            name: DeploymentState(name=name, target=target, running=target)
            for name, target in self.targets.items()
        }

    async def reports(self) -> Reports:
        if self.silent:
            return (), self.silent
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
        if self.acting_fails is not None:
            raise self.acting_fails
        self.targets[pool] = replicas

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        self.calls.append((pool, (tuple(replica_ids), role)))
        if self.acting_fails is not None:
            raise self.acting_fails
        self.roles |= dict.fromkeys(replica_ids, role)


class Memory:
    """A store that several loops may share."""

    def __init__(self) -> None:
        self.owner: object = None
        self.overrides: dict[str, Override] = {}
        self.saves = 0
        self.fails: Exception | None = None
        self.save_fails: Exception | None = None
        self.asked = asyncio.Semaphore(0)
        """Released once a turn."""

    def of(self, owner: object) -> MemoryOf:
        return MemoryOf(self, owner)


class MemoryOf:
    """The store as one loop has it."""

    def __init__(self, memory: Memory, owner: object) -> None:
        self._memory, self._owner = memory, owner

    async def claim(self) -> bool:
        before, self._memory.owner = self._memory.owner, self._owner
        return before not in {None, self._owner}

    async def is_ours(self) -> bool:
        self._memory.asked.release()
        if self._memory.fails is not None:
            raise self._memory.fails
        return self._memory.owner == self._owner

    async def load(self) -> dict[str, Override]:
        return dict(self._memory.overrides)

    async def save(self, overrides: Mapping[str, Override]) -> None:
        if self._memory.save_fails is not None:
            raise self._memory.save_fails
        self._memory.saves += 1
        self._memory.overrides = dict(overrides)


class Reader:
    def __init__(self) -> None:
        self.seen: list[Looks] = []
        self.heard = asyncio.Semaphore(0)
        self.fails = False

    async def take(self, looks: Looks) -> None:
        self.seen.append(looks)
        self.heard.release()
        if self.fails:
            raise RuntimeError("no")


class World:
    """A loop and everything around it; `turn` lets two seconds pass and takes a turn."""

    def __init__(self, rules: ScalingPlan | None = None) -> None:
        self.clock = Clock()
        self.fleet = Fleet(self.clock)
        self.memory = Memory()
        self.reader = Reader()
        self.loop = self.another_loop(rules or plan())

    def another_loop(self, rules: ScalingPlan) -> ScalingLoop:
        """As a controller that starts again has it."""
        self.memory.owner = owner = object()
        self.loop = ScalingLoop(
            rules,
            fleet=self.fleet,
            observer=Observer(),
            memory=self.memory.of(owner),
            clock=self.clock,
            readers=(self.reader,),
        )
        return self.loop

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.at_s += 2.0
            await self.loop.turn()

    async def settle(self) -> None:
        """Rates need two reports."""
        await self.turn(2)
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
