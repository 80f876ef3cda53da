"""How `baton plan` asks the planner, and its report of the answer."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from baton.bench.report import Curve, Evidence, Study, Table, Tradeoff
from baton.cli.model.calibrate import LoadedCalibration, load_calibration
from baton.cli.model.models import parse_dtype, read_model
from baton.cli.model.planning_text import (
    ONLY_GROUPS_FIT,
    PlanResult,
    answer_lines,
    candidate_rows,
    error_facts,
    facts,
    group_lines,
    quantization_rows,
    sensitivity_rows,
    speculation_rows,
)
from baton.cli.options import parse_seconds
from baton.cli.traces import TraceUnusable, load_trace, make_workload
from baton.config.write.render_plan import check_writable, render_plan
from baton.domain.errors import InsufficientMemory
from baton.perf.fitting.calibration import Conditions
from baton.perf.fitting.error_bands import TimeErrors, calibrated_errors, shipped_errors
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY
from baton.planner import explore, plan, sensitivity
from baton.planner.problem import (
    QUICK_SEARCH,
    AcceleratorOffer,
    PlanningProblem,
    SearchEffort,
    SearchSpace,
    SloClass,
)
from baton.planner.result import Plan, Speculation
from baton.planner.result import Tradeoff as PlannedTrade
from baton.planner.simulation_runner import ParallelMap, Progress
from baton.planner.tradeoffs import (
    Drafting,
    default_draft_cost,
    pareto_front,
    speculation_of,
)
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.arrivals import TimeUnit, UserLoad
from baton.simulator.workloads.formats import ReadOptions
from baton.simulator.workloads.rate_series import TraceLimits
from baton.simulator.workloads.trace import Trace

_WORKLOAD_RATE_PER_S = 10.0
_WORKLOAD_S = 600.0
"""Length of a named workload that is drawn from: enough for conversations of several turns."""
_NODES_OF_GROUP = 4
_USUAL_NODE = 8
_SAMPLED_REQUESTS = 200_000
"""Requests of a rate series, from which runs of some hundred are drawn."""
_STAGES = {plan.STAGE: (0.0, 0.25), explore.STAGE: (0.25, 0.55), sensitivity.STAGE: (0.8, 0.2)}
"""Start and share of each stage in the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateArgs:
    """How tokens are drafted; without a cost, by one layer of the model."""

    acceptance: float
    drafted: int
    draft_cost: float | None = None


def parse_speculation(text: str) -> SpeculateArgs:
    """`0.7:3`, or `0.7:3:0.05` with the cost of a drafted token.

    Raises:
        BadParameter: it is neither.
    """
    acceptance, drafted, cost_text = [*text.split(":", 2), "", ""][:3]
    try:
        cost = float(cost_text) if text.count(":") > 1 else None
        args = SpeculateArgs(acceptance=float(acceptance), drafted=int(drafted), draft_cost=cost)
        # Checked now: a plan takes minutes.
        Drafting(acceptance=args.acceptance, drafted=args.drafted, draft_cost=cost or 0.0)
    except ValueError as error:
        raise typer.BadParameter(
            f"got {text!r}, expected an acceptance rate and a number of tokens, as 0.7:3, and"
            f" perhaps a cost in steps, as 0.7:3:0.05: {error}",
            param_hint="--speculate",
        ) from error
    return args


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArgs:
    """The arguments of the command line."""

    model: str
    accelerators: tuple[str, ...]
    prices: tuple[float, ...]
    gpus: int | None
    trace: Path | None
    time_unit: TimeUnit | None
    workload: str | None
    rate_per_s: float | None
    users: UserLoad | None
    classes: tuple[SloClass, ...]
    dtype: str
    kv_dtype: str
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...]
    ranks: tuple[int, ...] | None
    """Data-parallel sizes; None: see `_rank_sizes`."""
    calibration: tuple[Path, ...]
    speculate: SpeculateArgs | None
    quantizations: bool
    max_num_seqs: int
    quick: bool
    processes: int
    seed: int
    ignore_invalid: bool
    write: Path | None


