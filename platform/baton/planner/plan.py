"""Finds the cheapest fleet that serves a workload within its objectives.

Theory of operation, from cheap to expensive:

- Reject shapes that do not fit into memory.
- Stop if the fastest shape, idle, misses an objective.
- Choose shapes by closed-form rates.
- Simulate each of them alone, for its duty, at rates found by bisection.
- Build fleets of all three kinds from the rates of single replicas.
- Simulate the best fleets of each kind, whole or as a proportional part, with the coordinator and
  placement policy that would run them. Short runs find a rate, long runs confirm it.

Only the last step's rates are in the answer. All runs draw their requests from the same trace with
the same seed.

Source: the placement search of DistServe (OSDI'24) section 4, extended by hybrid and colocated
fleets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.domain.errors import InsufficientMemory
from baton.domain.names.words import count_text
from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
from baton.planner.explore import Explorer, cost, first_by_kind, has_all_prices, rank_candidates
from baton.planner.problem import PlanningProblem, SloClass, class_of
from baton.planner.rates.closed_form import MeanRequest, decode_s, prefill_s, steady_rate
from baton.planner.rates.measure import InstanceTask, measure_instance
from baton.planner.rates.shortlist import shortlist_shapes
from baton.planner.rates.trials import Trial, steady_tpot_s
from baton.planner.result import (
    Bottleneck,
    Candidate,
    Constraint,
    Plan,
    Quantization,
    Tradeoff,
    UnreachableObjective,
)
from baton.planner.sensitivity import analyze_sensitivity, find_demand
from baton.planner.shapes.fleets import FleetKind, GpuBudget, PlannedPool
from baton.planner.shapes.space import (
    Duty,
    EngineShape,
    ShapeCatalogue,
    Split,
    build_engine_shape,
    enumerate_shapes,
)
from baton.planner.simulation_runner import ParallelMap, Progress, SimulationRunner
from baton.planner.tradeoffs import closed_form_tradeoffs, pareto_front, simulated_tradeoffs
from baton.simulator.outcome import quantile
from baton.simulator.workloads.statistics import reused_tokens
from baton.simulator.workloads.trace import Trace, TraceRequest

STAGE = "shapes"
_BUSY_FRACTION = 0.6
"""Utilization from which a pool counts as busy: bursts leave little more."""
_FULL_FRACTION = 0.85
_NEAR_FRACTION = 0.95
"""Of a limit by the mean request: a run's own requests are a little longer or shorter."""
_QUANTIZATIONS = (
    (Dtype.BF16, Dtype.FP8),
    (Dtype.FP8, Dtype.BF16),
    (Dtype.FP8, Dtype.FP8),
    (Dtype.FP4, Dtype.FP8),
)
"""Types of weights and of the KV cache to compare with; each no wider than the question's."""


def plan(
    question: PlanningProblem,
    *,
    parallel_map: ParallelMap = map,
    on_progress: Callable[[Progress], None] | None = None,
    catalogue: ShapeCatalogue | None = None,
    simulated: Sequence[Candidate] = (),
) -> Plan:
    """The answer to a question.

    Args:
        question: workload, objectives and accelerators.
        parallel_map: runs simulations; a process pool's `map` runs several at a time.
        on_progress: receives the progress of the search.
        catalogue: shapes to choose from, instead of the question's space on the roofline.
        simulated: fleets of an answer to the same question in another space, whose simulations are
            used again.

    Raises:
        InsufficientMemory: the model fits in no shape.
    """
    catalogue = catalogue or enumerate_shapes(question)
    if not any(catalogue.shapes_by_duty.values()):
        _raise_misfit(question)
    mix = _mean_mix(question.traffic)
    prefills = (*catalogue.shapes_by_duty[Duty.PREFILL], *catalogue.shapes_by_duty[Duty.BOTH])
    decodes = (*catalogue.shapes_by_duty[Duty.DECODE], *catalogue.shapes_by_duty[Duty.BOTH])
    bounds = unreachable_objectives(question, prefills, decodes)
    if bounds:
        return Plan(
            question=question,
            mix=mix,
            best=None,
            meets_rate=False,
            verdict="; ".join(str(bound) for bound in bounds),
            unreachable_objectives=bounds,
            rejected_shapes=catalogue.rejected,
        )
    runner = SimulationRunner(parallel_map, on_progress)
    tasks = shortlist_shapes(question, catalogue, mix)
    measured = runner.run_stage(STAGE, measure_instance, tasks)
    explorer = Explorer(question, tasks, measured, simulated)
    explorer.runs += sum(len(search.trials) for search in measured)
    result = _build_plan(explorer, explorer.explore(runner), mix)
    result = replace(result, demand=find_demand(result, explorer, runner))
    result = replace(
        result,
        rejected_shapes=catalogue.rejected,
        tradeoffs=_tradeoffs(result.candidates, catalogue, mix),
    )
    return _with_sensitivity(result, explorer, tasks, runner)


