"""About ten numbers in Ray's own metrics, for those who look at a cluster through Ray's dashboard.

Ray reports metrics every ten seconds, so these are set about as often, not with every turn of the
scaling loop. Everything else is at the controller's own endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.runtime.ports import Clock
from baton.serving.scaling_ports import Looks
from baton.telemetry.controller_metrics import ControllerState, pool_counts
from baton.telemetry.label_values import PoolCount

_EVERY_S = 10.0
_POOL, _CLASS = "pool", "slo_class"


class Gauge(Protocol):
    """The part of Ray's gauge that is used."""

    def set(self, value: float, tags: dict[str, str]) -> object:
        """Say a value."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """One gauge."""

    name: str
    help: str
    tag: str | None = None


READY = Mirrored(name="baton_pool_ready", help="Replicas that take work.", tag=_POOL)
WANT = Mirrored(name="baton_pool_want", help="Replicas that there are to be.", tag=_POOL)
KV_USED = Mirrored(name="baton_pool_kv_used_fraction", help="Of the KV cache.", tag=_POOL)
BUSY = Mirrored(name="baton_pool_busy_fraction", help="Time in engine steps.", tag=_POOL)
GOODPUT = Mirrored(name="baton_goodput_per_second", help="Requests that met their SLO.", tag=_CLASS)
ATTAINMENT = Mirrored(name="baton_attainment_fraction", help="Share of them, lately.", tag=_CLASS)
DEMAND = Mirrored(name="baton_demand_per_second", help="Requests that are asked for.")
IN_FLIGHT = Mirrored(name="baton_in_flight_requests", help="Requests under way.")
HELD = Mirrored(name="baton_held_requests", help="Requests that wait at an ingress.")
SCALING_HELD = Mirrored(name="baton_scaling_held", help="1 while the autoscaler holds still.")
MIRRORED = (
    READY, WANT, KV_USED, BUSY, GOODPUT, ATTAINMENT, DEMAND, IN_FLIGHT, HELD, SCALING_HELD,
)  # fmt: skip


def ray_gauge(one: Mirrored) -> Gauge:
    """A gauge of Ray's."""
    from ray.util import metrics

    tags = () if one.tag is None else (one.tag,)
    gauge: Gauge = metrics.Gauge(one.name, description=one.help, tag_keys=tags)
    return gauge


class RayGauges:
    """Mirrors a controller's state once in a while. A `ReportReader`."""

    def __init__(
        self,
        state: Callable[[], ControllerState],
        *,
        clock: Clock,
        make: Callable[[Mirrored], Gauge] = ray_gauge,
    ) -> None:
        self._state = state
        self._clock = clock
        self._make = make
        self._gauges: Mapping[Mirrored, Gauge] | None = None
        self._told: set[tuple[Mirrored, str]] = set()
        self._due_at_s = -math.inf

    async def take(self, _looks: Looks) -> None:
        """Mirror what is known, if it is time."""
        now_s = self._clock.now_s()
        if now_s < self._due_at_s:
            return
        self._due_at_s = now_s + _EVERY_S
        if self._gauges is None:
            self._gauges = {one: self._make(one) for one in MIRRORED}
        values = {(one, of): value for one, of, value in mirrored(self._state())}
        # Ray repeats what it was told last: what is not known any more has to be taken back.
        for gone in self._told - values.keys():
            values[gone] = math.nan
        for (one, of), value in values.items():
            self._gauges[one].set(value, {} if one.tag is None else {one.tag: of})
        self._told = {key for key, value in values.items() if math.isfinite(value)}


def mirrored(state: ControllerState) -> Iterator[tuple[Mirrored, str, float]]:
    """Each number with the pool or class that it is of; what is not known is left out."""
    for one, of, value in _all(state):
        if value is not None and math.isfinite(value):
            yield one, of, float(value)


def _all(state: ControllerState) -> Iterator[tuple[Mirrored, str, float | None]]:
    seen = state.seen
    for size in state.pools:
        pool = None if seen is None else seen.pools.get(size.name)
        counts = pool_counts(size, pool)
        yield WANT, size.name, counts[PoolCount.WANT]
        yield READY, size.name, counts[PoolCount.READY]
        if pool is not None:
            yield KV_USED, size.name, pool.kv_used_fraction if pool.ready else None
            yield BUSY, size.name, pool.busy_fraction
    for fare in state.classes:
        yield GOODPUT, fare.slo.name, fare.good_per_s
        yield ATTAINMENT, fare.slo.name, fare.lately.attainment
    if seen is not None:
        yield DEMAND, "", seen.demand.requests_per_s
        yield IN_FLIGHT, "", seen.service.in_flight
        yield HELD, "", seen.service.held
    yield SCALING_HELD, "", bool(state.tick is None or state.tick.held)
