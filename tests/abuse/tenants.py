"""More tenants than anybody has, all of whom are refused, and what an ingress' metrics say then."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from baton.domain.errors import QueueFull
from baton.domain.events import RequestsRefused
from baton.telemetry import catalogue
from tests.telemetry.test_ingress_families import Told, world_of_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What came of it."""

    series: int
    bound: int
    requests: int
    scrape_bytes: int


def crowded(tenants: int) -> Crowd:
    """One refused request of each of so many configured tenants."""
    names = [f"tenant-{number}" for number in range(tenants)]
    world = world_of_tenants(*names)
    told = Told(world, names)
    full = QueueFull("-", 1.0, "full")
    for name in names:
        world.machine.handle(RequestsRefused(error=full, requests=1, tenant=name), world.now_s)
    series = told(catalogue.SLO_REQUESTS)
    registry = CollectorRegistry()
    registry.register(told.collector)
    return Crowd(
        series=len(series),
        bound=catalogue.MOST_VALUES + 1,
        requests=int(sum(series.values())),
        scrape_bytes=len(generate_latest(registry)),
    )
