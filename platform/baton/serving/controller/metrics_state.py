"""Puts together what a controller measures, from the parts of it that know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric as Family

import baton
from baton.config.derive.options import devices_per_replica, price_per_hour, slo_classes
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.observer import Observer
from baton.runtime.ports import Clock
from baton.serving.scaling.loop import ScalingLoop
from baton.serving.scaling.ports import TickInputs
from baton.serving.scaling.reports import RecentClassStats, recent_class_stats
from baton.telemetry.metrics.controller import (
    ClassStatus,
    ControllerState,
    PoolSize,
    controller_families,
)
from baton.telemetry.metrics.usage_meter import UsageMeter


class ReportAges:
    """Notes when ingresses were heard last. A `TickListener`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all_reported_at_s = clock.now_s()
        self.unresponsive = 0
        """Ingresses that did not report in the last turn."""

    @property
    def age_s(self) -> float:
        """Since every ingress reported, and there was one; until then, since the beginning."""
        return self._clock.now_s() - self._all_reported_at_s

    async def on_tick(self, inputs: TickInputs) -> None:
        """Note who reported in a turn."""
        self.unresponsive = inputs.unresponsive_ingresses
        if inputs.reports and not inputs.unresponsive_ingresses:
            self._all_reported_at_s = self._clock.now_s()


class ControllerMetrics:
    """What one controller measures."""

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        loop: ScalingLoop,
        observer: Observer,
        report_ages: ReportAges,
        clock: Clock,
    ) -> None:
        self._config = config
        self._loop = loop
        self._observer = observer
        self._report_ages = report_ages
        self._clock = clock
        self._usage = UsageMeter()

    def reconfigure(self, config: DeploymentConfig) -> None:
        """Go on by other prices, bounds and classes."""
        self._ingest_usage()  # what was used until now has its price
        self._config = config

    def state(self, *, generation: int = 0, refused_configs: int = 0) -> ControllerState:
        """What is known now."""
        ticks = self._loop.history()
        return ControllerState(
            version=baton.__version__,
            model=self._config.model_name,
            generation=generation,
            rejected_configs=refused_configs,
            pools=tuple(self._pools()),
            observation=self._loop.last_observation,
            tick=ticks[-1] if ticks else None,
            counters=self._loop.counters,
            overridden_pools=len(self._loop.overrides()),
            report_age_s=self._report_ages.age_s,
            unresponsive_ingresses=self._report_ages.unresponsive,
            classes=tuple(self._classes()),
        )

    def families(self, *, generation: int, refused_configs: int) -> Iterable[Family]:
        """Every metric, as it is now."""
        self._ingest_usage()
        state = self.state(generation=generation, refused_configs=refused_configs)
        return controller_families(state, self._usage)

    def _pools(self) -> Iterable[PoolSize]:
        states = self._loop.states
        for name, pool in self._config.pools.items():
            state, price = states.get(name), price_per_hour(pool)
            yield PoolSize(
                name=name,
                min=pool.replicas.min,
                max=pool.replicas.max,
                desired=None if state is None else state.target,
                running=None if state is None else state.running,
                starting=None if state is None else state.starting,
                stopping=None if state is None else state.stopping,
                price_per_hour=None if price is None else price * devices_per_replica(pool),
            )

    def _classes(self) -> Iterable[ClassStatus]:
        recent, now_s = recent_class_stats(self._observer), self._clock.now_s()
        for name, slo in sorted(slo_classes(self._config).classes.items()):
            current = recent.get(name, RecentClassStats())
            yield ClassStatus(
                slo=slo,
                recent=current.counts,
                over_window=self._observer.cluster_totals.counts_in_window(slo, now_s),
            )

    def _ingest_usage(self) -> None:
        totals = self._observer.cluster_totals
        self._usage.ingest(totals.gpu_usage(), totals.pools(), prices(self._config))


def prices(config: DeploymentConfig) -> Mapping[str, float]:
    """Of a device, per hour, by pool; pools without a price are not among them."""
    by_pool = {name: price_per_hour(pool) for name, pool in config.pools.items()}
    return {name: price for name, price in by_pool.items() if price is not None}
