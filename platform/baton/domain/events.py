"""Facts that the coordinator is told, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.fleet import Load, LossReason, ReplicaFacts
from baton.domain.handoff import LegFailure, LegOutput
from baton.domain.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """A client's request reached the coordinator."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsCancelled:
    """Clients went away, or a stop string was found; ids that are unknown or ended are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProduced:
    """One engine step's outputs for this coordinator's legs."""

    replica_id: str
    outputs: tuple[LegOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegFailed:
    """A leg ended without its engine finishing it."""

    replica_id: str
    leg_id: str
    failure: LegFailure
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegsAborted:
    """The replica confirms that these legs no longer run and hold nothing there."""

    replica_id: str
    leg_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJoined:
    """A replica said hello; if it was known before, this is a new life of it."""

    facts: ReplicaFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLost:
    """A replica is no longer counted on; whatever ran there is gone."""

    replica_id: str
    reason: LossReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDraining:
    """A replica takes no new work and means to stop once its live work has ended."""

    replica_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """A replica's load snapshot."""

    replica_id: str
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing happened but time; deadlines are looked at."""


Event = (
    RequestArrived
    | RequestsCancelled
    | StepProduced
    | LegFailed
    | LegsAborted
    | ReplicaJoined
    | ReplicaLost
    | ReplicaDraining
    | LoadReported
    | TimePassed
)
