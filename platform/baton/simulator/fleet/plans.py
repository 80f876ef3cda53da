"""The plan of a simulation: pools, placement, limits and scheduled events."""

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
from baton.simulator.fleet.engines import EngineSettings
from baton.simulator.fleet.replica import MAX_STEP_RUN_S, ReportingOptions
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
"""No request ends because it is slow: an undersized fleet shows in its latencies, not in rejected
or moved requests. Only a request without any usable replica fails, after an hour."""

_REPORTS_PER_S = 400.0
_REPORTS_PER_S_TO_ONE = 100.0
"""To a coordinator without others. With 60 to 1,000 replicas, mean TTFT differs by up to 0.5 % from
four reports a second each, less than between seeds (S)."""
_REPORT_INTERVAL_S = 0.25
_UNREPORTED_CACHE_INTERVAL_S = 10.0
"""How long unreported cache changes are collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Replicas of one role and shape, named `<name>-0` and so on."""

    name: str
    role: Role
    replicas: int
    settings: EngineSettings
    cold_start_s: float | None = None
    """From the request for a replica until it serves; None for the engine's loading time."""
    gpus_per_replica: float = 1.0

    @property
    def effective_cold_start_s(self) -> float:
        """From the request for a replica until it serves."""
        if self.cold_start_s is not None:
            return self.cold_start_s
        return self.settings.weights_load_s if isinstance(self.settings, V1Settings) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet, its policies, and scheduled events."""

    pools: tuple[PoolPlan, ...]
    placer: Callable[[], Placer]
    """Makes the placer of each coordinator."""
    coordinators: int = 1
    """Number of ingress replicas; requests go to them in turn."""
    index: IndexOptions | None = None
    """None: the coordinator's default, without an index for a trace without shared blocks."""
    limits: CoordinatorLimits = UNBOUNDED_LIMITS
    rules: ServiceRules = field(default_factory=ServiceRules)
    seed: int = 0
    latency_s: float = 0.000_2
    """Mean one-way latency between coordinator and replica."""
    reporting: ReportingOptions | None = None
    """None for `throttled_reporting`."""
    priors: Mapping[str, EngineTiming] | None = None
    """Timing that coordinators assume before they have measurements, by pool. None: the engines'
    own timing where it is a model; empty: no priors."""
    scheduled_events: tuple[ScheduledEvent, ...] = ()
    autoscaler: Callable[[], Scaler] | None = None
    """Makes the autoscaler of each run; None: pools change only by scheduled events."""
    scaling_interval_s: float = 2.0
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
        for event in self.scheduled_events:
            self._check_event(event)

    def _check_event(self, event: ScheduledEvent) -> None:
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
        """Ids of the initial replicas and of those that scheduled events start."""
        replica_counts = {pool.name: pool.replicas for pool in self.pools}
        for event in self.scheduled_events:
            if isinstance(event, Start) and event.pool in replica_counts:
                replica_counts[event.pool] += event.replicas
        return tuple(
            f"{pool}-{number}"
            for pool, replicas in replica_counts.items()
            for number in range(replicas)
        )


def throttled_reporting(
    replicas: int, coordinators: int, *, prompts_shared: bool = True
) -> ReportingOptions:
    """Four reports a second per replica, as on the live link, but limited in all.

    To several coordinators, replicas send at most 400 a second: with four, 1,000 replicas report
    every 10 s. One coordinator knows all requests without a report, and gets at most 100 a second.
    Replicas without a change send nothing. Unless `prompts_shared`, they send no cache updates: no
    request could use them. Tokens may be as late as a report.
    """
    reports_per_s = _REPORTS_PER_S if coordinators > 1 else _REPORTS_PER_S_TO_ONE
    report_interval_s = max(_REPORT_INTERVAL_S, replicas * coordinators / reports_per_s)
    max_step_run_s = max(MAX_STEP_RUN_S, report_interval_s)
    reporting = ReportingOptions(
        report_interval_s=report_interval_s,
        report_unchanged=False,
        max_step_run_s=max_step_run_s,
    )
    if prompts_shared:
        return reporting
    return replace(
        reporting, report_cache=False, cache_flush_interval_s=_UNREPORTED_CACHE_INTERVAL_S
    )


def limits_for(reporting: ReportingOptions, limits: CoordinatorLimits) -> CoordinatorLimits:
    """The limits, without a heartbeat timeout where replicas report less often than live."""
    if reporting.report_unchanged and reporting.report_interval_s <= _REPORT_INTERVAL_S:
        return limits
    return replace(limits, recovery=replace(limits.recovery, heartbeat_timeout_s=float("inf")))


def timing_priors(scenario: Scenario) -> Mapping[str, EngineTiming]:
    """Timing that coordinators assume of each pool before they have measurements.

    Pools of equal engines have one timing.
    """
    if scenario.priors is not None:
        return scenario.priors
    priors: dict[str, ModelledTiming] = {}
    for pool in scenario.pools:
        if isinstance(pool.settings, V1Settings):
            settings = pool.settings
            timing = ModelledTiming(
                steps=settings.timing,
                max_batched_tokens=settings.max_batched_tokens,
                max_batched_tokens_while_decoding=settings.max_batched_tokens_while_decoding,
                host_block_s=0.0,
            )
            priors[pool.name] = next(
                (known for known in priors.values() if known == timing), timing
            )
    return priors
