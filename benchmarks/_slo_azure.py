"""Azure's traces, code completions in bursts first, under every autoscaler: request by request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil
from pathlib import Path

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.state.service_rules import ServiceRules
from baton.domain.slo import Slo
from baton.perf.hardware.accelerators import Dtype
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.scaling.observation import Demand
from baton.policy.scaling.options import PoolBounds
from baton.simulator.fleet.plans import UNBOUNDED_LIMITS, PoolPlan, Scenario
from baton.simulator.scenario import SimulationResult, simulate
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads import csv_traces as azure
from baton.simulator.workloads.trace import Trace, TraceRequest
from benchmarks._slo_fleets import (
    BURST_SLO,
    DECODE,
    GPUS,
    ORACLE_BURST_SLO,
    PREFILL,
    ROLES,
    VARIANTS,
    ReplicaCapacity,
    engine_settings,
    needed_replicas,
    pool_bounds,
    replica_capacity,
)
from benchmarks._slo_table import ORACLE, scaling_metrics

CODE_TRACE = Path("traces/azure/AzureLLMInferenceTrace_code.csv")
"""Gaps between arrivals have a coefficient of variation of 13."""
CONVERSATION_TRACE = Path("traces/azure/AzureLLMInferenceTrace_conv.csv")
"""Steady beside it; it was not used while the policy was made."""
INTERVAL_S = 2.0
_STEP_TOKENS = 8192
_DECODE_STEP_TOKENS = {PREFILL: None, DECODE: 512}
"""Short where streams wait, in the pool where they mostly do."""
FORESIGHT_S = 10.0
"""The oracle knows the mean demand of each 10 s to come, ..."""
BURST_FORESIGHT_S = 2.0
"""... and of bursts, of each TTFT objective. Means of 10 s hide them: with those it attained 0.94
to 0.95 of the code completions (S). Of a steady load, 2 s are noise, for which it would pay."""
_FIRST_S = 60.0
"""Every policy begins with what the first minute needs, or the first cold start."""


def read_trace(file: Path) -> Trace:
    """The trace as it was recorded."""
    with file.open() as lines:
        return azure.read(lines, file.stem)


def scenario(
    engines: Mapping[str, V1Settings],
    replicas: Mapping[str, int],
    slo: Slo,
    *,
    disaggregate: Disaggregate = Disaggregate.AUTO,
    autoscaler: Callable[[], Autoscaler] | None = None,
) -> Scenario:
    """A split fleet with one objective, by baton's own placement and admission."""
    options = PredictedOptions(
        disaggregate=disaggregate, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s
    )
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
        rules=ServiceRules(slos=SloClasses(classes={"default": slo})),
        limits=replace(UNBOUNDED_LIMITS, max_pulls=engines[DECODE].max_pulls),
        autoscaler=autoscaler,
        scaling_interval_s=INTERVAL_S,
    )


def engine_settings_by_pool(
    device: str, weights: Dtype, cold_start_s: float
) -> dict[str, V1Settings]:
    """Of both pools: long steps for prompts, short ones where streams wait for them."""
    return {
        pool: engine_settings(
            device,
            weights,
            max_batched_tokens=_STEP_TOKENS,
            max_batched_tokens_while_decoding=tokens,
            cold_start_s=cold_start_s,
        )
        for pool, tokens in _DECODE_STEP_TOKENS.items()
    }


def mean_lengths(trace: Trace) -> tuple[float, float]:
    """Prompt and output tokens of a request."""
    count = max(1, len(trace))
    return (
        sum(request.prompt_tokens for request in trace.requests) / count,
        sum(request.output_tokens for request in trace.requests) / count,
    )


