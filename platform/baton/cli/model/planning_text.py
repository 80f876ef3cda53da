"""The output of `baton plan`: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import TextIO

from baton.cli.output import duration_text, table_lines
from baton.domain.names.words import count_text
from baton.perf.fitting.error_bands import TimeErrors
from baton.perf.hardware.accelerators import Dtype
from baton.planner.explore import cost
from baton.planner.rates.trials import LatencyQuantiles
from baton.planner.result import Candidate, Plan, Quantization, Sensitivity, Speculation
from baton.planner.shapes.fleets import PlannedPool

_SCHEMA = 1
_MIN_SHARE = 0.01
_ANSWERS_UNKNOWN = "what they do to answers is not modelled"
_CHANGE = "carries"
NOT_STARTABLE = (
    "'baton up' starts no data-parallel group, whose ranks step together (vLLM does, of one pool)"
)
ONLY_GROUPS_FIT = f"only data-parallel groups fit; {NOT_STARTABLE}"
_QUANTIZATION_COLUMNS = ("GPUs", "requests/s", _CHANGE, "per GPU", "TTFT p90", "TPOT p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The answer, how the model's weights are stored, and the errors of its times."""

    plan: Plan
    stored_dtype: Dtype | None
    groups: Plan | None = None
    """The answer with data-parallel groups, where these are compared with."""
    time_errors: Mapping[str, TimeErrors] = field(default_factory=dict)
    """By accelerator."""
    speculation: Speculation | None = None
    quantizations: tuple[Quantization, ...] = ()


def error_facts(result: PlanResult) -> dict[str, str]:
    """The error of predicted times, in words."""
    return {f"error of times, {name}": str(errors) for name, errors in result.time_errors.items()}


def facts(plan: Plan) -> dict[str, str]:
    """The arguments, in words."""
    question, mix = plan.question, plan.mix
    names = ", ".join(offer.accelerator.name for offer in question.offers)
    return {
        "model": f"{question.model.name}, {question.weights_dtype} weights, {question.kv_dtype}"
        " KV cache",
        **({"not counted": ", ".join(left_out)} if (left_out := question.model.left_out) else {}),
        "GPUs": f"{names}, {'any number' if question.gpus is None else question.gpus}",
        "traffic": (
            f"{question.traffic.name}: {mix.prompt_tokens:.0f} tokens in,"
            f" {mix.output_tokens:.0f} out, {mix.cached_tokens / mix.prompt_tokens:.0%} of prompts"
            " shared"
        ),
        **({"arrival times": question.traffic.times} if question.traffic.times else {}),
        "rate": _rate_text(plan),
        "objectives": "; ".join(_objectives(plan)),
        "seed": str(question.seed),
    }


def _rate_text(plan: Plan) -> str:
    users, demand = plan.question.users, plan.demand
    if users is None:
        rate = plan.question.rate_per_s
        return "as much as possible" if rate is None else f"{rate:.4g}/s"
    implied_text = (
        "unknown: no fleet answers in time" if demand is None else f"{demand.rate_per_s:.4g}/s"
    )
    return (
        f"{implied_text}, of {count_text(users.users, 'user')} who think for"
        f" {duration_text(users.think_s)} between an answer and the next request"
    )


def _objectives(plan: Plan) -> Iterator[str]:
    for class_ in plan.question.classes:
        objectives = class_.objectives
        limits = {"TTFT": objectives.ttft_s, "TPOT": objectives.tpot_s, "E2E": objectives.e2e_s}
        bounds = [f"{name} {duration_text(s)}" for name, s in limits.items() if s is not None]
        name = "" if class_.name is None else f"{class_.name}: "
        yield f"{name}{', '.join(bounds) or 'none'} for {class_.attainment:.1%}"


def print_plan(result: PlanResult, file: TextIO) -> None:
    """The answer for a person."""
    for line in plan_lines(result):
        print(line, file=file)


