"""A fleet in virtual time: replicas, coordinators, and the latency between them.

Theory of operation: everything random (latencies, the moments of beats) comes from one seed, and
things of the same moment happen in the order they were said in; so the same calls give the same
story. Beats go on for ever: run until a time, or until what you wait for has happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from baton.control.coordinator import Coordinator
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.fleet import LossReason, Role
from baton.domain.request import Request
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.facts import replica_facts
from baton.simulator.engine.settings import SimSettings
from baton.simulator.ingress import VirtualIngress
from baton.simulator.replica import Reporting, VirtualReplica, World
from baton.simulator.timeline import Timeline
from baton.simulator.transfers import Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What a fleet is like besides its engines."""

    seed: int = 0
    latency_s: float = 0.000_2
    """One way between a coordinator and a replica, on average: a message within a data centre."""
    latency_spread: float = 0.2
    """Each pair's own differs from that by up to this fraction."""
    reporting: Reporting = field(default_factory=Reporting)
    share_bandwidth: bool = True


class VirtualFleet:
    """Replicas and coordinators, and the records of the requests that have ended."""

    def __init__(self, options: FleetOptions | None = None) -> None:
        self._options = options or FleetOptions()
        self.timeline = Timeline()
        self.records: list[RequestRecord] = []
        self.ingresses: list[VirtualIngress] = []
        self.replicas: dict[str, VirtualReplica] = {}
        """Those that live, by their ids."""
        self._random = random.Random(self._options.seed)  # noqa: S311 - a simulation
        self._world = World(
            timeline=self.timeline,
            transfers=Transfers(self.timeline, share=self._options.share_bandwidth),
            reporting=self._options.reporting,
        )
        self._lives = count()
        self._watchers: list[Callable[[RequestRecord], None]] = []

    # ------------------------------------------------------------------ who is there
    def add_coordinator(
        self, coordinator: Coordinator, on_tokens: Callable[[Delivery], None] | None = None
    ) -> VirtualIngress:
        """A new ingress; it hears of all replicas."""
        ingress = VirtualIngress(
            coordinator, self.timeline, on_end=self._on_end, on_tokens=on_tokens
        )
        self.ingresses.append(ingress)
        for replica in self.replicas.values():
            ingress.join(replica, self._latency_s())
        return ingress

    def add_replica(
        self, replica_id: str, settings: SimSettings, *, role: Role, pool: str, model: str = "sim"
    ) -> VirtualReplica:
        """A new replica, or a new life of one that has died; every coordinator hears of it."""
        facts = replica_facts(
            settings,
            replica_id=replica_id,
            pool=pool,
            role=role,
            model=model,
            side_channel=f"{replica_id}:{next(self._lives)}",
        )
        replica = VirtualReplica(facts, settings, self._world)
        self.replicas[replica_id] = replica
        for ingress in self.ingresses:
            ingress.join(replica, self._latency_s())
        beat_s = self._options.reporting.beat_s
        self.timeline.after(self._random.uniform(0, beat_s), lambda: self._beat(replica))
        return replica

    def kill(self, replica_id: str, reason: LossReason = LossReason.DISCONNECTED) -> None:
        """A replica dies now."""
        self.replicas.pop(replica_id).die(reason)

    # ------------------------------------------------------------------ requests
    def send(self, request: Request, ingress: int = 0) -> None:
        """A request reaches an ingress now."""
        self.ingresses[ingress].send(request)

    def watch(self, on_end: Callable[[RequestRecord], None]) -> None:
        """Call `on_end` for every request that ends from now on."""
        self._watchers.append(on_end)

    def run(self, *, until_s: float = float("inf"), ended: int | None = None) -> None:
        """Let time pass until then, or until so many requests have ended in all."""
        enough = None if ended is None else (lambda: len(self.records) >= ended)
        self.timeline.run(until_s=until_s, enough=enough)

    # ------------------------------------------------------------------ for tests
    def check_integrity(self) -> None:
        """Assert what must hold at any moment."""
        for replica in self.replicas.values():
            replica.core.check_integrity()
        for ingress in self.ingresses:
            ingress.coordinator.check_integrity()
        ids = [record.request_id for record in self.records]
        expect(len(ids) == len(set(ids)), "a request has ended twice")

    def check_idle(self) -> None:
        """Assert that nothing is left of any request: no leg, no block, no transfer."""
        self.check_integrity()
        for replica_id, replica in self.replicas.items():
            load = replica.core.load()
            busy = (load.queued_requests, load.running_requests, load.pulling_requests)
            expect(busy == (0, 0, 0), f"{replica_id} is busy: {load}")
            expect(load.kv_used_fraction == 0, f"{replica_id} keeps blocks: {load}")
        phases = [ingress.coordinator.phases() for ingress in self.ingresses]
        expect(not any(phases), f"requests are in flight: {phases}")
        expect(not len(self._world.transfers), "blocks are on the way")

    # ------------------------------------------------------------------ the works
    def _latency_s(self) -> float:
        spread = self._options.latency_spread
        return self._options.latency_s * self._random.uniform(1 - spread, 1 + spread)

    def _beat(self, replica: VirtualReplica) -> None:
        if replica.alive:
            replica.beat()
            beat_s = self._options.reporting.beat_s
            self.timeline.after(beat_s, lambda: self._beat(replica))

    def _on_end(self, record: RequestRecord) -> None:
        self.records.append(record)
        for watcher in self._watchers:
            watcher(record)