def demand_bins(trace: Trace, width_s: float) -> list[Demand]:
    """Arrivals in each span of `width_s` seconds, per second."""
    count = int(trace.requests[-1].at_s // width_s) + 1
    requests_by_bin: list[list[TraceRequest]] = [[] for _ in range(count)]
    for request in trace.requests:
        requests_by_bin[int(request.at_s // width_s)].append(request)
    return [_demand(part, width_s) for part in requests_by_bin]


def _demand(bin_requests: Sequence[TraceRequest], width_s: float) -> Demand:
    requests = len(bin_requests)
    prompts = sum(bin_request.prompt_tokens for bin_request in bin_requests)
    outputs = sum(bin_request.output_tokens for bin_request in bin_requests)
    per_request = 1 / requests if requests else 0.0
    return Demand(
        requests_per_s=requests / width_s,
        prompt_tokens_per_s=prompts / width_s,
        output_tokens_per_s=outputs / width_s,
        mean_prompt_tokens=prompts * per_request,
        mean_uncached_tokens=prompts * per_request,
        mean_output_tokens=outputs * per_request,
    )


def peak_demand(demands: Sequence[Demand]) -> Demand:
    """The most of everything."""
    return Demand(
        prompt_tokens_per_s=max(demand.prompt_tokens_per_s for demand in demands),
        output_tokens_per_s=max(demand.output_tokens_per_s for demand in demands),
    )


@lru_cache(maxsize=1)
def prepare(file: Path) -> tuple[Trace, list[Demand], ReplicaCapacity]:
    trace = read_trace(file)
    prompts, outputs = mean_lengths(trace)
    settings = engine_settings_by_pool("A100", Dtype.BF16, 60.0)[PREFILL]
    capacity = replica_capacity(settings, BURST_SLO, prompt_tokens=prompts, output_tokens=outputs)
    return trace, demand_bins(trace, FORESIGHT_S), capacity


def initial_sizes(
    name: str, demands: Sequence[Demand], capacity: ReplicaCapacity, cold_start_s: float
) -> tuple[Mapping[str, int], dict[str, PoolBounds]]:
    """How many replicas a policy begins with, and how many it may have."""
    at_peak = needed_replicas(peak_demand(demands), capacity, BURST_SLO)
    first_bins = ceil(max(_FIRST_S, cold_start_s + INTERVAL_S) / FORESIGHT_S)
    initial_replicas = needed_replicas(peak_demand(demands[:first_bins]), capacity, BURST_SLO)
    max_replicas = {pool: 2 * count for pool, count in at_peak.items()}
    start = at_peak if name == "static_peak" else initial_replicas
    return start, pool_bounds(start, max_replicas)


def planned_slo(file: Path, name: str) -> Slo:
    """The objective that a policy plans for; the oracle of bursts plans to serve them."""
    return ORACLE_BURST_SLO if name == ORACLE and _is_bursty(file) else BURST_SLO


def foresight_s(file: Path) -> float:
    """How long the means of the oracle are."""
    return BURST_FORESIGHT_S if _is_bursty(file) else FORESIGHT_S


def _is_bursty(file: Path) -> bool:
    return file.name == CODE_TRACE.name


def foresight(trace: Trace, width_s: float) -> Callable[[float], Demand]:
    """The demand that the oracle knows, by time: means of `width_s` seconds."""
    demands = demand_bins(trace, width_s)
    return lambda at_s: demands[min(len(demands) - 1, max(0, int(at_s // width_s)))]


def run(file: Path, name: str, cold_start_s: float) -> SimulationResult:
    """One policy on a trace, with one cold start."""
    trace, demands, capacity = prepare(file)
    start, limits = initial_sizes(name, demands, capacity, cold_start_s)
    every_s = foresight_s(file)
    known = foresight(trace, every_s)
    azure_scenario = scenario(
        engine_settings_by_pool("A100", Dtype.BF16, cold_start_s),
        start,
        planned_slo(file, name),
        autoscaler=lambda: VARIANTS[name].make_autoscaler(
            limits, known, interval_s=INTERVAL_S, every_s=every_s
        ),
    )
    return simulate(azure_scenario, trace)


def compute_metrics(file: Path, name: str, cold_start_s: float) -> dict[str, float]:
    """What one run comes to."""
    result = run(file, name, cold_start_s)
    good_requests = sum(outcome.slo_met for outcome in result.outcomes)
    return scaling_metrics(result.scaling, good_requests / len(result.outcomes))
