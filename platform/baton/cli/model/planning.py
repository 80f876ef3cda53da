"""How `baton plan` asks the planner, and what it makes of the answer."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from baton.bench.report import Curve, Evidence, Study, Table, Trade
from baton.cli.model.models import dtype_of, read_model
from baton.cli.model.planning_text import candidate_rows, facts, sensitivity_rows
from baton.cli.options import seconds
from baton.cli.traces import TraceUnusable, load_trace, make_workload
from baton.config.write.render_plan import check_writable, emit
from baton.perf.hardware.accelerators import BYTES, Dtype
from baton.perf.hardware.catalogue import accelerator
from baton.planner import explore, plan, sensitivity
from baton.planner.problem import QUICK, Effort, Offer, Question, SloClass, Space
from baton.planner.result import Plan
from baton.planner.result import Trade as PlannedTrade
from baton.planner.simulation_runner import Progress, RunAll
from baton.planner.tradeoffs import front
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.trace import Trace

_WORKLOAD_RATE_PER_S = 10.0
_WORKLOAD_S = 600.0
"""Of a named workload, what is drawn from: long enough for conversations of several turns."""
_STAGES = {plan.STAGE: (0.0, 0.25), explore.STAGE: (0.25, 0.55), sensitivity.STAGE: (0.8, 0.2)}
"""Where each stage begins, and how much of the whole it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked on the command line."""

    model: str
    accelerators: tuple[str, ...]
    prices: tuple[float, ...]
    gpus: int | None
    trace: Path | None
    workload: str | None
    rate_per_s: float | None
    classes: tuple[SloClass, ...]
    dtype: str
    kv_dtype: str
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...]
    max_num_seqs: int
    quick: bool
    processes: int
    seed: int
    skip_bad: bool
    write: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer, and how the model's weights are stored."""

    plan: Plan
    stored: Dtype | None


def slo_classes(
    *, ttft_s: float | None, tpot_s: float | None, attainment: float, named: Sequence[str]
) -> tuple[SloClass, ...]:
    """The class of all requests, and those with a name.

    Raises:
        BadParameter: a text is none of a class, two have the same name, or there are no objectives
            at all.
    """
    default = SloClass(objectives=Objectives(ttft_s=ttft_s, tpot_s=tpot_s), attainment=attainment)
    classes = (default, *(_named(text, default) for text in named))
    if twice := [name for name, count in Counter(one.name for one in classes).items() if count > 1]:
        raise typer.BadParameter(f"got {twice[0]!r} twice, wanted once", param_hint="--class")
    if all(one.objectives == Objectives() for one in classes):
        raise typer.BadParameter("give --ttft, --tpot, or both", param_hint="--ttft")
    return classes


def _named(text: str, default: SloClass) -> SloClass:
    name, _, pairs = text.partition(":")
    given = dict(pair.partition("=")[::2] for pair in pairs.split(","))
    unknown = given.keys() - {"ttft", "tpot", "attainment"}
    if not name or not pairs or unknown:
        raise typer.BadParameter(
            f"got {text!r}, wanted a name and its objectives, as batch:ttft=10s,attainment=0.8",
            param_hint="--class",
        )
    held = default.objectives
    if "ttft" in given:
        held = replace(held, ttft_s=seconds(given["ttft"], "--class"))
    if "tpot" in given:
        held = replace(held, tpot_s=seconds(given["tpot"], "--class"))
    try:
        share = float(given.get("attainment", default.attainment))
        return SloClass(name=name, objectives=held, attainment=share)
    except ValueError as error:
        raise typer.BadParameter(f"in {text!r}: {error}", param_hint="--class") from error


