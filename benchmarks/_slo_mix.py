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
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.scaling.catalogue import make_scaling_policy
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds
from baton.simulator.fleet.plans import PoolPlan, Scenario
from baton.simulator.outcome import Outcome
from baton.simulator.scenario import SimulationResult, simulate
from baton.simulator.workloads.generators import TrafficPhase, phased_traffic
from baton.simulator.workloads.lengths import Lognormal, lognormal
from baton.simulator.workloads.trace import Trace
from benchmarks._slo_azure import engine_settings_by_pool
from benchmarks._slo_fleets import GPUS, PREFILL, ROLES, replica_capacity

REPLICAS = 6
REQUESTS = 8000
"""Of each phase: where requests take longer, so does the phase, and none outweighs the others. They
last from two minutes to eight, longer than any pause between flips and any stream's usual life."""
LOAD_LEVELS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Of what the best split for a phase alone can just carry, with that phase's mean lengths: where
capacities are looked for."""
COMPARED_LOADS = (1.0, 1.1, 1.2)
"""At which all arms are compared by requests in time, too. More than 1.0 need not be carried: there
it shows who makes more of what there is."""
HEADLINE_LOAD = 1.1
"""Of these, the one that is reported in full. At 1.0 a fleet that serves all has 1.30 times
the best static split, so little more can be shown there than whether all were served."""
SEEDS = (0, 1, 2)
"""Arms are compared over several runs: what differs by chance between two is half a percent."""
SLO = Slo(ttft_s=2.0, tpot_s=0.05, attainment_target=0.95)
"""As quick as people read along, at which balanced splits of these phases are 26:1, 2.6:1 and
0.3:1. With 200 ms a token, a stream of 1,500 may wait for minutes before anything is late, and a
wrong split hardly shows."""
_PROCESSES = 2
_INTERVAL_S = 2.0

MEAN_LENGTHS = {"code": (2048, 28), "conversation": (1155, 211), "reasoning": (1268, 1527)}
"""Source: Azure's traces of 2023 for the first two; DeepSeek-R1-like lengths as in ServeGen."""
LENGTH_MODELS = {
    "code": lognormal(Lognormal(2048, 0.96, 7437), Lognormal(28, 2.15, 1899)),
    "conversation": lognormal(Lognormal(1155, 0.96, 14050), Lognormal(211, 0.77, 1000)),
    "reasoning": lognormal(Lognormal(1268, 1.0, 14050), Lognormal(1527, 0.8, 8192)),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to use the replicas."""

    prefill: int
    disaggregate: Disaggregate
    flips_roles: bool

    @property
    def name(self) -> str:
        """For people."""
        shape = f"{self.prefill}P{REPLICAS - self.prefill}D"
        if self.flips_roles:
            return f"baton {shape}"
        return f"{'static' if self.disaggregate is Disaggregate.ALWAYS else 'hybrid'} {shape}"


STATIC = tuple(
    Variant(count, Disaggregate.ALWAYS, flips_roles=False) for count in range(1, REPLICAS)
)
HYBRID = (Variant(REPLICAS // 2, Disaggregate.AUTO, flips_roles=False),)
"""Baton's placement without flips: how much deflection does by itself."""
BATON = Variant(REPLICAS // 2, Disaggregate.AUTO, flips_roles=True)


@lru_cache(maxsize=len(SEEDS))
def trace(load: float = HEADLINE_LOAD, seed: int = 0) -> Trace:
    """Code, then conversation, then reasoning."""
    rng = random.Random(seed)  # noqa: S311 - a load
    phases = [
        TrafficPhase(
            duration_s=phase_duration_s(kind, load),
            rate_per_s=phase_rate(kind, load),
            shares=((kind, 1.0),),
        )
        for kind in LENGTH_MODELS
    ]
    return phased_traffic("moving mix", phases, LENGTH_MODELS, rng)


def phase_rate(kind: str, load: float = HEADLINE_LOAD) -> float:
    """Requests a second of a phase."""
    return load * max(rates_by_split(kind).values())


@lru_cache(maxsize=len(LENGTH_MODELS))
def rates_by_split(kind: str) -> dict[int, float]:
    """Requests a second that each split can just carry, by its replicas that prefill."""
    prompt, output = MEAN_LENGTHS[kind]
    settings = engine_settings_by_pool("H100", Dtype.FP8, 60.0)[PREFILL]
    capacity = replica_capacity(settings, SLO, prompt_tokens=prompt, output_tokens=output)
    prompts_s, outputs_s = (
        prompt / capacity.prefill_tokens_per_s,
        output / capacity.decode_tokens_per_s,
    )
    return {
        prefill: min(prefill / prompts_s, (REPLICAS - prefill) / outputs_s)
        for prefill in range(1, REPLICAS)
    }


def phase_duration_s(kind: str, load: float = HEADLINE_LOAD) -> float:
    """How long a phase lasts."""
    return REQUESTS / phase_rate(kind, load)


def run(variant: Variant, load: float = HEADLINE_LOAD, seed: int = 0) -> SimulationResult:
    """One arm, once."""
    settings_by_pool = engine_settings_by_pool("H100", Dtype.FP8, 60.0)
    options = PredictedOptions(
        disaggregate=variant.disaggregate, ttft_slo_s=SLO.ttft_s, tpot_slo_s=SLO.tpot_s
    )
    counts = {
        pool: variant.prefill if pool == PREFILL else REPLICAS - variant.prefill for pool in ROLES
    }
    scenario = Scenario(
        pools=tuple(
            PoolPlan(
                name=pool,
                role=role,
                replicas=counts[pool],
                settings=settings_by_pool[pool],
                gpus_per_replica=GPUS,
            )
            for pool, role in ROLES.items()
        ),
        placer=lambda: PredictedPlacer(options),
        rules=ServiceRules(slos=SloClasses(classes={"default": SLO})),
        autoscaler=(lambda: _flip_autoscaler(counts)) if variant.flips_roles else None,
        scaling_interval_s=_INTERVAL_S,
    )
    return simulate(scenario, trace(load, seed))


def _flip_autoscaler(counts: dict[str, int]) -> Autoscaler:
    """No replica more or less: all that is left is to flip."""
    options = AutoscalerOptions(
        interval_s=_INTERVAL_S,
        gpu_budget=REPLICAS * GPUS,
        bounds={
            pool: PoolBounds(min=count, initial=count, max=count, gpus_per_replica=GPUS)
            for pool, count in counts.items()
        },
    )
    return Autoscaler(make_scaling_policy("slo", options), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCounts:
    """What one run came to: requests, and how many were in time, of each phase."""

    variant: Variant
    load: float
    arrived: Mapping[str, int]
    slo_met: Mapping[str, int]
    flips: tuple[str, ...]

    @property
    def attainment(self) -> float:
        """Over all phases."""
        return sum(self.slo_met.values()) / sum(self.arrived.values())


def run_and_count(variant: Variant, load: float, seed: int) -> PhaseCounts:
    """Run one arm and count."""
    result = run(variant, load, seed)
    phases = outcomes_by_phase(result.outcomes, load)
    return PhaseCounts(
        variant=variant,
        load=load,
        arrived={kind: len(outcomes) for kind, outcomes in phases.items()},
        slo_met={
            kind: sum(outcome.slo_met for outcome in outcomes) for kind, outcomes in phases.items()
        },
        flips=tuple(
            f"{change.replicas} to {change.direction} at {change.at_s:.0f} s"
            for change in result.scaling.changes
        ),
    )


def pool_runs(runs: Sequence[PhaseCounts]) -> dict[str, object]:
    """What several runs of an arm at one load come to: attainment by phase and in all, goodput."""
    load, slo_met = runs[0].load, Counter[str]()
    arrived = Counter[str]()
    for other in runs:
        slo_met.update(other.slo_met)
        arrived.update(other.arrived)
    attainment_by_phase = {kind: slo_met[kind] / arrived[kind] for kind in LENGTH_MODELS}
    span_s = len(runs) * sum(phase_duration_s(kind, load) for kind in LENGTH_MODELS)
    attainments = [other.attainment for other in runs]
    return {
        "arm": runs[0].variant.name,
        "load": load,
        "goodput_per_s": slo_met.total() / span_s,
        "attainment": slo_met.total() / arrived.total(),
        "attainment_least": min(attainments),
        "attainment_most": max(attainments),
        "by_phase": attainment_by_phase,
        "goodput_per_s_equal_times": fmean(
            phase_rate(kind, load) * share for kind, share in attainment_by_phase.items()
        ),
        "flipped": [list(other.flips) for other in runs],
    }


def outcomes_by_phase(
    outcomes: Sequence[Outcome], load: float = HEADLINE_LOAD
) -> dict[str, list[Outcome]]:
    """Requests by the phase in which they came."""
    phases: dict[str, list[Outcome]] = {}
    begins_s = 0.0
    for kind in LENGTH_MODELS:
        ends_s = begins_s + phase_duration_s(kind, load)
        phases[kind] = [
            outcome for outcome in outcomes if begins_s <= outcome.arrived_at_s < ends_s
        ]
        begins_s = ends_s
    return phases


def capacity(variant: Variant) -> dict[str, object]:
    """The highest of `LOAD_LEVELS` that an arm carries with the attainment, from the lowest up.

    As a share of what the best split for each phase alone can just carry; 0 when not even the
    lowest is carried. This is what the DistServe paper calls goodput (arXiv 2401.09670, section 2).
    """
    attainment_by_load: dict[str, float] = {}
    highest_load = 0.0
    for load in LOAD_LEVELS:
        attainment = attainment_by_load[f"{load:g}"] = run_and_count(
            variant, load, SEEDS[0]
        ).attainment
        if attainment < SLO.attainment_target:
            break
        highest_load = load
    return {"arm": variant.name, "slo_capacity": highest_load, "attained": attainment_by_load}


def compare_mix() -> dict[str, object]:
    """Every arm, and how much more goodput flips and deflection give than the best static split.

    Three times: as it ran; as if each phase had lasted as long as the others, which counts a
    request of code, of which more come in a second, for more; and by the highest load that is
    carried with the target attainment.
    """
    variants = (BATON, *STATIC, *HYBRID)
    jobs = [(arm, load, seed) for load in COMPARED_LOADS for arm in variants for seed in SEEDS]
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("fork")) as pool:
        runs = list(pool.map(run_and_count, *zip(*jobs, strict=True)))
        capacities = list(pool.map(capacity, variants))
    pooled_by_load = {
        load: [
            pool_runs([other for other in runs if (other.variant, other.load) == (arm, load)])
            for arm in variants
        ]
        for load in COMPARED_LOADS
    }
    return {
        "moving_mix_gain": gain_over_static(pooled_by_load[HEADLINE_LOAD], "goodput_per_s"),
        "moving_mix_gain_equal_times": gain_over_static(
            pooled_by_load[HEADLINE_LOAD], "goodput_per_s_equal_times"
        ),
        "moving_mix_slo_capacity_gain": gain_over_static(capacities, "slo_capacity"),
        **{
            f"moving_mix_gain_at_{load:g}": gain_over_static(rows, "goodput_per_s")
            for load, rows in pooled_by_load.items()
        },
        "phases": {
            kind: {"rate_per_s": phase_rate(kind), "lasts_s": phase_duration_s(kind)}
            for kind in LENGTH_MODELS
        },
        "rows": [row for rows in pooled_by_load.values() for row in rows],
        "capacities": capacities,
    }


def gain_over_static(rows: Sequence[Mapping[str, object]], measure: str) -> float:
    """Ours over the best split that stays, each by this measure."""
    values_by_variant = {str(row["arm"]): float(str(row[measure])) for row in rows}
    return values_by_variant[BATON.name] / max(values_by_variant[arm.name] for arm in STATIC)
