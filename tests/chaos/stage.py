"""Where cases play: a fleet of simulated engines without Ray, or a whole deployment by `baton`.

`sim_stage` is up in seconds. Its replicas are processes, to be killed and stopped; its doors are
coordinators in this process, with their clients; between them are the real links over TCP, through
a chaos proxy each where a case asks for it, and so are side channels. `ray_stage` is what a user
starts, with everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import RequestRecord
from baton.domain.fleet import ReplicaView, Role
from baton.engine.sim import SimSettings, expected_tokens
from baton.policy.placement.port import Disaggregate
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import HostOptions
from tests.chaos import faults
from tests.chaos.faults import LossyNetwork
from tests.chaos.history import Exchange
from tests.chaos.ingress_process import CoordinatorPlan, Front
from tests.chaos.proxy import ChaosProxy
from tests.chaos.remote import GoneError, Remote
from tests.chaos.replica_process import MODEL, Replica, ReplicaPlan
from tests.e2e.deployments import Deployment, running

SETTINGS = SimSettings(
    prefill_tokens_per_s=40_000.0,
    decode_step_s=0.008,
    step_overhead_s=0.001,
    kv_blocks=4096,
    max_running_requests=128,
    transfer_setup_s=0.002,
)
"""Of the order of one GPU, like the engine's own; a stream has a token every 9 ms."""
_QUIET_S = 15.0
_JOIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPlan:
    """A fleet without Ray."""

    roles: tuple[Role, ...] = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    """One replica for each, named `prefill-0`, `decode-1`, ..."""
    doors: int = 1
    """Coordinators in this process."""
    fronts: int = 0
    """Coordinators in processes of their own, with HTTP before them."""
    settings: SimSettings = SETTINGS
    limits: CoordinatorLimits = field(default_factory=CoordinatorLimits)
    link: LinkOptions = field(default_factory=LinkOptions)
    host: HostOptions = field(default_factory=HostOptions)
    disaggregate: Disaggregate = Disaggregate.ALWAYS
    probing: ProbeOptions = field(default_factory=ProbeOptions)
    proxied: bool = False
    """Whether links and side channels go through chaos proxies."""
    network: LossyNetwork | None = None
    """Where some replicas live; the others are in the machine's own network."""
    inside: tuple[int, ...] = ()
    """Which of `roles` those are."""
    seed: int = 0


