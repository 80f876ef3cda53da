"""Orders to the world, in the imperative; a body (live or simulated) carries them out."""

from __future__ import annotations

from enum import StrEnum

from baton.domain.errors import BatonError
from baton.domain.handoff import CacheUse, Lease, Leg, PlacementDecision, Route
from baton.domain.leg_record import LegRecord
from baton.domain.names.trace_context import TraceContext
from baton.domain.request import FinishReason, Phase
from baton.domain.slo import ALL_MET, NO_SLO, Slo, SloResult
from baton.domain.tenant import DEFAULT_TENANT
from baton.domain.value import Value


class SubmitLeg(Value, kw_only=True):
    """Start a leg on a replica. If it cannot be sent, the body answers with `LegFailed`."""

    replica_id: str
    leg: Leg


class AbortLegs(Value, kw_only=True):
    """Stop legs on a replica and free what they hold; answered by `LegsAborted`."""

    replica_id: str
    leg_ids: tuple[str, ...]


class ReleaseLease(Value, kw_only=True):
    """Free the blocks a prefill replica keeps for a leg that no replica will pull any more.

    `via_replica_id` is the replica to tell: engines release a KV handle from the pulling side.
    """

    lease: Lease
    via_replica_id: str


class SyncCache(Value, kw_only=True):
    """Ask a replica for a snapshot of its prefix cache; it comes as a `CacheChanged`."""

    replica_id: str


class CheckSideChannel(Value, kw_only=True):
    """Have a replica ask another's side channel, as before a pull; see `SideChannelChecked`."""

    replica_id: str
    source_id: str
    address: str


class ReportFailedAgent(Value, kw_only=True):
    """Ask for the replacement of a replica that can pull from no source, though others can."""

    replica_id: str
    reason: str


class Delivery(Value, kw_only=False):
    """Tokens for one client stream."""

    request_id: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    """Prompt tokens of the request that no replica had to compute. Comes with the first tokens."""
    engine_payload: bytes | None = None
    cache_use: CacheUse | None = None
    """Comes with `cached_tokens`."""


class Deliver(Value, kw_only=True):
    """Hand tokens to the frontend: all of one engine step at once."""

    deliveries: tuple[Delivery, ...]


class FailRequest(Value, kw_only=True, gc=True):
    """Tell the frontend that a request ends without finishing."""

    request_id: str
    error: BatonError


class RequestRecord(Value, kw_only=True):
    """The record of one ended request: the source of `baton explain` and of the metrics."""

    request_id: str
    outcome: Phase
    reason: str
    routes: tuple[Route, ...]
    """In order; more than one when the request was placed again."""
    decisions: tuple[PlacementDecision, ...]
    """One for each route, as predicted when it was placed; the route may have changed since (the
    decode replica is chosen again at the handoff)."""
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    resumes: int
    resume_reasons: tuple[str, ...] = ()
    """Why it was placed again, in order; one for each resume."""
    arrived_at_s: float
    first_token_at_s: float | None
    last_token_at_s: float | None
    ended_at_s: float
    prefill_done_at_s: float | None
    """When the KV handle arrived; None for LOCAL."""
    handed_off_blocks: int
    model: str = ""
    """Empty, as the pool is: it was never placed."""
    pool: str = ""
    """Where it decoded, or was to decode."""
    tenant: str = DEFAULT_TENANT
    slo: Slo = NO_SLO
    """The objectives of its class."""
    slo_result: SloResult = ALL_MET
    is_client_error: bool = False
    """Rejected for its tenant's or client's own fault: neither good nor a miss."""
    max_itl_s: float = 0.0
    """The longest time between two of its tokens."""
    itl_violations: int = 0
    """Those that were longer than its class's `itl_p99_s`."""
    queue_wait_s: float = 0.0
    """How long it was held here before it was placed for the first time."""
    gpu_s: float = 0.0
    """GPU-seconds that it took, predicted from its computed tokens."""
    legs: tuple[LegRecord, ...] = ()
    """In the order in which they began; one ends before the next begins."""
    trace: TraceContext | None = None
    """The trace that it belongs to, where its caller sent one or requests are traced here."""


class RecordSelection(StrEnum):
    """Which of the recently ended requests to list."""

    LATEST = "latest"
    SLOWEST = "slowest"
    """By time to first token, as a multiple of its objective if it has one."""
    MISSED = "missed"
    """The latest of those that missed an objective, and no others."""


class StoreRequestRecord(Value, kw_only=True):
    """Keep the record of an ended request. Issued exactly once for each request."""

    record: RequestRecord


Command = (
    SubmitLeg
    | AbortLegs
    | ReleaseLease
    | SyncCache
    | CheckSideChannel
    | ReportFailedAgent
    | Deliver
    | FailRequest
    | StoreRequestRecord
)
