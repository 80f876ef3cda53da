"""Where cases play: a fleet of simulated engines without Ray, or a whole deployment by `baton`.

`sim_stage` is up in seconds. Its replicas are processes, to be killed and stopped; its ingresses
are coordinators in this process, with their clients; between them are real links over TCP, through
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
from tests.chaos.ingress_process import CoordinatorSpec, IngressProcess
from tests.chaos.proxy import ChaosProxy
from tests.chaos.remote import GoneError, RemoteProcess
from tests.chaos.replica_process import MODEL, ReplicaProcess, ReplicaSpec
from tests.e2e.deployments import Deployment, running_deployment

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
class StageSpec:
    """A fleet without Ray."""

    roles: tuple[Role, ...] = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    """One replica for each, named `prefill-0`, `decode-1`, ..."""
    ingresses: int = 1
    """Coordinators in this process."""
    ingress_processes: int = 0
    """Coordinators in processes of their own, with HTTP before them."""
    settings: SimSettings = SETTINGS
    limits: CoordinatorLimits = field(default_factory=CoordinatorLimits)
    link: LinkOptions = field(default_factory=LinkOptions)
    host: HostOptions = field(default_factory=HostOptions)
    disaggregate: Disaggregate = Disaggregate.ALWAYS
    probing: ProbeOptions = field(default_factory=ProbeOptions)
    has_proxies: bool = False
    """Whether links and side channels go through chaos proxies."""
    network: LossyNetwork | None = None
    """Where some replicas live; the others are in the machine's own network."""
    networked_roles: tuple[int, ...] = ()
    """Which of `roles` those are."""
    seed: int = 0


class SimStage:
    """Replicas, ingresses and the links between them."""

    def __init__(self, plan: StageSpec) -> None:
        self.plan = plan
        self.ingresses = [
            self._coordinator(f"ingress-{n}", n).make_ingress() for n in range(plan.ingresses)
        ]
        self.ingress_processes: dict[str, IngressProcess] = {}
        """Those that have not been killed."""
        self.replicas: dict[str, ReplicaProcess] = {}
        """Those that have not been killed or stopped."""
        self.links: dict[tuple[str, str], ChaosProxy] = {}
        """By coordinator and replica, where the plan says `has_proxies`.

        `up` is from the former.
        """
        self.side_channels: dict[str, ChaosProxy] = {}
        """By the replica that listens; `up` is from who pulls."""
        self._replicas_started = 0
        self._ended_parts: list[RemoteProcess] = []

    def _coordinator(self, name: str, number: int) -> CoordinatorSpec:
        plan = self.plan
        return CoordinatorSpec(
            name=name,
            limits=plan.limits,
            link=plan.link,
            disaggregate=plan.disaggregate,
            probing=plan.probing,
            coordinators=plan.ingresses + plan.ingress_processes,
            seed=plan.seed + number,
        )

    async def start(self) -> None:
        """Start what the plan says."""
        for number in range(self.plan.ingress_processes):
            name = f"front-{number}"
            front = self.ingress_processes[name] = IngressProcess(
                self._coordinator(name, self.plan.ingresses + number)
            )
            await front.start()
        for role in self.plan.roles:
            await self.add_replica(role)

    # ---------------------------------------------------------------- replicas

    async def add_replica(self, role: Role) -> str:
        """Start one more replica and have every ingress know it; returns its name."""
        plan, name = self.plan, f"{role}-{self._replicas_started}"
        settings, network, announced_address = plan.settings, "", ""
        if plan.network is not None and self._replicas_started in plan.networked_roles:
            settings = replace(settings, side_channel_host=plan.network.inner_address)
            network = plan.network.name
        self._replicas_started += 1
        if plan.has_proxies:
            proxy = self.side_channels[name] = ChaosProxy(seed=plan.seed)
            host, port = await proxy.start()
            announced_address = f"{host}:{port}"
        replica = self.replicas[name] = ReplicaProcess(
            ReplicaSpec(
                name=name,
                role=role,
                settings=settings,
                link=plan.link,
                host=plan.host,
                announced_address=announced_address,
                network=network,
            )
        )
        await replica.start()
        if plan.has_proxies:
            self.side_channels[name].forward_to(*_split(replica.side_channel))
        for ingress in self.ingresses:
            ingress.link.connect(name, await self._address_for(ingress.name, replica))
            await ingress.wait_until(lambda d=ingress: d.view(name) is not None)  # type: ignore[misc]
        for front in self.ingress_processes.values():
            await front.send_command(
                "connect", (name, await self._address_for(front.name, replica))
            )
            async with asyncio.timeout(_JOIN_S):
                while name not in await front.known_replicas():  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.02)
        return name

    async def _address_for(self, coordinator: str, replica: ReplicaProcess) -> str:
        """The address at which a coordinator reaches a replica."""
        if not self.plan.has_proxies:
            return replica.address
        proxy = self.links[coordinator, replica.name] = ChaosProxy(seed=self.plan.seed)
        proxy.forward_to(*_split(replica.address.removeprefix("tcp://")))
        host, port = await proxy.start()
        return f"tcp://{host}:{port}"

    def replicas_of_role(self, role: Role) -> list[str]:
        """The replicas of a role, oldest first."""
        return [name for name, process in self.replicas.items() if process.plan.role is role]

    def busiest(self, role: Role) -> str:
        """The replica with most of the first ingress' legs."""
        known = self.ingresses[0].driver.fleet().replicas
        names = [
            name for name in self.replicas_of_role(role) if name in known
        ] or self.replicas_of_role(role)[:1]
        return max(names, key=lambda name: known[name].inflight_legs if name in known else 0)

    def kill(self, name: str) -> float:
        """End a replica as a crash does; returns when."""
        replica = self.replicas.pop(name)
        self._ended_parts.append(replica)
        at_s = time.monotonic()
        faults.kill(replica.pid)
        return at_s

    def kill_ingress(self, name: str) -> float:
        """End a coordinator's process as a crash does; returns when."""
        front = self.ingress_processes.pop(name)
        self._ended_parts.append(front)
        at_s = time.monotonic()
        faults.kill(front.pid)
        return at_s

    async def disconnect(self, name: str) -> None:
        """Have every coordinator know that a replica left, as the membership tells it."""
        for ingress in self.ingresses:
            ingress.link.disconnect(name)
        for front in self.ingress_processes.values():
            await front.send_command("forget", name)

    async def drain(self, name: str, *, deadline_s: float | None = None) -> float:
        """Have a replica drain; returns when every ingress knew it."""
        await self.replicas[name].send_command("drain", deadline_s)
        for ingress in self.ingresses:
            await ingress.wait_until(lambda d=ingress: d.change_at_s(name, "draining") is not None)  # type: ignore[misc]
        return time.monotonic()

    async def set_role(self, name: str, role: Role) -> float:
        """Give a replica another role; returns after how many seconds every ingress knew it."""
        began_s = time.monotonic()
        await self.replicas[name].send_command("role", str(role))
        for ingress in self.ingresses:
            await ingress.wait_until(lambda d=ingress: _role(d.view(name)) is role)  # type: ignore[misc]
        return time.monotonic() - began_s

    async def stop(self, name: str) -> None:
        """End a replica in good order, and have every ingress know that it left."""
        replica = self.replicas.pop(name)
        await replica.end()
        await self.disconnect(name)

    # ---------------------------------------------------------------- what came of it

    async def wait_idle(self, *, timeout_s: float = _QUIET_S) -> dict[str, float]:
        """Wait until nothing is held for anybody; returns what is, which should be all zeros."""
        until_s = time.monotonic() + timeout_s
        while True:
            resources = await self.held_resources()
            if not any(resources.values()) or time.monotonic() > until_s:
                break
            await asyncio.sleep(0.1)  # replicas have no event
        for ingress in self.ingresses:
            ingress.coordinator.check_integrity()
        return resources

    async def held_resources(self) -> dict[str, float]:
        """What ingresses and replicas hold now, by owner and kind."""
        resources = {
            f"{ingress.name}: {what}": n
            for ingress in self.ingresses
            for what, n in ingress.held_resources().items()
        }
        for part in (*self.ingress_processes.values(), *self.replicas.values()):
            try:
                resources |= {
                    f"{part.name}: {what}": n for what, n in (await part.held_resources()).items()
                }
            except GoneError:
                resources[f"{part.name}: does not answer"] = 1.0
        return resources

    def records(self) -> list[RequestRecord]:
        """The records of every ingress."""
        return [record for ingress in self.ingresses for record in ingress.records]

    def expected_tokens(self, exchange: Exchange) -> Sequence[int]:
        """The tokens that one undisturbed engine gives."""
        return expected_tokens(
            exchange.prompt, exchange.max_tokens, model=MODEL, settings=self.plan.settings
        )

    async def close(self) -> None:
        """End everything."""
        async with AsyncExitStack() as stack:
            for proxy in (*self.links.values(), *self.side_channels.values()):
                stack.push_async_callback(proxy.close)
            for part in (
                *self.replicas.values(),
                *self._ended_parts,
                *self.ingress_processes.values(),
            ):
                stack.push_async_callback(part.end)
            for ingress in self.ingresses:
                stack.push_async_callback(ingress.close)


