"""How long `baton apply` takes on a deployment under load, and what it costs requests: nothing.

While an open load runs, configurations are applied one after the other: objectives, tenants, limits
and the size of a pool live, then an engine option, for which that pool's replicas are replaced one
by one. `live_s` is from the first question to the last answer of an apply, `command_s` the whole
command with the start of Python and joining the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._load import Client, Exchange, completion_body, poisson_arrivals
from benchmarks._statistics import BadStreamError, read_stream
from benchmarks._systems import BatonDeployment
from benchmarks.deployed.part import Found

SCENARIO = "apply"
_RATE_PER_S = 5.0
_PAUSE_S = 2.0
"""Before each change."""
_TOKENS = 64
_LIVE: tuple[tuple[str, ...], ...] = (
    ("slo.default.ttft=5s", "slo.default.tpot=100ms"),
    ("slo.default.ttft=5s", "tenants.default={weight: 3, rate: {requests: 10k/s}}"),
    (
        "admission.max_queued_requests=500",
        "admission.max_n=4",
        "router.overflow.decode_on_prefill=0.5",
    ),
    ("pools.decode.replicas={min: 1, initial: 2, max: 2}",),
    (),
)
"""The settings of each beyond the scenario; the last one restores everything."""
_ROLLING = ("pools.decode.engine.max_num_seqs=200",)


def apply_all(baton: BatonDeployment) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Apply every configuration in turn; returns the reports of the live ones and the rolling one.

    Each report also has `command_s`, how long the whole command took.
    """
    live = [_timed(baton, sets) for sets in _LIVE]
    return live, _timed(baton, _ROLLING)


def _timed(baton: BatonDeployment, sets: Sequence[str]) -> dict[str, Any]:
    time.sleep(_PAUSE_S)
    began_s = time.perf_counter()
    report = baton.apply(*sets)
    return report | {"command_s": time.perf_counter() - began_s}


async def drive(
    baton: BatonDeployment,
) -> tuple[list[Exchange], list[dict[str, Any]], dict[str, Any]]:
    """Send an open load for as long as configurations are applied."""
    rng, client = random.Random(7), Client(baton.url)  # noqa: S311 - a workload, no secret
    await client.send_sequentially([_body(rng)])
    applying = asyncio.create_task(asyncio.to_thread(apply_all, baton))
    exchanges: list[Exchange] = []
    while not applying.done():
        arrivals = poisson_arrivals(rng, rate_per_s=_RATE_PER_S, window_s=2.0)
        exchanges += await client.send_at_times([_body(rng) for _ in arrivals], arrivals)
    client.close()
    live, rolling = await applying
    return exchanges, live, rolling


def _body(rng: random.Random) -> bytes:
    return completion_body(rng, model="tiny", words=100, max_tokens=_TOKENS)


def failed(exchanges: Sequence[Exchange]) -> list[str]:
    """Why requests were not answered in full."""
    found = []
    for exchange in exchanges:
        try:
            if exchange.error:
                found.append(exchange.error[:200])
            elif (tokens := read_stream(exchange.sent_at_s, exchange.body()).tokens) != _TOKENS:
                found.append(f"{tokens} tokens, expected {_TOKENS}")
        except BadStreamError as error:
            found.append(str(error)[:200])
    return found


def measure(_options: argparse.Namespace) -> Found:
    """Start a deployment, change it under load, end it."""
    baton = BatonDeployment("baton", SCENARIO)
    try:
        baton.start()
        exchanges, live, rolling = asyncio.run(drive(baton))
    finally:
        left = baton.stop()
    problems = failed(exchanges)
    figures = {
        "label": "M, simulated engines on Ray",
        "live_s": [report["took_s"] for report in live],
        "live_max_s": max(report["took_s"] for report in live),
        "command_s": [report["command_s"] for report in live],
        "rolling_s": rolling["took_s"],
        "replaced": rolling["replaced"],
        "requests": len(exchanges),
        "failed": len(problems),
        "problems": problems[:10],
        "left_behind": left,
    }
    return Found(figures=figures, good=not problems)
