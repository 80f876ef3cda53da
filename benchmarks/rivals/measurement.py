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
from benchmarks.rivals.contender import Contender, LaunchSite
from benchmarks.rivals.load import GeneratorResult, LoadError, LoadPoint, PromptFiles, run_generator
from benchmarks.rivals.programs import compile_program
from benchmarks.rivals.stacks import wait_until_answering

Metrics = dict[str, object]

FRONTEND_GROUPS = (API, HAPROXY)
"""Groups of processes that stand between client and engine."""
_MAX_FAILED_FRACTION = 0.01
_WARM_UP_REQUESTS = 32
_IDLE_WINDOW_S = 3.0


class BodyFiles:
    """The requests of each point and repeat: the same for every contender."""

    def __init__(self, folder: Path, prompts: PromptFiles) -> None:
        self._folder = folder
        self._prompts = prompts

    def body_file(self, point: LoadPoint, *, count: int, seed: str) -> Path:
        """A file with `count` bodies, written at first use."""
        file = self._folder / f"{point.name}-{seed}.jsonl"
        if not file.exists():
            self._prompts.write_bodies(file, point, count=count, seed=f"{point.name}/{seed}")
        return file


def measure_contender(
    contender: Contender,
    site: LaunchSite,
    points: Sequence[LoadPoint],
    bodies: BodyFiles,
    *,
    repeat: int,
    print_progress: Callable[[str], None],
) -> dict[str, Metrics]:
    """The figures of each point, for one repeat.

    Raises:
        NotAvailableError: it cannot be installed.
        NotStartedError: it did not come up.
        LoadError: too many requests failed; a benchmark of failures compares nothing.
    """
    system = contender.make(site)
    metrics_by_point = {}
    try:
        system.start()
        wait_until_answering(system.url)
        idle_cores = _idle_cores(system)
        for point in points:
            figures = _measure(contender, system, point, bodies, repeat=repeat)
            metrics_by_point[point.name] = figures | {"idle_cores": idle_cores}
            print_progress(
                f"  {contender.name} {point.name}: {format_metrics(metrics_by_point[point.name])}"
            )
    finally:
        if leftover_pids := system.stop():
            print_progress(f"  {contender.name}: processes had to be killed: {leftover_pids}")
    return metrics_by_point


def _idle_cores(system: System) -> float:
    """What stands between client and engine takes without a request, in cores."""
    meter = CpuMeter(system.process_groups())
    before = meter.read()
    time.sleep(_IDLE_WINDOW_S)
    cpu_s_by_group = cpu_used(before, meter.read())
    return sum(cpu_s_by_group.get(group, 0.0) for group in FRONTEND_GROUPS) / _IDLE_WINDOW_S


def _measure(
    contender: Contender, system: System, point: LoadPoint, bodies: BodyFiles, *, repeat: int
) -> Metrics:
    generator, port = compile_program("load"), urlsplit(system.url).port or 80

    def run(requests: int, seed: str) -> GeneratorResult:
        return run_generator(
            generator,
            port=port,
            point=point,
            bodies=bodies.body_file(point, count=requests, seed=seed),
            requests=requests,
            quickack=contender.quickack,
        )

    run(min(_WARM_UP_REQUESTS, point.requests), f"warm-{repeat}")
    groups = system.process_groups()
    meter = CpuMeter(groups)
    load_average, before = os.getloadavg()[0], meter.read()
    result = run(point.requests, str(repeat))
    cpu_s = cpu_used(before, meter.read())
    return load_metrics(result, cpu_s) | {
        "rss_mib": {name: _rss_mib(processes) for name, processes in groups.items()},
        "load_average": load_average,
    }


def load_metrics(result: GeneratorResult, cpu_s: dict[str, float]) -> Metrics:
    """The figures of a load.

    Raises:
        LoadError: too many requests failed.
    """
    requests = len(result.ttft_s)
    if result.failed > _MAX_FAILED_FRACTION * (requests + result.failed):
        raise LoadError(f"{result.failed} requests failed, {requests} did not: {result.problems}")
    tokens = sum(t if t >= 0 else e for t, e in zip(result.tokens, result.events, strict=True))
    frontend_cpu_s = sum(cpu_s.get(group, 0.0) for group in FRONTEND_GROUPS)
    system_cpu_s = sum(cpu_s.get(group, 0.0) for group in (*FRONTEND_GROUPS, ENGINE, OTHER))
    other_cpu_s = cpu_s["machine"] - system_cpu_s - result.own_cpu_s - cpu_s["client"]
    return {
        "requests": requests,
        "failed": result.failed,
        "problems": result.problems,
        "tokens": tokens,
        "events_per_token": sum(result.events) / tokens,
        "wall_s": result.wall_s,
        "requests_per_s": requests / result.wall_s,
        "tokens_per_s": tokens / result.wall_s,
        "cpu_ms_per_request": frontend_cpu_s / requests * 1e3,
        "cpu_us_per_token": us_per_token(frontend_cpu_s, tokens),
        "cpu_us_per_token_by_group": {
            group: us_per_token(cpu_s[group], tokens)
            for group in (*FRONTEND_GROUPS, ENGINE, OTHER)
            if group in cpu_s
        },
        "tokens_per_core_s": tokens / frontend_cpu_s if frontend_cpu_s else None,
        "ttft_s": percentiles(result.ttft_s),
        "gap_max_s": percentiles(result.gap_max_s),
        "strangers_cores": other_cpu_s / result.wall_s,
    }


def format_metrics(figures: Metrics) -> str:
    """For the progress display."""
    ttft, by_group = figures["ttft_s"], figures["cpu_us_per_token_by_group"]
    assert isinstance(ttft, dict), "made by `describe`"
    assert isinstance(by_group, dict), "made by `describe`"
    groups = ", ".join(f"{group} {value:.1f}" for group, value in by_group.items())
    return (
        f"{figures['tokens_per_s']:.0f} tokens/s, {figures['cpu_us_per_token']:.1f} us/token"
        f" ({groups}), TTFT {ttft['p50'] * 1e3:.2f} / {ttft['p99'] * 1e3:.2f} ms,"
        f" other {figures['strangers_cores']:.2f} cores"
    )


def _rss_mib(processes: Sequence[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20
