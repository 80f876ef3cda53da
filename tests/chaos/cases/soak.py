"""Long loads: an hour below capacity in which nothing may grow, and minutes far above it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.engine.sim import SimSettings
from baton.policy.admission.slo_classes import SloClasses
from benchmarks._statistics import quantile
from tests.chaos.case import (
    Bound,
    Engines,
    Figure,
    Outcome,
    at_least,
    at_most,
    case,
    requested_minutes,
)
from tests.chaos.cases.loads import CLOSED_LOOP, ONE_REPLICA_PER_POOL
from tests.chaos.growth import ResourceGrowth
from tests.chaos.history import Exchange, History, check_invariants, endings
from tests.chaos.load import HttpClient, Load
from tests.chaos.local_ingress import Ingress
from tests.chaos.stage import RayStage, StageSpec, ray_stage, sim_stage
from tests.chaos.sweep import RunningTotals, run_steady_load

# ------------------------------------------------------------------ L4

SOAK_LOAD = Load(
    rate_per_s=4.0,
    requests=0,
    prompt_tokens=(200, 400),
    output_tokens=(20, 40),
    shared_prompts=16,
    name="L4",
)
"""1,200 prompt tokens and 120 new ones a second: of 2,000 and 197 that the two replicas of the
scenario can do."""
FILL_LOAD = Load(
    rate_per_s=20.0,
    requests=0,
    prompt_tokens=(16, 32),
    output_tokens=(1, 2),
    name="books",
)
"""Short requests before that, more of them than an ingress keeps records of (4,096 of some 4 kB):
at four a second those would fill memory for 17 minutes, and it would look like a leak."""
_FILL_MINUTES = 4.0
_SAMPLE_S = 5.0
_TRANSIENT_DESCRIPTORS = 3.0
"""Connections of requests under way: there are about a dozen of them, seldom less than a few."""


@case(
    "L4",
    "an hour at 60 % load, the whole deployment: memory grows by less than 1 MB an hour and "
    "process after warm-up, file descriptors not at all",
    engines=Engines.SIMULATED,
    minutes=67.0,
)
def soak(folder: Path) -> Outcome:
    """Warm-up is until books are full, and the first part of the run: a quarter, at most ten
    minutes."""
    length = requested_minutes(60.0)
    warm_up_s = (_FILL_MINUTES + min(length["minutes"] / 4, 10.0)) * 60.0
    growth = ResourceGrowth(warm_up_s=warm_up_s)
    with ray_stage(CLOSED_LOOP, folder, **ONE_REPLICA_PER_POOL) as stage:
        bounds, note, ended = asyncio.run(_soak(stage, length["minutes"], growth))
        counters = stage.wait_idle()
    counter_bounds, _ = check_invariants(History(exchanges=[], counters=counters))
    memory, descriptors = growth.mb_per_hour(), growth.descriptor_growth()
    figures: dict[str, Figure] = {**length, **ended, "warm-up, minutes": warm_up_s / 60.0}
    figures |= {f"{name}, MB/h": round(slope, 2) for name, slope in memory.items()}
    usual = growth.usual_descriptors()
    figures |= {f"{name}, median of descriptors, more at the end": n for name, n in usual.items()}
    figures |= {f"{name}, MB at the end": round(growth.last_mb(name), 1) for name in memory}
    return Outcome(
        bounds=(
            *bounds,
            *(bound for bound in counter_bounds if bound.description.startswith("counters")),
            at_least("processes of baton that were followed", len(memory), 4),
            *(
                at_most(f"{name}: memory, MB an hour", round(slope, 2), 1.0)
                for name, slope in memory.items()
            ),
            *(
                at_most(
                    f"{name}: fewest file descriptors, more at the end",
                    more,
                    _TRANSIENT_DESCRIPTORS,
                )
                for name, more in descriptors.items()
            ),
        ),
        figures=figures,
        note=note,
    )


async def _soak(
    stage: RayStage, minutes: float, growth: ResourceGrowth
) -> tuple[tuple[Bound, ...], str, dict[str, int]]:
    """Load and sampling side by side; bounds on what clients saw."""
    exchanges: list[Exchange] = []
    async with HttpClient(stage.url) as client:

        async def ask(exchange: Exchange) -> None:
            exchanges.append(exchange)
            await client.send(exchange)

        sampling = asyncio.create_task(_sample(stage.deployment.process.pid, growth))
        try:
            await run_steady_load(FILL_LOAD, ask, minutes=_FILL_MINUTES)
            await run_steady_load(SOAK_LOAD, ask, minutes=minutes)
        finally:
            sampling.cancel()
            await asyncio.wait((sampling,))
    if not sampling.cancelled():
        sampling.result()  # it should have gone on
    bounds, note = check_invariants(History(exchanges=exchanges))
    return bounds, note, endings(exchanges)


async def _sample(root_pid: int, growth: ResourceGrowth) -> None:
    started_s = time.monotonic()
    while True:
        growth.sample(baton_processes(root_pid), time.monotonic() - started_s)
        await asyncio.sleep(_SAMPLE_S)


def baton_processes(root_pid: int) -> Mapping[str, psutil.Process]:
    """The processes of baton below the one that holds the cluster, by name; Ray's own are not."""
    processes: dict[str, psutil.Process] = {"baton up": psutil.Process(root_pid)}
    for process in psutil.Process(root_pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = (process.cmdline() or [""])[0]
            if title.startswith("ray::ServeReplica:baton:"):
                name = title.split(":")[4].split("#")[0].split(".")[0]
                processes[name if name not in processes else f"{name} {process.pid}"] = process
            elif process.name() == "haproxy":
                processes["haproxy" if "haproxy" not in processes else f"haproxy {process.pid}"] = (
                    process
                )
    return processes


# ------------------------------------------------------------------ twice as much as it can carry

SMALL = SimSettings(
    prefill_tokens_per_s=2_000.0,
    decode_step_s=0.032,
    decode_request_s=0.003,
    kv_blocks=4096,
    max_running_requests=16,
    max_batched_tokens=512,
)
"""As in the scenario `closed-loop`."""
FULL_LOAD = Load(
    rate_per_s=6.6,
    requests=0,
    prompt_tokens=(200, 400),
    output_tokens=(20, 40),
    deadline_s=660.0,
    name="once",
)
"""2,000 prompt tokens and 198 new ones a second: as many as the engines can do at best, so that it
is the load at which the most can be served, or a little more."""
DOUBLE_LOAD = replace(FULL_LOAD, rate_per_s=13.2, name="twice")
_BASELINE_FRACTION = 0.2
"""Of the minutes, as many before it at once the rate: what is served then is to be served still."""
_SLO_RULES = ServiceRules(
    slos=SloClasses(classes={"default": Slo(ttft_s=1.5, tpot_s=0.1, attainment_target=0.95)})
)
_LIMITS = CoordinatorLimits()


@case(
    "L4-overload",
    "twice what a fleet can carry for 10 minutes, with objectives: no collapse, no unbounded "
    "queue, nothing left of it",
    engines=Engines.SIMULATED,
    minutes=12.0,
)
def overload(_folder: Path) -> Outcome:
    """What cannot be in time is refused."""
    return asyncio.run(_overload(requested_minutes(10.0), _SLO_RULES))


@case(
    "L4-overload-plain",
    "the same without objectives: only requests that would time out in a queue are rejected",
    engines=Engines.SIMULATED,
    minutes=14.0,
)
def overload_without_objectives(_folder: Path) -> Outcome:
    """Where each would be tried again elsewhere, at the end of another queue."""
    return asyncio.run(_overload(requested_minutes(10.0), ServiceRules()))


async def _overload(length: dict[str, float], rules: ServiceRules) -> Outcome:
    minutes = length["minutes"]
    plan = StageSpec(roles=(Role.PREFILL, Role.DECODE), settings=SMALL, limits=_LIMITS)
    async with sim_stage(plan) as stage:
        (ingress,) = stage.ingresses
        ingress.driver.reconfigure(rules=rules)
        baseline_totals = RunningTotals(ingress)
        async with baseline_totals.collecting():
            await run_steady_load(FULL_LOAD, ingress.send, minutes=minutes * _BASELINE_FRACTION)
        totals, queues = RunningTotals(ingress), _QueueWatcher(ingress)
        started_s = time.monotonic()
        watching = asyncio.create_task(queues.watch())
        async with totals.collecting():
            await run_steady_load(DOUBLE_LOAD, ingress.send, minutes=minutes)
        watching.cancel()
        await asyncio.wait((watching,))
        counters = await stage.wait_idle(timeout_s=60.0)
        bounds, note = totals.check_invariants(
            expected_tokens=stage.expected_tokens, counters=counters
        )
    half_s = minutes * 30.0
    ended_s = [at_s - started_s for at_s in totals.finished_at_s]
    # The beginning of each half is left out: in the first one there is no client yet.
    first = sum(half_s * 0.2 <= at_s < half_s for at_s in ended_s) / (half_s * 0.8)
    second = sum(half_s * 1.2 <= at_s < half_s * 2 for at_s in ended_s) / (half_s * 0.8)
    baseline_rate_per_s = len(baseline_totals.finished_at_s) / (minutes * _BASELINE_FRACTION * 60.0)
    refused_s = totals.rejection_waits_s or [0.0]
    return Outcome(
        bounds=(
            *bounds,
            at_least(
                "finished a second, of those at once the rate",
                round(second / baseline_rate_per_s, 3),
                0.9,
            ),
            at_least("the same, of the first half", round(second / max(1e-9, first), 3), 0.9),
            at_most("requests in flight", queues.in_flight, _LIMITS.max_requests),
            at_most("requests held at the coordinator", queues.queued, _LIMITS.max_queued_requests),
        ),
        figures={
            **length,
            **totals.endings,
            "offered at once the rate, requests/s": FULL_LOAD.rate_per_s,
            "finished at once the rate, requests/s": round(baseline_rate_per_s, 2),
            "finished in the first half, requests/s": round(first, 2),
            "finished in the second half, requests/s": round(second, 2),
            "time to a refusal, p99, s": round(quantile(refused_s, 0.99), 3),
            "resumes": totals.resumes,
            "queued in engines": queues.in_engines,
        },
        note=note,
    )


class _QueueWatcher:
    """The most that waited anywhere."""

    def __init__(self, ingress: Ingress) -> None:
        self.in_flight = self.queued = self.in_engines = 0
        self._ingress = ingress

    async def watch(self) -> None:
        """Look, five times a second."""
        while True:
            phases = list(self._ingress.driver.phases().values())
            views = self._ingress.driver.fleet().replicas.values()
            self.in_flight = max(self.in_flight, len(phases))
            self.queued = max(self.queued, sum(phase is Phase.QUEUED for phase in phases))
            waiting = sum(view.load.queued_requests for view in views)
            self.in_engines = max(self.in_engines, waiting)
            await asyncio.sleep(0.2)
