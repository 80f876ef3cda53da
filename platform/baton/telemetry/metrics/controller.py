"""Metrics of a controller: pools, demand, scaling, SLOs and itself.

Its counters begin at zero with each controller; Prometheus handles the reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric as Family

from baton.control.accounting.class_counts import ClassCounts
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.actions import AutoscalerTick
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import (
    DESIRED,
    Objective,
    PoolBound,
    PoolCount,
    ScalingAction,
    TokenKind,
    Window,
)
from baton.telemetry.families import Families
from baton.telemetry.metrics.scaling_counters import ScalingCounters
from baton.telemetry.metrics.usage_meter import UsageMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """A pool as configured and as deployed; None: not known yet."""

    name: str
    min: int
    max: int
    desired: int | None = None
    running: int | None = None
    starting: int | None = None
    stopping: int | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """The attainment of one class."""

    slo: Slo
    recent: ClassCounts = field(default_factory=ClassCounts)
    over_window: ClassCounts = field(default_factory=ClassCounts)

    @property
    def error_budget_fraction(self) -> float | None:
        """The share left of the misses that the target allows; None where it allows none."""
        counts = self.over_window
        misses = counts.evaluated - counts.good
        allowed = (1 - self.slo.attainment_target) * counts.evaluated
        if misses <= 0:
            return 1.0
        return 1 - misses / allowed if allowed > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """All exported state, at one moment."""

    version: str
    model: str
    generation: int
    rejected_configs: int = 0
    pools: tuple[PoolSize, ...] = ()
    observation: Observation | None = None
    tick: AutoscalerTick | None = None
    counters: ScalingCounters = field(default_factory=ScalingCounters)
    overridden_pools: int = 0
    report_age_s: float | None = None
    unresponsive_ingresses: int = 0
    classes: tuple[ClassStatus, ...] = ()


def controller_families(state: ControllerState, usage: UsageMeter) -> Iterator[Family]:
    """Every metric of a controller."""
    families = Families()
    _add_pools(families, state)
    _add_demand(families, state.observation)
    _add_scaling(families, state)
    _add_slos(families, state.classes)
    usage.add_to(families)
    families.add(c.CONFIG_GENERATION, state.generation)
    families.add(c.CONFIG_REJECTED, state.rejected_configs)
    families.add(c.BUILD_INFO, 1, state.version, state.model)
    return families.collect()


def _add_pools(families: Families, state: ControllerState) -> None:
    observed_pools: Mapping[str, PoolObservation] = (
        {} if state.observation is None else state.observation.pools
    )
    for size in state.pools:
        pool = observed_pools.get(size.name)
        for count, replicas in _pool_counts(size, pool).items():
            families.add(c.POOL_REPLICAS, replicas, size.name, count)
        families.add(c.POOL_BOUNDS, size.min, size.name, PoolBound.MIN)
        families.add(c.POOL_BOUNDS, size.max, size.name, PoolBound.MAX)
        families.add(c.POOL_PRICE, size.price_per_hour, size.name)
        if pool is not None:
            _add_pool(families, pool)


def _pool_counts(size: PoolSize, pool: PoolObservation | None) -> dict[PoolCount, int | None]:
    """Replicas as ingresses see them; without an observation, as deployed."""
    return {
        PoolCount.DESIRED: size.desired,
        PoolCount.READY: size.running if pool is None else pool.ready_replicas,
        PoolCount.STARTING: size.starting if pool is None else pool.starting,
        PoolCount.DRAINING: size.stopping if pool is None else pool.draining,
    }


def _add_pool(families: Families, pool: PoolObservation) -> None:
    roles = {Role.PREFILL: pool.prefill, Role.DECODE: pool.decode, Role.MIXED: pool.mixed}
    for role, replicas in roles.items():
        families.add(c.POOL_ROLES, replicas, pool.name, role)
    families.add(c.POOL_BUSY, pool.utilization_fraction, pool.name)
    families.add(c.POOL_COLD_START, pool.cold_start_s, pool.name)
    families.add(c.POOL_CAPACITY, pool.prefill_tokens_per_s, pool.name, TokenKind.PROMPT)
    families.add(c.POOL_CAPACITY, pool.decode_tokens_per_s, pool.name, TokenKind.OUTPUT)


def _add_demand(families: Families, observation: Observation | None) -> None:
    if observation is None:
        return
    demand = observation.demand
    families.add(c.DEMAND_REQUESTS, demand.requests_per_s)
    families.add(c.DEMAND_TOKENS, demand.prompt_tokens_per_s, TokenKind.PROMPT)
    families.add(c.DEMAND_TOKENS, demand.output_tokens_per_s, TokenKind.OUTPUT)


def _add_scaling(families: Families, state: ControllerState) -> None:
    tick, counters = state.tick, state.counters
    families.add(c.AUTOSCALER_PAUSED, bool(tick is None or tick.paused_reason))
    for decision in () if tick is None else tick.decisions:
        for name, value in {**decision.inputs, DESIRED: decision.desired_replicas}.items():
            families.add(c.SCALING_INPUT, value, decision.pool, name)
    for (pool, reason), ticks in counters.decisions.items():
        families.add(c.SCALING_DECISIONS, ticks, pool, reason)
    # An increase is visible only after a first value of 0.
    zeros = {(size.name, action): 0 for size in state.pools for action in ScalingAction}
    for (pool, action), replicas in (zeros | counters.actions).items():
        families.add(c.SCALING_ACTIONS, replicas, pool, action)
    for outcome, ticks_ended in counters.by_outcome().items():
        families.add(c.AUTOSCALER_TICKS, ticks_ended, outcome)
    families.add(c.POOL_OVERRIDES, state.overridden_pools)
    families.add(c.REPORT_AGE, state.report_age_s)
    families.add(c.UNRESPONSIVE_INGRESSES, state.unresponsive_ingresses)


def _add_slos(families: Families, classes: Iterable[ClassStatus]) -> None:
    for status in classes:
        slo, name = status.slo, status.slo.name
        families.add(c.SLO_TARGET, slo.attainment_target, name)
        families.add(c.SLO_OBJECTIVE, slo.ttft_s, name, Objective.TTFT)
        families.add(c.SLO_OBJECTIVE, slo.tpot_s, name, Objective.TPOT)
        families.add(c.SLO_OBJECTIVE, slo.itl_p99_s, name, Objective.ITL)
        families.add(c.SLO_ATTAINMENT, status.recent.attainment, name, Window.RECENT)
        families.add(c.SLO_ATTAINMENT, status.over_window.attainment, name, Window.TARGET)
        families.add(c.SLO_BUDGET, status.error_budget_fraction, name)
