"""What a controller measures: pools, demand, scaling, promises and itself.

Whoever owns the controller's state puts it together (`ControllerState`) when it is asked for. Its
counters begin at zero with the controller, which may be started again at any time: Prometheus sees
that they went back, and adds up across it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric as Family

from baton.control.accounting.class_counts import ClassCounts
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.actions import Tick
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import Objective, TokenKind
from baton.telemetry.families import Families
from baton.telemetry.label_values import ASKED, PoolBound, PoolCount, ScalingAct, Window
from baton.telemetry.metrics.scaling_counters import ScalingCounters
from baton.telemetry.metrics.usage_meter import UsageMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """One pool, as it was configured and as it is deployed."""

    name: str
    min: int
    max: int
    want: int | None = None
    """None, as are the others: not known yet."""
    running: int | None = None
    starting: int | None = None
    stopping: int | None = None
    price_per_hour: float | None = None
    """Of a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFare:
    """How one class fares."""

    slo: Slo
    lately: ClassCounts = field(default_factory=ClassCounts)
    over_window: ClassCounts = field(default_factory=ClassCounts)
    """Over the time for which its target counts."""

    @property
    def budget(self) -> float | None:
        """What is left of the misses that the target allows; None where it allows none."""
        counts = self.over_window
        misses = counts.judged - counts.good
        allowed = (1 - self.slo.attainment_target) * counts.judged
        if misses <= 0:
            return 1.0
        return 1 - misses / allowed if allowed > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """Everything that is told, at one moment."""

    version: str
    model: str
    generation: int
    refused_configs: int = 0
    pools: tuple[PoolSize, ...] = ()
    seen: Observation | None = None
    """By the last turn of the scaling loop."""
    tick: Tick | None = None
    """The last one."""
    counters: ScalingCounters = field(default_factory=ScalingCounters)
    overridden_pools: int = 0
    report_age_s: float | None = None
    silent_ingresses: int = 0
    classes: tuple[ClassFare, ...] = ()


def controller_families(state: ControllerState, usage: UsageMeter) -> Iterator[Family]:
    """Every metric of a controller."""
    found = Families()
    _add_pools(found, state)
    _add_demand(found, state.seen)
    _add_scaling(found, state)
    _add_promises(found, state.classes)
    usage.add_to(found)
    found.add(c.CONFIG_GENERATION, state.generation)
    found.add(c.CONFIG_REFUSED, state.refused_configs)
    found.add(c.BUILD_INFO, 1, state.version, state.model)
    return found.collect()


def _add_pools(found: Families, state: ControllerState) -> None:
    seen: Mapping[str, PoolObservation] = {} if state.seen is None else state.seen.pools
    for size in state.pools:
        pool = seen.get(size.name)
        for count, replicas in _pool_counts(size, pool).items():
            found.add(c.POOL_REPLICAS, replicas, size.name, count)
        found.add(c.POOL_BOUNDS, size.min, size.name, PoolBound.MIN)
        found.add(c.POOL_BOUNDS, size.max, size.name, PoolBound.MAX)
        found.add(c.POOL_PRICE, size.price_per_hour, size.name)
        if pool is not None:
            _add_pool(found, pool)


def _pool_counts(size: PoolSize, pool: PoolObservation | None) -> dict[PoolCount, int | None]:
    """How many replicas there are: as ingresses see them, or where they do not, as deployed."""
    return {
        PoolCount.WANT: size.want,
        PoolCount.READY: size.running if pool is None else pool.ready,
        PoolCount.STARTING: size.starting if pool is None else pool.starting,
        PoolCount.DRAINING: size.stopping if pool is None else pool.draining,
    }


def _add_pool(found: Families, pool: PoolObservation) -> None:
    roles = {Role.PREFILL: pool.prefill, Role.DECODE: pool.decode, Role.MIXED: pool.mixed}
    for role, replicas in roles.items():
        found.add(c.POOL_ROLES, replicas, pool.name, role)
    found.add(c.POOL_BUSY, pool.busy_fraction, pool.name)
    found.add(c.POOL_COLD_START, pool.cold_start_s, pool.name)
    found.add(c.POOL_CAPACITY, pool.prefill_tokens_per_s, pool.name, TokenKind.PROMPT)
    found.add(c.POOL_CAPACITY, pool.decode_tokens_per_s, pool.name, TokenKind.OUTPUT)


def _add_demand(found: Families, seen: Observation | None) -> None:
    if seen is None:
        return
    demand = seen.demand
    found.add(c.DEMAND_REQUESTS, demand.requests_per_s)
    found.add(c.DEMAND_TOKENS, demand.prompt_tokens_per_s, TokenKind.PROMPT)
    found.add(c.DEMAND_TOKENS, demand.output_tokens_per_s, TokenKind.OUTPUT)


def _add_scaling(found: Families, state: ControllerState) -> None:
    tick, counters = state.tick, state.counters
    found.add(c.SCALING_HELD, bool(tick is None or tick.held))
    for decision in () if tick is None else tick.decisions:
        for name, value in {**decision.inputs, ASKED: decision.asked}.items():
            found.add(c.SCALING_INPUT, value, decision.pool, name)
    for (pool, reason), ticks in counters.decisions.items():
        found.add(c.SCALING_DECISIONS, ticks, pool, reason)
    # From 0 on: an increase is seen only after a first value.
    none = {(size.name, act): 0 for size in state.pools for act in ScalingAct}
    for (pool, act), replicas in (none | counters.actions).items():
        found.add(c.SCALING_ACTIONS, replicas, pool, act)
    for outcome, turns in counters.by_outcome().items():
        found.add(c.SCALING_TURNS, turns, outcome)
    found.add(c.OVERRIDES, state.overridden_pools)
    found.add(c.REPORT_AGE, state.report_age_s)
    found.add(c.SILENT_INGRESSES, state.silent_ingresses)


def _add_promises(found: Families, classes: Iterable[ClassFare]) -> None:
    for fare in classes:
        slo, name = fare.slo, fare.slo.name
        found.add(c.SLO_TARGET, slo.attainment_target, name)
        found.add(c.SLO_OBJECTIVE, slo.ttft_s, name, Objective.TTFT)
        found.add(c.SLO_OBJECTIVE, slo.tpot_s, name, Objective.TPOT)
        found.add(c.SLO_OBJECTIVE, slo.itl_p99_s, name, Objective.ITL)
        found.add(c.SLO_ATTAINMENT, fare.lately.attainment, name, Window.LATELY)
        found.add(c.SLO_ATTAINMENT, fare.over_window.attainment, name, Window.TARGET)
        found.add(c.SLO_BUDGET, fare.budget, name)
