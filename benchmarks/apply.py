"""How long `baton apply` takes on a deployment under load, and what it costs requests: nothing.

Ray Serve, HAProxy, vLLM's API server, coordinators and replicas are real; only the engines'
computing is simulated, in real time. While an open load runs, configurations are applied one after
the other: objectives, tenants, limits and the size of a pool live, then an engine option, for which
that pool's replicas are replaced one by one.

`live_s` is from the first question to the last answer of an apply, `command_s` the whole command
with the start of Python and joining the cluster. Prints one JSON object and writes
`results/apply.json`; see `--help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._figures import BadStreamError, read_stream, rounded
from benchmarks._load import Client, Exchange, completion_body, poisson_arrivals
from benchmarks._provenance import provenance
from benchmarks._systems import SCENARIOS, Baton

SCENARIO = "overhead-pd"
RESULTS = Path(__file__).parent / "results"
_COMMAND_S = 120.0
_TOKENS = 64
_LIVE: tuple[tuple[str, ...], ...] = (
    ("slo.default.ttft=5s", "slo.default.tpot=100ms"),
    ("slo.default.ttft=5s", "tenants.default={weight: 3, rate: {requests: 10k/s}}"),
    ("admission.max_queue=500", "admission.max_n=4", "router.deflect.streams=0.5"),
    ("pools.decode.replicas={min: 1, start: 2, max: 2}",),
    (),
)
"""What each says besides the scenario; the last one takes everything back."""
_ROLLING = ("pools.decode.engine.max_num_seqs=200",)


def apply(url: str, sets: Sequence[str]) -> dict[str, Any]:
    """One `baton apply`; its report, and how long the whole command took."""
    options = [f"server.port={url.rpartition(':')[2]}", *sets]
    command = [sys.executable, "-m", "baton.cli.main", "apply", "-o", "json"]
    command += ["-c", str(SCENARIOS / f"{SCENARIO}.yaml")]
    for one in options:
        command += ["--set", one]
    began_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - our own command
        command, capture_output=True, text=True, check=False, timeout=_COMMAND_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(sets)} was not applied: {done.stderr[-500:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report | {"command_s": time.perf_counter() - began_s}


def apply_all(url: str, pause_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every configuration in turn; the live ones, and the rolling one."""
    live = []
    for sets in _LIVE:
        time.sleep(pause_s)
        live.append(apply(url, sets))
    time.sleep(pause_s)
    return live, apply(url, _ROLLING)


async def drive(
    url: str, rate_per_s: float, pause_s: float
) -> tuple[list[Exchange], list[dict[str, Any]], dict[str, Any]]:
    """Send an open load for as long as configurations are applied."""
    rng, client = random.Random(7), Client(url)  # noqa: S311 - a workload, no secret
    body = [completion_body(rng, model="tiny", words=100, max_tokens=_TOKENS)]
    await client.one_by_one(body)
    applying = asyncio.create_task(asyncio.to_thread(apply_all, url, pause_s))
    exchanges: list[Exchange] = []
    while not applying.done():
        arrivals = poisson_arrivals(rng, rate_per_s=rate_per_s, window_s=2.0)
        bodies = [
            completion_body(rng, model="tiny", words=100, max_tokens=_TOKENS) for _ in arrivals
        ]
        exchanges += await client.at_times(bodies, arrivals)
    client.close()
    live, rolling = await applying
    return exchanges, live, rolling


def failed(exchanges: Sequence[Exchange]) -> list[str]:
    """Why requests were not answered in full."""
    found = []
    for one in exchanges:
        try:
            if one.problem:
                found.append(one.problem[:200])
            elif (tokens := read_stream(one.sent_at_s, one.body()).tokens) != _TOKENS:
                found.append(f"{tokens} tokens, wanted {_TOKENS}")
        except BadStreamError as error:
            found.append(str(error)[:200])
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second (5)")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between changes (2)")
    options = parser.parse_args()
    baton = Baton("baton", SCENARIO)
    try:
        baton.start()
        exchanges, live, rolling = asyncio.run(drive(baton.url, options.rate, options.pause))
    finally:
        left = baton.stop()
    problems = failed(exchanges)
    figures = {
        "label": "M, simulated engines on Ray",
        "live_s": [one["took_s"] for one in live],
        "live_max_s": max(one["took_s"] for one in live),
        "command_s": [one["command_s"] for one in live],
        "rolling_s": rolling["took_s"],
        "replaced": rolling["replaced"],
        "requests": len(exchanges),
        "failed": len(problems),
        "problems": problems[:10],
        "left_behind": left,
    }
    RESULTS.mkdir(exist_ok=True)
    kept = {"figures": rounded(figures)} | provenance(("ray", "vllm"))
    (RESULTS / "apply.json").write_text(json.dumps(kept, indent=1) + "\n")
    sys.stdout.write(json.dumps(rounded(figures)) + "\n")


if __name__ == "__main__":
    main()
