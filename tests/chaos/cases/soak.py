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
from baton.policy.admission.slo_classes import SloBook
from benchmarks._statistics import quantile
from tests.chaos.case import Bound, Engines, Figure, Outcome, at_least, at_most, case, minutes_asked
from tests.chaos.cases.loads import CLOSED_LOOP, ONE_EACH
from tests.chaos.growth import Growth
from tests.chaos.history import Exchange, History, endings, judged
from tests.chaos.load import HttpClient, Load
from tests.chaos.local_ingress import Door
from tests.chaos.stage import RayStage, SimPlan, ray_stage, sim_stage
from tests.chaos.sweep import Sweep, steadily

# ------------------------------------------------------------------ L4

SIXTY_PERCENT = Load(
    rate_per_s=4.0,
    requests=0,
    prompt_tokens=(200, 400),
    output_tokens=(20, 40),
    shared_prompts=16,
    name="L4",
)
"""1,200 prompt tokens and 120 new ones a second: of 2,000 and 197 that the two replicas of the
scenario can do."""
BOOKS_FULL = Load(
    rate_per_s=20.0,
    requests=0,
    prompt_tokens=(16, 32),
    output_tokens=(1, 2),
    name="books",
)
"""Short requests before that, more of them than an ingress keeps stories of (4,096 of some 4 kB):
at four a second those would fill memory for 17 minutes, and it would look like a leak."""
_FILL_MINUTES = 4.0
_SAMPLE_S = 5.0
_COME_AND_GO = 3.0
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
    length = minutes_asked(60.0)
    warm_up_s = (_FILL_MINUTES + min(length["minutes"] / 4, 10.0)) * 60.0
    growth = Growth(warm_up_s=warm_up_s)
    with ray_stage(CLOSED_LOOP, folder, **ONE_EACH) as stage:
        bounds, note, ended = asyncio.run(_soak(stage, length["minutes"], growth))
        held = stage.quiet()
    tidy, _ = judged(History(exchanges=[], counters=held))
    memory, descriptors = growth.mb_per_hour(), growth.descriptors()
    figures: dict[str, Figure] = {**length, **ended, "warm-up, minutes": warm_up_s / 60.0}
    figures |= {f"{name}, MB/h": round(slope, 2) for name, slope in memory.items()}
    usual = growth.usual_descriptors()
    figures |= {f"{name}, median of descriptors, more at the end": n for name, n in usual.items()}
    figures |= {f"{name}, MB at the end": round(growth.last_mb(name), 1) for name in memory}
    return Outcome(
        bounds=(
            *bounds,
            *(bound for bound in tidy if bound.what.startswith("counters")),
            at_least("processes of baton that were followed", len(memory), 4),
            *(
                at_most(f"{name}: memory, MB an hour", round(slope, 2), 1.0)
                for name, slope in memory.items()
            ),
            *(
                at_most(f"{name}: fewest file descriptors, more at the end", more, _COME_AND_GO)
                for name, more in descriptors.items()
            ),
        ),
        figures=figures,
        note=note,
    )


async def _soak(
    stage: RayStage, minutes: float, growth: Growth
) -> tuple[tuple[Bound, ...], str, dict[str, int]]:
    """Load and sampling side by side; bounds on what clients saw."""
    seen: list[Exchange] = []
    async with HttpClient(stage.url) as client:

        async def ask(exchange: Exchange) -> None:
            seen.append(exchange)
            await client.ask(exchange)

        sampling = asyncio.create_task(_sample(stage.deployment.process.pid, growth))
        try:
            await steadily(BOOKS_FULL, ask, minutes=_FILL_MINUTES)
            await steadily(SIXTY_PERCENT, ask, minutes=minutes)
        finally:
            sampling.cancel()
            await asyncio.wait((sampling,))
    if not sampling.cancelled():
        sampling.result()  # it should have gone on
    bounds, note = judged(History(exchanges=seen))
    return bounds, note, endings(seen)


async def _sample(holder: int, growth: Growth) -> None:
    began_s = time.monotonic()
    while True:
        growth.sample(batons(holder), time.monotonic() - began_s)
        await asyncio.sleep(_SAMPLE_S)


