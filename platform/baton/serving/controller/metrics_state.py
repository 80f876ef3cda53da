"""Puts together what a controller measures, from the parts of it that know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric as Family

import baton
from baton.config.derive.options import devices_of, price_per_hour, slo_book
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.observer import Observer
from baton.runtime.ports import Clock
from baton.serving.scaling.loop import ScalingLoop
from baton.serving.scaling.ports import Looks
from baton.serving.scaling.reports import Lately, lately
from baton.telemetry.metrics.controller import (
    ClassFare,
    ControllerState,
    PoolSize,
    controller_families,
)
from baton.telemetry.metrics.usage_meter import UsageMeter


class Hearing:
    """Notes when ingresses were heard last. A `ReportReader`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all_heard_at_s = clock.now_s()
        self.silent = 0
        """Ingresses that did not report in the last turn."""

    @property
    def age_s(self) -> float:
        """Since every ingress reported, and there was one; until then, since the beginning."""
        return self._clock.now_s() - self._all_heard_at_s

    async def take(self, looks: Looks) -> None:
        """Note who reported in a turn."""
        self.silent = looks.silent
        if looks.reports and not looks.silent:
            self._all_heard_at_s = self._clock.now_s()


class Measured:
    """What one controller measures."""

    def __init__(
        self,
        config: DeploymentConfig,
        *,
        loop: ScalingLoop,
        observer: Observer,
        hearing: Hearing,
        clock: Clock,
    ) -> None:
        self._config = config
        self._loop = loop
        self._observer = observer
        self._hearing = hearing
        self._clock = clock
        self._usage = UsageMeter()

    def reconfigure(self, config: DeploymentConfig) -> None:
        """Go on by other prices, bounds and classes."""
        self._take_usage()  # what was used until now has its price
        self._config = config

    def state(self, *, generation: int = 0, refused_configs: int = 0) -> ControllerState:
        """What is known now."""
        ticks = self._loop.history()
        return ControllerState(
            version=baton.__version__,
            model=self._config.model_name,
            generation=generation,
            refused_configs=refused_configs,
            pools=tuple(self._pools()),
            seen=self._loop.last_seen,
            tick=ticks[-1] if ticks else None,
            counters=self._loop.counters,
            overridden_pools=len(self._loop.overrides()),
            report_age_s=self._hearing.age_s,
            silent_ingresses=self._hearing.silent,
            classes=tuple(self._classes()),
        )

    def families(self, *, generation: int, refused_configs: int) -> Iterable[Family]:
        """Every metric, as it is now."""
        self._take_usage()
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
                want=None if state is None else state.target,
                running=None if state is None else state.running,
                starting=None if state is None else state.starting,
                stopping=None if state is None else state.stopping,
                price_per_hour=None if price is None else price * devices_of(pool),
            )

    def _classes(self) -> Iterable[ClassFare]:
        recent, now_s = lately(self._observer), self._clock.now_s()
        for name, slo in sorted(slo_book(self._config).classes.items()):
            now = recent.get(name, Lately())
            yield ClassFare(
                slo=slo,
                lately=now.counts,
                over_window=self._observer.ledgers.attained(slo, now_s),
            )

    def _take_usage(self) -> None:
        ledgers = self._observer.ledgers
        self._usage.take(ledgers.spent(), ledgers.pools(), prices(self._config))


def prices(config: DeploymentConfig) -> Mapping[str, float]:
    """Of a device, per hour, by pool; pools without a price are not among them."""
    found = {name: price_per_hour(pool) for name, pool in config.pools.items()}
    return {name: price for name, price in found.items() if price is not None}
