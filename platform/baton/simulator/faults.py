"""What is done to a simulated fleet from outside while it serves: starts, stops, deaths, flips."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.fleet import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Replicas are asked for; they serve when their weights are loaded."""

    at_s: float
    pool: str
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Replicas of a pool take no new work and leave when they have ended theirs.

    The newest first; those that still start are called off before. Where there are fewer, all go.
    """

    at_s: float
    pool: str
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplica:
    """One replica takes no new work and leaves when it has ended what it has."""

    at_s: float
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A replica dies, with all that runs there."""

    at_s: float
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """A replica's process is stopped, and goes on later."""

    at_s: float
    replica_id: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    """A replica is meant for something else from now on; what runs there runs on."""

    at_s: float
    replica_id: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBandwidth:
    """A replica's network interfaces carry so much from now on, in and out each."""

    at_s: float
    replica_id: str
    bytes_per_s: float


ScheduledEvent = Start | Stop | StopReplica | Kill | Freeze | SetRole | SetBandwidth
"""Whatever is to happen to a replica that does not live at that time does not happen."""