def batons(holder: int) -> Mapping[str, psutil.Process]:
    """The processes of baton below the one that holds the cluster, by name; Ray's own are not."""
    named: dict[str, psutil.Process] = {"baton up": psutil.Process(holder)}
    for process in psutil.Process(holder).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = (process.cmdline() or [""])[0]
            if title.startswith("ray::ServeReplica:baton:"):
                name = title.split(":")[4].split("#")[0].split(".")[0]
                named[name if name not in named else f"{name} {process.pid}"] = process
            elif process.name() == "haproxy":
                named["haproxy" if "haproxy" not in named else f"haproxy {process.pid}"] = process
    return named


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
ONCE = Load(
    rate_per_s=6.6,
    requests=0,
    prompt_tokens=(200, 400),
    output_tokens=(20, 40),
    deadline_s=660.0,
    name="once",
)
"""2,000 prompt tokens and 198 new ones a second: as many as the engines can do at best, so that it
is the load at which the most can be served, or a little more."""
TWICE = replace(ONCE, rate_per_s=13.2, name="twice")
_BEFORE = 0.2
"""Of the minutes, as many before it at once the rate: what is served then is to be served still."""
_PROMISED = ServiceRules(
    slos=SloBook(classes={"default": Slo(ttft_s=1.5, tpot_s=0.1, attainment_target=0.95)})
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
    return asyncio.run(_overload(minutes_asked(10.0), _PROMISED))


@case(
    "L4-overload-plain",
    "the same without objectives, so that one is refused only who would be given up in a queue",
    engines=Engines.SIMULATED,
    minutes=14.0,
)
def overload_without_objectives(_folder: Path) -> Outcome:
    """Where each would be tried again elsewhere, at the end of another queue."""
    return asyncio.run(_overload(minutes_asked(10.0), ServiceRules()))


async def _overload(length: dict[str, float], rules: ServiceRules) -> Outcome:
    minutes = length["minutes"]
    plan = SimPlan(roles=(Role.PREFILL, Role.DECODE), settings=SMALL, limits=_LIMITS)
    async with sim_stage(plan) as stage:
        (door,) = stage.doors
        door.driver.reconfigure(rules=rules)
        alone = Sweep(door)
        async with alone.running():
            await steadily(ONCE, door.ask, minutes=minutes * _BEFORE)
        sweep, queues = Sweep(door), _Queues(door)
        began_s = time.monotonic()
        watching = asyncio.create_task(queues.watch())
        async with sweep.running():
            await steadily(TWICE, door.ask, minutes=minutes)
        watching.cancel()
        await asyncio.wait((watching,))
        held = await stage.quiet(within_s=60.0)
        bounds, note = sweep.judged(wanted=stage.wanted, held=held)
    half_s = minutes * 30.0
    ended_s = [at_s - began_s for at_s in sweep.finished_at_s]
    # The beginning of each half is left out: in the first one nobody is there yet.
    first = sum(half_s * 0.2 <= at_s < half_s for at_s in ended_s) / (half_s * 0.8)
    second = sum(half_s * 1.2 <= at_s < half_s * 2 for at_s in ended_s) / (half_s * 0.8)
    once = len(alone.finished_at_s) / (minutes * _BEFORE * 60.0)
    refused_s = sweep.refused_s or [0.0]
    return Outcome(
        bounds=(
            *bounds,
            at_least("finished a second, of those at once the rate", round(second / once, 3), 0.9),
            at_least("the same, of the first half", round(second / max(1e-9, first), 3), 0.9),
            at_most("requests in flight", queues.in_flight, _LIMITS.max_requests),
            at_most("requests held at the coordinator", queues.queued, _LIMITS.max_queued),
        ),
        figures={
            **length,
            **sweep.endings,
            "offered at once the rate, requests/s": ONCE.rate_per_s,
            "finished at once the rate, requests/s": round(once, 2),
            "finished in the first half, requests/s": round(first, 2),
            "finished in the second half, requests/s": round(second, 2),
            "time to a refusal, p99, s": round(quantile(refused_s, 0.99), 3),
            "resumes": sweep.resumes,
            "queued in engines": queues.in_engines,
        },
        note=note,
    )


class _Queues:
    """The most that waited anywhere."""

    def __init__(self, door: Door) -> None:
        self.in_flight = self.queued = self.in_engines = 0
        self._door = door

    async def watch(self) -> None:
        """Look, five times a second."""
        while True:
            phases = list(self._door.driver.phases().values())
            views = self._door.driver.fleet().replicas.values()
            self.in_flight = max(self.in_flight, len(phases))
            self.queued = max(self.queued, sum(one is Phase.QUEUED for one in phases))
            waiting = sum(view.load.queued_requests for view in views)
            self.in_engines = max(self.in_engines, waiting)
            await asyncio.sleep(0.2)