@asynccontextmanager
async def sim_stage(plan: StageSpec | None = None) -> AsyncIterator[SimStage]:
    """A fleet of simulated engines without Ray; ended on the way out."""
    stage = SimStage(plan or StageSpec())
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
        row_dict: dict[str, Any] = row
        return row_dict

    def wait_complete(self, pools: Mapping[str, int], *, within_s: float) -> None:
        """Wait until pools have this many replicas, as the ingress sees them."""
        self.wait_until(lambda rows: _counts(rows) == pools, within_s=within_s)

    def wait_until(
        self, predicate: Callable[[list[dict[str, Any]]], bool], *, within_s: float
    ) -> None:
        """Wait until the replicas are as wanted, as the ingress sees them."""
        self.deployment.wait_for(lambda s: predicate(s["ingresses"][0]["replicas"]), within_s)

    def wait_links_ok(self, *, within_s: float) -> None:
        """Wait until every pair of replicas is known to work."""
        self.deployment.wait_for(
            lambda answer: (
                bool(answer["links"]) and {"ok"} == {r["state"] for r in answer["links"]}
            ),
            within_s,
            "links",
        )

    def wait_idle(self, *, within_s: float = 60.0) -> dict[str, float]:
        """Wait until nothing is held for anybody; returns what is, which should be all zeros."""
        until_s = time.monotonic() + within_s
        while True:
            resources = _held_resources(self.ingress())
            if not any(resources.values()) or time.monotonic() > until_s:
                return resources


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["pool"]] = counts.get(row["pool"], 0) + 1
    return counts


def _held_resources(ingress: Mapping[str, Any]) -> dict[str, float]:
    held = {f"requests: {phase}": float(n) for phase, n in ingress["in_flight"].items()}
    for row in ingress["replicas"]:
        for what in ("inflight_legs", "kv_used_fraction"):
            held[f"{row['replica_id']}: {what}"] = float(row[what])
    return held


@contextmanager
def ray_stage(config: str, folder: Path, **settings: object) -> Iterator[RayStage]:
    """A file of `configs/`, started by `baton up` on ports of its own; ended in good order."""
    with running_deployment(config, folder, **settings) as deployment:
        yield RayStage(deployment=deployment)
