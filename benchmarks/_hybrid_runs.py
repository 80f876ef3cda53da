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
from baton.perf.hardware.catalogue import accelerator
from baton.perf.model.known_models import shape_of
from baton.perf.model.memory import fit
from baton.perf.steps.roofline import Roofline
from baton.policy.admission.slo_classes import DEFAULT_CLASS, SloBook
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
class Arm:
    """One way to run the same GPUs."""

    prefill: int
    """Replicas meant for prefill; the others decode, or do both where there are none of these."""
    split: Disaggregate
    budget: int = _DECODE_BUDGET
    """Tokens a step, of the others."""
    admits: bool = False
    """Whether requests that are predicted to miss their objectives are turned away at once."""

    @property
    def name(self) -> str:
        """For people."""
        kind = {"never": "colocated", "always": "static", "auto": "hybrid"}[self.split.value]
        shape = f"{self.prefill}P{REPLICAS - self.prefill}D" if self.prefill else f"{self.budget}"
        return f"{kind} {shape}{', admission' if self.admits else ''}"


COLOCATED = tuple(Arm(0, Disaggregate.NEVER, budget) for budget in (512, 2048))
STATIC = tuple(Arm(count, Disaggregate.ALWAYS) for count in range(1, REPLICAS))


def hybrid(prefill: int, budget: int = _DECODE_BUDGET, *, admits: bool = False) -> Arm:
    """Baton's own: split where that is predicted to serve better; pools are hints."""
    return Arm(prefill, Disaggregate.AUTO, budget, admits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A trace at any rate, for a while."""

    trace: Trace
    window_s: float

    def at(self, rate_per_s: float) -> Trace:
        """Its requests of the window; those of a lower rate are among those of a higher one."""
        scaled = at_rate(self.trace, rate_per_s, random.Random(0))  # noqa: S311 - a load
        return cut(scaled, until_s=self.window_s)


def read_loads(folder: Path) -> dict[str, Trace]:
    """The three traces."""
    traces = folder / "traces"
    found = {}
    for name in ("conv", "code"):
        with (traces / f"azure/AzureLLMInferenceTrace_{name}.csv").open() as file:
            found[f"azure_{name}"] = azure.read(file, name)
    with (traces / "mooncake/conversation_trace.jsonl").open() as file:
        found["mooncake_conv"] = mooncake.read(file, "conversation", spread_s=3.0)
    return found


def engine(budget: int, block_tokens: int) -> V1Settings:
    """A replica: Llama-3.1-70B in FP8 on four H100."""
    shape, device = shape_of("meta-llama/Llama-3.1-70B-Instruct"), accelerator("H100")
    memory = fit(shape, device, tp=4, pp=1, weights=Dtype.FP8, kv=Dtype.BF16)
    return V1Settings(
        timing=Roofline(shape, device, tp=4, weights=Dtype.FP8),
        kv_blocks=memory.kv_blocks(block_tokens),
        kv_block_bytes=round(shape.kv_token_bytes(Dtype.BF16)) * block_tokens,
        block_size_tokens=block_tokens,
        max_running_requests=512,
        max_batched_tokens=budget,
        transfer_bytes_per_s=4 * device.network_bytes_per_s,
    )


def scenario(arm: Arm, objectives: Objectives, block_tokens: int) -> Scenario:
    """A fleet of `REPLICAS`; placement aims at the objectives."""
    options = PredictedOptions(
        disaggregate=arm.split, ttft_slo_s=objectives.ttft_s, tpot_slo_s=objectives.tpot_s
    )
    rest = Role.DECODE if arm.prefill else Role.MIXED
    pools = [
        PoolPlan(
            name="prefill",
            role=Role.PREFILL,
            replicas=arm.prefill,
            settings=engine(_PREFILL_BUDGET, block_tokens),
        ),
        PoolPlan(
            name="rest",
            role=rest,
            replicas=REPLICAS - arm.prefill,
            settings=engine(arm.budget, block_tokens),
        ),
    ]
    return Scenario(
        pools=tuple(pool for pool in pools if pool.replicas),
        placer=lambda: PredictedPlacer(options),
        index=IndexOptions(mode=IndexMode.HYBRID),
        rules=_promising(objectives) if arm.admits else ServiceRules(),
    )


def _promising(objectives: Objectives) -> ServiceRules:
    """Every request is promised the objectives."""
    slo = Slo(ttft_s=objectives.ttft_s, tpot_s=objectives.tpot_s, attainment_target=TARGET)
    return ServiceRules(slos=SloBook(classes={DEFAULT_CLASS: slo}))


def run(arm: Arm, load: Trace, objectives: Objectives = Objectives()) -> tuple[Outcome, ...]:  # noqa: B008 - a frozen value
    """What becomes of a load."""
    cached = any(one.block_ids for one in load.requests)
    block_tokens = load.block_tokens if cached else _BLOCK_TOKENS
    return simulate(scenario(arm, objectives, block_tokens), load).outcomes


# -------------------------------------------------------------------- rates


def rungs(lowest: float, highest: float, *, ratio: float = 1.08) -> list[float]:
    """Rates from one to the other, each so many times the one before."""
    found = [lowest]
    while found[-1] < highest:
        found.append(found[-1] * ratio)
    return found


def capacity(shares: Mapping[float, float], target: float = TARGET) -> float:
    """The highest rate up to which attainment stays at the target, linear between rungs; 0: none.

    `shares` is attainment by rate, rates rising. The last rate is an answer, too: more was not
    asked for.
    """
    first = next(iter(shares), 0.0)
    if not shares or shares[first] < target:
        return 0.0
    for (low, held), (high, lost) in pairwise(shares.items()):
        if lost < target:
            return low + (held - target) / (held - lost) * (high - low)
    return max(shares)


def highest(
    share_at: Callable[[float], float],
    rates: Sequence[float],
    *,
    near: float,
    target: float = TARGET,
) -> float:
    """The highest rate at which attainment stays at the target, looked for from near a guess.

    `share_at` says attainment at one of the rates, which rise.
    """
    shares: dict[float, float] = {}

    def met(place: int) -> bool:
        rate = rates[place]
        shares[rate] = share_at(rate)
        return shares[rate] >= target

    place = max(0, sum(rate <= near for rate in rates) - 1)
    if met(place):
        while place + 1 < len(rates) and met(place + 1):
            place += 1
    else:
        while place > 0 and not met(place - 1):
            place -= 1
    return capacity(dict(sorted(shares.items())), target)


def ladder(
    arm: Arm, load: Load, cells: Sequence[Objectives], rates: Sequence[float]
) -> list[dict[float, float]]:
    """Attainment by rate, for each cell; it ends where every cell is missed.

    One run serves all cells: without objectives of its own, an arm does the same for all of them.
    """
    shares: list[dict[float, float]] = [{} for _ in cells]
    for rate in rates:
        outcomes = run(arm, load.at(rate))
        for share, cell in zip(shares, cells, strict=True):
            share[rate] = attainment(outcomes, cell)
        if all(share[rate] < TARGET for share in shares):
            break
    return shares
