"""A coordinator's report to the controller: demand, results of requests, and the state it sees.

Counts are totals since the coordinator started. So two reports give the difference between them,
even if reports between them were lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from baton.domain.errors import Cause
from baton.domain.fleet import Role


class Tally(NamedTuple):
    """Requests of one class, tenant, model and pool that have ended, and their tokens and time."""

    slo_class: str
    tenant: str
    model: str
    pool: str
    """Where it decoded, or would have; empty for requests that were never placed."""
    evaluated: int = 0
    """All ended requests, without excluded requests and client errors; divides attainment."""
    excluded: int = 0
    """Neither good nor a miss: the client left before anything was due, and had got nothing."""
    client_errors: int = 0
    """Refused for their own doing: over their tenant's limits, not allowed, too long."""
    good: int = 0
    """Those of the evaluated that met every objective."""
    ttft_met: int = 0
    tpot_met: int = 0
    itl_met: int = 0
    shed: int = 0
    """Of the evaluated, as are the next two."""
    evicted: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    """Of requests that were placed on replicas; rejected requests use none."""
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_s: float = 0.0
    """In whichever pools it was spent; see `GpuUsage`."""


class GpuUsage(NamedTuple):
    """Device-seconds of a pool and a tenant, predicted from computed tokens."""

    tenant: str
    pool: str
    gpu_s: float


class AdmissionOutcome(StrEnum):
    """The result of admission."""

    ADMITTED = "admitted"
    SHED = "shed"
    EVICTED = "evicted"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CLIENT_ERROR = "client_error"
    """Shed or failed for its own doing."""


class AdmissionPath(StrEnum):
    """How a request was admitted."""

    IMMEDIATE = "immediate"
    QUEUED = "queued"
    """After it had waited here."""


class AdmissionCount(NamedTuple):
    """Requests of one class with the same outcome of admission, for the same reason."""

    slo_class: str
    outcome: AdmissionOutcome
    reason: AdmissionPath | Cause
    requests: int


class DemandTotals(NamedTuple):
    """Demand on one coordinator, counted on arrival.

    Demand beyond tenants' limits is not included: no additional replica would serve it. While a
    request runs, its tokens are expectations; facts replace them later. So these totals are right
    in the end, and may decrease a little on the way.
    """

    requests: int = 0
    prompt_tokens: int = 0
    uncached_tokens: float = 0.0
    """As predicted when they arrived, or as engines reported."""
    output_tokens: float = 0.0
    """Generated, or expected of running requests; for rejected requests, the average."""


class LatencyTotals(NamedTuple):
    """Of requests that got a first token: for means, and by upper edge for quantiles."""

    requests: int = 0
    sum_s: float = 0.0
    buckets: tuple[int, ...] = ()
    """How many were at most each of `LATENCY_BUCKET_BOUNDS_S`; not cumulative.

    The last bucket holds the rest. Another version of baton may have more or fewer buckets whose
    edges begin alike.
    """


NO_LATENCIES = LatencyTotals()
NO_DEMAND = DemandTotals()

LATENCY_BUCKET_BOUNDS_S: tuple[float, ...] = tuple(0.001 * 1.25**step for step in range(83))
"""1 ms to 24.5 hours, each a quarter longer than the one before: the longest timeout that can be
configured is a day."""
MIN_LATENCY_BUCKETS = 65
"""Of a report: versions of baton that ended at 21 minutes sent as many."""


class PoolReport(NamedTuple):
    """One pool, as one coordinator sees it now."""

    pool: str
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    draining: int = 0
    busy_s: float = 0.0
    """Time in engine steps, added up over its replicas: a total."""
    running_requests: float = 0.0
    queued_requests: float = 0.0
    queued_tokens: float = 0.0
    """Of all of its replicas together, as these are."""
    kv_used_fraction: float = 0.0
    """On average."""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_streams: float | None = None
    """See `policy.scaling.observation.PoolObservation`."""
    oldest_report_age_s: float = 0.0
    """Age of the oldest load report that counts."""
    roles: tuple[tuple[str, Role], ...] = ()
    """Its replicas and their roles."""


class ColdStart(NamedTuple):
    """The known facts of the start of a model's next replica, while the model has none."""

    can_start: bool = True
    """Whether one is started when a request waits for it."""
    duration_s: float = 60.0
    """From asking for a replica until it takes work."""
    is_measured: bool = False
    """Whether that was seen, rather than assumed."""
    remaining_s: float | None = None
    """Until the first of those that start is expected; None: none starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorReport:
    """Everything, at one moment."""

    coordinator_id: str
    at_s: float
    """By its own clock."""
    demand: DemandTotals = NO_DEMAND
    tallies: tuple[Tally, ...] = ()
    gpu_usage: tuple[GpuUsage, ...] = ()
    ttft: LatencyTotals = NO_LATENCIES
    tpot: LatencyTotals = NO_LATENCIES
    in_flight: int = 0
    queued: int = 0
    slack_s: float | None = None
    """See `policy.scaling.observation.Service`."""
    pools: tuple[PoolReport, ...] = ()
    queued_gpu_s: float = 0.0
    """GPU-seconds that wait here."""
    requested_rates: tuple[tuple[str, float, float], ...] = field(default=())
    """By tenant with a rate limit: recently requested requests and tokens per second here; shares
    of its limits are divided by these."""

    @property
    def model(self) -> str:
        """Whose requests these are, where an ingress has several models; else empty.

        It is part of the id: reports travel between versions of baton as they are.
        """
        return self.coordinator_id.partition("/")[2]
