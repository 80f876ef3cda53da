"""Traffic whose mix moves, on a fixed number of GPUs: flips and deflection against every split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from statistics import fmean

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.state.service_rules import ServiceRules
from baton.domain.slo import Slo
from baton.perf.hardware.accelerators import Dtype
from baton.policy.admission.slo_classes import SloBook
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.scaling.catalogue import scaling_policy
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds
from baton.simulator.fleet.plans import PoolPlan, Scenario
from baton.simulator.outcome import Outcome
from baton.simulator.scenario import Run, simulate
from baton.simulator.workloads.generators import Phase, phased
from baton.simulator.workloads.lengths import Lognormal, lognormal
from baton.simulator.workloads.trace import Trace
from benchmarks._slo_azure import engines
from benchmarks._slo_fleets import GPUS, PREFILL, ROLES, strength

REPLICAS = 6
REQUESTS = 8000
"""Of each phase: where requests take longer, so does the phase, and none outweighs the others. They
last from two minutes to eight, longer than any pause between flips and any stream's usual life."""
LOADS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Of what the best split for a phase alone can just carry, with that phase's mean lengths: where
capacities are looked for."""
COMPARED = (1.0, 1.1, 1.2)
"""At which all arms are compared by requests in time, too. More than 1.0 nobody has to carry: there
it shows who makes more of what there is."""
LOAD = 1.1
"""Of these, the one that is told in full. At 1.0 who serves everybody has 1.30 times what the best
static split has, so little more can be told there than whether all were served."""
SEEDS = (0, 1, 2)
"""Arms are compared over several runs: what differs by chance between two is half a percent."""
PROMISE = Slo(ttft_s=2.0, tpot_s=0.05, attainment_target=0.95)
"""As quick as people read along, at which balanced splits of these phases are 26:1, 2.6:1 and
0.3:1. With 200 ms a token, a stream of 1,500 may wait for minutes before anything is late, and a
wrong split hardly shows."""
_PROCESSES = 2
_INTERVAL_S = 2.0

MEANS = {"code": (2048, 28), "conversation": (1155, 211), "reasoning": (1268, 1527)}
"""Source: Azure's traces of 2023 for the first two; DeepSeek-R1-like lengths as in ServeGen."""
KINDS = {
    "code": lognormal(Lognormal(2048, 0.96, 7437), Lognormal(28, 2.15, 1899)),
    "conversation": lognormal(Lognormal(1155, 0.96, 14050), Lognormal(211, 0.77, 1000)),
    "reasoning": lognormal(Lognormal(1268, 1.0, 14050), Lognormal(1527, 0.8, 8192)),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to use the replicas."""

    prefill: int
    split: Disaggregate
    flips: bool

    @property
    def name(self) -> str:
        """For people."""
        shape = f"{self.prefill}P{REPLICAS - self.prefill}D"
        if self.flips:
            return f"baton {shape}"
        return f"{'static' if self.split is Disaggregate.ALWAYS else 'hybrid'} {shape}"


STATIC = tuple(Arm(count, Disaggregate.ALWAYS, flips=False) for count in range(1, REPLICAS))
HYBRID = (Arm(REPLICAS // 2, Disaggregate.AUTO, flips=False),)
"""Baton's placement without flips: how much deflection does by itself."""
BATON = Arm(REPLICAS // 2, Disaggregate.AUTO, flips=True)


@lru_cache(maxsize=len(SEEDS))
def trace(load: float = LOAD, seed: int = 0) -> Trace:
    """Code, then conversation, then reasoning."""
    rng = random.Random(seed)  # noqa: S311 - a load
    phases = [
        Phase(duration_s=phase_s(kind, load), rate_per_s=rate(kind, load), shares=((kind, 1.0),))
        for kind in KINDS
    ]
    return phased("moving mix", phases, KINDS, rng)


def rate(kind: str, load: float = LOAD) -> float:
    """Requests a second of a phase."""
    return load * max(carried(kind).values())


@lru_cache(maxsize=len(KINDS))
def carried(kind: str) -> dict[int, float]:
    """Requests a second that each split can just carry, by its replicas that prefill."""
    prompt, output = MEANS[kind]
    settings = engines("H100", Dtype.FP8, 60.0)[PREFILL]
    one = strength(settings, PROMISE, prompt_tokens=prompt, output_tokens=output)
    prompts_s, outputs_s = prompt / one.prefill_tokens_per_s, output / one.decode_tokens_per_s
    return {
        prefill: min(prefill / prompts_s, (REPLICAS - prefill) / outputs_s)
        for prefill in range(1, REPLICAS)
    }


def phase_s(kind: str, load: float = LOAD) -> float:
    """How long a phase lasts."""
    return REQUESTS / rate(kind, load)


def run(arm: Arm, load: float = LOAD, seed: int = 0) -> Run:
    """One arm, once."""
    made = engines("H100", Dtype.FP8, 60.0)
    options = PredictedOptions(
        disaggregate=arm.split, ttft_slo_s=PROMISE.ttft_s, tpot_slo_s=PROMISE.tpot_s
    )
    counts = {pool: arm.prefill if pool == PREFILL else REPLICAS - arm.prefill for pool in ROLES}
    scene = Scenario(
        pools=tuple(
            PoolPlan(
                name=pool,
                role=role,
                replicas=counts[pool],
                settings=made[pool],
                gpus_per_replica=GPUS,
            )
            for pool, role in ROLES.items()
        ),
        placer=lambda: PredictedPlacer(options),
        rules=ServiceRules(slos=SloBook(classes={"default": PROMISE})),
        autoscaler=(lambda: _flipper(counts)) if arm.flips else None,
        scaling_interval_s=_INTERVAL_S,
    )
    return simulate(scene, trace(load, seed))


def _flipper(counts: dict[str, int]) -> Autoscaler:
    """No replica more or less: all that is left is to flip."""
    options = AutoscalerOptions(
        interval_s=_INTERVAL_S,
        gpu_budget=REPLICAS * GPUS,
        bounds={
            pool: PoolBounds(min=count, start=count, max=count, gpus_per_replica=GPUS)
            for pool, count in counts.items()
        },
    )
    return Autoscaler(scaling_policy("slo", options), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one run came to: requests, and how many were in time, of each phase."""

    arm: Arm
    load: float
    came: Mapping[str, int]
    good: Mapping[str, int]
    flipped: tuple[str, ...]

    @property
    def attainment(self) -> float:
        """Over all phases."""
        return sum(self.good.values()) / sum(self.came.values())


def made(arm: Arm, load: float, seed: int) -> Made:
    """Run one arm and count."""
    done = run(arm, load, seed)
    phases = by_phase(done.outcomes, load)
    return Made(
        arm=arm,
        load=load,
        came={kind: len(outcomes) for kind, outcomes in phases.items()},
        good={kind: sum(one.good for one in outcomes) for kind, outcomes in phases.items()},
        flipped=tuple(
            f"{change.replicas} to {change.direction} at {change.at_s:.0f} s"
            for change in done.story.changes
        ),
    )


def pooled(runs: Sequence[Made]) -> dict[str, object]:
    """What several runs of an arm at one load come to: attainment by phase and in all, goodput."""
    load, good = runs[0].load, Counter[str]()
    came = Counter[str]()
    for one in runs:
        good.update(one.good)
        came.update(one.came)
    shares = {kind: good[kind] / came[kind] for kind in KINDS}
    span_s = len(runs) * sum(phase_s(kind, load) for kind in KINDS)
    attained = [one.attainment for one in runs]
    return {
        "arm": runs[0].arm.name,
        "load": load,
        "goodput_per_s": good.total() / span_s,
        "attainment": good.total() / came.total(),
        "attainment_least": min(attained),
        "attainment_most": max(attained),
        "by_phase": shares,
        "goodput_per_s_equal_times": fmean(
            rate(kind, load) * share for kind, share in shares.items()
        ),
        "flipped": [list(one.flipped) for one in runs],
    }


def by_phase(outcomes: Sequence[Outcome], load: float = LOAD) -> dict[str, list[Outcome]]:
    """Requests by the phase in which they came."""
    phases: dict[str, list[Outcome]] = {}
    begins_s = 0.0
    for kind in KINDS:
        ends_s = begins_s + phase_s(kind, load)
        phases[kind] = [one for one in outcomes if begins_s <= one.arrived_at_s < ends_s]
        begins_s = ends_s
    return phases


def capacity(arm: Arm) -> dict[str, object]:
    """The highest of `LOADS` that an arm carries with the promised attainment, from the lowest up.

    As a share of what the best split for each phase alone can just carry; 0 when not even the
    lowest is carried. This is what the DistServe paper calls goodput (arXiv 2401.09670, section 2).
    """
    attained: dict[str, float] = {}
    carries = 0.0
    for load in LOADS:
        share = attained[f"{load:g}"] = made(arm, load, SEEDS[0]).attainment
        if share < PROMISE.attainment_target:
            break
        carries = load
    return {"arm": arm.name, "slo_capacity": carries, "attained": attained}


def mix() -> dict[str, object]:
    """Every arm, and how much more goodput flips and deflection give than the best static split.

    Three times: as it ran; as if each phase had lasted as long as the others, which counts a
    request of code, of which more come in a second, for more; and by the highest load that is
    carried with the promised attainment.
    """
    arms = (BATON, *STATIC, *HYBRID)
    asked = [(arm, load, seed) for load in COMPARED for arm in arms for seed in SEEDS]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("fork")) as pool:
        runs = list(pool.map(made, *zip(*asked, strict=True)))
        capacities = list(pool.map(capacity, arms))
    compared = {
        load: [pooled([one for one in runs if (one.arm, one.load) == (arm, load)]) for arm in arms]
        for load in COMPARED
    }
    return {
        "moving_mix_gain": gain(compared[LOAD], "goodput_per_s"),
        "moving_mix_gain_equal_times": gain(compared[LOAD], "goodput_per_s_equal_times"),
        "moving_mix_slo_capacity_gain": gain(capacities, "slo_capacity"),
        **{
            f"moving_mix_gain_at_{load:g}": gain(rows, "goodput_per_s")
            for load, rows in compared.items()
        },
        "phases": {kind: {"rate_per_s": rate(kind), "lasts_s": phase_s(kind)} for kind in KINDS},
        "rows": [row for rows in compared.values() for row in rows],
        "capacities": capacities,
    }


def gain(rows: Sequence[Mapping[str, object]], measure: str) -> float:
    """Ours over the best split that stays, each by this measure."""
    found = {str(row["arm"]): float(str(row[measure])) for row in rows}
    return found[BATON.name] / max(found[arm.name] for arm in STATIC)
