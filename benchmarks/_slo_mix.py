"""Traffic whose mix moves, on a fixed number of GPUs: flips and deflection against every split."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

from baton.control.autoscaler import Autoscaler
from baton.control.service_rules import ServiceRules
from baton.perf.hardware import Dtype
from baton.policy.placement import Disaggregate
from baton.policy.predicted import PredictedOptions, PredictedPlacer
from baton.policy.scaling.catalogue import scaling_policy
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds
from baton.policy.slo_book import SloBook
from baton.simulator.outcome import Outcome
from baton.simulator.plans import PoolPlan, Scenario
from baton.simulator.scenario import Run, simulate
from baton.simulator.workloads.generators import Phase, phased
from baton.simulator.workloads.lengths import Lognormal, lognormal
from baton.simulator.workloads.trace import Trace
from benchmarks._slo_azure import engines
from benchmarks._slo_world import GPUS, PREFILL, ROLES, SERVER, strength

REPLICAS = 6
PHASE_S = 180.0
LOAD = 0.75
"""Of what as many replicas could do if they were split as each phase wants it."""
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


@lru_cache(maxsize=1)
def trace() -> Trace:
    """Code, then conversation, then reasoning."""
    rng = random.Random(0)  # noqa: S311 - a load
    phases = [
        Phase(duration_s=PHASE_S, rate_per_s=_rate(kind), shares=((kind, 1.0),)) for kind in KINDS
    ]
    return phased("moving mix", phases, KINDS, rng)


def _rate(kind: str) -> float:
    prompt, output = MEANS[kind]
    settings = engines("H100", Dtype.FP8, 60.0)[PREFILL]
    one = strength(settings, SERVER, prompt_tokens=prompt, output_tokens=output)
    busy_s = prompt / one.prefill_tokens_per_s + output / one.decode_tokens_per_s
    return LOAD * REPLICAS / busy_s


def run(arm: Arm) -> Run:
    """One arm."""
    made = engines("H100", Dtype.FP8, 60.0)
    options = PredictedOptions(
        disaggregate=arm.split, ttft_slo_s=SERVER.ttft_s, tpot_slo_s=SERVER.tpot_s
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
        rules=ServiceRules(slos=SloBook(classes={"default": SERVER})),
        autoscaler=(lambda: _flipper(counts)) if arm.flips else None,
        scaling_interval_s=_INTERVAL_S,
    )
    return simulate(scene, trace())


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


def figures(arm: Arm) -> dict[str, object]:
    """What one arm comes to: attainment in each phase and over all, and goodput."""
    made = run(arm)
    return {
        "arm": arm.name,
        "goodput_per_s": _good(made.outcomes) / (3 * PHASE_S),
        "attainment": _good(made.outcomes) / len(made.outcomes),
        "by_phase": {
            kind: _share(
                [one for one in made.outcomes if number <= one.arrived_at_s / PHASE_S < number + 1]
            )
            for number, kind in enumerate(KINDS)
        },
        "flips": sum(change.replicas for change in made.story.changes),
        "gpu_hours": made.story.gpu_hours,
    }


def _good(outcomes: Sequence[Outcome]) -> int:
    return sum(one.good for one in outcomes)


def _share(outcomes: Sequence[Outcome]) -> float:
    return _good(outcomes) / len(outcomes) if outcomes else 1.0


def mix() -> dict[str, object]:
    """Every arm, and how much more goodput flips and deflection give than the best static split."""
    arms = (BATON, *STATIC, *HYBRID)
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("fork")) as pool:
        rows = list(pool.map(figures, arms))
    goodput = {str(row["arm"]): float(str(row["goodput_per_s"])) for row in rows}
    best = max(goodput[arm.name] for arm in STATIC)
    return {"moving_mix_gain": goodput[BATON.name] / best, "rows": rows}