def slo_classes(
    *, ttft_s: float | None, tpot_s: float | None, attainment: float, class_texts: Sequence[str]
) -> tuple[SloClass, ...]:
    """The class of all requests, and those with a name.

    Raises:
        BadParameter: a text is no class, two have the same name, or there are no objectives at all.
    """
    default = SloClass(objectives=Objectives(ttft_s=ttft_s, tpot_s=tpot_s), attainment=attainment)
    classes = (default, *(_parse_class(text, default) for text in class_texts))
    if duplicates := [
        name for name, count in Counter(class_.name for class_ in classes).items() if count > 1
    ]:
        raise typer.BadParameter(
            f"got {duplicates[0]!r} twice, expected once", param_hint="--class"
        )
    if all(class_.objectives == Objectives() for class_ in classes):
        raise typer.BadParameter("give --ttft, --tpot, or both", param_hint="--ttft")
    return classes


def _parse_class(text: str, default: SloClass) -> SloClass:
    name, _, pairs = text.partition(":")
    fields = dict(pair.partition("=")[::2] for pair in pairs.split(","))
    unknown = fields.keys() - {"ttft", "tpot", "attainment"}
    if not name or not pairs or unknown:
        raise typer.BadParameter(
            f"got {text!r}, expected a name and its objectives, as batch:ttft=10s,attainment=0.8",
            param_hint="--class",
        )
    objectives = default.objectives
    if "ttft" in fields:
        objectives = replace(objectives, ttft_s=parse_seconds(fields["ttft"], "--class"))
    if "tpot" in fields:
        objectives = replace(objectives, tpot_s=parse_seconds(fields["tpot"], "--class"))
    try:
        attainment = float(fields.get("attainment", default.attainment))
        return SloClass(name=name, objectives=objectives, attainment=attainment)
    except ValueError as error:
        raise typer.BadParameter(f"in {text!r}: {error}", param_hint="--class") from error


def run_planner(args: PlanArgs, *, on_progress: Callable[[float], None]) -> PlanResult:
    """The planner's answer.

    Raises:
        BadParameter: a data type or a price is invalid.
        BatonError: the model, an accelerator or the trace cannot be used, or nothing fits.
    """
    stored = read_model(
        args.model,
        weights=parse_dtype(args.dtype, "--dtype"),
        kv=parse_dtype(args.kv_dtype, "--kv-dtype"),
    )
    offers, traffic = _offers(args), _traffic(args)
    calibration = load_calibration(args.calibration)
    rate = args.rate_per_s
    if rate is None and args.users is None and args.gpus is None:
        rate = traffic.rate_per_s
    question = PlanningProblem(
        model=stored.shape,
        offers=offers,
        traffic=traffic,
        classes=args.classes,
        rate_per_s=rate,
        users=args.users,
        gpus=args.gpus,
        weights_dtype=stored.weights,
        kv_dtype=stored.kv,
        efficiency=DEFAULT_EFFICIENCY if calibration is None else calibration.fit.efficiency,
        space=SearchSpace(
            tensor_parallel_sizes=args.tensor,
            pipeline_parallel_sizes=args.pipeline,
            max_running_requests=args.max_num_seqs,
        ),
        effort=QUICK_SEARCH if args.quick else SearchEffort(),
        seed=args.seed,
    )
    if args.write is not None:  # before minutes are spent on an unwritable plan
        check_writable(question, source=args.model, stored_dtype=stored.published)
    with _process_pool(args.processes) as run_all:
        best_plan, groups = _plan_both(args, question, run_all, on_progress)
        quantizations = (
            plan.plan_quantizations(question, parallel_map=run_all) if args.quantizations else ()
        )
    return PlanResult(
        plan=best_plan,
        groups=groups,
        stored_dtype=stored.published,
        time_errors=_time_errors(best_plan, calibration),
        speculation=_speculation(args, best_plan),
        quantizations=quantizations,
    )


