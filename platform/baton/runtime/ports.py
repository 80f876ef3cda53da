"""The ports of the live body: the needs of the driver and the replica host from the outside.

Protocols live here, with their consumers; adapters match them without subclassing.
"""

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
    consumer iterates `steps`, and another `kv_events`. Every submitted leg ends exactly once in
    `steps`. It ends with an output whose `finish` is set, with a `LegOutput` with ERROR (details in
    the log), or, after `abort`, without an output. A leg that the engine only finds
    wrong when it looks at it ends in INVALID or REFUSED, with why as its stop reason. Nothing here
    blocks the event loop.
    """

    async def start(self) -> ReplicaFacts:
        """Bring the engine up and say what it is.

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

        An output that was already under way is still yielded by `steps` before this returns, so a
        prefill leg that finished first still hands out its ticket. Unknown ids are ignored.
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
        """Yield what the prefix cache gains and loses until the engine closes.

        Called once, right after `start`; nothing that happened since `start` is left out. A reader
        that is too slow loses batches, which their numbers show. An engine that says nothing about
        its cache ends at once. A death is told by `steps`: here it is an end like any other.
        """
        ...

    def links(self) -> tuple[LinkTotals, ...]:
        """The pulls so far, by source; cheap, never blocks."""
        ...

    async def check_side_channel(self, source_id: str, address: str, deadline_s: float) -> None:
        """Ask replica `source_id` at `address` for the data of a pull from it; move no block.

        Returns when the answer came and blocks could be pulled, at the latest after `deadline_s`.

        Raises:
            TransferFailed: it did not answer in time, or with something this engine cannot use.
        """
        ...

    def load(self) -> Load:
        """The current load; cheap, never blocks."""
        ...

    async def close(self) -> None:
        """Stop the engine and leave no process, port or memory behind. Idempotent."""
        ...


class ReplicaLink(Protocol):
    """The coordinator's way to the replicas. Nothing here waits: sending is to a bounded queue."""

    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        """Send a leg; None when queued for sending, else why not.

        OVERLOADED: the queue is full; UNREACHABLE: there is no session; INVALID: it can never be
        sent, because it does not fit into a frame.
        """
        ...

    def abort(self, replica_id: str, leg_ids: Sequence[str]) -> None:
        """Ask for an abort; a replica that cannot be reached has nothing left to abort."""
        ...

    def release(self, replica_id: str, kv_handle: KvHandle) -> None:
        """Ask replica `replica_id` to release a ticket; best effort, the lease expires anyway."""
        ...

    def sync_cache(self, replica_id: str) -> None:
        """Ask for a snapshot of a prefix cache; best effort, it may be asked for again."""
        ...

    def check_side_channel(self, replica_id: str, source_id: str, address: str) -> None:
        """Have `replica_id` check that it could pull from `source_id`; best effort."""
        ...

    def report_broken_agent(self, replica_id: str, why: str) -> None:
        """Tell `replica_id` that its transfer agent is broken; best effort."""
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
