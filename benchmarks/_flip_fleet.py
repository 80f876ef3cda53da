"""Replicas with simulated engines in processes of their own, and coordinators that use them.

What runs is what runs live, but for Ray: replica hosts, the fleet link, drivers and coordinators.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from baton.control.coordinator import Coordinator
from baton.control.limits import CoordinatorLimits
from baton.control.pairs import ProbeOptions
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.events import Event, RoleChanged
from baton.domain.fleet import Role
from baton.domain.request import Request
from baton.engine.sim import SimEngine, SimSettings
from baton.policy.predicted import PredictedPlacer
from baton.runtime.clock import MonotonicClock
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.replica_host import ReplicaHost

MODEL = "tiny"
SETTINGS = SimSettings(
    prefill_tokens_per_s=40_000.0,
    decode_step_s=0.004,
    step_overhead_s=0.001,
    kv_blocks=2048,
    max_running_requests=64,
    transfer_setup_s=0.002,
)
"""Fast enough for a thousand flips in half a minute, slow enough that every phase meets some."""
_DRAIN_S = 60.0
_ANSWER_S = 90.0
_JOIN_S = 20.0

Answer = tuple[str, int]
"""What came of an order, and the process that carried it out."""


def serve(name: str, role: str, orders: Connection) -> None:
    """A replica's process: carries out `role NAME` and `stop`, and answers with its process id."""
    asyncio.run(_serve(name, Role(role), orders))


async def _serve(name: str, role: Role, orders: Connection) -> None:
    engine = SimEngine(SETTINGS, replica_id=name, pool=str(role), role=role, model=MODEL)
    host = ReplicaHost(engine, bind="tcp://127.0.0.1:0")
    await host.start()
    try:
        orders.send((host.address, os.getpid()))
        while (order := await asyncio.to_thread(orders.recv)) != "stop":
            host.set_role(Role(order))
            orders.send((order, os.getpid()))
        host.drain(deadline_s=_DRAIN_S)
        await host.drained.wait()
    finally:
        await host.close()
    orders.send(("stopped", os.getpid()))


class ReplicaProcess:
    """One replica, as its owner sees it."""

    def __init__(self, name: str, role: Role) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.name, self.role = name, role
        self.address = ""
        self.pids: set[int] = set()
        """Of all its answers: more than one means that it was started again."""
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(name, str(role), theirs), daemon=True)

    async def start(self) -> None:
        """Run; returns when coordinators can connect."""
        self._process.start()
        self.address = await self._answer()

    async def set_role(self, role: Role) -> None:
        """Have it meant for something else."""
        self.role = role
        self._orders.send(str(role))
        await self._answer()

    async def stop(self) -> None:
        """Drain, then end."""
        self._orders.send("stop")
        await self._answer()
        await asyncio.to_thread(self._process.join, _ANSWER_S)

    def kill(self) -> None:
        """End at once, if it has not ended."""
        if self._process.is_alive():
            self._process.kill()

    async def _answer(self) -> str:
        async with asyncio.timeout(_ANSWER_S):
            if not await asyncio.to_thread(self._orders.poll, _ANSWER_S):
                raise TimeoutError(f"replica {self.name} did not answer within {_ANSWER_S} s")
        said, pid = self._orders.recv()
        self.pids.add(pid)
        return str(said)


@dataclass(slots=True)
class Stream:
    """What one client asked for and got."""

    request: Request
    tokens: list[int]
    record: RequestRecord | None = None
    error: BatonError | None = None


class Ingress:
    """A coordinator with its link and driver, and the clients before it."""

    def __init__(self, name: str, seed: int) -> None:
        self.streams: dict[str, Stream] = {}
        self.doubled = 0
        """Requests that ended more than once."""
        self.link = LinkClient(name, self._on_event)
        self.coordinator = Coordinator(
            limits=CoordinatorLimits(),
            placer=PredictedPlacer(seed=seed),
            probing=ProbeOptions(),
            seed=seed,
        )
        self.driver = Driver(
            self.coordinator,
            link=self.link,
            frontend=self,
            recorder=self,
            clock=MonotonicClock(),
        )
        self._ends: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self.roles_heard: list[tuple[float, str, Role]] = []
        """When, of whom, what."""

    def _on_event(self, event: Event) -> None:
        self.driver.on_event(event)
        if isinstance(event, RoleChanged):
            self.roles_heard.append((time.monotonic(), event.replica_id, event.role))
        self._changed.set()

    async def ask(self, request: Request) -> Stream:
        """Send a request and wait until it has ended."""
        stream = self.streams[request.request_id] = Stream(request, [])
        ended = self._ends[request.request_id] = asyncio.Event()
        self.driver.on_request(request)
        await ended.wait()
        return stream

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what events of the link bring about."""
        async with asyncio.timeout(_JOIN_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def join(self, replica: ReplicaProcess) -> None:
        """Connect to a replica, and wait until it counts."""
        self.link.connect(replica.name, replica.address)
        await self.until(lambda: replica.name in self.driver.fleet().replicas)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Tokens for clients."""
        for delivery in deliveries:
            self.streams[delivery.request_id].tokens.extend(delivery.token_ids)

    def fail(self, request_id: str, error: BatonError) -> None:
        """A request ends without finishing."""
        self.streams[request_id].error = error

    def record(self, record: RequestRecord) -> None:
        """A request has ended."""
        stream = self.streams[record.request_id]
        self.doubled += stream.record is not None
        stream.record = record
        self._ends[record.request_id].set()

    async def close(self) -> None:
        """Leave every replica."""
        self.driver.close()
        await self.link.close()
