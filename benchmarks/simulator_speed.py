"""How long the simulator takes, and how much memory: measured, each case in a process of its own.

Prints one JSON object (M: measured on this machine; what is simulated is in `simulated`). Cases:

- `mooncake`: the conversation trace of Mooncake on 8 prefill and 8 decode replicas, in blocks of
  512 tokens as the trace has them; `mooncake16`: of 16, as vLLM has them. Both need
  `--data FOLDER`, in which `traces/mooncake/conversation_trace.jsonl` lies.
- `fleet`: 400 prefill and 600 decode replicas, 200 requests/s with lengths like those of Azure's
  conversations, which share no prefixes; `--seconds` of it (an hour by default).

Collection of cycles is off meanwhile: the simulator makes none, and to look for them takes a fifth
of the time. Run: `make bench-simulator ARGS="--data FOLDER"`, or with `--case`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import log
from multiprocessing import get_context
from pathlib import Path

from baton.domain.fleet import Role
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.steps.roofline import Roofline
from baton.policy.placement.predicted import PredictedPlacer
from baton.simulator.outcome import mean
from baton.simulator.scenario import PoolPlan, Scenario, SimulationResult, simulate
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads import mooncake
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._program import RESULTS
from benchmarks._provenance import provenance

TRACE = Path("traces", "mooncake", "conversation_trace.jsonl")
RESULT = RESULTS / "simulator_speed.json"
CASES = ("mooncake", "mooncake16", "fleet")
KV_TOKEN_BYTES = 327_680
"""Llama-3.1-70B in 16 bits: 80 layers, 8 heads of 128, keys and values."""
KV_TOKENS = 500_000
"""About what four H100 have room for beside the weights."""
RATE_PER_S = 200.0
PROMPT_TOKENS, OUTPUT_TOKENS = (1155, 1.0), (211, 1.0)
"""Mean, and sigma of the logarithm. Source: Azure LLM inference trace 2023, conversations."""
_LOOP_PASSES = 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run."""

    name: str
    data: Path | None
    seconds: float
    replicas: int = 1000
    """Of `fleet`."""


def build_pools(
    prefill: int, decode: int, *, block_tokens: int, prefix_caching: bool
) -> tuple[PoolPlan, ...]:
    """Replicas of Llama-3.1-70B on four H100 each."""
    shape = find_shape("meta-llama/Llama-3.1-70B")
    settings = V1Settings(
        timing=Roofline(shape, find_accelerator("H100"), tp=4),
        kv_blocks=KV_TOKENS // block_tokens,
        kv_block_bytes=block_tokens * KV_TOKEN_BYTES,
        block_size_tokens=block_tokens,
        prefix_caching=prefix_caching,
        transfer_bytes_per_s=200e9,
    )
    counts = ((Role.PREFILL, prefill), (Role.DECODE, decode))
    return tuple(
        PoolPlan(name=str(role), role=role, replicas=count, settings=settings)
        for role, count in counts
    )


def generate_conversations(seconds: float, seed: int = 0) -> Trace:
    """Independent requests, each with lengths of its own."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    at_s, requests = 0.0, []
    while (at_s := at_s + rng.expovariate(RATE_PER_S)) < seconds:
        requests.append(
            TraceRequest(at_s, _draw_tokens(rng, *PROMPT_TOKENS), _draw_tokens(rng, *OUTPUT_TOKENS))
        )
    return Trace(name="conversations", requests=tuple(requests))


def _draw_tokens(rng: random.Random, mean_tokens: float, sigma: float) -> int:
    """Lognormal with this mean; at least 1, at most 16,384."""
    sample = rng.lognormvariate(log(mean_tokens) - sigma * sigma / 2, sigma)
    return min(16_384, max(1, round(sample)))


def measure(case: Case) -> dict[str, object]:
    """Run one case and say what it took."""
    gc.disable()
    match case.name:
        case "fleet":
            trace = generate_conversations(case.seconds)
            prefill = round(0.4 * case.replicas)
            plans = build_pools(
                prefill, case.replicas - prefill, block_tokens=16, prefix_caching=False
            )
        case _:
            if case.data is None:
                raise SystemExit(f"{case.name}: --data must name the folder with {TRACE}")
            with (case.data / TRACE).open(encoding="utf-8") as lines:
                trace = mooncake.read(lines, str(TRACE))
            plans = build_pools(
                8, 8, block_tokens=512 if case.name == "mooncake" else 16, prefix_caching=True
            )
    scenario = Scenario(pools=plans, placer=PredictedPlacer)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run = simulate(scenario, trace)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "kind": "M",
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "cpu_us_per_request": round(1e6 * cpu_s / len(trace)),
        "peak_bytes": peak,
        "loop_ns": round(measure_loop_ns(), 1),
        "requests": len(trace),
        "replicas": sum(plan.replicas for plan in plans),
        "events": run.event_count,
        "simulated": summarize_run(run),
    }


def measure_loop_ns() -> float:
    """CPU time of a pass through a small loop, by which machines, and loads of them, compare."""
    begun_s, total = time.process_time(), 0
    for number in range(_LOOP_PASSES):
        total += number & 7
    return 1e9 * (time.process_time() - begun_s) / _LOOP_PASSES


def summarize_run(run: SimulationResult) -> dict[str, object]:
    """What came out, so that a change of it is seen."""
    prompts = sum(outcome.prompt_tokens for outcome in run.outcomes)
    return {
        "kind": "S",
        "served": sum(outcome.ok for outcome in run.outcomes),
        "ttft_mean_s": round(mean([outcome.ttft_s for outcome in run.outcomes]), 6),
        "tpot_mean_s": round(mean([outcome.tpot_s for outcome in run.outcomes]), 6),
        "cached_fraction": round(
            sum(outcome.cached_tokens for outcome in run.outcomes) / prompts, 6
        ),
        "handoffs": run.handoffs,
        "ended_at_s": round(run.ended_at_s, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases that were asked for, one after the other."""
    parser = argparse.ArgumentParser(description="How long the simulator takes.")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--data", type=Path, help=f"the folder in which {TRACE} lies")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the fleet's load")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULT.name}, too")
    options = parser.parse_args(arguments)
    names = options.case or (CASES if options.data else ("fleet",))
    results: dict[str, object] = {}
    for name in names:
        case = Case(name=name, data=options.data, seconds=options.seconds)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
            results[name] = executor.submit(measure, case).result()
    report = {"provenance": provenance(), "cases": results}
    text = json.dumps(report, indent=2, sort_keys=True)
    if options.keep:
        RESULT.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
