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

from baton.domain.errors import DoesNotFit
from baton.planner.bottleneck import binding
from baton.planner.explore import Explorer, best_of, by_kind, cost, in_dollars
from baton.planner.problem import Question
from baton.planner.rates.closed_form import Mix
from baton.planner.rates.measure import Task, measure
from baton.planner.rates.shortlist import shortlist
from baton.planner.result import Candidate, Plan, Trade
from baton.planner.sensitivity import sensitivity
from baton.planner.shapes.fleets import Kind, Stock
from baton.planner.shapes.space import Duty, Shapes, instance, shapes
from baton.planner.simulation_runner import Progress, RunAll, Work
from baton.planner.tradeoffs import closed_form, front, simulated
from baton.planner.unreachable import mean_mix, out_of_reach

STAGE = "shapes"


def plan(
    question: Question,
    *,
    run: RunAll = map,
    on_progress: Callable[[Progress], None] | None = None,
    found: Shapes | None = None,
) -> Plan:
    """The answer to a question.

    Args:
        question: what is to be served, how well, and on what.
        run: how simulations are run: a pool of processes' `map` runs several at a time.
        on_progress: told how far the search is.
        found: shapes to choose from, instead of the question's space on the roofline.

    Raises:
        DoesNotFit: the model fits in no shape.
    """
    found = found or shapes(question)
    if not any(found.fitting.values()):
        _raise_misfit(question)
    mix = mean_mix(question.traffic)
    prefills = (*found.fitting[Duty.PREFILL], *found.fitting[Duty.BOTH])
    decodes = (*found.fitting[Duty.DECODE], *found.fitting[Duty.BOTH])
    bounds = out_of_reach(question, prefills, decodes)
    if bounds:
        return Plan(
            question=question,
            mix=mix,
            best=None,
            enough=False,
            verdict="; ".join(str(one) for one in bounds),
            out_of_reach=bounds,
            misfits=found.misfits,
        )
    work = Work(run, on_progress)
    tasks = shortlist(question, found, mix)
    measured = work.all(STAGE, measure, tasks)
    explorer = Explorer(question, tasks, measured)
    explorer.runs += sum(len(one.trials) for one in measured)
    answer = _answer(explorer, explorer.explore(work), mix)
    answer = replace(
        answer,
        misfits=found.misfits,
        trades=_trades(answer.candidates, found, mix),
    )
    return _with_sensitivity(answer, explorer, tasks, work)


def _answer(explorer: Explorer, candidates: Sequence[Candidate], mix: Mix) -> Plan:
    question = explorer.question
    best, ranked = best_of(candidates, question)
    rate = question.rate_per_s
    enough = best is not None and (rate is None or best.rate_per_s >= rate)
    return Plan(
        question=question,
        mix=mix,
        best=best,
        enough=enough,
        verdict=_verdict(best, ranked, question) + _without_prices(best, question),
        candidates=tuple(ranked),
        binding=None if best is None else binding(best, mix),
        gpus_needed=None if enough or best is None else _needed(explorer, best),
    )


def _with_sensitivity(answer: Plan, explorer: Explorer, tasks: list[Task], work: Work) -> Plan:
    found = answer.sensitivity
    if answer.best is not None and explorer.question.effort.sensitivity:
        found = sensitivity(answer.best, explorer, tasks, work)
    return replace(answer, sensitivity=found, runs=explorer.runs)


def _trades(candidates: Sequence[Candidate], found: Shapes, mix: Mix) -> tuple[Trade, ...]:
    return (*front(closed_form(found.fitting, mix)), *simulated(candidates))


def _needed(explorer: Explorer, best: Candidate) -> int | None:
    """GPUs for the rate, if there were any number: as much more as the best is short of it."""
    rate = explorer.question.rate_per_s
    assert rate is not None, "without a rate, anything is enough"
    wanted = rate * best.estimate_per_s / best.rate_per_s
    endless = Stock(gpus=None, by_name={})
    fleet = explorer.least(best.fleet.kind, wanted, stock=endless)
    return None if fleet is None else fleet.gpus


