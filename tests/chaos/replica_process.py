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
from tests.chaos.remote import RemoteProcess, serve_commands

MODEL = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """How a replica is made."""

    name: str
    role: Role
    settings: SimSettings
    link: LinkOptions = field(default_factory=LinkOptions)
    host: HostOptions = field(default_factory=HostOptions)
    announced_address: str = ""
    """What it says its side channel's address is; empty: what it is."""
    network: str = ""
    """The namespace that it lives in; empty: the machine's own."""

    @property
    def address(self) -> str:
        """Where its link is to listen."""
        return f"tcp://{self.settings.side_channel_host}:0"


def serve(plan: ReplicaSpec, commands: Connection) -> None:
    """The process."""
    if plan.network:
        enter_network(plan.network)
    asyncio.run(_serve(plan, commands))


async def _serve(plan: ReplicaSpec, commands: Connection) -> None:
    engine = SimEngine(
        plan.settings, replica_id=plan.name, pool=str(plan.role), role=plan.role, model=MODEL
    )
    side_channels: list[str] = []
    _announce_address(engine, plan.announced_address, side_channels)
    host = ReplicaHost(engine, bind=plan.address, link=plan.link, options=plan.host)
    await host.start()
    try:
        addresses = (host.address, side_channels[0])
        await serve_commands(commands, addresses, _CommandHandler(host, engine).handle)
    finally:
        await host.close()


def _announce_address(
    engine: SimEngine, announced_address: str, listen_addresses: list[str]
) -> None:
    """Have an engine tell another address of its side channel than the one it listens at."""
    channel = engine._side_channel
    start = channel.start

    async def start_and_announce(host: str, port: int) -> str:
        listen_addresses.append(await start(host, port))
        return announced_address or listen_addresses[0]

    channel.start = start_and_announce  # type: ignore[method-assign]


class _CommandHandler:
    """Carries out the orders of a replica."""

    def __init__(self, host: ReplicaHost, engine: SimEngine) -> None:
        self._host = host
        self._engine = engine

    def handle(self, command: str, value: object) -> object:
        """An order by name; what comes back is what its owner gets."""
        match command:
            case "role":
                self._host.set_role(Role(cast("str", value)))
            case "drain":
                self._host.drain(cast("float | None", value))
            case "slow transfers":
                self._engine.transfer_slowdown(cast("float", value))
            case "held":
                return self._held_resources()
            case "sessions":
                return self._host.coordinators, len(self._host._inbox.orphans)
            case _:
                raise ValueError(f"no order is called {command!r}")
        return None

    def _held_resources(self) -> dict[str, float]:
        """What it holds for anybody; all zeros when nothing is under way."""
        load = self._engine.load()
        return {
            "live legs": self._host.live_legs,
            "leases": self._host.leases,
            "blocks in use": load.kv_used_fraction,
            "requests": load.running_requests + load.queued_requests + load.pulling_requests,
        }


class ReplicaProcess(RemoteProcess):
    """A replica's process, as its owner sees it."""

    def __init__(self, plan: ReplicaSpec) -> None:
        super().__init__(plan.name, serve, plan)
        self.plan = plan
        self.address = ""
        """Of its link."""
        self.side_channel = ""
        """Where it really listens."""

    async def start(self) -> None:
        """Run; returns when coordinators can connect."""
        addresses = cast("tuple[str, str]", await self.start_process())
        self.address, self.side_channel = addresses

    async def sessions(self) -> tuple[int, int]:
        """Coordinators that it serves, and legs of lost ones that it has not aborted yet."""
        return cast("tuple[int, int]", await self.send_command("sessions"))
