"""Finds the fleet that carries a traffic within objectives at the least cost.

Theory of operation, from cheap to dear: shapes that do not fit into memory are left out; objectives
that the fastest shape misses with nothing else to do end the search with what is physical about
it; closed-form rates leave the shapes that are worth simulating; each of those is simulated alone,
for its duty, at rates found by bisection; fleets of all three kinds are put together from what
their replicas carry alone; and the most promising of each kind are simulated whole, or in a part
that has their proportions, with the coordinator and the placement policy that would run them. Only
the last step's rates are answered. Every run draws its requests from the same trace with the same
seed.

Source: the placement search of DistServe (OSDI'24) section 4, with hybrid and colocated fleets
beside the disaggregated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.domain.errors import InsufficientMemory
from baton.planner.bottleneck import find_bottleneck
from baton.planner.explore import Explorer, cost, first_by_kind, has_all_prices, rank_candidates
from baton.planner.problem import PlanningProblem
from baton.planner.rates.closed_form import MeanRequest
from baton.planner.rates.measure import InstanceTask, measure_instance
from baton.planner.rates.shortlist import shortlist_shapes
from baton.planner.result import Candidate, Plan, Tradeoff
from baton.planner.sensitivity import analyze_sensitivity
from baton.planner.shapes.fleets import FleetKind, GpuBudget
from baton.planner.shapes.space import Duty, ShapeCatalogue, build_engine_shape, enumerate_shapes
from baton.planner.simulation_runner import ParallelMap, Progress, SimulationRunner
from baton.planner.tradeoffs import closed_form_tradeoffs, pareto_front, simulated_tradeoffs
from baton.planner.unreachable import mean_mix, unreachable_objectives

STAGE = "shapes"


def plan(
    question: PlanningProblem,
    *,
    parallel_map: ParallelMap = map,
    on_progress: Callable[[Progress], None] | None = None,
    catalogue: ShapeCatalogue | None = None,
) -> Plan:
    """The answer to a question.

    Args:
        question: what is to be served, how well, and on what.
        parallel_map: how simulations are run: a pool of processes' `map` runs several at a time.
        on_progress: told how far the search is.
        catalogue: shapes to choose from, instead of the question's space on the roofline.

    Raises:
        InsufficientMemory: the model fits in no shape.
    """
    catalogue = catalogue or enumerate_shapes(question)
    if not any(catalogue.shapes_by_duty.values()):
        _raise_misfit(question)
    mix = mean_mix(question.traffic)
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
    explorer = Explorer(question, tasks, measured)
    explorer.runs += sum(len(search.trials) for search in measured)
    result = _build_plan(explorer, explorer.explore(runner), mix)
    result = replace(
        result,
        rejected_shapes=catalogue.rejected,
        tradeoffs=_tradeoffs(result.candidates, catalogue, mix),
    )
    return _with_sensitivity(result, explorer, tasks, runner)


def _build_plan(explorer: Explorer, candidates: Sequence[Candidate], mix: MeanRequest) -> Plan:
    question = explorer.question
    best, ranked = rank_candidates(candidates, question)
    rate = question.rate_per_s
    meets_rate = best is not None and (rate is None or best.rate_per_s >= rate)
    return Plan(
        question=question,
        mix=mix,
        best=best,
        meets_rate=meets_rate,
        verdict=_verdict(best, ranked, question) + _missing_prices_note(best, question),
        candidates=tuple(ranked),
        bottleneck=None if best is None else find_bottleneck(best, mix),
        gpus_needed=None if meets_rate or best is None else _required_gpus(explorer, best),
    )


def _with_sensitivity(
    result: Plan, explorer: Explorer, tasks: list[InstanceTask], runner: SimulationRunner
) -> Plan:
    results = result.sensitivity
    if result.best is not None and explorer.question.effort.sensitivity:
        results = analyze_sensitivity(result.best, explorer, tasks, runner)
    return replace(result, sensitivity=results, runs=explorer.runs)


def _tradeoffs(
    candidates: Sequence[Candidate], catalogue: ShapeCatalogue, mix: MeanRequest
) -> tuple[Tradeoff, ...]:
    return (
        *pareto_front(closed_form_tradeoffs(catalogue.shapes_by_duty, mix)),
        *simulated_tradeoffs(candidates),
    )


def _required_gpus(explorer: Explorer, best: Candidate) -> int | None:
    """GPUs for the rate, if there were any number: as much more as the best is short of it."""
    rate = explorer.question.rate_per_s
    assert rate is not None, "without a rate, anything is enough"
    scaled_rate = rate * best.estimate_per_s / best.rate_per_s
    unlimited_stock = GpuBudget(gpus=None, limit_by_accelerator={})
    fleet = explorer.cheapest_fleet(best.fleet.kind, scaled_rate, stock=unlimited_stock)
    return None if fleet is None else fleet.gpus


def _raise_misfit(question: PlanningProblem) -> None:
    """Say which term of the largest shape overflows.

    Raises:
        InsufficientMemory: always, or what else keeps every shape from being one.
    """
    widest = max(question.space.tensor_parallel_sizes)
    for tp in sorted(question.space.tensor_parallel_sizes, reverse=True):
        if not question.model.heads % tp:
            widest = tp
            break
    build_engine_shape(
        question,
        question.offers[0],
        tp=widest,
        pp=1,
        chunk_tokens=question.space.decode_chunk_tokens,
    )
    offer = question.offers[0]
    raise InsufficientMemory(
        f"no shape of {question.model.name} on {offer.accelerator.name} is within the GPUs given",
        "allow more GPUs, or other tensor or pipeline sizes",
        "devices",
        0.0,
        None,
    )


def _verdict(best: Candidate | None, ranked: Sequence[Candidate], question: PlanningProblem) -> str:
    if best is None:
        return _describe_infeasible(ranked)
    kinds = first_by_kind(ranked)
    colocated = kinds.get(FleetKind.COLOCATED)
    disaggregated = [
        kinds[kind] for kind in (FleetKind.HYBRID, FleetKind.DISAGGREGATED) if kind in kinds
    ]
    rate = question.rate_per_s
    meeting_rate = [
        candidate
        for candidate in disaggregated
        if rate is not None and candidate.rate_per_s >= rate
    ]
    alternative = (
        min(meeting_rate, key=lambda trial: cost(trial.fleet, question))
        if meeting_rate
        else max(
            disaggregated,
            key=lambda trial: trial.rate_per_s / cost(trial.fleet, question),
            default=None,
        )
    )
    if best.fleet.kind is FleetKind.COLOCATED:
        if alternative is None:
            return "do not disaggregate: there is no room for two pools"
        return f"do not disaggregate: {_compare(best, alternative, question)}"
    recommendation = (
        "disaggregate"
        if best.fleet.kind is FleetKind.DISAGGREGATED
        else ("disaggregate, and let decode replicas prefill what is served better so")
    )
    if colocated is None:
        return f"{recommendation}: no colocated fleet meets the objectives"
    return f"{recommendation}: {_compare(best, colocated, question)}"


def _missing_prices_note(best: Candidate | None, question: PlanningProblem) -> str:
    """That dollars are not compared although some prices are known; nothing where they are."""
    unpriced = [offer.accelerator.name for offer in question.offers if not offer.price]
    if best is None or len(unpriced) in {0, len(question.offers)}:
        return ""
    return f" (fleets are compared by GPUs: no price is known of {', '.join(unpriced)})"


def _compare(best: Candidate, alternative: Candidate, question: PlanningProblem) -> str:
    rate_per_s = question.rate_per_s
    if not alternative.rate_per_s:
        return (
            f"{best.fleet.kind} carries {_describe_rate(best)}, {alternative.fleet.kind}"
            " nothing in time"
        )
    best_cost, alternative_cost = (
        cost(candidate.fleet, question) for candidate in (best, alternative)
    )
    if rate_per_s is not None and min(best.rate_per_s, alternative.rate_per_s) >= rate_per_s:
        same_cost = best_cost == alternative_cost
        return (
            f"{best.fleet.kind} carries {_describe_rate(best)}, {alternative.fleet.kind}"
            f" {_describe_rate(alternative)}"
            + (": it costs the same, and is the more complicated" if same_cost else "")
        )
    ratio = (best.rate_per_s / best_cost) / (alternative.rate_per_s / alternative_cost)
    unit = "dollar" if has_all_prices(question) else "GPU"
    return (
        f"{best.fleet.kind} carries {_describe_rate(best)}, {alternative.fleet.kind}"
        f" {_describe_rate(alternative)}:"
        f" {ratio:.2f} times as much per {unit}"
    )


def _describe_rate(candidate: Candidate) -> str:
    return f"{candidate.rate_per_s:.3g} requests/s on {candidate.fleet.gpus} GPUs"


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
