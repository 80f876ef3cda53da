"""A load step of 5x against a baton that scales itself: simulated engines, everything else real.

Load is open: requests are sent at their times, however late others are. A request *attains* when it
was answered in full, its first token came in time and so did the others; refused and broken ones do
not. `back_s` is the time from the step to the first moment from which on the next ten seconds, and
all that is left of the step, attain the target; `steady_s` to the first from which on every window
of ten seconds does, which some eighty requests that come by chance may miss for a burst.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from baton.config.derive.options import slo_classes
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.serving.cluster.cluster_state import running_clusters, state_folder
from baton.serving.cluster.local_cluster import attach, detach
from baton.serving.operator.local_deployment import query_all
from baton.serving.shared.names import CONTROLLER
from benchmarks._load import Client, Exchange, completion_body, poisson_arrivals
from benchmarks._statistics import BadStreamError, read_stream, round_floats
from benchmarks._systems import BatonDeployment, load_scenario
from benchmarks.deployed.part import Found

SCENARIO = "closed-loop"
_BIN_S = 2.0
_WINDOW_S = 10.0
_POLL_S = 1.0
_SETTLE_S = 100.0
"""How long pools have to shrink again after the load has gone down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Base, step, base again."""

    rate_per_s: float = 1.5
    step: float = 5.0
    before_s: float = 40.0
    high_s: float = 60.0
    after_s: float = 45.0
    words: int = 380
    """Of a prompt: about 500 tokens."""
    max_tokens: int = 32
    seed: int = 7

    def phases(self) -> list[tuple[float, float, float]]:
        """Begin, end and rate of each."""
        high_at_s = self.before_s
        low_at_s = high_at_s + self.high_s
        return [
            (0.0, high_at_s, self.rate_per_s),
            (high_at_s, low_at_s, self.rate_per_s * self.step),
            (low_at_s, low_at_s + self.after_s, self.rate_per_s),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    at_s: float
    """When it was to be sent."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    refused: bool = False
    failed: str = ""

    def attains(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it met the objectives of its class."""
        if self.ttft_s is None or self.tpot_s is None:
            return False
        return self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


class Watch:
    """Asks the controller for its view once a second, in a thread of its own."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; waits for the last answer."""
        self._over.set()
        self._thread.join(30.0)

    def settled(self, step_at_s: float) -> bool:
        """Whether every pool is back at the size that it had before the step, and none drains."""
        before = [row for row in self.rows if row["at_s"] < step_at_s]
        if not before:
            return False
        return all(
            row["desired"] <= _of(before[-1], row["pool"], "desired") and not row["draining"]
            for row in self.rows[-1]["pools"]
        )

    def _poll(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                (status,) = cast("list[dict[str, Any]]", query_all(CONTROLLER, "status"))
            except Exception as error:  # noqa: BLE001 - a benchmark's observer: counted, shown
                self.failures += 1
                sys.stderr.write(f"the controller was not reached: {error}\n")
                continue
            self.rows.append(
                {
                    "at_s": time.perf_counter(),
                    "pools": status["pools"],
                    "paused_reason": status["autoscaler"]["paused_reason"],
                    "demand": status["demand"],
                }
            )


def answers(load: Load, exchanges: Sequence[Exchange], planned: Sequence[float]) -> list[Answer]:
    """What became of each request."""
    return [_answer(load, *item) for item in zip(exchanges, planned, strict=True)]


def _answer(load: Load, exchange: Exchange, at_s: float) -> Answer:
    if exchange.error.startswith(("HTTP/1.1 429", "HTTP/1.1 503")):
        return Answer(at_s=at_s, refused=True)
    if exchange.error:
        return Answer(at_s=at_s, failed=exchange.error[:200])
    try:
        stream = read_stream(exchange.sent_at_s, exchange.body())
    except BadStreamError as error:
        return Answer(at_s=at_s, failed=str(error)[:200])
    if stream.tokens != load.max_tokens:
        return Answer(at_s=at_s, failed=f"{stream.tokens} tokens, expected {load.max_tokens}")
    ttft_s = stream.ttft_s + max(0.0, exchange.send_delay_s)
    return Answer(at_s=at_s, ttft_s=ttft_s, tpot_s=stream.tpot_s)


def objectives() -> tuple[float, float, float]:
    """TTFT, TPOT and the share of requests that are to have both."""
    slo = slo_classes(load_scenario(SCENARIO)).classes[DEFAULT_CLASS]
    assert slo.ttft_s is not None, "the scenario has no TTFT objective"
    assert slo.tpot_s is not None, "the scenario has no TPOT objective"
    return slo.ttft_s, slo.tpot_s, slo.attainment_target


def attainment(good: Sequence[tuple[float, bool]], begin_s: float, end_s: float) -> float | None:
    """The share of good ones among those that were sent in a span; None when none were."""
    inside = [is_good for at_s, is_good in good if begin_s <= at_s < end_s]
    return sum(inside) / len(inside) if inside else None


def back_s(
    good: Sequence[tuple[float, bool]], step_at_s: float, end_s: float, target: float
) -> float | None:
    """From the step until the next window and all the rest attain the target; None for never."""
    at_s = step_at_s
    while at_s + _WINDOW_S <= end_s:
        shares = (attainment(good, at_s, at_s + _WINDOW_S), attainment(good, at_s, end_s))
        if all(share is None or share >= target for share in shares):
            return at_s - step_at_s
        at_s += _BIN_S
    return None


def steady_s(
    good: Sequence[tuple[float, bool]], step_at_s: float, end_s: float, target: float
) -> float | None:
    """From the step until every window attains the target; None when the last does not."""
    at_s, back = end_s - _WINDOW_S, None
    while at_s >= step_at_s:
        share = attainment(good, at_s, at_s + _WINDOW_S)
        if share is not None and share < target:
            break
        back = at_s - step_at_s
        at_s -= _BIN_S
    return back


async def drive(url: str, load: Load) -> tuple[float, list[Answer]]:
    """Send the whole load; when it began, by `perf_counter`, and what became of each request."""
    rng = random.Random(load.seed)  # noqa: S311 - a workload, no secret
    planned: list[float] = []
    for begin_s, end_s, rate in load.phases():
        span_s = end_s - begin_s
        arrivals = poisson_arrivals(rng, rate_per_s=rate, window_s=span_s)
        planned += [begin_s + at_s for at_s in arrivals]
    bodies = [
        completion_body(rng, model="tiny", words=load.words, max_tokens=load.max_tokens)
        for _ in planned
    ]
    client = Client(url)
    await client.send_sequentially(bodies[:1])  # the first one warms HAProxy and the tokenizer up
    began_at_s = time.perf_counter()
    exchanges = await client.send_at_times(bodies, planned)
    client.close()
    return began_at_s, answers(load, exchanges, planned)


def figures(
    load: Load, got: Sequence[Answer], rows: Sequence[Mapping[str, Any]], settled_s: float | None
) -> dict[str, object]:
    """The figures of one run."""
    ttft_s, tpot_s, target = objectives()
    good = [(answer.at_s, answer.attains(ttft_s, tpot_s)) for answer in got]
    (_, step_at_s, _), (_, low_at_s, _), (_, end_s, _) = load.phases()
    back = back_s(good, step_at_s, low_at_s, target)
    pools = sorted({row["pool"] for other in rows for row in other["pools"]})
    wants = {name: [_of(row, name, "desired") for row in rows] for name in pools}
    starts_s = started_in_s(rows)
    cold_s = max(starts_s, default=0.0)
    return {
        "back_s": back,
        "steady_s": steady_s(good, step_at_s, low_at_s, target),
        "cold_start_s": cold_s,
        "cold_starts_s": starts_s,
        "within_cold_start_plus_10_s": back is not None and back <= cold_s + 10.0,
        "requests": len(got),
        "failed": sum(1 for answer in got if answer.failed),
        "refused": sum(1 for answer in got if answer.refused),
        "attainment_before": attainment(good, 0.0, step_at_s),
        "attainment_high": attainment(good, step_at_s, low_at_s),
        "attainment_after": attainment(good, low_at_s, end_s),
        "attainment_high_last_20_s": attainment(good, low_at_s - 20.0, low_at_s),
        "shrunk_after_s": settled_s,
        "pools": {
            name: {
                "start": counts[0],
                "before_step": _last([row for row in rows if row["at_s"] < step_at_s], name),
                "high": _last([row for row in rows if row["at_s"] < low_at_s], name),
                "peak": max(counts),
                "end": counts[-1],
            }
            for name, counts in wants.items()
        },
    }


def timeline(
    load: Load, got: Sequence[Answer], rows: Sequence[Mapping[str, Any]]
) -> dict[str, object]:
    """What was plotted: bins of requests, and the controller's view."""
    ttft_s, tpot_s, _ = objectives()
    end_s = load.phases()[-1][1]
    bins = []
    at_s = 0.0
    while at_s < end_s:
        inside = [answer for answer in got if at_s <= answer.at_s < at_s + _BIN_S]
        bins.append(
            {
                "at_s": at_s,
                "rate_per_s": len(inside) / _BIN_S,
                "attained": sum(answer.attains(ttft_s, tpot_s) for answer in inside),
                "refused": sum(answer.refused for answer in inside),
                "failed": sum(bool(answer.failed) for answer in inside),
                "ttft_max_s": max((answer.ttft_s or 0.0 for answer in inside), default=0.0),
            }
        )
        at_s += _BIN_S
    return {"bins": bins, "controller": rows}


def draw(path: Path, load: Load, drawn: Mapping[str, Any]) -> None:
    """Rate, attainment and replicas over time, below each other."""
    from matplotlib import pyplot

    bins, rows = drawn["bins"], drawn["controller"]
    figure, (rates, shares, replicas) = pyplot.subplots(3, 1, figsize=(9, 8), sharex=True)
    times = [bin_["at_s"] for bin_ in bins]
    rates.step(times, [bin_["rate_per_s"] for bin_ in bins], where="post", label="sent")
    refused = [bin_["refused"] / _BIN_S for bin_ in bins]
    rates.step(times, refused, where="post", label="refused")
    rates.set_ylabel("requests/s")
    asked = [max(1.0, bin_["rate_per_s"] * _BIN_S) for bin_ in bins]
    share = [key["attained"] / count for key, count in zip(bins, asked, strict=True)]
    shares.step(times, share, where="post", label="attained")
    shares.axhline(objectives()[2], linestyle=":", color="grey")
    shares.set_ylabel(f"share of {_BIN_S:g} s")
    for name in sorted({row["pool"] for other in rows for row in other["pools"]}):
        at = [row["at_s"] for row in rows]
        line = replicas.step(at, [_of(row, name, "desired") for row in rows], where="post")[0]
        line.set_label(f"{name} wanted")
        ready = [_of(row, name, "ready") for row in rows]
        replicas.step(
            at, ready, where="post", linestyle="--", color=line.get_color(), label=f"{name} ready"
        )
    replicas.set_ylabel("replicas")
    replicas.set_xlabel("seconds")
    for axes in (rates, shares, replicas):
        for _, end_s, _ in load.phases()[:2]:
            axes.axvline(end_s, color="grey", linewidth=0.5)
        axes.legend(loc="upper right", fontsize="small")
    figure.suptitle("A load step of 5x, simulated engines on Ray (measured)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _dated(tick: Mapping[str, Any], began_at_s: float) -> dict[str, Any]:
    """A tick with its time since the load began instead of its age."""
    at_s = time.perf_counter() - began_at_s - tick["age_s"]
    return {"at_s": at_s} | {name: value for name, value in tick.items() if name != "age_s"}


def started_in_s(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """How long each growth of a pool took until all of it was ready, to the second."""
    found = []
    for name in sorted({row["pool"] for other in rows for row in other["pools"]}):
        asked_at_s, had = None, _of(rows[0], name, "desired") if rows else 0.0
        for row in rows:
            want, ready = _of(row, name, "desired"), _of(row, name, "ready")
            if want > had and asked_at_s is None:
                asked_at_s = row["at_s"]
            if asked_at_s is not None and ready >= want:
                found.append(row["at_s"] - asked_at_s)
                asked_at_s = None
            had = want
    return found


def _of(row: Mapping[str, Any], pool: str, name: str) -> float:
    return next((float(item.get(name, 0)) for item in row["pools"] if item["pool"] == pool), 0.0)


def _last(rows: Sequence[Mapping[str, Any]], pool: str) -> float:
    return _of(rows[-1], pool, "desired") if rows else 0.0


def run(load: Load) -> tuple[dict[str, object], Mapping[str, Any]]:
    """One run, from `baton up` to its end."""
    baton = BatonDeployment("closed loop", SCENARIO)
    watch = Watch()
    try:
        baton.start()
        state = running_clusters(state_folder())[-1]
        attach(state.address, token_file=state.token_file)
        try:
            watch.start()
            began_at_s, got = asyncio.run(drive(baton.url, load))
            until_s = time.perf_counter() + _SETTLE_S
            step_at_s = began_at_s + load.before_s
            while not watch.settled(step_at_s) and time.perf_counter() < until_s:
                time.sleep(_POLL_S)
            watch.stop()
            (explained,) = cast(
                "list[dict[str, Any]]", query_all(CONTROLLER, "explain_scale", 1000)
            )
            acted = [_dated(tick, began_at_s) for tick in explained["ticks"] if tick["actions"]]
        finally:
            detach()
    finally:
        baton.stop()
    rows = [row | {"at_s": row["at_s"] - began_at_s} for row in watch.rows]
    low_at_s = load.phases()[1][1]
    settled_s = rows[-1]["at_s"] - low_at_s if watch.settled(step_at_s) else None
    drawn = {**timeline(load, got, rows), "acted": acted}
    failures = sorted({answer.failed for answer in got if answer.failed})
    return figures(load, got, rows, settled_s) | {"failures": failures[:5]}, drawn


def measure(options: argparse.Namespace) -> Found:
    """Run the step, and draw it beside the result file."""
    load = Load()
    found, drawn = run(load)
    draw(options.results / "closed_loop.png", load, drawn)
    details = {
        "kind": "measured; simulated engines in real time, everything else real",
        "load": asdict(load),
        "scenario": SCENARIO,
        "timeline": round_floats(drawn, 3),
    }
    return Found(figures=cast("dict[str, object]", round_floats(found, 3)), details=details)
