"""The coordinator's end of the fleet link: one connection per replica, one timer for all.

Theory of operation: every `beat_s` each connection has its turn to beat and to check its last
message. In a large fleet that is tens of milliseconds in which no token would move, so turns are
taken by a few connections at a time, spread over the beat. An idle replica without new work gets
only one beat of a few; replicas do the same. When this process itself did not run for longer than a
beat, no replica is to blame for the missing messages: that holds for one turn of each connection.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence

import zmq

from baton.domain.events import Event
from baton.domain.handoff import KvHandle, Leg, LegFailure
from baton.domain.names.addresses import Address, parse_address
from baton.runtime.link.connection import LinkContext, ReplicaConnection
from baton.runtime.link.options import LinkCounters, LinkOptions, next_tick_at_s

_HOST = re.compile(r"[0-9A-Za-z.:_-]+")
_CLOSE_DEADLINE_S = 5.0
_CONNECTIONS_PER_TICK = 32
"""Connections that have their turn together: about a millisecond."""
_MAX_SOCKETS = 16_384  # three for each replica; ZMQ's default of 1023 ends at 340 replicas


def _check_address(replica_id: str, address: str) -> None:
    try:
        parsed = parse_address(address)
    except ValueError:
        parsed = Address("", 0)
    if not (address.startswith("tcp://") and _HOST.fullmatch(parsed.host) and parsed.port):
        raise ValueError(
            f"address of replica {replica_id} is {address!r}, expected tcp://HOST:PORT"
        )


def _random_session() -> str:
    return secrets.token_hex(8)


class LinkClient:
    """Keeps sessions with replicas and turns what they say into domain events.

    Matches `ports.ReplicaLink`. To be made, used and closed on one running event loop. Events are
    handed to `on_event` synchronously, in the order in which each replica sent them; none is
    emitted from inside any method of the port.
    """

    def __init__(
        self,
        coordinator_id: str,
        on_event: Callable[[Event], None],
        *,
        options: LinkOptions | None = None,
        new_session: Callable[[], str] = _random_session,
    ) -> None:
        self.counters = LinkCounters()
        self._options = options or LinkOptions()
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._link_context = LinkContext(
            context=self._context,
            coordinator_id=coordinator_id,
            new_session=new_session,
            on_event=on_event,
            options=self._options,
            counters=self.counters,
        )
        self._connections: dict[str, ReplicaConnection] = {}
        self._closed = False
        self._pending_ticks: list[ReplicaConnection] = []
        """Those that have not had their turn in this round."""
        self._tick_parts = 1
        """Into which a round is split."""
        self._stalled_at_s = -math.inf
        self._tick_due_at_s = self._loop.time() + self._options.heartbeat_interval_s
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)

    # ------------------------------------------------------------------ membership

    def connect(self, replica_id: str, address: str) -> None:
        """Keep a session with the replica at `address` from now on.

        The same address again changes nothing; another address replaces the connection.

        Raises:
            ValueError: the address is not of the form tcp://HOST:PORT.
        """
        _check_address(replica_id, address)
        existing = self._connections.get(replica_id)
        if existing is not None and existing.address == address:
            return
        self.disconnect(replica_id)
        self._connections[replica_id] = ReplicaConnection(replica_id, address, self._link_context)

    def disconnect(self, replica_id: str) -> None:
        """Forget a replica; emits `ReplicaLost(LEFT)` if it had joined. Unknown ids are ignored."""
        connection = self._connections.pop(replica_id, None)
        if connection is not None:
            connection.close()

    @property
    def replica_ids(self) -> frozenset[str]:
        """The replicas that sessions are kept with, joined or not."""
        return frozenset(self._connections)

    @property
    def joined_ids(self) -> frozenset[str]:
        """The replicas that legs can be sent to now."""
        return frozenset(r for r, connection in self._connections.items() if connection.joined)

    @property
    def rejection_reasons(self) -> Mapping[str, str]:
        """Why replicas that have not joined would not open a session, where they said so."""
        return {
            r: c.rejection_reason
            for r, c in self._connections.items()
            if c.rejection_reason is not None
        }

    # ------------------------------------------------------------------ ports.ReplicaLink

    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        """Queue a leg; else UNREACHABLE, OVERLOADED, or INVALID when it can never be sent."""
        connection = self._connections.get(replica_id)
        return LegFailure.UNREACHABLE if connection is None else connection.submit(leg)

    def abort(self, replica_id: str, leg_ids: Sequence[str]) -> None:
        """Ask for an abort; a replica that cannot be reached has nothing left to abort."""
        connection = self._connections.get(replica_id)
        if connection is not None and leg_ids:
            connection.abort(leg_ids)

    def release(self, replica_id: str, kv_handle: KvHandle) -> None:
        """Ask replica `replica_id` to release a ticket; best effort, the lease expires anyway."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.release(kv_handle)

    def sync_cache(self, replica_id: str) -> None:
        """Ask for a snapshot of a prefix cache; best effort, it may be asked for again."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.sync_cache()

    def check_side_channel(self, replica_id: str, source_id: str, address: str) -> None:
        """Have `replica_id` check that it could pull from `source_id`; best effort."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.check_side_channel(source_id, address)

    def report_broken_agent(self, replica_id: str, why: str) -> None:
        """Tell `replica_id` that its transfer agent is broken; best effort."""
        connection = self._connections.get(replica_id)
        if connection is not None:
            connection.report_broken_agent(why)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        now_s, beat_s = self._loop.time(), self._options.heartbeat_interval_s
        late_s = now_s - self._tick_due_at_s
        if late_s > beat_s:
            self._stalled_at_s = now_s
        if not self._pending_ticks:
            self._pending_ticks = list(self._connections.values())
            self._tick_parts = max(1, math.ceil(len(self._pending_ticks) / _CONNECTIONS_PER_TICK))
        part_s = beat_s / self._tick_parts
        # A loop whose turns are longer than a part would let beats come ever later.
        due_parts = 1 if late_s > beat_s else 1 + int(max(0.0, late_s) / part_s)
        # Half a part less: the turns of the next round are none of those that the stall excuses.
        stalled = now_s - self._stalled_at_s < beat_s * (1 - 0.5 / self._tick_parts)
        self._tick_due_at_s = next_tick_at_s(
            self._tick_due_at_s, now_s, due_parts * part_s, beat_s=beat_s
        )
        self._timer = self._loop.call_at(self._tick_due_at_s, self._tick)
        count = due_parts * _CONNECTIONS_PER_TICK
        batch, self._pending_ticks = self._pending_ticks[:count], self._pending_ticks[count:]
        for connection in batch:
            if self._connections.get(connection.replica_id) is connection:
                connection.tick(now_s, stalled=stalled)

    async def close(self) -> None:
        """Say goodbye to every replica and free all sockets. Idempotent.

        A consumer that still wants `ReplicaLost(LEFT)` for each gets it during this call.
        """
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        for replica_id in tuple(self._connections):
            self.disconnect(replica_id)
        async with asyncio.timeout(_CLOSE_DEADLINE_S):
            # Every socket was closed on this thread, as ZMQ wants it; this waits for its own.
            await asyncio.to_thread(self._context.term)
