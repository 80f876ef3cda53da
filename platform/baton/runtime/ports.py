"""The ports of the driver and the replica host; adapters match them without subclassing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegOutput
from baton.domain.kv_events import KvEventBatch


class Engine(Protocol):
    """The inference engine inside a replica.

    Theory of operation: `start` once, then `submit` / `abort` / `release` at any time while one
    consumer iterates `steps`, and another `kv_events`. Every submitted leg ends exactly once: with
    a `LegOutput` whose `finish` is set (ERROR: the log has the details), or, after `abort`, without
    an output. A leg that the engine finds wrong late ends in INVALID or REFUSED, with the reason as
    its stop reason. Nothing here blocks the event loop.
    """

    async def start(self) -> ReplicaFacts:
        """Start the engine.

        Raises:
            EngineStartFailed: with one clear line and a remedy.
        """
        ...

    async def submit(self, leg: Leg) -> LegFailure | None:
        """Start a leg; None when accepted, else why not (the leg then never runs).

        Raises:
            LegInvalid: its request is wrong; it never runs.
        """
        ...

    async def abort(self, leg_ids: Sequence[str]) -> None:
        """Stop legs and free their blocks. Returns when they can produce no further output.

        `steps` yields outputs in flight before this returns, so a prefill leg that finished first
        still hands out its KV handle. Unknown ids are ignored.
        """
        ...

    async def release(self, kv_handle: KvHandle) -> None:
        """Tell the replica that issued `kv_handle` to free its blocks without pulling them."""
        ...

    def steps(self) -> AsyncIterator[tuple[LegOutput, ...]]:
        """Yield the outputs of each engine step that produced any; ends when the engine closes.

        Raises:
            EngineDied: the engine died.
        """
        ...

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Yield changes of the prefix cache until the engine closes or dies.

        Called once, right after `start`, and complete since then. Numbers show the batches that a
        slow reader loses. An engine without cache events ends at once.
        """
        ...

    def links(self) -> tuple[LinkTotals, ...]:
        """The pulls so far, by source; cheap, never blocks."""
        ...

    async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
        """Ask replica `source_id` at `address` for the data of a pull from it; move no block.

        Raises:
            TransferFailed: it did not answer within `deadline_s`, or with something unusable.
        """
        ...

    def load(self) -> Load:
        """The current load; cheap, never blocks."""
        ...

    async def close(self) -> None:
        """Stop the engine and leave no process, port or memory behind. Idempotent."""
        ...


class ReplicaLink(Protocol):
    """The coordinator's way to the replicas; sending never waits, queues are bounded."""

    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        """Send a leg; None when queued for sending, else why not.

        OVERLOADED: the queue is full; UNREACHABLE: there is no session; INVALID: it does not fit
        into a frame.
        """
        ...

    def abort(self, replica_id: str, leg_ids: Sequence[str]) -> None:
        """Request an abort; a replica that cannot be reached has nothing left to abort."""
        ...

    def release(self, replica_id: str, kv_handle: KvHandle) -> None:
        """Ask a replica to release a KV handle; best effort, the lease expires anyway."""
        ...

    def sync_cache(self, replica_id: str) -> None:
        """Request a snapshot of a prefix cache; best effort, it may be requested again."""
        ...

    def check_side_channel(self, replica_id: str, source_id: str, address: str) -> None:
        """Have `replica_id` check that it could pull from `source_id`; best effort."""
        ...

    def report_broken_agent(self, replica_id: str, reason: str) -> None:
        """Tell a replica that its transfer agent is broken; best effort."""
        ...


class Frontend(Protocol):
    """The client side: turns HTTP requests into tokens and streams tokens back."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Stream tokens to clients; one call per engine step."""
        ...

    def fail(self, request_id: str, error: BatonError) -> None:
        """End a request with an error the client can read."""
        ...


class Recorder(Protocol):
    """Keeps the records of ended requests."""

    def record(self, record: RequestRecord) -> None:
        """Keep one record; called exactly once for each request."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment."""
        ...