class SimStage:
    """Replicas, doors and what is between them."""

    def __init__(self, plan: SimPlan) -> None:
        self.plan = plan
        self.doors = [self._coordinator(f"door-{n}", n).door() for n in range(plan.doors)]
        self.fronts: dict[str, Front] = {}
        """Those that have not been killed."""
        self.replicas: dict[str, Replica] = {}
        """Those that have not been killed or stopped."""
        self.links: dict[tuple[str, str], ChaosProxy] = {}
        """By coordinator and replica, where the plan says `proxied`; `up` is from the former."""
        self.side_channels: dict[str, ChaosProxy] = {}
        """By the replica that listens; `up` is from who pulls."""
        self._made = 0
        self._left: list[Remote] = []

    def _coordinator(self, name: str, number: int) -> CoordinatorPlan:
        plan = self.plan
        return CoordinatorPlan(
            name=name,
            limits=plan.limits,
            link=plan.link,
            disaggregate=plan.disaggregate,
            probing=plan.probing,
            coordinators=plan.doors + plan.fronts,
            seed=plan.seed + number,
        )

    async def start(self) -> None:
        """Start what the plan says."""
        for number in range(self.plan.fronts):
            name = f"front-{number}"
            front = self.fronts[name] = Front(self._coordinator(name, self.plan.doors + number))
            await front.start()
        for role in self.plan.roles:
            await self.grow(role)

    # ---------------------------------------------------------------- replicas

    async def grow(self, role: Role) -> str:
        """Start one more replica and have every door know it; returns its name."""
        plan, name = self.plan, f"{role}-{self._made}"
        settings, network, announced = plan.settings, "", ""
        if plan.network is not None and self._made in plan.inside:
            settings = replace(settings, side_channel_host=plan.network.inner)
            network = plan.network.name
        self._made += 1
        if plan.proxied:
            proxy = self.side_channels[name] = ChaosProxy(seed=plan.seed)
            host, port = await proxy.start()
            announced = f"{host}:{port}"
        replica = self.replicas[name] = Replica(
            ReplicaPlan(
                name=name,
                role=role,
                settings=settings,
                link=plan.link,
                host=plan.host,
                announced=announced,
                network=network,
            )
        )
        await replica.start()
        if plan.proxied:
            self.side_channels[name].forward_to(*_split(replica.side_channel))
        for door in self.doors:
            door.link.connect(name, await self._way(door.name, replica))
            await door.until(lambda d=door: d.view(name) is not None)  # type: ignore[misc]
        for front in self.fronts.values():
            await front.order("connect", (name, await self._way(front.name, replica)))
            async with asyncio.timeout(_JOIN_S):
                while name not in await front.knows():  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.02)
        return name

    async def _way(self, who: str, replica: Replica) -> str:
        """The address at which a coordinator reaches a replica."""
        if not self.plan.proxied:
            return replica.address
        proxy = self.links[who, replica.name] = ChaosProxy(seed=self.plan.seed)
        proxy.forward_to(*_split(replica.address.removeprefix("tcp://")))
        host, port = await proxy.start()
        return f"tcp://{host}:{port}"

    def named(self, role: Role) -> list[str]:
        """The replicas of a role, oldest first."""
        return [name for name, one in self.replicas.items() if one.plan.role is role]

    def busiest(self, role: Role) -> str:
        """Who runs most of the first door's legs, of those that it knows."""
        known = self.doors[0].driver.fleet().replicas
        names = [name for name in self.named(role) if name in known] or self.named(role)[:1]
        return max(names, key=lambda name: known[name].inflight_legs if name in known else 0)

    def kill(self, name: str) -> float:
        """End a replica as a crash does; returns when."""
        replica = self.replicas.pop(name)
        self._left.append(replica)
        at_s = time.monotonic()
        faults.kill(replica.pid)
        return at_s

    def kill_front(self, name: str) -> float:
        """End a coordinator's process as a crash does; returns when."""
        front = self.fronts.pop(name)
        self._left.append(front)
        at_s = time.monotonic()
        faults.kill(front.pid)
        return at_s

    async def forget(self, name: str) -> None:
        """Have every coordinator know that a replica left, as the membership tells it."""
        for door in self.doors:
            door.link.disconnect(name)
        for front in self.fronts.values():
            await front.order("forget", name)

    async def drain(self, name: str, *, deadline_s: float | None = None) -> float:
        """Have a replica drain; returns when every door knew it."""
        await self.replicas[name].order("drain", deadline_s)
        for door in self.doors:
            await door.until(lambda d=door: d.when(name, "draining") is not None)  # type: ignore[misc]
        return time.monotonic()

    async def set_role(self, name: str, role: Role) -> float:
        """Give a replica another role; returns after how many seconds every door knew it."""
        began_s = time.monotonic()
        await self.replicas[name].order("role", str(role))
        for door in self.doors:
            await door.until(lambda d=door: _role(d.view(name)) is role)  # type: ignore[misc]
        return time.monotonic() - began_s

    async def stop(self, name: str) -> None:
        """End a replica in good order, and have every door know that it left."""
        replica = self.replicas.pop(name)
        await replica.end()
        await self.forget(name)

    # ---------------------------------------------------------------- what came of it

    async def quiet(self, *, within_s: float = _QUIET_S) -> dict[str, float]:
        """Wait until nothing is held for anybody; returns what is, which should be all zeros."""
        until_s = time.monotonic() + within_s
        while True:
            held = await self.held()
            if not any(held.values()) or time.monotonic() > until_s:
                break
            await asyncio.sleep(0.1)  # replicas tell nobody
        for door in self.doors:
            door.coordinator.check_integrity()
        return held

    async def held(self) -> dict[str, float]:
        """What doors and replicas hold now, by who and what."""
        held = {f"{door.name}: {what}": n for door in self.doors for what, n in door.held().items()}
        for part in (*self.fronts.values(), *self.replicas.values()):
            try:
                held |= {f"{part.name}: {what}": n for what, n in (await part.held()).items()}
            except GoneError:
                held[f"{part.name}: does not answer"] = 1.0
        return held

    def records(self) -> list[RequestRecord]:
        """What every door wrote down."""
        return [record for door in self.doors for record in door.records]

    def wanted(self, exchange: Exchange) -> Sequence[int]:
        """The tokens that one undisturbed engine gives."""
        return expected_tokens(
            exchange.prompt, exchange.max_tokens, model=MODEL, settings=self.plan.settings
        )

    async def close(self) -> None:
        """End everything."""
        async with AsyncExitStack() as stack:
            for proxy in (*self.links.values(), *self.side_channels.values()):
                stack.push_async_callback(proxy.close)
            for part in (*self.replicas.values(), *self._left, *self.fronts.values()):
                stack.push_async_callback(part.end)
            for door in self.doors:
                stack.push_async_callback(door.close)