def plan_lines(result: PlanResult) -> Iterator[str]:
    """The answer for a person, a paragraph each: answer, fleets, uncertainties, question."""
    plan = result.plan
    answer, *reasons = answer_lines(plan)
    yield f"answer (simulated): {answer}"
    yield from (f"  {line}" for line in (*reasons, *group_lines(result)))
    if plan.candidates:
        yield ""
        yield f"fleets (simulated; best first{_ranking_reason(plan)}):"
        yield from table_lines(candidate_rows(plan), "  ")
    if plan.sensitivity:
        yield ""
        yield "if the question was a fifth off, the same fleet:"
        yield from table_lines(sensitivity_rows(plan), "  ")
    if result.quantizations:
        yield ""
        precision = plan.question.effort.precision
        yield (
            f"with other types of weights and KV cache (simulated, rates within {precision:.0%};"
            f" {_ANSWERS_UNKNOWN}):"
        )
        yield from table_lines(quantization_rows(result), "  ")
    if result.speculation is not None:
        yield ""
        yield "speculative decoding (simulated, in closed form; without prompts in the steps):"
        yield from (f"  {line}" for line in speculation_lines(result.speculation))
        yield from table_lines(speculation_rows(result.speculation), "  ")
    if plan.rejected_shapes:
        yield ""
        yield "left out:"
        yield from (
            f"  {rejected_shape.label}: {rejected_shape.reason}"
            for rejected_shape in plan.rejected_shapes
        )
    yield ""
    for name, value in (error_facts(result) | facts(plan)).items():
        yield f"{name}: {value}"


def answer_lines(plan: Plan) -> Iterator[str]:
    """The answer and its reasons, then the fleet's rate and its bottleneck."""
    yield plan.verdict
    if plan.best is not None:
        yield from _best_lines(plan, plan.best)


def group_lines(result: PlanResult) -> Iterator[str]:
    """The best fleet with data-parallel groups, where it is better; a start of it is vLLM's."""
    if result.groups is None:
        return
    best, question = result.groups.best, result.groups.question
    sizes = ", ".join(map(str, question.space.data_parallel_sizes))
    if best is None or not _is_better(best, result.plan):
        yield f"no fleet with data-parallel groups (dp {sizes}, shared experts) is better"
        return
    price = best.fleet.price_per_hour
    cost_text = "" if price is None else f", ${price:.2f} an hour"
    yield (
        f"better, but {NOT_STARTABLE}: {best.fleet.label}: {count_text(best.fleet.gpus, 'GPU')}"
        f"{cost_text}, carries {best.rate_per_s:.3g} requests/s"
    )
    yield from (line for pool in best.fleet.pools for line in _argument_lines(pool))


def _is_better(best: Candidate, plan: Plan) -> bool:
    """Whether a fleet with groups is enough for less, or carries more for its cost."""
    if all(pool.engine_shape.is_startable for pool in best.fleet.pools):
        return False
    other, question = plan.best, plan.question
    if other is None:
        return True
    if question.demand is not None and best.meets_demand(question) != other.meets_demand(question):
        return best.meets_demand(question)
    costs = cost(best.fleet, question), cost(other.fleet, question)
    if question.demand is not None and best.meets_demand(question):
        return costs[0] < costs[1]
    loads = best.load(question) / costs[0], other.load(question) / costs[1]
    return loads[0] > loads[1] * (1 + question.effort.precision)


def _argument_lines(pool: PlannedPool) -> Iterator[str]:
    """A pool's split in vLLM's words, where it is not plain tensor parallelism."""
    shape = pool.engine_shape
    if not (shape.ep or shape.dp > 1):
        return
    devices = "" if shape.is_startable else f", {count_text(shape.gpus, 'GPU')} each"
    yield f"  {pool.role}{devices}: vllm serve {shape.vllm_arguments}"


