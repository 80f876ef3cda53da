"""What metrics cost a data plane: CPU of ingress and replicas, with and without.

Two data planes run side by side, one with metrics and one without: an ingress, a prefill and a
decode replica with simulated engines. They get the same requests in turn, in changing order, while
the other one is idle; in each window every process with metrics is scraped as often as Prometheus
would. Twenty tenants send requests of three classes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path

import httpx
import uvloop

from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import edit_key_file
from benchmarks._data_processes import DataPlane
from benchmarks._load import Client, Exchange, GcDisabled, completion_body, poisson_arrivals
from benchmarks._program import say
from benchmarks._statistics import RepeatSpread

SCENARIO = "metrics"
REPLICAS = ("prefill-0", "decode-0")
TENANTS = 20
CLASSES = ("default", "code", "batch")
_WINDOWS = 6
_WINDOW_S = 15.0
"""Prometheus scrapes once in it."""
_STREAMS = 16
_TOKENS = 64
_WORDS = 200
_STEP_S = 0.008
_CONNECTIONS = 96
_IDLE_SCRAPES = 20
_ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class Tenants(Client):
    """A client that is another tenant, and names another class, with each request."""

    def __init__(self, url: str, keys: Sequence[str]) -> None:
        super().__init__(url)
        pairs = [(key, slo_class) for key in keys for slo_class in CLASSES]
        self._whose = cycle(pairs)

    def _http_request(self, body: bytes) -> bytes:
        key, slo_class = next(self._whose)
        head, _, rest = super()._http_request(body).partition(b"\r\n")
        own = f"Authorization: Bearer {key}\r\nX-SLO-Class: {slo_class}".encode()
        return head + b"\r\n" + own + b"\r\n" + rest


@dataclass(slots=True)
class Measured:
    """CPU seconds of both planes by window, and the cost of a scrape."""

    with_s: list[float] = field(default_factory=list)
    without_s: list[float] = field(default_factory=list)
    scrape_s: float = 0.0
    scrape_series: int = 0
    scrape_bytes: int = 0


def cost(folder: Path, *, frontend: str, seed: int) -> dict[str, float]:
    """Run both planes and every window; returns the figures."""
    keys, known = tenants(folder)

    def plane(*, metrics: str) -> DataPlane:
        sets = [*known, f"observability.metrics.enabled={metrics}"]
        return DataPlane(
            SCENARIO,
            REPLICAS,
            frontend=frontend,
            replica_sets=sets,
            ingress_sets=sets,
            timed=True,
        )

    with plane(metrics="true") as on, plane(metrics="false") as off:
        measured = uvloop.run(measure(on, off, keys, seed=seed))
    return figures(measured, on.hook_costs)


async def measure(on: DataPlane, off: DataPlane, keys: Sequence[str], *, seed: int) -> Measured:
    """Measure every window of both planes; first comes a window of each to warm up."""
    found = Measured()
    for plane in (on, off):
        await load(plane, keys, "warm up")
    for window in range(_WINDOWS):
        turns = [(on, found.with_s), (off, found.without_s)]
        for plane, used_s in turns if window % 2 == 0 else reversed(turns):
            before_s = plane.cpu_s(replicas=True)
            with GcDisabled():
                tokens = await load(plane, keys, f"{seed}/{window}")
            used_s.append(plane.cpu_s(replicas=True) - before_s)
            name = "with" if plane is on else "without"
            say(f"  window {window + 1}: {1e6 * used_s[-1] / tokens:.1f} us a token {name} metrics")
    found.scrape_series, found.scrape_bytes = await scrape(on)
    found.scrape_s = await scrape_cost_s(on)
    return found


async def load(plane: DataPlane, keys: Sequence[str], seed: str) -> int:
    """Send a window's requests, with a scrape in its middle; returns how many tokens they ask for.

    Raises:
        SystemExit: more than one in a hundred failed.
    """
    rng = random.Random(seed)  # noqa: S311 - a load, no secret
    rate_per_s = _STREAMS / (_TOKENS * _STEP_S)
    arrivals = poisson_arrivals(rng, rate_per_s=rate_per_s, window_s=_WINDOW_S)
    bodies = [
        completion_body(rng, model="tiny", words=_WORDS, max_tokens=_TOKENS) for _ in arrivals
    ]
    client = Tenants(f"http://127.0.0.1:{plane.port}", keys)
    await client.open(_CONNECTIONS)
    scraping = asyncio.create_task(_scrape_later(plane))
    try:
        exchanges = await client.send_at_times(bodies, arrivals)
    finally:
        client.close()
        await scraping
    _check(exchanges)
    return _TOKENS * len(bodies)


def _check(exchanges: Sequence[Exchange]) -> None:
    problems = [exchange.error for exchange in exchanges if exchange.error]
    if len(problems) > len(exchanges) // 100:
        raise SystemExit(f"{len(problems)} of {len(exchanges)} requests failed: {problems[0]}")


async def _scrape_later(plane: DataPlane) -> None:
    await asyncio.sleep(_WINDOW_S / 2)
    await scrape(plane)


async def scrape(plane: DataPlane) -> tuple[int, int]:
    """Scrape every process of a plane once; returns the numbers of series and of bytes."""
    series = size = 0
    async with httpx.AsyncClient(headers={"accept": _ACCEPT}, timeout=30.0) as http:
        for address in plane.metrics:
            text = (await http.get(f"http://{address}/metrics")).raise_for_status().text
            series += sum(not line.startswith("#") for line in text.splitlines())
            size += len(text)
    return series, size


async def scrape_cost_s(plane: DataPlane) -> float:
    """CPU seconds of a plane for one scrape of all of it, while it is idle."""
    rest_s = 5.0
    before_s = plane.cpu_s(replicas=True)
    await asyncio.sleep(rest_s)
    idle_per_s = (plane.cpu_s(replicas=True) - before_s) / rest_s
    before_s, began_s = plane.cpu_s(replicas=True), time.monotonic()
    for _ in range(_IDLE_SCRAPES):
        await scrape(plane)
    used_s = plane.cpu_s(replicas=True) - before_s
    return (used_s - idle_per_s * (time.monotonic() - began_s)) / _IDLE_SCRAPES


def figures(measured: Measured, hook_costs: Mapping[str, float]) -> dict[str, float]:
    """The figures; `hook_costs` are what the plane with metrics measured in its own hooks.

    `metrics_cpu_fraction` is how much more CPU the plane with metrics took, over all windows;
    `direct_cpu_fraction` is what was measured inside it: hooks, and scrapes when idle.
    """
    with_s, windows = sum(measured.with_s), len(measured.with_s)
    pairs = [on / off - 1 for on, off in zip(measured.with_s, measured.without_s, strict=True)]
    # The warm-up is one window more.
    hooks_s = (hook_costs["steps_cpu_s"] + hook_costs["requests_cpu_s"]) * windows / (windows + 1)
    inside_s = hooks_s + windows * measured.scrape_s
    spread = RepeatSpread.from_values(pairs)
    return {
        "metrics_cpu_fraction": with_s / sum(measured.without_s) - 1,
        "direct_cpu_fraction": inside_s / (with_s - inside_s),
        "pairs_min": spread.min,
        "pairs_median": spread.median,
        "pairs_max": spread.max,
        "pairs_standard_error": statistics.stdev(pairs) / windows**0.5,
        "us_per_step": 1e6 * hook_costs["steps_cpu_s"] / hook_costs["steps"],
        "us_per_request": 1e6 * hook_costs["requests_cpu_s"] / hook_costs["requests"],
        "steps": hook_costs["steps"],
        "requests": hook_costs["requests"],
        "scrape_cpu_s": measured.scrape_s,
        "scrape_series": measured.scrape_series,
        "scrape_bytes": measured.scrape_bytes,
    }


def tenants(folder: Path) -> tuple[list[str], list[str]]:
    """A key of each tenant, and the settings that declare the tenants."""
    keys, sets = [], []
    for number in range(TENANTS):
        name, path = f"team-{number}", folder / f"team-{number}.keys"
        with edit_key_file(path, create=True) as document:
            key, token = mint(name, now=datetime.now(UTC))
            document.add(key)
        keys.append(token)
        sets += [
            f"tenants.{name}.keys_file={path}",
            f"tenants.{name}.classes=[{', '.join(CLASSES)}]",
        ]
    return keys, sets
