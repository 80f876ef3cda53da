"""Options of a fleet link, and its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.runtime.link.keys import FleetKeys

_MAX_IDLE_BEAT_DIVISOR = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Timings and bounds; both ends of a link are given the same."""

    heartbeat_interval_s: float = 0.25
    """Each side says at this interval that it lives; the replica adds its load."""
    heartbeat_timeout_s: float = 2.0
    """A peer that has said nothing for this long is taken for dead."""
    reconnect_s: float = 0.1
    """First pause before a lost replica is tried again; doubled up to `reconnect_max_s`."""
    reconnect_max_s: float = 2.0
    handshake_s: float = 5.0
    """A peer that accepts a connection and then does not speak ZMTP is given up after this."""
    queue_frames: int = 1024
    """Bound of each send queue, per peer."""
    max_part_bytes: int = 64 * 1024 * 1024
    """No part of a frame is longer; a peer that sends a longer one is disconnected."""
    batch_frames: int = 256
    """Frames taken from a socket before the event loop gets its turn."""
    max_coordinators: int = 1024
    """Sessions that one replica serves at a time."""
    keys: FleetKeys | None = field(default=None, repr=False)
    """Of the deployment. None: any peer that reaches a replica may speak, in clear; for tests
    alone."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.heartbeat_timeout_s:
            raise ValueError(
                f"link: heartbeat_interval_s is {self.heartbeat_interval_s} and"
                f" heartbeat_timeout_s {self.heartbeat_timeout_s}, expected"
                " 0 < heartbeat_interval_s < heartbeat_timeout_s"
            )

    @property
    def idle_beat_divisor(self) -> int:
        """Of how many beats one is sent where nothing is under way and nothing new.

        In a large fleet most replicas of a moment are idle, and their beats are most of an
        ingress's work. No request waits for an idle replica: given work, it speaks as often as
        ever.
        """
        return max(
            1,
            min(
                _MAX_IDLE_BEAT_DIVISOR,
                int(2 * self.heartbeat_timeout_s / self.heartbeat_interval_s),
            ),
        )

    @property
    def idle_extra_s(self) -> float:
        """How much longer the timeout of an idle peer is than that of others."""
        return (self.idle_beat_divisor - 1) * self.heartbeat_interval_s


def next_tick_at_s(due_at_s: float, now_s: float, interval_s: float, *, beat_s: float) -> float:
    """When to tick next, after a tick that was due at `due_at_s`.

    A process that is a little late each time must not beat ever later: peers count on a number of
    beats in a time. Beats that a stopped process has missed are not made up for.
    """
    return now_s + interval_s if now_s - due_at_s > beat_s else max(now_s, due_at_s + interval_s)


@dataclass(slots=True, kw_only=True)
class LinkCounters:
    """Counts of one end of the fleet link since it was made; only ever grow."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bad_frames: int = 0
    """Undecodable, or out of place in the conversation."""
    dropped_frames: int = 0
    """Well-formed, but of a session that is over, or with no room left to send them."""
    overloaded: int = 0
    """A bounded send queue was full."""
    sessions: int = 0
    """Sessions that were opened."""
    sessions_lost: int = 0
    """Sessions that ended other than by a parting word of the coordinator."""
    unowned_outputs: int = 0
    """Outputs of legs that no session waits for any more."""
    rejected_connections: int = 0
    """Connections to a replica that ended before they were known to be a coordinator's."""