def _ranking_reason(plan: Plan) -> str:
    """Why the first fleet does not carry most, where it does not."""
    best = plan.best
    question = plan.question
    if best is None or best.load(question) >= max(
        candidate.load(question) for candidate in plan.candidates
    ):
        return ""
    if plan.question.demand is not None and plan.meets_rate:
        return "; the cheapest that is enough"
    return f"; of those within {plan.question.effort.precision:.0%}, the simplest to run"


def _best_lines(plan: Plan, best: Candidate) -> Iterator[str]:
    fleet, demand, users = best.fleet, plan.demand, plan.question.users
    rate = None if demand is None else demand.rate_per_s
    yield f"take {fleet.label}: {count_text(fleet.gpus, 'GPU')}"
    for pool in fleet.pools:
        shape, settings = pool.engine_shape, pool.engine_shape.settings
        rank = " of a rank" if shape.dp > 1 else ""
        yield (
            f"  {pool.role}: steps of at most {shape.chunk_tokens} tokens{rank}, KV cache of"
            f" {settings.kv_blocks * settings.block_size_tokens:,} tokens each"
        )
        yield from _argument_lines(pool)
    carried_text = f"carries {best.rate_per_s:.3g} requests/s"
    if users is not None and demand is not None and demand.answer_s is not None:
        verb = "send" if plan.meets_rate else "would send"
        yield (
            f"{count_text(users.users, 'user')} {verb} {rate:.3g} requests/s, where an answer takes"
            f" {duration_text(demand.answer_s)} in the mean"
        )
        carried_text += f" of {best.load(plan.question):.0f} users"
    yield (
        carried_text
        if plan.question.demand is None
        else f"{carried_text}, {_share_text(best.load(plan.question) / plan.question.demand)} of"
        " what was asked"
    )
    if not plan.meets_rate:
        needed = "more" if plan.gpus_needed is None else f"about {plan.gpus_needed}"
        yield f"not enough: {needed} GPUs are needed"
    if best.best_trial is not None:
        trial = best.best_trial
        yield (
            f"there, {trial.attainment:.1%} meet the objectives: TTFT {_spread_text(trial.ttft)},"
            f" TPOT {_spread_text(trial.tpot)}"
        )
    price, token_cost = fleet.price_per_hour, best.cost_per_million_tokens(rate)
    if price is not None and token_cost is not None:
        yield f"costs ${price:.2f} an hour, ${token_cost:.2f} per million output tokens"
    if plan.bottleneck is not None:
        yield f"what binds: {plan.bottleneck.constraint}: {plan.bottleneck.reason}"
    if best.simulated_fleet is not best.fleet:
        yield (
            f"simulated in part, as {best.simulated_fleet.label}; the whole should carry"
            f" {best.scale_factor:.3g} times as much"
        )


def _share_text(share: float) -> str:
    return f"{share:.2f}" if share >= _MIN_SHARE else f"{share:.1g}"


def _spread_text(spread: LatencyQuantiles) -> str:
    percentiles_s = (spread.p50_s, spread.p90_s, spread.p99_s)
    return f"{' / '.join(duration_text(value) for value in percentiles_s)} (p50 / p90 / p99)"


def candidate_rows(plan: Plan) -> list[dict[str, str]]:
    """The simulated fleets, as a table."""
    return [_candidate_row(candidate, plan) for candidate in plan.candidates]


def _candidate_row(candidate: Candidate, plan: Plan) -> dict[str, str]:
    trial = candidate.best_trial
    dollars = candidate.cost_per_million_tokens(plan.question.rate_of_demand(candidate.answer_s))
    return {
        "kind": str(candidate.fleet.kind),
        "fleet": candidate.fleet.label,
        "GPUs": str(candidate.fleet.gpus),
        "requests/s": f"{candidate.rate_per_s:.3g}",
        "per GPU": f"{candidate.rate_per_gpu:.3g}",
        "tokens/s/GPU": "-" if trial is None else f"{candidate.tokens_per_s_per_gpu(trial):.0f}",
        "TTFT p90": "-" if trial is None else duration_text(trial.ttft.p90_s),
        "TPOT p90": "-" if trial is None else duration_text(trial.tpot.p90_s),
        "$/M tokens": "-" if dollars is None else f"{dollars:.2f}",
    }


