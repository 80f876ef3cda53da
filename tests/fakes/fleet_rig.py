"""A whole fleet in one process: engines behind the real link, a driver in front.

`running_fleet` is of simulated engines; `Fleet.host` takes any.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.events import Event
from baton.domain.fleet import Role
from baton.domain.names.addresses import format_endpoint
from baton.domain.request import LocalOnlyReason, Request
from baton.engine.sim import SimEngine, SimSettings
from baton.policy.placement.port import Disaggregate
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.ports import Engine
from baton.runtime.process.clock import MonotonicClock
from baton.runtime.replica_host import HostOptions, ReplicaHost
from tests.fakes.placers import placer
from tests.fakes.scripted_engine import Watch

FAST_LINK = LinkOptions(
    heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0, reconnect_s=0.02, reconnect_max_s=0.2
)
ENGINE = SimSettings(
    decode_step_s=0.002,
    step_overhead_s=0.0002,
    prefill_tokens_per_s=200_000,
    kv_blocks=1024,
    transfer_setup_s=0.001,
)


class Clients:
    """The frontend and the recorder of a fleet: what clients saw, and how requests ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, BatonError] = {}
        self.records: dict[str, RequestRecord] = {}
        self._watch = Watch()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.tokens.setdefault(delivery.request_id, []).extend(delivery.token_ids)
        self._watch.notify()

    def fail(self, request_id: str, error: BatonError) -> None:
        self.errors[request_id] = error
        self._watch.notify()

    def record(self, record: RequestRecord) -> None:
        assert record.request_id not in self.records, f"{record.request_id} ended twice"
        self.records[record.request_id] = record
        self._watch.notify()

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 20.0) -> None:
        await self._watch.wait_until(predicate, timeout_s)

    async def wait_ended(self, count: int, timeout_s: float = 20.0) -> None:
        await self.wait_until(lambda: len(self.records) >= count, timeout_s)


class Fleet:
    """Replicas by name, each with its engine and host; and one coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        name: str = "test",
        link: LinkOptions = FAST_LINK,
        clients: Clients | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        """`address` is the address at which replicas listen."""
        self._address = address
        self.clients = clients or Clients()
        self.hosts: dict[str, ReplicaHost] = {}
        self.engines: dict[str, SimEngine] = {}
        """The simulated ones."""
        self.events: list[Event] = []
        """All that the link has told the coordinator."""
        self._link_options = link
        self.link = LinkClient(name, self._on_event, options=link)
        self.coordinator = coordinator
        self.driver = Driver(
            self.coordinator,
            link=self.link,
            frontend=self.clients,
            recorder=self.clients,
            clock=MonotonicClock(),
        )
        self._joined = Watch()

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self.driver.on_event(event)
        self._joined.notify()

    async def add(
        self,
        name: str,
        role: Role,
        settings: SimSettings = ENGINE,
    ) -> None:
        """Start a simulated replica and wait until the coordinator knows it."""
        engine = SimEngine(settings, replica_id=name, pool=str(role), role=role, model="tiny")
        self.engines[name] = engine
        options = HostOptions(lease_s=settings.lease_s)
        await self.host(name, engine, options)

    async def host(self, name: str, engine: Engine, options: HostOptions | None = None) -> None:
        """Start a replica with this engine and wait until the coordinator knows it."""
        host = ReplicaHost(
            engine,
            bind=format_endpoint("tcp", self._address, 0),
            options=options,
            link=self._link_options,
        )
        await host.start()
        self.hosts[name] = host
        await self.join(name, host)

    async def join(self, name: str, host: ReplicaHost) -> None:
        """Have the coordinator know a replica that runs already; whoever started it closes it."""
        self.link.connect(name, host.address)
        await self._joined.wait_until(lambda: name in self.driver.fleet().replicas, 10.0)

    async def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for something that a link event brings about."""
        await self._joined.wait_until(predicate, timeout_s)

    def send_request(
        self,
        request_id: str,
        *,
        prompt_tokens: int = 64,
        max_tokens: int = 16,
        local_only: LocalOnlyReason | None = None,
    ) -> Request:
        """Send a request; its prompt is its own."""
        offset = sum(request_id.encode()) % 50
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(3 + (offset + i) % 90 for i in range(prompt_tokens)),
            max_tokens=max_tokens,
            arrived_at_s=0.0,
            local_only=local_only,
        )
        self.driver.on_request(request)
        return request

    def used_fractions(self) -> dict[str, float]:
        """The share of each engine's blocks that is in use right now."""
        return {name: engine.load().kv_used_fraction for name, engine in self.engines.items()}

    async def wait_freed(self, timeout_s: float = 1.0) -> None:
        """Wait until no engine holds a block; a second is what the failure table allows."""
        async with asyncio.timeout(timeout_s):
            while any(self.used_fractions().values()):  # noqa: ASYNC110 - engines tell nobody
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.driver.close()
        await self.link.close()
        await asyncio.gather(*(host.close() for host in self.hosts.values()))


@asynccontextmanager
async def running_fleet(
    *,
    prefill: int = 1,
    decode: int = 1,
    limits: CoordinatorLimits | None = None,
    disaggregate: Disaggregate = Disaggregate.ALWAYS,
    settings: SimSettings = ENGINE,
) -> AsyncIterator[Fleet]:
    """A fleet of `prefill` + `decode` replicas, ready to serve; closed on the way out.

    Links are at the address of the side channels.
    """
    coordinator = Coordinator(limits=limits or CoordinatorLimits(), placer=placer(disaggregate))
    fleet = Fleet(coordinator, address=settings.side_channel_host)
    try:
        for i in range(prefill):
            await fleet.add(f"p{i}", Role.PREFILL, settings)
        for i in range(decode):
            await fleet.add(f"d{i}", Role.DECODE, settings)
        yield fleet
    finally:
        await fleet.close()
