"""The fleets of the hybrid grid, what they are asked, and the highest rate that each sustains."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.model.memory import fit
from baton.perf.steps.roofline import Roofline
from baton.policy.admission.slo_classes import DEFAULT_CLASS, SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from baton.simulator.fleet.plans import PoolPlan, Scenario
from baton.simulator.outcome import Objectives, Outcome, attainment
from baton.simulator.scenario import simulate
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads import csv_traces as azure
from baton.simulator.workloads import mooncake
from baton.simulator.workloads.scaling import at_rate, cut
from baton.simulator.workloads.trace import Trace

REPLICAS = 4
TARGET = 0.9
_BLOCK_TOKENS = 16
_PREFILL_BUDGET = 8192
_DECODE_BUDGET = 512
"""Tokens a step of a replica that decodes: prompts beside its streams go in chunks of this."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the same GPUs."""

    prefill: int
    """Replicas meant for prefill; the others decode, or do both where there are none of these."""
    disaggregate: Disaggregate
    step_tokens: int = _DECODE_BUDGET
    """Tokens a step, of the others."""
    has_admission: bool = False
    """Whether requests that are predicted to miss their objectives are rejected at once."""

    @property
    def name(self) -> str:
        """For people."""
        kind = {"never": "colocated", "always": "static", "auto": "hybrid"}[self.disaggregate.value]
        shape = (
            f"{self.prefill}P{REPLICAS - self.prefill}D" if self.prefill else f"{self.step_tokens}"
        )
        return f"{kind} {shape}{', admission' if self.has_admission else ''}"


COLOCATED = tuple(Variant(0, Disaggregate.NEVER, budget) for budget in (512, 2048))
STATIC = tuple(Variant(count, Disaggregate.ALWAYS) for count in range(1, REPLICAS))


def hybrid_variant(
    prefill: int, step_tokens: int = _DECODE_BUDGET, *, has_admission: bool = False
) -> Variant:
    """Baton's own: split where that is predicted to serve better; pools are hints."""
    return Variant(prefill, Disaggregate.AUTO, step_tokens, has_admission)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """A trace at any rate, for a while."""

    trace: Trace
    window_s: float

    def at_rate(self, rate_per_s: float) -> Trace:
        """Its requests of the window; those of a lower rate are among those of a higher one."""
        scaled = at_rate(self.trace, rate_per_s, random.Random(0))  # noqa: S311 - a load
        return cut(scaled, until_s=self.window_s)


def read_traces(folder: Path) -> dict[str, Trace]:
    """The three traces."""
    traces = folder / "traces"
    traces_by_name = {}
    for name in ("conv", "code"):
        with (traces / f"azure/AzureLLMInferenceTrace_{name}.csv").open() as file:
            traces_by_name[f"azure_{name}"] = azure.read(file, name)
    with (traces / "mooncake/conversation_trace.jsonl").open() as file:
        traces_by_name["mooncake_conv"] = mooncake.read(file, "conversation", spread_s=3.0)
    return traces_by_name


def engine_settings(step_tokens: int, block_tokens: int) -> V1Settings:
    """A replica: Llama-3.1-70B in FP8 on four H100."""
    shape, device = find_shape("meta-llama/Llama-3.1-70B-Instruct"), find_accelerator("H100")
    memory = fit(shape, device, tp=4, pp=1, weights=Dtype.FP8, kv=Dtype.BF16)
    return V1Settings(
        timing=Roofline(shape, device, tp=4, weights=Dtype.FP8),
        kv_blocks=memory.kv_blocks(block_tokens),
        kv_block_bytes=round(shape.kv_token_bytes(Dtype.BF16)) * block_tokens,
        block_size_tokens=block_tokens,
        max_running_requests=512,
        max_batched_tokens=step_tokens,
        transfer_bytes_per_s=4 * device.network_bytes_per_s,
    )


