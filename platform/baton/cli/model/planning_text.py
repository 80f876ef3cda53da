"""What `baton plan` prints: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from typing import TextIO

from baton.cli.output import duration_text, table_lines
from baton.planner.rates.trials import Spread
from baton.planner.result import Candidate, Plan, Sensitivity

_SCHEMA = 1


def facts(plan: Plan) -> dict[str, str]:
    """What was asked, in words."""
    question, mix = plan.question, plan.mix
    names = ", ".join(one.accelerator.name for one in question.offers)
    asked = "as much as possible" if question.rate_per_s is None else f"{question.rate_per_s:.4g}/s"
    return {
        "model": f"{question.model.name}, {question.weights} weights, {question.kv} KV cache",
        "GPUs": f"{names}, {'any number' if question.gpus is None else question.gpus}",
        "traffic": (
            f"{question.traffic.name}: {mix.prompt_tokens:.0f} tokens in,"
            f" {mix.output_tokens:.0f} out, {mix.cached_tokens / mix.prompt_tokens:.0%} of prompts"
            " shared"
        ),
        "rate": asked,
        "objectives": "; ".join(_objectives(plan)),
        "seed": str(question.seed),
    }


def _objectives(plan: Plan) -> Iterator[str]:
    for one in plan.question.classes:
        held = one.objectives
        limits = {"TTFT": held.ttft_s, "TPOT": held.tpot_s, "E2E": held.e2e_s}
        said = [f"{name} {duration_text(s)}" for name, s in limits.items() if s is not None]
        name = "" if one.name is None else f"{one.name}: "
        yield f"{name}{', '.join(said) or 'none'} for {one.attainment:.1%}"


def print_plan(plan: Plan, file: TextIO) -> None:
    """The answer for a person."""
    for line in lines(plan):
        print(line, file=file)


def lines(plan: Plan) -> Iterator[str]:
    """The answer for a person, a paragraph each: question, answer, fleets, doubts."""
    for name, value in facts(plan).items():
        yield f"{name}: {value}"
    yield ""
    yield f"answer (simulated): {plan.verdict}"
    best = plan.best
    if best is not None:
        yield from _best_lines(plan, best)
    if plan.candidates:
        yield ""
        yield f"fleets (simulated; best first{_simplest(plan)}):"
        yield from table_lines(candidate_rows(plan), "  ")
    if plan.sensitivity:
        yield ""
        yield "if the question was a fifth off, the same fleet:"
        yield from table_lines(sensitivity_rows(plan), "  ")
    if plan.misfits:
        yield ""
        yield "left out:"
        yield from (f"  {one.label}: {one.why}" for one in plan.misfits)


def _simplest(plan: Plan) -> str:
    """Why the first does not carry most, where it does not."""
    best = plan.best
    if best is None or best.rate_per_s >= max(one.rate_per_s for one in plan.candidates):
        return ""
    if plan.question.rate_per_s is not None and plan.enough:
        return "; the cheapest that is enough"
    return f"; of those within {plan.question.effort.precision:.0%}, the simplest to run"


def _best_lines(plan: Plan, best: Candidate) -> Iterator[str]:
    fleet, rate = best.fleet, plan.question.rate_per_s
    yield f"  take {fleet.label}: {fleet.gpus} GPUs"
    for pool in fleet.pools:
        settings = pool.instance.settings
        yield (
            f"    {pool.role}: steps of at most {settings.max_batched_tokens} tokens, KV cache of"
            f" {settings.kv_blocks * settings.block_size_tokens:,} tokens each"
        )
    carries = f"  carries {best.rate_per_s:.3g} requests/s"
    yield carries if rate is None else f"{carries}, {best.rate_per_s / rate:.2f} of what was asked"
    if not plan.enough:
        needed = "more" if plan.gpus_needed is None else f"about {plan.gpus_needed}"
        yield f"  not enough: {needed} GPUs are needed"
    if best.trial is not None:
        trial = best.trial
        yield (
            f"  there, {trial.attainment:.1%} meet the objectives: TTFT {_spread(trial.ttft)},"
            f" TPOT {_spread(trial.tpot)}"
        )
    cost = best.cost_per_million_tokens(rate)
    if fleet.price_per_hour is not None and cost is not None:
        yield f"  costs ${fleet.price_per_hour:.2f} an hour, ${cost:.2f} per million output tokens"
    if plan.binding is not None:
        yield f"  what binds: {plan.binding.constraint}: {plan.binding.why}"
    if best.cell is not best.fleet:
        yield (
            f"  simulated in part, as {best.cell.label}; the whole should carry"
            f" {best.factor:.3g} times as much"
        )


def _spread(spread: Spread) -> str:
    each = (spread.p50_s, spread.p90_s, spread.p99_s)
    return f"{' / '.join(duration_text(one) for one in each)} (p50 / p90 / p99)"


def candidate_rows(plan: Plan) -> list[dict[str, str]]:
    """The fleets that were simulated, as a table."""
    return [_row(one, plan) for one in plan.candidates]


def _row(one: Candidate, plan: Plan) -> dict[str, str]:
    trial = one.trial
    cost = one.cost_per_million_tokens(plan.question.rate_per_s)
    return {
        "kind": str(one.fleet.kind),
        "fleet": one.fleet.label,
        "GPUs": str(one.fleet.gpus),
        "requests/s": f"{one.rate_per_s:.3g}",
        "per GPU": f"{one.rate_per_gpu:.3g}",
        "tokens/s/GPU": "-" if trial is None else f"{one.tokens_per_s_per_gpu(trial):.0f}",
        "TTFT p90": "-" if trial is None else duration_text(trial.ttft.p90_s),
        "TPOT p90": "-" if trial is None else duration_text(trial.tpot.p90_s),
        "$/M tokens": "-" if cost is None else f"{cost:.2f}",
    }


def sensitivity_rows(plan: Plan) -> list[dict[str, str]]:
    """What becomes of the answer, as a table."""
    return [_change(one) for one in plan.sensitivity]


def _change(one: Sensitivity) -> dict[str, str]:
    return {
        "what": one.term,
        "change": f"{one.change - 1:+.0%}",
        "carries": "-" if one.rate_per_s is None else f"{one.rate_per_s:.3g} requests/s",
        "attains": "-" if one.attainment is None else f"{one.attainment:.1%}",
    }


def plain(plan: Plan) -> dict[str, object]:
    """The answer as plain values; what is infinite or unknown is null."""
    best, rate = plan.best, plan.question.rate_per_s
    return {
        "schema": _SCHEMA,
        "evidence": "simulated",
        "question": facts(plan),
        "answer": None if best is None else str(best.fleet.kind),
        "disaggregate": None if best is None else len(best.fleet.pools) > 1,
        "verdict": plan.verdict,
        "enough": plan.enough,
        "gpus": plan.gpus,
        "gpus_needed": plan.gpus if plan.enough else plan.gpus_needed,
        "rate_per_s": None if best is None else best.rate_per_s,
        "price_per_hour": None if best is None else best.fleet.price_per_hour,
        "cost_per_million_tokens": None if best is None else best.cost_per_million_tokens(rate),
        "binding": None
        if plan.binding is None
        else {"constraint": str(plan.binding.constraint), "why": plan.binding.why},
        "candidates": [_candidate(one, plan) for one in plan.candidates],
        "trades": [_finite(asdict(one)) for one in plan.trades],
        "sensitivity": [_finite(asdict(one)) for one in plan.sensitivity],
        "out_of_reach": [
            {**asdict(one), "is_physical": one.is_physical, "factor": one.factor, "why": str(one)}
            for one in plan.out_of_reach
        ],
        "left_out": [asdict(one) for one in plan.misfits],
        "runs": plan.runs,
    }


def _candidate(one: Candidate, plan: Plan) -> dict[str, object]:
    trial = one.trial
    return {
        "kind": str(one.fleet.kind),
        "pools": [
            {
                "role": str(pool.role),
                "replicas": pool.replicas,
                "accelerator": pool.instance.accelerator.name,
                "tp": pool.instance.tp,
                "pp": pool.instance.pp,
                "max_num_batched_tokens": pool.instance.chunk_tokens,
            }
            for pool in one.fleet.pools
        ],
        "gpus": one.fleet.gpus,
        "rate_per_s": one.rate_per_s,
        "rate_per_s_per_gpu": one.rate_per_gpu,
        "estimate_per_s": one.estimate_per_s,
        "price_per_hour": one.fleet.price_per_hour,
        "cost_per_million_tokens": one.cost_per_million_tokens(plan.question.rate_per_s),
        "simulated_as": one.cell.label,
        "at_that_rate": None
        if trial is None
        else {
            **_finite(asdict(trial)),
            "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu(trial),
        },
        "trials": [
            {
                "rate_per_s_per_gpu": each.rate_per_s / one.cell.gpus,
                "attainment": each.attainment,
                "requests": each.requests,
            }
            for each in one.measured.trials
        ],
    }


def _finite(values: dict[str, object]) -> dict[str, object]:
    return {key: _value(value) for key, value in values.items()}


def _value(value: object) -> object:
    match value:
        case float() if not isfinite(value):
            return None
        case dict():
            return {key: _value(inner) for key, inner in value.items()}
        case _:
            return value
