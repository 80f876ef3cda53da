"""More tenants than anybody has, all of whom are refused, and what an ingress' metrics say then."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from baton.domain.errors import QueueFull
from baton.domain.events import RequestsRejected
from baton.telemetry import catalogue
from tests.telemetry.test_ingress_families import ScrapedIngress, world_of_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesReport:
    """What came of it."""

    series: int
    bound: int
    requests: int
    scrape_bytes: int


def reject_tenants(tenants: int) -> SeriesReport:
    """One refused request of each of so many configured tenants."""
    names = [f"tenant-{number}" for number in range(tenants)]
    world = world_of_tenants(*names)
    collect = ScrapedIngress(world, names)
    error = QueueFull("-", 1.0, "full")
    for name in names:
        world.coordinator.handle(
            RequestsRejected(error=error, requests=1, tenant=name), world.now_s
        )
    series = collect(catalogue.SLO_REQUESTS)
    registry = CollectorRegistry()
    registry.register(collect.collector)
    return SeriesReport(
        series=len(series),
        bound=catalogue.MAX_LABEL_VALUES + 1,
        requests=int(sum(series.values())),
        scrape_bytes=len(generate_latest(registry)),
    )
