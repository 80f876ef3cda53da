"""A coordinator with its link and driver, and the clients before it, in this process.

What a client would see over HTTP is written down in its `Exchange`: a refusal by its status, tokens
when they are delivered, and each end that it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.control.coordinator import Coordinator
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError, Rejected
from baton.domain.events import Event, ReplicaDraining, ReplicaJoined, ReplicaLost
from baton.domain.fleet import ReplicaView
from baton.domain.request import FinishReason, Request
from baton.runtime.driver import Driver
from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions
from baton.runtime.process.clock import MonotonicClock
from tests.chaos.history import Ending, Exchange

_GOOD_FINISHES = frozenset({FinishReason.LENGTH, FinishReason.STOP})
_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A change of the fleet that the coordinator has heard of."""

    at_s: float
    replica_id: str
    kind: str
    """`joined`, `draining`, or the reason of the loss: `disconnected`, ..."""


class Ingress:
    """One coordinator; `send` is what clients of `tests.chaos.load` call."""

    def __init__(
        self, name: str, coordinator: Coordinator, *, link: LinkOptions, payload: bytes = b""
    ) -> None:
        self.name = name
        self._payload = payload
        self.coordinator = coordinator
        self.exchanges: dict[str, Exchange] = {}
        self.records: list[RequestRecord] = []
        self.fleet_changes: list[FleetChange] = []
        self.link = LinkClient(name, self._on_event, options=link)
        self.driver = Driver(
            coordinator, link=self.link, frontend=self, recorder=self, clock=MonotonicClock()
        )
        self._ended_events: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------- clients

    async def send(self, exchange: Exchange) -> None:
        """Send a request and wait until it has ended; given up, it is left to go on."""
        self.exchanges[exchange.request_id] = exchange
        ended = self._ended_events[exchange.request_id] = asyncio.Event()
        self.driver.on_request(
            Request(
                request_id=exchange.request_id,
                prompt_token_ids=exchange.prompt,
                max_tokens=exchange.max_tokens,
                arrived_at_s=time.monotonic(),
                payload=self._payload,
            )
        )
        await ended.wait()

    def cancel(self, exchange: Exchange) -> None:
        """Its client goes away."""
        exchange.end(Ending.CANCELLED, time.monotonic())
        self.driver.on_abort((exchange.request_id,))
        self._ended_events[exchange.request_id].set()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Tokens for clients."""
        now_s = time.monotonic()
        for delivery in deliveries:
            exchange = self.exchanges.get(delivery.request_id)
            if exchange is None:
                continue
            if delivery.token_ids:
                exchange.add_tokens(delivery.token_ids, now_s)
            if delivery.finish is not None:
                ending = Ending.FINISHED if delivery.finish in _GOOD_FINISHES else Ending.FAILED
                self._end_exchange(exchange, ending, f"finish reason {delivery.finish}")

    def fail(self, request_id: str, error: BatonError) -> None:
        """A request ends without finishing."""
        exchange = self.exchanges[request_id]
        if isinstance(error, Rejected) and not exchange.tokens:
            exchange.status, exchange.retry_after_s = error.http_status, error.retry_after_s
            self._end_exchange(exchange, Ending.REJECTED, str(error))
        else:
            exchange.status = exchange.status or error.http_status
            self._end_exchange(exchange, Ending.FAILED, str(error))

    def record(self, record: RequestRecord) -> None:
        """A coordinator has written down how a request ended; the next to ask may see it."""
        self.records.append(record)
        self._notify()

    def _end_exchange(self, exchange: Exchange, ending: Ending, reason: str) -> None:
        exchange.end(ending, time.monotonic(), reason)
        self._ended_events[exchange.request_id].set()

    # ---------------------------------------------------------------- the fleet

    def _on_event(self, event: Event) -> None:
        self.driver.on_event(event)
        now_s = time.monotonic()
        match event:
            case ReplicaLost():
                self.fleet_changes.append(FleetChange(now_s, event.replica_id, str(event.reason)))
            case ReplicaJoined():
                self.fleet_changes.append(FleetChange(now_s, event.facts.replica_id, "joined"))
            case ReplicaDraining():
                self.fleet_changes.append(FleetChange(now_s, event.replica_id, "draining"))
        self._notify()

    def change_at_s(self, replica_id: str, *kinds: str, since_s: float = 0.0) -> float | None:
        """When it first heard something of a replica; None when it has not."""
        for change in self.fleet_changes:
            is_match = change.replica_id == replica_id and change.at_s >= since_s
            if is_match and (not kinds or change.kind in kinds):
                return change.at_s
        return None

    def lost_at_s(self, replica_id: str, *, since_s: float) -> float | None:
        """When it gave a replica up, for any reason; None when it has not."""
        return next(
            (
                change.at_s
                for change in self.fleet_changes
                if change.replica_id == replica_id
                and change.at_s >= since_s
                and change.kind not in {"joined", "draining"}
            ),
            None,
        )

    def view(self, replica_id: str) -> ReplicaView | None:
        """A replica as it sees it; None when it does not."""
        return self.driver.fleet().replicas.get(replica_id)

    async def wait_until(
        self, predicate: Callable[[], bool], *, timeout_s: float = _WAIT_S
    ) -> None:
        """Wait for what events of the link, or ends of requests, bring about.

        Raises:
            TimeoutError: they do not.
        """
        async with asyncio.timeout(timeout_s):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()

    def held_resources(self) -> dict[str, float]:
        """What it holds for anybody; all zeros when nothing is under way."""
        legs = {
            f"legs at {replica_id}": view.inflight_legs
            for replica_id, view in self.driver.fleet().replicas.items()
        }
        return {
            "requests": len(self.coordinator.phases()),
            "leases": sum(self.coordinator.lease_counts().values()),
            "unconfirmed aborts": self.coordinator.unconfirmed_aborts(),
            **legs,
        }

    async def close(self) -> None:
        """Leave every replica."""
        self.driver.close()
        await self.link.close()