def _plan_both(
    args: PlanArgs,
    question: PlanningProblem,
    run_all: ParallelMap,
    on_progress: Callable[[float], None],
) -> tuple[Plan, Plan | None]:
    """The answer, and that with data-parallel groups; the latter alone if nothing else fits.

    Raises:
        InsufficientMemory: nothing fits.
    """
    sizes = _rank_sizes(args, question)
    plans = 1 + bool(sizes)

    def plan_groups(without: Plan | None = None) -> Plan:
        return plan.plan_groups(
            question,
            sizes,
            without=without,
            parallel_map=run_all,
            on_progress=lambda at: on_progress((1 + _fraction(at)) / plans),
        )

    try:
        best_plan = plan.plan(
            question,
            parallel_map=run_all,
            on_progress=lambda at: on_progress(_fraction(at) / plans),
        )
    except InsufficientMemory:
        if not sizes:
            raise
        groups = plan_groups()
        return replace(groups, verdict=f"{ONLY_GROUPS_FIT}: {groups.verdict}"), None
    return best_plan, plan_groups(best_plan) if sizes else None


def _rank_sizes(args: PlanArgs, question: PlanningProblem) -> tuple[int, ...]:
    """Sizes of groups to compare with; none for models without experts.

    By default powers of 2 within four nodes, and within one where it is as large.
    """
    if question.model.experts is None:
        return ()
    if args.ranks is not None:
        return tuple(size for size in args.ranks if size > 1)
    devices = max(offer.accelerator.devices_per_node for offer in question.offers)
    most = max(_NODES_OF_GROUP * min(devices, _USUAL_NODE), devices)
    return tuple(2**power for power in range(1, most.bit_length()) if 2**power <= most)


def _speculation(args: PlanArgs, best_plan: Plan) -> Speculation | None:
    if args.speculate is None or best_plan.best is None:
        return None
    cost = args.speculate.draft_cost
    drafting = Drafting(
        acceptance=args.speculate.acceptance,
        drafted=args.speculate.drafted,
        draft_cost=default_draft_cost(best_plan.question.model.layers) if cost is None else cost,
    )
    return speculation_of(best_plan.best, best_plan.mix, drafting)


def _time_errors(best_plan: Plan, calibration: LoadedCalibration | None) -> dict[str, TimeErrors]:
    """By accelerator."""
    question, mix = best_plan.question, best_plan.mix
    names = [offer.accelerator.name for offer in question.offers]
    if calibration is None:
        has_experts = question.model.experts is not None
        has_ranks = best_plan.best is not None and not all(
            pool.engine_shape.is_startable for pool in best_plan.best.fleet.pools
        )
        return {
            name: shipped_errors(name, has_experts=has_experts, has_ranks=has_ranks)
            for name in names
        }
    errors = {}
    for name in names:
        conditions = [
            Conditions(
                prompt_tokens=mix.prompt_tokens,
                context_tokens=mix.prompt_tokens + mix.output_tokens,
                devices=pool.engine_shape.gpus,
            )
            for candidate in best_plan.candidates
            for pool in candidate.fleet.pools
            if pool.engine_shape.accelerator.name == name
        ]
        errors[name] = calibrated_errors(
            calibration.fit, name=calibration.name, conditions=conditions
        )
    return errors


def _traffic(args: PlanArgs) -> Trace:
    if args.trace is not None:
        has_rate = any(given is not None for given in (args.rate_per_s, args.users, args.gpus))
        options = ReadOptions(
            ignore_invalid=args.ignore_invalid,
            time_unit=args.time_unit,
            # Of lengths alone: a plan draws from them at any rate.
            rate_per_s=args.rate_per_s or (_WORKLOAD_RATE_PER_S if has_rate else None),
            # Without a rate, it is the trace's own.
            limits=TraceLimits(thinned_to=_SAMPLED_REQUESTS if has_rate else None),
            seed=args.seed,
        )
        trace = load_trace(args.trace, options)
        if not trace.span_s:
            problem = f"{args.trace}: all its requests, {len(trace)}, arrive at one time"
            raise TraceUnusable(problem, "name a trace whose requests arrive one after another")
        return trace
    return make_workload(
        args.workload or "",
        rate_per_s=_WORKLOAD_RATE_PER_S,
        duration_s=_WORKLOAD_S,
        seed=args.seed,
    )


