"""A replica with a simulated engine in a process of its own.

What runs there is what runs live, but for Ray: the replica host, the fleet link, the side channel.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

from baton.domain.fleet import Role
from baton.engine.sim import SimEngine, SimSettings
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import HostOptions, ReplicaHost
from tests.chaos.faults import enter_network
from tests.chaos.remote import Remote, obey

MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """How a replica is made."""

    name: str
    role: Role
    settings: SimSettings
    link: LinkOptions = field(default_factory=LinkOptions)
    host: HostOptions = field(default_factory=HostOptions)
    announced: str = ""
    """What it says its side channel's address is; empty: what it is."""
    network: str = ""
    """The namespace that it lives in; empty: the machine's own."""

    @property
    def address(self) -> str:
        """Where its link is to listen."""
        return f"tcp://{self.settings.side_channel_host}:0"


def serve(plan: ReplicaPlan, orders: Connection) -> None:
    """The process."""
    if plan.network:
        enter_network(plan.network)
    asyncio.run(_serve(plan, orders))


async def _serve(plan: ReplicaPlan, orders: Connection) -> None:
    engine = SimEngine(
        plan.settings, replica_id=plan.name, pool=str(plan.role), role=plan.role, model=MODEL
    )
    side_channels: list[str] = []
    _announce(engine, plan.announced, side_channels)
    host = ReplicaHost(engine, bind=plan.address, link=plan.link, options=plan.host)
    await host.start()
    try:
        told = (host.address, side_channels[0])
        await obey(orders, told, _Body(host, engine).carry_out)
    finally:
        await host.close()


def _announce(engine: SimEngine, announced: str, listens_at: list[str]) -> None:
    """Have an engine tell another address of its side channel than the one it listens at."""
    channel = engine._side_channel
    start = channel.start

    async def start_and_announce(host: str, port: int) -> str:
        listens_at.append(await start(host, port))
        return announced or listens_at[0]

    channel.start = start_and_announce  # type: ignore[method-assign]


class _Body:
    """Carries out what a replica is told."""

    def __init__(self, host: ReplicaHost, engine: SimEngine) -> None:
        self._host = host
        self._engine = engine

    def carry_out(self, order: str, value: object) -> object:
        """An order by name; what comes back is what its owner gets."""
        match order:
            case "role":
                self._host.set_role(Role(cast("str", value)))
            case "drain":
                self._host.drain(cast("float | None", value))
            case "slow transfers":
                self._engine.transfer_slowdown(cast("float", value))
            case "held":
                return self._held()
            case "sessions":
                return self._host.coordinators, len(self._host._desk.orphans)
            case _:
                raise ValueError(f"no order is called {order!r}")
        return None

    def _held(self) -> dict[str, float]:
        """What it holds for anybody; all zeros when nothing is under way."""
        load = self._engine.load()
        return {
            "live legs": self._host.live_legs,
            "leases": self._host.leases,
            "blocks in use": load.kv_used_fraction,
            "requests": load.running_requests + load.queued_requests + load.pulling_requests,
        }


class Replica(Remote):
    """A replica's process, as its owner sees it."""

    def __init__(self, plan: ReplicaPlan) -> None:
        super().__init__(plan.name, serve, plan)
        self.plan = plan
        self.address = ""
        """Of its link."""
        self.side_channel = ""
        """Where it really listens."""

    async def start(self) -> None:
        """Run; returns when coordinators can connect."""
        told = cast("tuple[str, str]", await self.begin())
        self.address, self.side_channel = told

    async def sessions(self) -> tuple[int, int]:
        """Coordinators that it serves, and legs of lost ones that it has not aborted yet."""
        return cast("tuple[int, int]", await self.order("sessions"))