@asynccontextmanager
async def sim_stage(plan: SimPlan | None = None) -> AsyncIterator[SimStage]:
    """A fleet of simulated engines without Ray; ended on the way out."""
    stage = SimStage(plan or SimPlan())
    try:
        await stage.start()
        yield stage
    finally:
        await stage.close()


def _role(view: ReplicaView | None) -> Role | None:
    return None if view is None else view.facts.role


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# -------------------------------------------------------------------- with Ray


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStage:
    """A deployment that `baton up` has started."""

    deployment: Deployment

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self.deployment.url

    def pids(self, pool: str) -> dict[str, int]:
        """The processes of a pool's replicas, by replica id."""
        pids = self.deployment.pids()
        return {name: pid for name, pid in pids.items() if name.startswith(f"{pool}-")}

    def ingress(self) -> dict[str, Any]:
        """What the only ingress says of itself."""
        (row,) = self.deployment.status()["ingresses"]
        found: dict[str, Any] = row
        return found

    def whole(self, pools: Mapping[str, int], *, within_s: float) -> None:
        """Wait until pools have so many replicas, as the ingress sees them."""
        self.until(lambda rows: _counts(rows) == pools, within_s=within_s)

    def until(self, holds: Callable[[list[dict[str, Any]]], bool], *, within_s: float) -> None:
        """Wait until the replicas are as wanted, as the ingress sees them."""
        self.deployment.wait_for(lambda s: holds(s["ingresses"][0]["replicas"]), within_s)

    def proven(self, *, within_s: float) -> None:
        """Wait until every pair of replicas is known to work."""
        self.deployment.wait_for(
            lambda answer: (
                bool(answer["links"]) and {"ok"} == {r["state"] for r in answer["links"]}
            ),
            within_s,
            "links",
        )

    def quiet(self, *, within_s: float = 60.0) -> dict[str, float]:
        """Wait until nothing is held for anybody; returns what is, which should be all zeros."""
        until_s = time.monotonic() + within_s
        while True:
            held = _held(self.ingress())
            if not any(held.values()) or time.monotonic() > until_s:
                return held


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["pool"]] = counts.get(row["pool"], 0) + 1
    return counts


def _held(ingress: Mapping[str, Any]) -> dict[str, float]:
    held = {f"requests: {phase}": float(n) for phase, n in ingress["in_flight"].items()}
    for row in ingress["replicas"]:
        for what in ("inflight_legs", "kv_used_fraction"):
            held[f"{row['replica_id']}: {what}"] = float(row[what])
    return held


@contextmanager
def ray_stage(config: str, folder: Path, **settings: object) -> Iterator[RayStage]:
    """A file of `configs/`, started by `baton up` on ports of its own; ended in good order."""
    with running(config, folder, **settings) as deployment:
        yield RayStage(deployment=deployment)
