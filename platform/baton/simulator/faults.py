"""Scheduled events of a simulated fleet: starts, stops, crashes, freezes, changes."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.fleet import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start replicas; they serve when their weights are loaded."""

    at_s: float
    pool: str
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Drain replicas of a pool: the newest first, and starting replicas before those.

    All of them where there are fewer.
    """

    at_s: float
    pool: str
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReplica:
    """Drain one replica; it leaves when its legs have ended."""

    at_s: float
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Crash a replica with all its legs."""

    at_s: float
    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Stop a replica's process for a time."""

    at_s: float
    replica_id: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    """Change a replica's role; its legs run on."""

    at_s: float
    replica_id: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBandwidth:
    """Set the bandwidth of a replica's network interfaces, in and out each."""

    at_s: float
    replica_id: str
    bytes_per_s: float


ScheduledEvent = Start | Stop | StopReplica | Kill | Freeze | SetRole | SetBandwidth
"""An event for a replica that does not live at `at_s` has no effect."""
