"""What is simulated: pools of replicas, who decides, and what is done to them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from baton.control.state.limits import CoordinatorLimits, RecoveryOptions
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.timing import EngineTiming
from baton.policy.placement.port import Placer
from baton.policy.prefix_cache.index import IndexOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions
from baton.simulator.faults import ScheduledEvent, SetBandwidth, Start, Stop
from baton.simulator.fleet.context import ReportingOptions
from baton.simulator.fleet.engines import EngineSettings
from baton.simulator.fleet.scaling_log import Scaler
from baton.simulator.v1.settings import V1Settings

_UNLIMITED_S = 1e6
UNBOUNDED_LIMITS = CoordinatorLimits(
    max_requests=10_000_000,
    max_queued_requests=10_000_000,
    queue_timeout_s=3600.0,
    resume_timeout_s=3600.0,
    first_token_timeout_s=_UNLIMITED_S,
    transfer_deadline_s=_UNLIMITED_S,
    stall_timeout_s=_UNLIMITED_S,
    total_timeout_s=_UNLIMITED_S,
    lease_s=_UNLIMITED_S,
    recovery=RecoveryOptions(
        heartbeat_timeout_s=float("inf"),
        retry_budget=RetryOptions(min_retries=10_000_000),
        hedging=HedgeOptions(latency_multiple=None),
    ),
)
"""Nothing ends because it is slow: a fleet that is too small shows in its latencies, and not in
requests that were refused, or taken away from a replica that would have served them. Only where
nobody can take a request at all, it is given up after an hour."""

_REPORTS_PER_S = 400.0
_REPORT_INTERVAL_S = 0.25
_UNREPORTED_CACHE_INTERVAL_S = 10.0
"""How long changes are gathered that nobody is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Replicas of one role and one shape, called `<name>-0` and so on."""

    name: str
    role: Role
    replicas: int
    settings: EngineSettings
    cold_start_s: float | None = None
    """From being asked for to serving; None: as long as the engine's weights take to load."""
    gpus_per_replica: float = 1.0

    @property
    def effective_cold_start_s(self) -> float:
        """From being asked for to serving."""
        if self.cold_start_s is not None:
            return self.cold_start_s
        return self.settings.weights_load_s if isinstance(self.settings, V1Settings) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet, who decides in it, and what is done to it."""

    pools: tuple[PoolPlan, ...]
    placer: Callable[[], Placer]
    """Makes one for each coordinator."""
    coordinators: int = 1
    """Ingress replicas; requests go to one after the other."""
    index: IndexOptions | None = None
    """None: the coordinator's own; or none at all for a trace whose prompts share nothing."""
    limits: CoordinatorLimits = UNBOUNDED_LIMITS
    rules: ServiceRules = field(default_factory=ServiceRules)
    """Classes, tenants and admission."""
    seed: int = 0
    latency_s: float = 0.000_2
    """One way between a coordinator and a replica."""
    reporting: ReportingOptions | None = None
    """None: as `throttled_reporting` says."""
    priors: Mapping[str, EngineTiming] | None = None
    """By pool: how long coordinators think that engines take, before they have seen them work.
    None: what the engines' own timing says, where it is a model; an empty one: nothing."""
    scheduled_events: tuple[ScheduledEvent, ...] = ()
    autoscaler: Callable[[], Scaler] | None = None
    """Makes one for each run; None: pools stay as they are, but for what happens to them."""
    scaling_interval_s: float = 2.0
    """Between two of its ticks."""
    model: str = "simulated"

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError(f"scenario: two pools have the same name: {', '.join(names)}")
        if self.coordinators < 1:
            raise ValueError(f"scenario: coordinators is {self.coordinators}, expected at least 1")
        if not self.scaling_interval_s > 0:
            raise ValueError(
                f"scenario: scaling_interval_s is {self.scaling_interval_s}, expected more than 0"
            )
        for pool in self.pools:
            if pool.replicas < 0:
                raise ValueError(f"scenario: pool {pool.name!r} has {pool.replicas} replicas")
        for happening in self.scheduled_events:
            self._check_event(happening)

    def _check_event(self, event: ScheduledEvent) -> None:
        """Refuse what names a pool or a replica that can never be."""
        if isinstance(event, Start | Stop):
            target, known = event.pool, {pool.name for pool in self.pools}
        else:
            target, known = event.replica_id, set(self.replica_ids())
        if target not in known:
            examples = ", ".join(sorted(known)[:8]) or "none"
            raise ValueError(f"scenario: nothing is called {target!r}, known are {examples}")
        if isinstance(event, SetBandwidth) and not event.bytes_per_s > 0:
            raise ValueError(
                f"scenario: {target}: bytes_per_s is {event.bytes_per_s}, expected more than 0"
            )

    def replica_ids(self) -> tuple[str, ...]:
        """Every replica that there is or will be."""
        replica_counts = {pool.name: pool.replicas for pool in self.pools}
        for happening in self.scheduled_events:
            if isinstance(happening, Start) and happening.pool in replica_counts:
                replica_counts[happening.pool] += happening.replicas
        return tuple(
            f"{pool}-{number}" for pool, all_ in replica_counts.items() for number in range(all_)
        )


def throttled_reporting(
    replicas: int, coordinators: int, *, prompts_shared: bool = True
) -> ReportingOptions:
    """Reports as the live link sends them, four a second, but no more than 400 a second in all.

    With one coordinator that is so for up to 100 replicas; 1,000 replicas report every 2.5 s. Who
    has nothing new to say is silent. What a coordinator has sent itself it knows without a report,
    so with one coordinator little is lost by this. Where no prompts are `prompts_shared`, nobody
    says what is cached: it would be of use to nobody.
    """
    report_interval_s = max(_REPORT_INTERVAL_S, replicas * coordinators / _REPORTS_PER_S)
    if prompts_shared:
        return ReportingOptions(report_interval_s=report_interval_s, report_unchanged=False)
    return ReportingOptions(
        report_interval_s=report_interval_s,
        report_unchanged=False,
        report_cache=False,
        cache_flush_interval_s=_UNREPORTED_CACHE_INTERVAL_S,
    )


def limits_for(reporting: ReportingOptions, limits: CoordinatorLimits) -> CoordinatorLimits:
    """The limits, but nobody is blamed for silence where replicas say less than live ones do."""
    if reporting.report_unchanged and reporting.report_interval_s <= _REPORT_INTERVAL_S:
        return limits
    return replace(limits, recovery=replace(limits.recovery, heartbeat_timeout_s=float("inf")))


def timing_priors(scenario: Scenario) -> Mapping[str, EngineTiming]:
    """What coordinators think of each pool's speed before they have seen it work."""
    if scenario.priors is not None:
        return scenario.priors
    return {
        pool.name: ModelledTiming(
            steps=pool.settings.timing,
            max_batched_tokens=pool.settings.max_batched_tokens,
            max_batched_tokens_while_decoding=pool.settings.max_batched_tokens_while_decoding,
            host_block_s=0.0,
        )
        for pool in scenario.pools
        if isinstance(pool.settings, V1Settings)
    }