def answer(order: Order, *, on_progress: Callable[[float], None]) -> Found:
    """The planner's answer.

    Raises:
        BadParameter: a type of numbers or a price is none.
        BatonError: the model, an accelerator or the trace cannot be used, or nothing fits.
    """
    shape, stored = read_model(order.model)
    weights = dtype_of(order.dtype, "--dtype") or stored or Dtype.BF16
    wide = weights if BYTES[weights] >= BYTES[Dtype.BF16] else Dtype.BF16
    offers, traffic = _offers(order), _traffic(order)
    rate = order.rate_per_s
    if rate is None and order.gpus is None:
        rate = traffic.rate_per_s
    question = Question(
        model=shape,
        offers=offers,
        traffic=traffic,
        classes=order.classes,
        rate_per_s=rate,
        gpus=order.gpus,
        weights=weights,
        kv=dtype_of(order.kv_dtype, "--kv-dtype") or wide,
        space=Space(
            tensor=order.tensor, pipeline=order.pipeline, max_running_requests=order.max_num_seqs
        ),
        effort=QUICK if order.quick else Effort(),
        seed=order.seed,
    )
    if order.write is not None:  # before minutes are spent on what cannot be written
        check_writable(question, source=order.model, stored=stored)
    with _processes(order.processes) as run_all:
        made = plan.plan(question, run=run_all, on_progress=lambda at: on_progress(_fraction(at)))
    return Found(plan=made, stored=stored)


def _traffic(order: Order) -> Trace:
    if order.trace is not None:
        read = load_trace(
            order.trace, skip_bad=order.skip_bad, rate_per_s=order.rate_per_s, seed=order.seed
        )
        if not read.span_s:
            what = f"{order.trace}: all its requests, {len(read)}, arrive at one time"
            raise TraceUnusable(what, "name a trace whose requests arrive one after another")
        return read
    return make_workload(
        order.workload or "",
        rate_per_s=_WORKLOAD_RATE_PER_S,
        duration_s=_WORKLOAD_S,
        seed=order.seed,
    )


def _offers(order: Order) -> tuple[Offer, ...]:
    for price in order.prices:
        if not price > 0:
            raise typer.BadParameter(f"got {price:g}, wanted more than 0", param_hint="--price")
    prices: Sequence[float | None] = order.prices or [None] * len(order.accelerators)
    return tuple(
        Offer(accelerator=accelerator(name), price_per_hour=price)
        for name, price in zip(order.accelerators, prices, strict=True)
    )


@contextmanager
def _processes(count: int) -> Iterator[RunAll]:
    """So many that simulate at a time; with one, this process itself does."""
    if count == 1:
        yield map
        return
    # Not forked: the progress bar has a thread.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawned) as pool:
        yield pool.map


def _fraction(progress: Progress) -> float:
    start, share = _STAGES[progress.stage]
    return start + share * progress.done / max(1, progress.of)


def written(order: Order, found: Found) -> str | None:
    """The configuration that was written; None when none was asked for, or there is none."""
    best = found.plan.best
    if order.write is None or best is None:
        return None
    text = emit(found.plan, best, source=order.model, stored=found.stored)
    order.write.write_text(text, encoding="utf-8")
    return text


def study_of(found: Found, *, command: str) -> Study:
    """The answer as a report shows it."""
    made = found.plan
    best = {id(one) for one in front(one for one in made.trades if one.simulated)}
    labels = _labels(made.trades)
    question = made.question
    return Study(
        title=f"Plan for {question.model.name}",
        evidence=Evidence.SIMULATED,
        command=command,
        facts=facts(made),
        notes=(made.verdict, *([] if made.binding is None else [made.binding.why])),
        objectives=question.classes[0].objectives,
        target=question.classes[0].attainment,
        curves=tuple(
            Curve(
                name=f"{one.fleet.kind}: {one.fleet.label}",
                points=tuple(
                    sorted(
                        (t.rate_per_s / one.cell.gpus, t.attainment) for t in one.measured.trials
                    )
                ),
            )
            for one in made.candidates
        ),
        trades=tuple(
            Trade(
                name=str(one.kind) if one.simulated else f"{one.kind} (closed form)",
                user_tokens_per_s=one.tokens_per_s_per_user,
                device_tokens_per_s=one.tokens_per_s_per_gpu,
                label=label,
                best=id(one) in best,
            )
            for one, label in zip(made.trades, labels, strict=True)
        ),
        tables=(
            _table("Fleets", candidate_rows(made)),
            _table("If the question was a fifth off", sensitivity_rows(made)),
        ),
    )


def _labels(trades: Sequence[PlannedTrade]) -> Iterator[str]:
    """What each is, where that is not what the one before it was."""
    before = ""
    for one in trades:
        yield "" if one.label == before else one.label
        before = one.label


def _table(title: str, rows: Sequence[dict[str, str]]) -> Table:
    columns = tuple(rows[0]) if rows else ()
    return Table(title=title, columns=columns, rows=tuple(tuple(row.values()) for row in rows))