def _offers(args: PlanArgs) -> tuple[AcceleratorOffer, ...]:
    for price in args.prices:
        if not price > 0:
            raise typer.BadParameter(f"got {price:g}, expected more than 0", param_hint="--price")
    prices: Sequence[float | None] = args.prices or [None] * len(args.accelerators)
    return tuple(
        AcceleratorOffer(accelerator=find_accelerator(name), price_per_hour=price)
        for name, price in zip(args.accelerators, prices, strict=True)
    )


@contextmanager
def _process_pool(count: int) -> Iterator[ParallelMap]:
    """Processes that simulate; with one, this process itself."""
    if count == 1:
        yield map
        return
    # Not forked: the progress bar has a thread.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        yield pool.map


def _fraction(progress: Progress) -> float:
    start, share = _STAGES[progress.stage]
    return start + share * progress.done / max(1, progress.total)


def write_config(args: PlanArgs, result: PlanResult) -> str | None:
    """The configuration that was written; None when none was asked for, or there is none."""
    best = result.plan.best
    if args.write is None or best is None:
        return None
    text = render_plan(result.plan, best, source=args.model, stored_dtype=result.stored_dtype)
    args.write.write_text(text, encoding="utf-8")
    return text


def study_of(result: PlanResult, *, command: str) -> Study:
    """The answer as a report shows it."""
    best_plan = result.plan
    best = {
        id(other)
        for other in pareto_front(
            tradeoff for tradeoff in best_plan.tradeoffs if tradeoff.simulated
        )
    }
    labels = _labels(best_plan.tradeoffs)
    question = best_plan.question
    return Study(
        title=f"Plan for {question.model.name}",
        evidence=Evidence.SIMULATED,
        command=command,
        facts=facts(best_plan) | error_facts(result),
        answer=(*answer_lines(best_plan), *group_lines(result)),
        objectives=question.classes[0].objectives,
        target=question.classes[0].attainment,
        rate_curves=tuple(
            Curve(
                name=f"{candidate.fleet.kind}: {candidate.fleet.label}",
                points=tuple(
                    sorted(
                        (t.rate_per_s / candidate.simulated_fleet.gpus, t.attainment)
                        for t in candidate.search_result.trials
                    )
                ),
            )
            for candidate in best_plan.candidates
        ),
        tradeoffs=tuple(
            Tradeoff(
                name=str(tradeoff.kind) if tradeoff.simulated else f"{tradeoff.kind} (closed form)",
                user_tokens_per_s=tradeoff.tokens_per_s_per_user,
                device_tokens_per_s=tradeoff.tokens_per_s_per_gpu,
                label=label,
                is_pareto_optimal=id(tradeoff) in best,
            )
            for tradeoff, label in zip(best_plan.tradeoffs, labels, strict=True)
        ),
        tables=tuple(
            _table(title, rows)
            for title, rows in (
                ("Fleets", candidate_rows(best_plan)),
                ("Other types of weights and KV cache", quantization_rows(result)),
                (
                    "Speculative decoding",
                    speculation_rows(result.speculation) if result.speculation else [],
                ),
                ("If the question was a fifth off", sensitivity_rows(best_plan)),
            )
            if rows
        ),
    )


def _labels(trades: Sequence[PlannedTrade]) -> Iterator[str]:
    """The name of each, where it differs from the last name."""
    previous = ""
    for trade in trades:
        yield "" if trade.label == previous else trade.label
        previous = trade.label


def _table(title: str, rows: Sequence[dict[str, str]]) -> Table:
    return Table(
        title=title, columns=tuple(rows[0]), rows=tuple(tuple(row.values()) for row in rows)
    )