def _raise_misfit(question: Question) -> None:
    """Say which term of the largest shape overflows.

    Raises:
        DoesNotFit: always, or what else keeps every shape from being one.
    """
    widest = max(question.space.tensor)
    for tp in sorted(question.space.tensor, reverse=True):
        if not question.model.heads % tp:
            widest = tp
            break
    instance(
        question, question.offers[0], tp=widest, pp=1, chunk_tokens=question.space.decode_chunk
    )
    offer = question.offers[0]
    raise DoesNotFit(
        f"no shape of {question.model.name} on {offer.accelerator.name} is within the GPUs given",
        "allow more GPUs, or other tensor or pipeline sizes",
        "devices",
        0.0,
        None,
    )


def _verdict(best: Candidate | None, ranked: Sequence[Candidate], question: Question) -> str:
    if best is None:
        return _hopeless(ranked)
    kinds = by_kind(ranked)
    alone = kinds.get(Kind.COLOCATED)
    split = [kinds[kind] for kind in (Kind.HYBRID, Kind.DISAGGREGATED) if kind in kinds]
    rate = question.rate_per_s
    able = [one for one in split if rate is not None and one.rate_per_s >= rate]
    other = (
        min(able, key=lambda one: cost(one.fleet, question))
        if able
        else max(split, key=lambda one: one.rate_per_s / cost(one.fleet, question), default=None)
    )
    if best.fleet.kind is Kind.COLOCATED:
        if other is None:
            return "do not disaggregate: there is no room for two pools"
        return f"do not disaggregate: {_against(best, other, question)}"
    how = (
        "disaggregate"
        if best.fleet.kind is Kind.DISAGGREGATED
        else ("disaggregate, and let decode replicas prefill what is served better so")
    )
    if alone is None:
        return f"{how}: no colocated fleet meets the objectives"
    return f"{how}: {_against(best, alone, question)}"


def _without_prices(best: Candidate | None, question: Question) -> str:
    """That dollars are not compared although some prices are known; nothing where they are."""
    unknown = [one.accelerator.name for one in question.offers if not one.price]
    if best is None or len(unknown) in {0, len(question.offers)}:
        return ""
    return f" (fleets are compared by GPUs: no price is known of {', '.join(unknown)})"


def _against(best: Candidate, other: Candidate, question: Question) -> str:
    rate_per_s = question.rate_per_s
    if not other.rate_per_s:
        return f"{best.fleet.kind} carries {_carries(best)}, {other.fleet.kind} nothing in time"
    costs, others = (cost(one.fleet, question) for one in (best, other))
    if rate_per_s is not None and min(best.rate_per_s, other.rate_per_s) >= rate_per_s:
        simpler = costs == others
        return (
            f"{best.fleet.kind} carries {_carries(best)}, {other.fleet.kind} {_carries(other)}"
            + (": it costs the same, and is the more complicated" if simpler else "")
        )
    ratio = (best.rate_per_s / costs) / (other.rate_per_s / others)
    unit = "dollar" if in_dollars(question) else "GPU"
    return (
        f"{best.fleet.kind} carries {_carries(best)}, {other.fleet.kind} {_carries(other)}:"
        f" {ratio:.2f} times as much per {unit}"
    )


def _carries(one: Candidate) -> str:
    return f"{one.rate_per_s:.3g} requests/s on {one.fleet.gpus} GPUs"


def _hopeless(ranked: Sequence[Candidate]) -> str:
    trials = [trial for one in ranked for trial in one.measured.trials]
    if not trials:
        return "no shape meets the objectives alone, at any rate that was tried"
    near = max(trials, key=lambda one: one.margin)
    return (
        f"no fleet meets the objectives: at best {near.attainment:.1%} of requests do, at"
        f" {near.rate_per_s:.3g} requests/s; {near.late_first:.1%} have a late first token,"
        f" {near.late_stream:.1%} a slow stream"
    )
