"""A fleet in virtual time: replicas, coordinators, and the latency between them.

Theory of operation: all randomness (latencies, heartbeat phases) comes from one seed, and events of
the same time run in the order of their scheduling, so runs are reproducible. Heartbeats never end:
run until a time or until enough requests have ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from baton.control.coordinator import Coordinator
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.fleet import LossReason, Role
from baton.domain.request import Request
from baton.simulator.engine.blocks import expect
from baton.simulator.fleet.engines import EngineSettings, create_engine, link_settings
from baton.simulator.fleet.ingress import VirtualIngress
from baton.simulator.fleet.replica import FleetContext, ReportingOptions, VirtualReplica
from baton.simulator.network.timeline import Timeline
from baton.simulator.network.transfers import Transfers

HEARTBEAT_TIMEOUT_S = 2.0
"""How long a replica may be unresponsive before its session ends; the fleet link's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of a fleet apart from its engines."""

    seed: int = 0
    latency_s: float = 0.000_2
    """Mean one-way latency between coordinator and replica: a message within a data centre."""
    latency_spread: float = 0.2
    """Maximum deviation of a pair's latency, as a fraction."""
    reporting: ReportingOptions = field(default_factory=ReportingOptions)
    share_bandwidth: bool = True


class VirtualFleet:
    """Replicas and coordinators, and the records of ended requests."""

    def __init__(
        self,
        options: FleetOptions | None = None,
        *,
        start_s: float = 0.0,
        keep_records: bool = True,
    ) -> None:
        self._options = options or FleetOptions()
        self.timeline = Timeline(start_s)
        self.records: list[RequestRecord] = []
        """Of all ended requests, if `keep_records`."""
        self.ended = 0
        self._stop_after_ended: int | None = None
        """Number of ended requests at which `run` stops."""
        self.ingresses: list[VirtualIngress] = []
        self.replicas: dict[str, VirtualReplica] = {}
        self._random = random.Random(self._options.seed)  # noqa: S311 - a simulation
        self._context = FleetContext(
            timeline=self.timeline,
            transfers=Transfers(self.timeline, share=self._options.share_bandwidth),
            reporting=self._options.reporting,
            replace_replica=self._report_broken,
        )
        self.on_replica_broken: Callable[[str], None] = self.retire
        """Called with the id of a replica that is reported as broken."""
        self._keep_records = keep_records
        self._address_numbers = count()
        self._end_listeners: list[Callable[[RequestRecord], None]] = []

    # ------------------------------------------------------------------ members
    def add_coordinator(
        self, coordinator: Coordinator, on_tokens: Callable[[Delivery], None] | None = None
    ) -> VirtualIngress:
        """Add an ingress, with a session to every replica."""
        ingress = VirtualIngress(
            coordinator, self.timeline, on_end=self._on_end, on_tokens=on_tokens
        )
        self.ingresses.append(ingress)
        for replica in self.replicas.values():
            ingress.join(replica, self._latency_s())
        return ingress

    def add_replica(
        self,
        replica_id: str,
        settings: EngineSettings,
        *,
        role: Role,
        pool: str,
        model: str = "sim",
    ) -> VirtualReplica:
        """Add a replica, or restart a dead replica; every ingress opens a session."""
        address = f"{replica_id}:{next(self._address_numbers)}"
        engine = create_engine(settings, engine_id=replica_id, model=model, address=address)
        engine_facts = engine.facts(replica_id=replica_id, side_channel=address)
        sends_cache_events = engine_facts.cache_events and self._options.reporting.report_cache
        facts = replace(engine_facts, pool=pool, role=role, cache_events=sends_cache_events)
        replica = VirtualReplica(facts, engine, link_settings(settings), self._context)
        self.replicas[replica_id] = replica
        for ingress in self.ingresses:
            ingress.join(replica, self._latency_s())
        interval_s = self._options.reporting.report_interval_s
        replica.begin_heartbeats(self._random.uniform(0, interval_s))
        return replica

    def kill(self, replica_id: str, reason: LossReason = LossReason.DISCONNECTED) -> None:
        """Crash a replica."""
        self.replicas.pop(replica_id).die(reason)

    def freeze(
        self,
        replica_id: str,
        duration_s: float,
        *,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        """Stop a replica's process for a time; after `heartbeat_timeout_s` its sessions end."""
        replica = self.replicas[replica_id]
        replica.freeze()

        def thaw() -> None:
            if replica.thaw():
                for ingress in self.ingresses:
                    ingress.join(replica, self._latency_s())

        if duration_s > heartbeat_timeout_s:
            self.timeline.call_later(heartbeat_timeout_s, replica.on_heartbeat_timeout)
        self.timeline.call_later(duration_s, thaw)

    def retire(self, replica_id: str, on_stopped: Callable[[], None] | None = None) -> None:
        """Drain a replica; it leaves when its legs have ended."""
        replica = self.replicas[replica_id]

        def stop() -> None:
            if self.replicas.get(replica_id) is replica:
                self.kill(replica_id, LossReason.LEFT)
                if on_stopped is not None:
                    on_stopped()

        replica.drain(stop)

    def change_bandwidth(self, replica_id: str, bytes_per_s: float) -> None:
        """Set the bandwidth of a replica's network interface."""
        address = self.replicas[replica_id].facts.side_channel
        self._context.transfers.change_bandwidth(address, bytes_per_s)

    def expect_event(self, at_s: float) -> None:
        """Set the time of the next scheduled event for replicas; inf for none."""
        self._context.next_event_at_s = at_s

    # ------------------------------------------------------------------ requests
    def send(self, request: Request, ingress: int = 0) -> None:
        """A request reaches an ingress now."""
        self.ingresses[ingress].send(request)

    def add_end_listener(self, on_end: Callable[[RequestRecord], None]) -> None:
        """Call `on_end` for every request that ends."""
        self._end_listeners.append(on_end)

    def run(self, *, until_s: float = float("inf"), until_ended: int | None = None) -> None:
        """Run until `until_s`, or until `until_ended` requests have ended in all."""
        if until_ended is not None and self.ended >= until_ended:
            return
        self._stop_after_ended = until_ended
        self.timeline.run(until_s=until_s)

    def stop_after(self, requests: int) -> None:
        """End the `run` that is under way when this number of requests has ended in all."""
        self._stop_after_ended = requests
        if self.ended >= requests:
            self.timeline.stop()

    # ------------------------------------------------------------------ for tests
    def check_integrity(self) -> None:
        """Assert the invariants of replicas and coordinators."""
        for replica in self.replicas.values():
            replica.engine.check_integrity()
        for ingress in self.ingresses:
            ingress.coordinator.check_integrity()
        ids = [record.request_id for record in self.records]
        expect(len(ids) == len(set(ids)), "a request has ended twice")

    def check_idle(self) -> None:
        """Assert that no request has left a leg, a block or a transfer."""
        self.check_integrity()
        for replica_id, replica in self.replicas.items():
            load = replica.load()
            expect(load.total_requests == 0, f"{replica_id} is busy: {load}")
            expect(load.kv_used_fraction == 0, f"{replica_id} keeps blocks: {load}")
        phases = [ingress.coordinator.phases() for ingress in self.ingresses]
        expect(not any(phases), f"requests are in flight: {phases}")
        expect(not len(self._context.transfers), "blocks are on the way")

    # ------------------------------------------------------------------ internals
    def _report_broken(self, replica_id: str) -> None:
        self.on_replica_broken(replica_id)

    def _latency_s(self) -> float:
        spread = self._options.latency_spread
        return self._options.latency_s * self._random.uniform(1 - spread, 1 + spread)

    def _on_end(self, record: RequestRecord) -> None:
        self.ended += 1
        if self._keep_records:
            self.records.append(record)
        for on_end in self._end_listeners:
            on_end(record)
        if self.ended == self._stop_after_ended:
            self.timeline.stop()