def sensitivity_rows(plan: Plan) -> list[dict[str, str]]:
    """The sensitivity of the answer, as a table."""
    return [_sensitivity_row(sensitivity) for sensitivity in plan.sensitivity]


def _sensitivity_row(sensitivity: Sensitivity) -> dict[str, str]:
    return {
        "what": sensitivity.parameter,
        "change": f"{sensitivity.change - 1:+.0%}",
        "carries": "-"
        if sensitivity.rate_per_s is None
        else f"{sensitivity.rate_per_s:.3g} requests/s",
        "attains": "-" if sensitivity.attainment is None else f"{sensitivity.attainment:.1%}",
    }


def quantization_rows(result: PlanResult) -> list[dict[str, str]]:
    """The plan as asked, and with narrower types, as a table."""
    question = result.plan.question
    asked = Quantization(
        weights=str(question.weights_dtype), kv=str(question.kv_dtype), plan=result.plan
    )
    return [_quantization_row(item, result.plan) for item in (asked, *result.quantizations)]


def _quantization_row(item: Quantization, asked: Plan) -> dict[str, str]:
    best = None if item.plan is None else item.plan.best
    types = {"weights": item.weights, "KV cache": item.kv}
    if item.plan is None or best is None:
        reason = item.reason or ("" if item.plan is None else item.plan.verdict)
        return {**types, "fleet": f"none: {reason}"} | dict.fromkeys(_QUANTIZATION_COLUMNS, "-")
    row = _candidate_row(best, item.plan)
    before = asked.best
    change = "-"
    if before is not None and item.plan is not asked:
        change = f"x{best.load(asked.question) / before.load(asked.question):.2f}"
    return {**types, "fleet": row["fleet"]} | {
        name: change if name == _CHANGE else row[name] for name in _QUANTIZATION_COLUMNS
    }


def speculation_lines(speculation: Speculation) -> Iterator[str]:
    """The gain at the fleet's load, and where it turns negative."""
    at_load, end = speculation.at_load, speculation.break_even_streams
    yield (
        f"{speculation.drafted} drafted tokens, of which each is accepted with a probability of"
        f" {speculation.acceptance:g}, give {speculation.expected_tokens:.2f} tokens a step"
    )
    yield (
        f"{_gain_text(at_load.gain)} with {count_text(at_load.streams, 'stream')} on a replica"
        f" ({speculation.pool}), its load in this plan"
    )
    yield (
        "with max_num_seqs streams it is a gain, too"
        if end is None
        else f"from {count_text(end, 'stream')} on a replica it is no gain"
    )
    yield (
        "at this load, no number of drafted tokens is a gain"
        if not speculation.best_drafted
        else f"at this load, {count_text(speculation.best_drafted, 'drafted token')} would give the"
        " most"
    )


def _gain_text(gain: float) -> str:
    return f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"


def speculation_rows(speculation: Speculation) -> list[dict[str, str]]:
    """The gain by streams, as a table."""
    return [
        {
            "streams": str(point.streams),
            "TPOT": duration_text(point.step_s),
            "TPOT with it": duration_text(point.step_s / point.gain),
            "gain": f"x{point.gain:.2f}",
        }
        for point in sorted({*speculation.points, speculation.at_load}, key=lambda x: x.streams)
    ]


