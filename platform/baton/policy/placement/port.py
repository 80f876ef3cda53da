"""Placement: whether a request is disaggregated, and which replicas run its phases.

The port of every placement policy: inputs and answers. Policies are in `predicted` (baton's own),
`simple` and the user's modules; `chooser` adapts the latter two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from baton.domain.fleet import FleetView, ReplicaView
from baton.domain.handoff import PlacementDecision
from baton.domain.request import LocalOnlyReason
from baton.domain.slo import Slo
from baton.domain.value import Value
from baton.perf.timing import EngineTiming
from baton.policy.prefix_cache.hits import NO_HITS, Hits
from baton.policy.prefix_cache.replication import NO_CREDITS, ReplicationCredits


class Disaggregate(StrEnum):
    """Whether prefill and decode may be split over two replicas."""

    AUTO = "auto"
    """Where it is predicted to serve the request better."""
    ALWAYS = "always"
    NEVER = "never"


class NoRouteReason(StrEnum):
    """Why no replica can take a request now."""

    NO_REPLICA = "no_replica"
    ALL_DRAINING = "all_draining"


class NoRoute(Value, kw_only=True):
    """Placement found no replica; the request waits or is rejected."""

    reason: NoRouteReason


def no_route(fleet: FleetView) -> NoRoute:
    """Say why no replica of this fleet can take a request."""
    has_replicas = bool(fleet.replicas)
    return NoRoute(reason=NoRouteReason.ALL_DRAINING if has_replicas else NoRouteReason.NO_REPLICA)


class PlacementQuery(Value, kw_only=True):
    """The properties of a request that placement needs."""

    prompt_tokens: int
    max_tokens: int = 1
    """How many tokens it may still generate."""
    local_only: LocalOnlyReason | None = None
    avoid: frozenset[str] = frozenset()
    """Replicas on which this request failed before: never for prefill, for decode only if no
    other is left."""
    adapter: str | None = None
    """The adapter that it needs, which may have to be loaded first."""
    hits: Hits = NO_HITS
    session_replica_id: str | None = None
    """Where the last request of the same session was decoded: a hint among equals."""
    reuses_per_token: float = 0.0
    """How often a token that is cached is used again before it goes, on average over the fleet."""
    replication_credits: ReplicationCredits = NO_CREDITS
    """Recent losses because too few replicas hold its prefix."""
    allow_early_token: bool = False
    """Whether a replica that only prefills it gives it its first token."""
    waited_s: float = 0.0
    """Since the request arrived: its deadline is that much nearer."""
    slo: Slo | None = None
    """Its objectives; None: those that the placer was made with."""
    is_decode_saturated: bool = False
    """Streams that decode, and prompts that are on their way there, are as many as keep their pace:
    it stays where it is prefilled, if that keeps its own."""


class LinkEstimates(Protocol):
    """Estimates of the links that KV blocks can take."""

    def transfer_s(self, source_id: str, target_id: str, moved_bytes: int) -> float | None:
        """Until these bytes are moved, beside the flows in flight; None: do not use this pair."""
        ...


class TimingEstimates(Protocol):
    """Estimates of engines' times."""

    def of(self, view: ReplicaView) -> EngineTiming:
        """How long this replica takes."""
        ...

    def prefill_time_fraction(self, view: ReplicaView, now_s: float) -> float:
        """The share of its time that this replica spends on prompts, while streams wait for it."""
        ...

    def stream_context(self, view: ReplicaView) -> float | None:
        """How many tokens each stream on this replica attends to; None: not reported."""
        ...

    def expected_output_tokens(self, max_tokens: int) -> float:
        """How many tokens a request that may generate `max_tokens` will generate, on average."""
        ...


class CacheCapacity(Protocol):
    """Estimates of how full KV caches are."""

    def free_blocks(self, replica_id: str) -> int:
        """Blocks that nothing is known to be stored in."""
        ...


class _FullCache:
    def free_blocks(self, replica_id: str) -> int:
        return 0


FULL_CACHE: CacheCapacity = _FullCache()
"""Every cache is full: a stored block evicts another."""


class PlacementContext(Value, kw_only=True):
    """The inputs of placement beyond the request."""

    fleet: FleetView
    timings: TimingEstimates
    links: LinkEstimates
    cache_capacity: CacheCapacity = FULL_CACHE
    prefills_done_at_s: Mapping[str, float]
    """By replica: when the prompts that this coordinator has sent there will be computed, for all
    that is known."""


class Placer(Protocol):
    """A placement policy. It may keep a seeded random generator or a counter, and nothing else."""

    def place(
        self, query: PlacementQuery, context: PlacementContext
    ) -> PlacementDecision | NoRoute:
        """Choose the replicas for a request."""
        ...

    def place_decode(
        self, query: PlacementQuery, source: ReplicaView, context: PlacementContext
    ) -> str | None:
        """Choose the decode replica of a prompt that `source` has prefilled, or None."""
        ...


def choose_releaser(source: ReplicaView, fleet: FleetView) -> str | None:
    """Choose the replica that tells `source` to free a KV handle's blocks; None without candidates.

    Engines free a KV handle when the pulling side says so, hence any other replica of the same
    layout will do. A draining replica still can, and so may an unhealthy replica.
    """
    candidates = [
        view
        for view in fleet.replicas.values()
        if view.replica_id != source.replica_id and view.facts.layout == source.facts.layout
    ]
    eligible = [view for view in candidates if view.is_eligible]
    return least_loaded(eligible or candidates).replica_id if candidates else None


def least_loaded(views: Iterable[ReplicaView]) -> ReplicaView:
    """The view with the least work; ties go to the smallest id."""
    return min(views, key=load_key)


def load_key(view: ReplicaView) -> tuple[int, int, str]:
    """The meaning of least loaded: fewest requests, then fewest tokens to compute, then by id."""
    # Reports and later legs; or the known legs, where reports are missing.
    reported = view.load.running_requests + view.load.queued_requests
    return (
        max(view.inflight_legs, reported + view.unreported_legs),
        max(view.inflight_tokens, view.load.queued_tokens + view.unreported_tokens),
        view.replica_id,
    )