def scenario(variant: Variant, objectives: Objectives, block_tokens: int) -> Scenario:
    """A fleet of `REPLICAS`; placement aims at the objectives."""
    options = PredictedOptions(
        disaggregate=variant.disaggregate,
        ttft_slo_s=objectives.ttft_s,
        tpot_slo_s=objectives.tpot_s,
    )
    other_role = Role.DECODE if variant.prefill else Role.MIXED
    pools = [
        PoolPlan(
            name="prefill",
            role=Role.PREFILL,
            replicas=variant.prefill,
            settings=engine_settings(_PREFILL_BUDGET, block_tokens),
        ),
        PoolPlan(
            name="rest",
            role=other_role,
            replicas=REPLICAS - variant.prefill,
            settings=engine_settings(variant.step_tokens, block_tokens),
        ),
    ]
    return Scenario(
        pools=tuple(pool for pool in pools if pool.replicas),
        placer=lambda: PredictedPlacer(options),
        index=IndexOptions(mode=IndexMode.HYBRID),
        rules=_rules_with_slo(objectives) if variant.has_admission else ServiceRules(),
    )


def _rules_with_slo(objectives: Objectives) -> ServiceRules:
    """Every request has the objectives."""
    slo = Slo(ttft_s=objectives.ttft_s, tpot_s=objectives.tpot_s, attainment_target=TARGET)
    return ServiceRules(slos=SloClasses(classes={DEFAULT_CLASS: slo}))


def run(
    variant: Variant,
    load: Trace,
    objectives: Objectives = Objectives(),  # noqa: B008 - frozen
) -> tuple[Outcome, ...]:
    """What becomes of a load."""
    shares_blocks = any(request.block_ids for request in load.requests)
    block_tokens = load.block_tokens if shares_blocks else _BLOCK_TOKENS
    return simulate(scenario(variant, objectives, block_tokens), load).outcomes


# -------------------------------------------------------------------- rates


def geometric_rates(lowest: float, highest: float, *, ratio: float = 1.08) -> list[float]:
    """Rates from one to the other, each a constant multiple of the one before."""
    rates = [lowest]
    while rates[-1] < highest:
        rates.append(rates[-1] * ratio)
    return rates


def capacity(attainment_by_rate: Mapping[float, float], target: float = TARGET) -> float:
    """The highest rate up to which attainment stays at the target, linear between rungs; 0: none.

    `attainment_by_rate` is attainment by rate, rates rising. The last rate is an answer, too: more
    was not asked for.
    """
    first = next(iter(attainment_by_rate), 0.0)
    if not attainment_by_rate or attainment_by_rate[first] < target:
        return 0.0
    for (low, attained_low), (high, attained_high) in pairwise(attainment_by_rate.items()):
        if attained_high < target:
            return low + (attained_low - target) / (attained_low - attained_high) * (high - low)
    return max(attainment_by_rate)


def highest_rate(
    attainment_at: Callable[[float], float],
    rates: Sequence[float],
    *,
    guess: float,
    target: float = TARGET,
) -> float:
    """The highest rate at which attainment stays at the target, looked for from near a guess.

    `attainment_at` says attainment at one of the rates, which rise.
    """
    attainment_by_rate: dict[float, float] = {}

    def meets_target(place: int) -> bool:
        rate = rates[place]
        attainment_by_rate[rate] = attainment_at(rate)
        return attainment_by_rate[rate] >= target

    index = max(0, sum(rate <= guess for rate in rates) - 1)
    if meets_target(index):
        while index + 1 < len(rates) and meets_target(index + 1):
            index += 1
    else:
        while index > 0 and not meets_target(index - 1):
            index -= 1
    return capacity(dict(sorted(attainment_by_rate.items())), target)


def attainment_curves(
    variant: Variant, load: TraceLoad, cells: Sequence[Objectives], rates: Sequence[float]
) -> list[dict[float, float]]:
    """Attainment by rate, for each cell; it ends where every cell is missed.

    One run serves all cells: without objectives of its own, an arm does the same for all of them.
    """
    curves: list[dict[float, float]] = [{} for _ in cells]
    for rate in rates:
        outcomes = run(variant, load.at_rate(rate))
        for share, cell in zip(curves, cells, strict=True):
            share[rate] = attainment(outcomes, cell)
        if all(share[rate] < TARGET for share in curves):
            break
    return curves