def plan_json(result: PlanResult) -> dict[str, object]:
    """The answer as plain values; infinite or unknown values are null."""
    plan = result.plan
    best, demand, users = plan.best, plan.demand, plan.question.users
    rate = None if demand is None else demand.rate_per_s
    return {
        "schema": _SCHEMA,
        "evidence": "simulated",
        "question": facts(plan),
        "answer": None if best is None else str(best.fleet.kind),
        "disaggregate": None if best is None else len(best.fleet.pools) > 1,
        "verdict": plan.verdict,
        "enough": plan.meets_rate,
        "gpus": plan.gpus,
        "gpus_needed": plan.gpus if plan.meets_rate else plan.gpus_needed,
        "rate_per_s": None if best is None else best.rate_per_s,
        "users": None
        if users is None
        else {
            **asdict(users),
            "implied_rate_per_s": rate,
            "answer_s": None if demand is None else demand.answer_s,
            "carried": None if best is None else best.load(plan.question),
        },
        "price_per_hour": None if best is None else best.fleet.price_per_hour,
        "cost_per_million_tokens": None if best is None else best.cost_per_million_tokens(rate),
        "binding": None
        if plan.bottleneck is None
        else {"constraint": str(plan.bottleneck.constraint), "reason": plan.bottleneck.reason},
        "candidates": [_candidate_json(candidate, plan) for candidate in plan.candidates],
        "trades": [_finite(asdict(tradeoff)) for tradeoff in plan.tradeoffs],
        "sensitivity": [_finite(asdict(sensitivity)) for sensitivity in plan.sensitivity],
        "out_of_reach": [
            {
                **asdict(unreachable_objective),
                "is_physical": unreachable_objective.is_physical,
                "factor": unreachable_objective.factor,
                "reason": str(unreachable_objective),
            }
            for unreachable_objective in plan.unreachable_objectives
        ],
        "error_bands": {name: errors.to_dict() for name, errors in result.time_errors.items()},
        "data_parallel_groups": None
        if result.groups is None or result.groups.best is None
        else {
            "better": _is_better(result.groups.best, plan),
            "startable": False,
            "best": _candidate_json(result.groups.best, result.groups),
        },
        "speculation": None if result.speculation is None else asdict(result.speculation),
        "quantizations": [_quantization_json(item) for item in result.quantizations],
        "left_out": [asdict(rejected_shape) for rejected_shape in plan.rejected_shapes],
        "runs": plan.runs,
    }


def _quantization_json(item: Quantization) -> dict[str, object]:
    best = None if item.plan is None else item.plan.best
    return {
        "weights": item.weights,
        "kv": item.kv,
        "verdict": item.reason if item.plan is None else item.plan.verdict,
        "enough": item.plan is not None and item.plan.meets_rate,
        "gpus": None if item.plan is None else item.plan.gpus,
        "best": None if item.plan is None or best is None else _candidate_json(best, item.plan),
    }


def _candidate_json(candidate: Candidate, plan: Plan) -> dict[str, object]:
    trial = candidate.best_trial
    return {
        "kind": str(candidate.fleet.kind),
        "pools": [
            {
                "role": str(pool.role),
                "replicas": pool.replicas,
                "accelerator": pool.engine_shape.accelerator.name,
                "tp": pool.engine_shape.tp,
                "pp": pool.engine_shape.pp,
                "dp": pool.engine_shape.dp,
                "ep": pool.engine_shape.ep,
                "max_num_batched_tokens": pool.engine_shape.chunk_tokens,
            }
            for pool in candidate.fleet.pools
        ],
        "gpus": candidate.fleet.gpus,
        "rate_per_s": candidate.rate_per_s,
        "rate_per_s_per_gpu": candidate.rate_per_gpu,
        "estimate_per_s": candidate.estimate_per_s,
        "price_per_hour": candidate.fleet.price_per_hour,
        "cost_per_million_tokens": candidate.cost_per_million_tokens(
            plan.question.rate_of_demand(candidate.answer_s)
        ),
        "simulated_as": candidate.simulated_fleet.label,
        "at_that_rate": None
        if trial is None
        else {
            **_finite(asdict(trial)),
            "tokens_per_s_per_gpu": candidate.tokens_per_s_per_gpu(trial),
        },
        "trials": [
            {
                "rate_per_s_per_gpu": measured.rate_per_s / candidate.simulated_fleet.gpus,
                "attainment": measured.attainment,
                "requests": measured.requests,
            }
            for measured in candidate.search_result.trials
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
