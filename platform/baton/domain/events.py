"""Facts that the coordinator gets, in the past tense."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.cache import CacheUpdate
from baton.domain.demand import ColdStart
from baton.domain.errors import Rejected
from baton.domain.fleet import LinkTotals, Load, LossReason, ReplicaFacts, Role
from baton.domain.handoff import LegFailure, LegOutput
from baton.domain.request import Request
from baton.domain.tenant import QuotaShare
from baton.domain.value import Value


class RequestArrived(Value, kw_only=True):
    """A client's request reached the coordinator."""

    request: Request


class RequestsRejected(Value, kw_only=True, gc=True):
    """A client was refused before its requests were read, as this coordinator had advised."""

    error: Rejected
    requests: int
    tenant: str
    slo_class: str | None = None
    """The class that it asks to be served in."""


class RequestsCancelled(Value, kw_only=True):
    """Clients went away, or a stop string was found; ids that are unknown or ended are ignored."""

    request_ids: tuple[str, ...]


class StepCompleted(Value, kw_only=True):
    """One engine step's outputs for this coordinator's legs."""

    replica_id: str
    outputs: tuple[LegOutput, ...]
    steps: int = 1
    """Steps at even intervals with these outputs; a simulator sends several at once."""


class LegFailed(Value, kw_only=True):
    """A leg ended without its engine finishing it."""

    replica_id: str
    leg_id: str
    failure: LegFailure
    reason: str = ""
    was_sent: bool = True
    """False when the leg never left for the replica."""


class LegsAborted(Value, kw_only=True):
    """The replica confirms that these legs no longer run and hold nothing there."""

    replica_id: str
    leg_ids: tuple[str, ...]


class ReplicaJoined(Value, kw_only=True):
    """A replica joined; if it was known before, this is a new life of it."""

    facts: ReplicaFacts


class ReplicaLost(Value, kw_only=True):
    """A replica is lost, with the requests that ran there."""

    replica_id: str
    reason: LossReason
    detail: str = ""
    """The replica's own words; empty without any."""


class ReplicaDraining(Value, kw_only=True):
    """A replica takes no new work and means to stop once its live work has ended."""

    replica_id: str


class RoleChanged(Value, kw_only=True):
    """A replica gets another role; its existing work finishes there."""

    replica_id: str
    role: Role


class LoadReported(Value, kw_only=True):
    """A replica's load snapshot."""

    replica_id: str
    load: Load
    received_legs: int | None = None
    """How many of this coordinator's legs, since the replica joined, the snapshot knows of; None
    when the replica does not count them."""


class CacheChanged(Value, kw_only=True):
    """A replica reported the content of its prefix cache."""

    replica_id: str
    update: CacheUpdate


class LinksReported(Value, kw_only=True):
    """A replica's pulls from others so far; only sources with news."""

    replica_id: str
    links: tuple[LinkTotals, ...]


class SideChannelChecked(Value, kw_only=True):
    """A decode replica has tried to reach a prefill replica's side channel."""

    replica_id: str
    source_id: str
    is_reachable: bool
    elapsed_s: float
    reason: str = ""
    """The failure; empty after a success."""


class QuotasAllocated(Value, kw_only=True):
    """Tenants' limits were dealt out anew; these are this coordinator's shares of them."""

    shares: Mapping[str, QuotaShare]
    """By tenant; those that are not among them keep what they have."""


class ColdStartReported(Value, kw_only=True):
    """The controller has reported how long the next replica takes to start."""

    cold_start: ColdStart


class TimerFired(Value, kw_only=True):
    """Nothing happened but time; deadlines are looked at."""


Event = (
    RequestArrived
    | RequestsRejected
    | RequestsCancelled
    | StepCompleted
    | LegFailed
    | LegsAborted
    | ReplicaJoined
    | ReplicaLost
    | ReplicaDraining
    | RoleChanged
    | LoadReported
    | CacheChanged
    | LinksReported
    | SideChannelChecked
    | QuotasAllocated
    | ColdStartReported
    | TimerFired
)