def plan_groups(
    question: PlanningProblem,
    sizes: tuple[int, ...],
    *,
    parallel_map: ParallelMap = map,
    on_progress: Callable[[Progress], None] | None = None,
    without: Plan | None = None,
) -> Plan:
    """The answer that also considers groups of these many data-parallel ranks with shared experts.

    Args:
        question: workload, objectives and accelerators.
        sizes: ranks of a group.
        parallel_map: runs simulations.
        on_progress: receives the progress of the search.
        without: the answer without groups; its fleets are not simulated again.

    Raises:
        InsufficientMemory: the model fits in no shape, either.
    """
    changed = replace(
        question,
        space=replace(question.space, data_parallel_sizes=sizes),
        effort=replace(question.effort, sensitivity=False),
    )
    return plan(
        changed,
        parallel_map=parallel_map,
        on_progress=on_progress,
        simulated=() if without is None else without.candidates,
    )


def plan_quantizations(
    question: PlanningProblem,
    *,
    parallel_map: ParallelMap = map,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[Quantization, ...]:
    """The answers with narrower weights and KV cache than the question's, to compare with."""
    effort = replace(question.effort, sensitivity=False)
    present = question.weights_dtype, question.kv_dtype
    results: dict[tuple[Dtype, Dtype], Quantization] = {}
    for pair in _QUANTIZATIONS:
        weights, kv = (
            min(types, key=DTYPE_BYTES.__getitem__) for types in zip(present, pair, strict=True)
        )
        if (weights, kv) == present or (weights, kv) in results:
            continue
        changed = replace(question, weights_dtype=weights, kv_dtype=kv, effort=effort)
        answer, reason = None, ""
        try:
            answer = plan(changed, parallel_map=parallel_map, on_progress=on_progress)
        except InsufficientMemory as error:
            reason = str(error)
        results[weights, kv] = Quantization(
            weights=str(weights), kv=str(kv), plan=answer, reason=reason
        )
    return tuple(results.values())


def _build_plan(explorer: Explorer, candidates: Sequence[Candidate], mix: MeanRequest) -> Plan:
    question = explorer.question
    best, ranked = rank_candidates(candidates, question)
    meets_rate = best is not None and (question.demand is None or best.meets_demand(question))
    return Plan(
        question=question,
        mix=mix,
        best=best,
        meets_rate=meets_rate,
        verdict=verdict_of(best, ranked, question) + _missing_prices_note(best, question),
        candidates=tuple(ranked),
        bottleneck=None if best is None else find_bottleneck(best, mix, question.classes),
        gpus_needed=None if meets_rate or best is None else _required_gpus(explorer, best),
    )


def _with_sensitivity(
    result: Plan, explorer: Explorer, tasks: list[InstanceTask], runner: SimulationRunner
) -> Plan:
    results = result.sensitivity
    if result.best is not None and explorer.question.effort.sensitivity:
        demand_per_s = None if result.demand is None else result.demand.rate_per_s
        results = analyze_sensitivity(result.best, explorer, tasks, runner, demand_per_s)
    return replace(result, sensitivity=results, runs=explorer.runs)


def _tradeoffs(
    candidates: Sequence[Candidate], catalogue: ShapeCatalogue, mix: MeanRequest
) -> tuple[Tradeoff, ...]:
    return (
        *pareto_front(closed_form_tradeoffs(catalogue.shapes_by_duty, mix)),
        *simulated_tradeoffs(candidates),
    )


def _required_gpus(explorer: Explorer, best: Candidate) -> int | None:
    """GPUs for the rate without a budget, by the best fleet's ratio of estimate and simulation."""
    demand = explorer.question.demand
    assert demand is not None, "without a demand, anything is enough"
    scaled = demand * explorer.correction(best)
    unlimited_stock = GpuBudget(gpus=None, limit_by_accelerator={})
    fleet = explorer.cheapest_fleet(best.fleet.kind, scaled, stock=unlimited_stock)
    return None if fleet is None else fleet.gpus


def _raise_misfit(question: PlanningProblem) -> None:
    """Raise the memory error of the largest shape.

    Raises:
        InsufficientMemory: always, unless the shape is invalid in another way.
    """
    widest = max(question.space.tensor_parallel_sizes)
    for tp in sorted(question.space.tensor_parallel_sizes, reverse=True):
        if not question.model.heads % tp:
            widest = tp
            break
    offer = question.offers[0]
    build_engine_shape(
        question, offer, Split(widest, 1), chunk_tokens=question.space.decode_chunk_tokens
    )
    raise InsufficientMemory(
        reason=(
            f"no shape of {question.model.name} on {offer.accelerator.name} is within the GPUs"
            " given"
        ),
        remedy="allow more GPUs, or other tensor or pipeline sizes",
        term="devices",
        excess_bytes=0.0,
        min_parallelism=None,
    )


def verdict_of(
    best: Candidate | None, ranked: Sequence[Candidate], question: PlanningProblem
) -> str:
    """Whether to disaggregate, with the best fleet's rate beside that of the strongest other.

    If the best fleet is not enough, or another carries more, that and the reason come first.
    """
    if best is None:
        return _describe_infeasible(ranked)
    recommendation = {
        FleetKind.COLOCATED: "do not disaggregate",
        FleetKind.DISAGGREGATED: "disaggregate",
        FleetKind.HYBRID: "disaggregate, and let decode replicas prefill where that is faster",
    }[best.fleet.kind]
    is_colocated = best.fleet.kind is FleetKind.COLOCATED
    others = [
        candidate
        for kind, candidate in first_by_kind(ranked).items()
        if (kind is FleetKind.COLOCATED) is not is_colocated
    ]
    alternative = _alternative(others, question)
    reasons = [
        _WITHOUT_OTHERS[is_colocated]
        if alternative is None
        else _compare(best, alternative, question)
    ]
    strongest = max(ranked, key=lambda candidate: _load_per_cost(candidate, question))
    if strongest is not alternative and _outdoes(strongest, best, question):
        ratio_text = _ratio_text(best, strongest, question)
        reasons.append(f"against {strongest.fleet.kind} ({_describe_rate(strongest)}) {ratio_text}")
    return f"{recommendation}{_concession(best, ranked, question)}: {'; '.join(reasons)}"


def _concession(best: Candidate, ranked: Sequence[Candidate], question: PlanningProblem) -> str:
    """Why the best fleet is taken, if it is not enough or another carries more; else empty."""
    load = best.load(question)
    stronger = [candidate for candidate in ranked if candidate.load(question) > load]
    if best.meets_demand(question):
        best_cost = cost(best.fleet, question)
        text = ", with the cheapest fleet that is enough" if stronger else ""
        stronger = [
            candidate for candidate in stronger if cost(candidate.fleet, question) <= best_cost
        ]
        reason = "it costs the same, and is the more complicated"
    else:
        text = "" if question.demand is None else ", although no fleet is enough"
        reason = (
            f"equal within the tolerance of {question.effort.precision:.0%}, and"
            f" {best.fleet.kind} is the simpler to run"
        )
    if not stronger:
        return text
    strongest = max(stronger, key=lambda candidate: candidate.load(question))
    return f"{text}, although {strongest.fleet.kind} carries more: {reason}"


_WITHOUT_OTHERS = {
    True: "there is no room for two pools",
    False: "no colocated fleet meets the objectives",
}
"""By whether the best fleet is colocated: why there is no fleet of the other choice."""


def _alternative(others: Sequence[Candidate], question: PlanningProblem) -> Candidate | None:
    """The best fleet of the other choice: to disaggregate, or not. None if there is none."""
    meeting_demand = [candidate for candidate in others if candidate.meets_demand(question)]
    if meeting_demand:
        return min(meeting_demand, key=lambda candidate: cost(candidate.fleet, question))
    return max(others, key=lambda candidate: _load_per_cost(candidate, question), default=None)


def _outdoes(candidate: Candidate, best: Candidate, question: PlanningProblem) -> bool:
    """Whether a fleet carries more than the best one for its cost, where that decides."""
    return not best.meets_demand(question) and _load_per_cost(candidate, question) > _load_per_cost(
        best, question
    )


def _load_per_cost(candidate: Candidate, question: PlanningProblem) -> float:
    return candidate.load(question) / cost(candidate.fleet, question)


def _missing_prices_note(best: Candidate | None, question: PlanningProblem) -> str:
    """A note that some prices are missing, so that fleets are compared by GPUs; else empty."""
    unpriced = [offer.accelerator.name for offer in question.offers if not offer.price]
    if best is None or len(unpriced) in {0, len(question.offers)}:
        return ""
    return f" (fleets are compared by GPUs: no price is known of {', '.join(unpriced)})"


def _compare(best: Candidate, alternative: Candidate, question: PlanningProblem) -> str:
    if not alternative.rate_per_s:
        return (
            f"{best.fleet.kind} carries {_describe_rate(best)}, {alternative.fleet.kind}"
            " nothing in time"
        )
    rates = (
        f"{best.fleet.kind} carries {_describe_rate(best)}, {alternative.fleet.kind}"
        f" {_describe_rate(alternative)}"
    )
    if best.meets_demand(question) and alternative.meets_demand(question):
        return f"{rates}: {_compare_costs(best, alternative, question)}"
    return f"{rates}: {_ratio_text(best, alternative, question)}"


def _ratio_text(best: Candidate, alternative: Candidate, question: PlanningProblem) -> str:
    """How much the best fleet carries for its cost."""
    ratio = _load_per_cost(best, question) / _load_per_cost(alternative, question)
    unit = "dollar" if has_all_prices(question) else "GPU"
    carries_more = ratio < 1 and best.load(question) >= alternative.load(question)
    reason = f": {best.fleet.kind} carries more in all" if carries_more else ""
    return f"{ratio:.2f} times as much per {unit}{reason}"


def _compare_costs(best: Candidate, alternative: Candidate, question: PlanningProblem) -> str:
    """Of two fleets that both carry the required rate."""
    best_cost, other_cost = (cost(fleet.fleet, question) for fleet in (best, alternative))
    if best_cost == other_cost:
        return f"{alternative.fleet.kind} costs the same, and is the more complicated"
    return f"{alternative.fleet.kind} costs {other_cost / best_cost:.2f} times as much for the rate"


def _describe_rate(candidate: Candidate) -> str:
    return f"{candidate.rate_per_s:.3g} requests/s on {count_text(candidate.fleet.gpus, 'GPU')}"


def _describe_infeasible(ranked: Sequence[Candidate]) -> str:
    trials = [trial for candidate in ranked for trial in candidate.search_result.trials]
    if not trials:
        return "no shape meets the objectives alone, at any rate that was tried"
    closest = max(trials, key=lambda trial: trial.margin)
    return (
        f"no fleet meets the objectives: at best {closest.attainment:.1%} of requests do, at"
        f" {closest.rate_per_s:.3g} requests/s; {closest.late_first_token_fraction:.1%} have a"
        " late first token,"
        f" {closest.slow_stream_fraction:.1%} a slow stream"
    )


def find_bottleneck(
    candidate: Candidate, mix: MeanRequest, classes: Sequence[SloClass] = ()
) -> Bottleneck:
    """The bottleneck of a candidate, at the lowest rate that it did not sustain."""
    failed_trial = candidate.search_result.lowest_failed_trial
    if failed_trial is None:
        return Bottleneck(constraint=Constraint.NONE, reason="no rate that was tried was too high")
    if stream_limit := _stream_bottleneck(candidate, failed_trial, mix, classes):
        return stream_limit
    if capacity_limit := _capacity_bottleneck(candidate, failed_trial, mix):
        return capacity_limit
    if failed_trial.late_first_token_fraction >= failed_trial.slow_stream_fraction:
        return _first_token_bottleneck(candidate, failed_trial, mix)
    evidence = (
        f"at {failed_trial.rate_per_s * candidate.scale_factor:.3g} requests/s"
        f" {failed_trial.slow_stream_fraction:.0%}"
    )
    if candidate.fleet.kind is FleetKind.DISAGGREGATED:
        return Bottleneck(
            constraint=Constraint.DECODE_BANDWIDTH,
            reason=f"{evidence} of streams are too slow: steps of that many streams read too much",
        )
    return Bottleneck(
        constraint=Constraint.SHARED_STEPS,
        reason=f"{evidence} of streams are too slow: steps compute prompts beside them",
    )


def _first_token_bottleneck(
    candidate: Candidate, failed_trial: Trial, mix: MeanRequest
) -> Bottleneck:
    # A hybrid's decode replicas compute prompts, too.
    is_hybrid = candidate.fleet.kind is FleetKind.HYBRID
    pools = candidate.simulated_fleet.pools if is_hybrid else candidate.simulated_fleet.pools[:1]
    prompt_s = _prompt_s(pools[0], mix, failed_trial.cached_fraction)
    engines = sum(pool.replicas * pool.engine_shape.settings.pipeline_stages for pool in pools)
    utilization = failed_trial.rate_per_s * prompt_s / engines
    late = failed_trial.late_first_token_fraction
    evidence = f"at {failed_trial.rate_per_s * candidate.scale_factor:.3g} requests/s " + (
        f"{late:.0%} of first tokens are late"
        if failed_trial.margin < 0
        else "the wait for first tokens grows"
    )
    if network := _network_bottleneck(candidate, failed_trial, mix):
        return Bottleneck(constraint=Constraint.NETWORK, reason=f"{evidence}: {network}")
    replicas_text = "all" if is_hybrid else f"the {pools[0].role}"
    share = f"computing prompts takes {utilization:.0%} of {replicas_text} replicas' time"
    if utilization >= _BUSY_FRACTION or candidate.fleet.kind is not FleetKind.DISAGGREGATED:
        return Bottleneck(constraint=Constraint.PREFILL_COMPUTE, reason=f"{evidence}: {share}")
    return Bottleneck(constraint=Constraint.BURSTS, reason=f"{evidence}, although {share}")


def _prompt_s(pool: PlannedPool, mix: MeanRequest, cached_fraction: float) -> float:
    """Of a prompt among as many as share a step."""
    settings, tokens = pool.engine_shape.settings, max(1, round(mix.prompt_tokens))
    cached_tokens = min(tokens - 1, round(mix.prompt_tokens * cached_fraction))
    prompts = max(1, settings.prompt_chunk_tokens // (tokens - cached_tokens))
    together_s = prefill_s(
        settings.timing,
        tokens,
        cached_tokens=cached_tokens,
        budget_tokens=settings.prompt_chunk_tokens,
        prompts=prompts,
    )
    return together_s / prompts


def _network_bottleneck(candidate: Candidate, failed_trial: Trial, mix: MeanRequest) -> str | None:
    """Evidence that the prefill pool's network is full; None if it is not."""
    if candidate.fleet.kind is FleetKind.COLOCATED:
        return None
    pool = candidate.simulated_fleet.pools[0]
    settings = pool.engine_shape.settings
    token_bytes = settings.kv_block_bytes / settings.block_size_tokens
    utilization = (
        failed_trial.rate_per_s
        * mix.prompt_tokens
        * token_bytes
        / (pool.replicas * settings.transfer_bytes_per_s)
    )
    if utilization < _FULL_FRACTION:
        return None
    return f"handing KV blocks over takes {utilization:.0%} of the prefill pool's network"


def _stream_bottleneck(
    candidate: Candidate, failed_trial: Trial, mix: MeanRequest, classes: Sequence[SloClass]
) -> Bottleneck | None:
    """Evidence that a group gets more streams than its steps can have; None if it does not.

    Its runs are too short to show these (see `verify`).
    """
    pool = candidate.simulated_fleet.pools[-1]
    if pool.engine_shape.dp == 1 or failed_trial.margin < 0 or not classes:
        return None
    settings, tpot_s = pool.engine_shape.settings, steady_tpot_s(classes)
    limit_per_s = steady_rate(settings, mix, tpot_s)
    if failed_trial.rate_per_s < _NEAR_FRACTION * pool.replicas * limit_per_s:
        return None
    evidence = (
        f"at {failed_trial.rate_per_s * candidate.scale_factor:.3g} requests/s more streams come to"
        f" each {pool.role} group than"
    )
    if tpot_s is None or limit_per_s >= steady_rate(settings, mix, None):
        return Bottleneck(
            constraint=Constraint.BATCH_LIMIT,
            reason=f"{evidence} its ranks have places: {settings.max_running_requests}"
            " (--max-num-seqs)",
        )
    return Bottleneck(
        constraint=Constraint.DECODE_BANDWIDTH,
        reason=f"{evidence} a step can have within {tpot_s * 1e3:.3g} ms",
    )


def _capacity_bottleneck(
    candidate: Candidate, failed_trial: Trial, mix: MeanRequest
) -> Bottleneck | None:
    """Evidence that the decoding pool has no room for more streams; None if it has."""
    pool = candidate.simulated_fleet.pools[-1]
    settings = pool.engine_shape.settings
    streams = failed_trial.rate_per_s * mix.output_tokens * failed_trial.tpot.p50_s / pool.replicas
    tokens = settings.kv_blocks * settings.block_size_tokens
    kv_used_fraction = min(streams, settings.max_running_requests) * mix.context_tokens / tokens
    if kv_used_fraction >= _FULL_FRACTION:
        return Bottleneck(
            constraint=Constraint.KV_MEMORY,
            reason=f"{streams:.0f} streams on each {pool.role} replica fill"
            f" {min(kv_used_fraction, 1):.0%} of"
            " its KV cache",
        )
    if streams >= _FULL_FRACTION * settings.max_running_requests:
        return Bottleneck(
            constraint=Constraint.BATCH_LIMIT,
            reason=f"{streams:.0f} streams on each {pool.role} replica, of at most"
            f" {settings.max_running_requests} (--max-num-seqs)",
        )
    return None


def _mean_mix(trace: Trace) -> MeanRequest:
    """The mean request of a trace; shared prompt tokens count as cached."""
    return _mean_request(list(zip(trace.requests, reused_tokens(trace), strict=True)))


def _mean_request(requests: Sequence[tuple[TraceRequest, int]]) -> MeanRequest:
    count = len(requests)
    return MeanRequest(
        prompt_tokens=sum(request.prompt_tokens for request, _ in requests) / count,
        output_tokens=max(1.0, sum(request.output_tokens for request, _ in requests) / count),
        cached_tokens=sum(cached for _, cached in requests) / count,
    )


def unreachable_objectives(
    question: PlanningProblem, prefills: Sequence[EngineShape], decodes: Sequence[EngineShape]
) -> tuple[UnreachableObjective, ...]:
    """The objectives that even the fastest shape misses when idle.

    Each class is compared with its own requests; a class without requests has no bound.
    """
    traffic = question.traffic
    requests = list(zip(traffic.requests, reused_tokens(traffic), strict=True))
    bounds: list[UnreachableObjective | None] = []
    for class_ in question.classes:
        class_requests = [
            pair for pair in requests if class_of(pair[0], question.classes) is class_
        ]
        if not class_requests:
            continue
        computed_tokens = [
            max(1, request.prompt_tokens - cached) for request, cached in class_requests
        ]
        bounds += [
            _ttft_bound(
                question, class_, round(quantile(computed_tokens, class_.attainment)), prefills
            ),
            _tpot_bound(question, class_, _mean_request(class_requests), decodes),
        ]
    return tuple(bound for bound in bounds if bound is not None)


def _ttft_bound(
    question: PlanningProblem, slo_class: SloClass, tokens: int, shapes: Sequence[EngineShape]
) -> UnreachableObjective | None:
    """By the prompt length at the attainment quantile."""
    limit_s = slo_class.objectives.ttft_s
    if limit_s is None or not shapes:
        return None
    prefill_s_by_shape = {
        shape.key: shape.settings.first_token_s
        + prefill_s(shape.settings.timing, tokens, budget_tokens=shape.chunk_tokens)
        for shape in shapes
    }
    best = min(shapes, key=lambda shape: prefill_s_by_shape[shape.key])
    if prefill_s_by_shape[best.key] <= limit_s:
        return None
    operations = 2.0 * question.model.active_parameters * tokens
    flops_per_s = best.stage_gpus * best.accelerator.flops_of(question.weights_dtype)
    return UnreachableObjective(
        objective="time to first token",
        limit_s=limit_s,
        physical_s=operations / flops_per_s,
        modelled_s=prefill_s_by_shape[best.key],
        shape=best.label,
        operation=f"computing a prompt of {tokens} tokens (a share of {slo_class.attainment:g}"
        " has fewer)",
    )


def _tpot_bound(
    question: PlanningProblem, slo_class: SloClass, mix: MeanRequest, shapes: Sequence[EngineShape]
) -> UnreachableObjective | None:
    limit_s = slo_class.objectives.tpot_s
    if limit_s is None or not shapes:
        return None
    step_s_by_shape = {
        shape.key: decode_s(shape.settings.timing, 1, mix.context_tokens) for shape in shapes
    }
    best = min(shapes, key=lambda shape: step_s_by_shape[shape.key])
    if step_s_by_shape[best.key] <= limit_s:
        return None
    read_bytes = question.model.touched_parameters(1) * DTYPE_BYTES[question.weights_dtype]
    return UnreachableObjective(
        objective="time per token",
        limit_s=limit_s,
        physical_s=read_bytes / (best.stage_gpus * best.accelerator.memory_bytes_per_s),
        modelled_s=step_s_by_shape[best.key],
        shape=best.label,
        operation="reading the weights once for a step of a single stream",
    )
