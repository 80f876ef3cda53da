"""Requests to a virtual fleet: open loop, at times that nothing changes, and closed loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from baton.domain.request import Request
from baton.domain.value import evolve
from baton.simulator.fleet.fleet import VirtualFleet


def poisson_times(
    rate_per_s: float, requests: int, rng: random.Random, *, start_s: float = 0.0
) -> Iterator[float]:
    """When requests arrive that come independently of each other."""
    at_s = start_s
    for _ in range(requests):
        at_s += rng.expovariate(rate_per_s)
        yield at_s


def open_loop(
    fleet: VirtualFleet,
    requests: Iterable[Request],
    times_s: Iterable[float],
    choose: Callable[[Request], int] = lambda _: 0,
) -> None:
    """Let requests arrive at these times, each at the ingress that `choose` says."""
    for request, at_s in zip(requests, times_s, strict=True):
        arrival = evolve(request, arrived_at_s=at_s)
        fleet.timeline.call_at(at_s, _sending(fleet, arrival, choose(request)))


def closed_loop(fleet: VirtualFleet, requests: Iterator[Request], *, clients: int) -> None:
    """Let `clients` clients send the next request when their last one has ended."""

    def send_next() -> None:
        request = next(requests, None)
        if request is not None:
            fleet.send(evolve(request, arrived_at_s=fleet.timeline.now_s))

    # A client sends from a moment of its own: an end may be reported in the midst of another event.
    fleet.add_end_listener(lambda _: fleet.timeline.call_later(0.0, send_next))
    for _ in range(clients):
        fleet.timeline.call_later(0.0, send_next)


def _sending(fleet: VirtualFleet, request: Request, ingress: int) -> Callable[[], None]:
    return lambda: fleet.send(request, ingress)
