"""One visit to a contender: started alone, put under each load, ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks._statistics import cpu_used, percentiles, us_per_token
from benchmarks._systems import API, ENGINE, HAPROXY, OTHER, CpuMeter, System
from benchmarks.rivals.contender import Contender, Site
from benchmarks.rivals.load import Loaded, LoadError, Point, Prompts, send
from benchmarks.rivals.programs import compiled
from benchmarks.rivals.stacks import await_answer

Figures = dict[str, object]

BETWEEN = (API, HAPROXY)
"""Groups of processes that stand between client and engine."""
_MOST_FAILED = 0.01
_WARM_UP_REQUESTS = 32
_IDLE_S = 3.0


class Bodies:
    """The requests of each point and repeat: the same for every contender."""

    def __init__(self, folder: Path, prompts: Prompts) -> None:
        self._folder = folder
        self._prompts = prompts

    def file(self, point: Point, *, count: int, seed: str) -> Path:
        """A file with so many bodies, written at first use."""
        file = self._folder / f"{point.name}-{seed}.jsonl"
        if not file.exists():
            self._prompts.write(file, point, count=count, seed=f"{point.name}/{seed}")
        return file


def visit(
    contender: Contender,
    site: Site,
    points: Sequence[Point],
    bodies: Bodies,
    *,
    repeat: int,
    say: Callable[[str], None],
) -> dict[str, Figures]:
    """The figures of each point, for one repeat.

    Raises:
        NotAvailableError: it cannot be installed.
        NotStartedError: it did not come up.
        LoadError: too many requests failed; a benchmark of failures compares nothing.
    """
    system = contender.make(site)
    found = {}
    try:
        system.start()
        await_answer(system.url)
        idle = _idle_cores(system)
        for point in points:
            figures = _measure(contender, system, point, bodies, repeat=repeat)
            found[point.name] = figures | {"idle_cores": idle}
            say(f"  {contender.name} {point.name}: {in_one_line(found[point.name])}")
    finally:
        if left := system.stop():
            say(f"  {contender.name}: processes had to be killed: {left}")
    return found


def _idle_cores(system: System) -> float:
    """What stands between client and engine takes without a request, in cores."""
    meter = CpuMeter(system.groups())
    before = meter.read()
    time.sleep(_IDLE_S)
    used = cpu_used(before, meter.read())
    return sum(used.get(group, 0.0) for group in BETWEEN) / _IDLE_S


def _measure(
    contender: Contender, system: System, point: Point, bodies: Bodies, *, repeat: int
) -> Figures:
    generator, port = compiled("load"), urlsplit(system.url).port or 80

    def run(requests: int, seed: str) -> Loaded:
        return send(
            generator,
            port=port,
            point=point,
            bodies=bodies.file(point, count=requests, seed=seed),
            requests=requests,
            quickack=contender.quickack,
        )

    run(min(_WARM_UP_REQUESTS, point.requests), f"warm-{repeat}")
    groups = system.groups()
    meter = CpuMeter(groups)
    busy, before = os.getloadavg()[0], meter.read()
    loaded = run(point.requests, str(repeat))
    cpu_s = cpu_used(before, meter.read())
    return describe(loaded, cpu_s) | {
        "rss_mib": {name: _rss_mib(processes) for name, processes in groups.items()},
        "load_average": busy,
    }


def describe(loaded: Loaded, cpu_s: dict[str, float]) -> Figures:
    """The figures of a load.

    Raises:
        LoadError: too many requests failed.
    """
    requests = len(loaded.ttft_s)
    if loaded.failed > _MOST_FAILED * (requests + loaded.failed):
        raise LoadError(f"{loaded.failed} requests failed, {requests} did not: {loaded.problems}")
    tokens = sum(t if t >= 0 else e for t, e in zip(loaded.tokens, loaded.events, strict=True))
    front_s = sum(cpu_s.get(group, 0.0) for group in BETWEEN)
    known_s = sum(cpu_s.get(group, 0.0) for group in (*BETWEEN, ENGINE, OTHER))
    others_s = cpu_s["machine"] - known_s - loaded.own_cpu_s - cpu_s["client"]
    return {
        "requests": requests,
        "failed": loaded.failed,
        "problems": loaded.problems,
        "tokens": tokens,
        "events_per_token": sum(loaded.events) / tokens,
        "wall_s": loaded.wall_s,
        "requests_per_s": requests / loaded.wall_s,
        "tokens_per_s": tokens / loaded.wall_s,
        "cpu_ms_per_request": front_s / requests * 1e3,
        "cpu_us_per_token": us_per_token(front_s, tokens),
        "cpu_us_per_token_by_group": {
            group: us_per_token(cpu_s[group], tokens)
            for group in (*BETWEEN, ENGINE, OTHER)
            if group in cpu_s
        },
        "tokens_per_core_s": tokens / front_s if front_s else None,
        "ttft_s": percentiles(loaded.ttft_s),
        "gap_max_s": percentiles(loaded.gap_max_s),
        "strangers_cores": others_s / loaded.wall_s,
    }


def in_one_line(figures: Figures) -> str:
    """For the progress display."""
    ttft, by_group = figures["ttft_s"], figures["cpu_us_per_token_by_group"]
    assert isinstance(ttft, dict), "made by `describe`"
    assert isinstance(by_group, dict), "made by `describe`"
    groups = ", ".join(f"{group} {value:.1f}" for group, value in by_group.items())
    return (
        f"{figures['tokens_per_s']:.0f} tokens/s, {figures['cpu_us_per_token']:.1f} us/token"
        f" ({groups}), TTFT {ttft['p50'] * 1e3:.2f} / {ttft['p99'] * 1e3:.2f} ms,"
        f" strangers {figures['strangers_cores']:.2f} cores"
    )


def _rss_mib(processes: Sequence[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20
