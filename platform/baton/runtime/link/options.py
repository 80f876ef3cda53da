"""Options of a fleet link, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.policy.resilience.liveness import (
    HEARTBEAT_INTERVAL_S,
    INTERVALS_PER_IDLE_HEARTBEAT,
    LINK_TIMEOUT_S,
)
from baton.runtime.link.keys import FleetKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Timings and bounds; both ends of a link are given the same."""

    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    """Interval of heartbeats of both sides; the replica's have its load."""
    heartbeat_timeout_s: float = LINK_TIMEOUT_S
    """A peer without a message for this long is dead."""
    reconnect_s: float = 0.1
    """First pause before a reconnect; doubled up to `reconnect_max_s`."""
    reconnect_max_s: float = 2.0
    handshake_s: float = 5.0
    """Limit of the ZMTP handshake."""
    queue_frames: int = 1024
    """Bound of each send queue, per peer."""
    max_part_bytes: int = 64 * 1024 * 1024
    """Limit of a part of a frame; a peer that sends a longer part is disconnected."""
    batch_frames: int = 256
    """Frames taken from a socket before the event loop gets its turn."""
    max_coordinators: int = 1024
    """Sessions that one replica serves at a time."""
    keys: FleetKeys | None = field(default=None, repr=False)
    """Keys of the deployment. None: any peer may connect, unencrypted; for tests alone."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.heartbeat_timeout_s:
            raise ValueError(
                f"link: heartbeat_interval_s is {self.heartbeat_interval_s} and"
                f" heartbeat_timeout_s {self.heartbeat_timeout_s}, expected"
                " 0 < heartbeat_interval_s < heartbeat_timeout_s"
            )

    @property
    def idle_beat_divisor(self) -> int:
        """An idle link sends one heartbeat of this many.

        In a large fleet most replicas are idle at a time, and their heartbeats are most of an
        ingress's work.
        """
        return max(
            1,
            min(
                INTERVALS_PER_IDLE_HEARTBEAT,
                int(2 * self.heartbeat_timeout_s / self.heartbeat_interval_s),
            ),
        )

    @property
    def idle_extra_s(self) -> float:
        """Added to the timeout of an idle peer."""
        return (self.idle_beat_divisor - 1) * self.heartbeat_interval_s


def next_tick_at_s(due_at_s: float, now_s: float, interval_s: float, *, beat_s: float) -> float:
    """The next tick, after a tick that was due at `due_at_s`.

    Lateness does not add up, since peers count on a number of heartbeats in a time. A stopped
    process does not make up for missed heartbeats.
    """
    return now_s + interval_s if now_s - due_at_s > beat_s else max(now_s, due_at_s + interval_s)


@dataclass(slots=True, kw_only=True)
class LinkCounters:
    """Counts of one end of the fleet link; they only grow."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bad_frames: int = 0
    """Undecodable, or out of order."""
    dropped_frames: int = 0
    """Well-formed, but of an ended session, or without room in the queue."""
    overloaded: int = 0
    """A bounded send queue was full."""
    sessions: int = 0
    sessions_lost: int = 0
    """Sessions that ended without the coordinator's `Close`."""
    unowned_outputs: int = 0
    """Outputs of legs that no session waits for."""
    rejected_connections: int = 0
    """Connections to a replica that ended unauthenticated."""
