"""Azure's traces, code completions in bursts first, under every autoscaler: request by request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.state.service_rules import ServiceRules
from baton.domain.slo import Slo
from baton.perf.hardware.accelerators import Dtype
from baton.policy.admission.slo_classes import SloBook
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.scaling.observation import Demand
from baton.policy.scaling.options import PoolBounds
from baton.simulator.fleet.plans import PoolPlan, Scenario
from baton.simulator.scenario import Run, simulate
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads import csv_traces as azure
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._slo_fleets import (
    ARMS,
    BURSTS,
    DECODE,
    GPUS,
    PREFILL,
    ROLES,
    Strength,
    bounds,
    engine,
    needed,
    strength,
)
from benchmarks._slo_table import figures_of

CODE = Path("traces/azure/AzureLLMInferenceTrace_code.csv")
"""Gaps between arrivals have a coefficient of variation of 13."""
CONVERSATION = Path("traces/azure/AzureLLMInferenceTrace_conv.csv")
"""Steady beside it; nobody looked at it while the policy was made."""
INTERVAL_S = 2.0
_STEP_TOKENS = 8192
_DECODE_STEP_TOKENS = {PREFILL: None, DECODE: 512}
"""Short where streams wait, in the pool where they mostly do."""
FORESIGHT_S = 10.0
_FIRST_BINS = 6
"""Every policy begins with what the first minute needs."""


def read(file: Path) -> Trace:
    """The trace as it was recorded."""
    with file.open() as lines:
        return azure.read(lines, file.stem)


def scenario(
    engines: Mapping[str, V1Settings],
    replicas: Mapping[str, int],
    slo: Slo,
    *,
    split: Disaggregate = Disaggregate.AUTO,
    autoscaler: Callable[[], Autoscaler] | None = None,
) -> Scenario:
    """A split fleet that keeps one promise, by baton's own placement and admission."""
    options = PredictedOptions(disaggregate=split, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    return Scenario(
        pools=tuple(
            PoolPlan(
                name=pool,
                role=role,
                replicas=replicas[pool],
                settings=engines[pool],
                gpus_per_replica=GPUS,
            )
            for pool, role in ROLES.items()
        ),
        placer=lambda: PredictedPlacer(options),
        rules=ServiceRules(slos=SloBook(classes={"default": slo})),
        autoscaler=autoscaler,
        scaling_interval_s=INTERVAL_S,
    )


def engines(device: str, weights: Dtype, cold_start_s: float) -> dict[str, V1Settings]:
    """Of both pools: long steps for prompts, short ones where streams wait for them."""
    return {
        pool: engine(
            device,
            weights,
            budget=_STEP_TOKENS,
            decode_step_tokens=tokens,
            cold_start_s=cold_start_s,
        )
        for pool, tokens in _DECODE_STEP_TOKENS.items()
    }


def mean_lengths(trace: Trace) -> tuple[float, float]:
    """Prompt and output tokens of a request."""
    count = max(1, len(trace))
    return (
        sum(one.prompt_tokens for one in trace.requests) / count,
        sum(one.output_tokens for one in trace.requests) / count,
    )


def bins(trace: Trace, width_s: float) -> list[Demand]:
    """What arrives in each stretch of so many seconds, per second."""
    count = int(trace.requests[-1].at_s // width_s) + 1
    parts: list[list[TraceRequest]] = [[] for _ in range(count)]
    for one in trace.requests:
        parts[int(one.at_s // width_s)].append(one)
    return [_demand(part, width_s) for part in parts]


def _demand(part: Sequence[TraceRequest], width_s: float) -> Demand:
    requests = len(part)
    prompts = sum(one.prompt_tokens for one in part)
    outputs = sum(one.output_tokens for one in part)
    each = 1 / requests if requests else 0.0
    return Demand(
        requests_per_s=requests / width_s,
        prompt_tokens_per_s=prompts / width_s,
        output_tokens_per_s=outputs / width_s,
        mean_prompt_tokens=prompts * each,
        mean_uncached_tokens=prompts * each,
        mean_output_tokens=outputs * each,
    )


def peak_of(demands: Sequence[Demand]) -> Demand:
    """The most of everything."""
    return Demand(
        prompt_tokens_per_s=max(one.prompt_tokens_per_s for one in demands),
        output_tokens_per_s=max(one.output_tokens_per_s for one in demands),
    )


@lru_cache(maxsize=1)
def prepared(file: Path) -> tuple[Trace, list[Demand], Strength]:
    trace = read(file)
    prompts, outputs = mean_lengths(trace)
    settings = engines("A100", Dtype.BF16, 60.0)[PREFILL]
    one = strength(settings, BURSTS, prompt_tokens=prompts, output_tokens=outputs)
    return trace, bins(trace, FORESIGHT_S), one


def sizes(
    name: str, ahead: Sequence[Demand], one: Strength
) -> tuple[Mapping[str, int], dict[str, PoolBounds]]:
    """How many replicas a policy begins with, and how many it may have."""
    at_peak = needed(peak_of(ahead), one, BURSTS)
    first = needed(peak_of(ahead[:_FIRST_BINS]), one, BURSTS)
    most = {pool: 2 * count for pool, count in at_peak.items()}
    start = at_peak if name == "static_peak" else first
    return start, bounds(start, most)


def foreseen(ahead: Sequence[Demand], at_s: float) -> Demand:
    """What the oracle knows of a moment."""
    return ahead[min(len(ahead) - 1, max(0, int(at_s // FORESIGHT_S)))]


def run(file: Path, name: str, cold_start_s: float) -> Run:
    """One policy on a trace, with one cold start."""
    trace, ahead, one = prepared(file)
    start, limits = sizes(name, ahead, one)

    def known(at_s: float) -> Demand:
        return foreseen(ahead, at_s)

    scene = scenario(
        engines("A100", Dtype.BF16, cold_start_s),
        start,
        BURSTS,
        autoscaler=lambda: ARMS[name].scaler(
            limits, known, interval_s=INTERVAL_S, every_s=FORESIGHT_S
        ),
    )
    return simulate(scene, trace)


def figures(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run comes to."""
    made = run(file, name, cold_start_s)
    good = sum(one.good for one in made.outcomes)
    return figures_of(made.story, good / len(made.outcomes))
