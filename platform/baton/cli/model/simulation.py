"""What `baton simulate` runs: one configuration or several, at one rate or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import baton
from baton.bench.formatting import number_text, seconds_text
from baton.bench.report import Curve, Evidence, Moment, Result, Scaling, Study
from baton.bench.report.summary import SCALES, scaled, tail_notes
from baton.cli.traces import load_or_pace, make_workload
from baton.config.language.bounds import Wait
from baton.config.language.units import Unit, format_quantity
from baton.config.load import load_config
from baton.config.schema.deployment import DeploymentConfig
from baton.config.simulation.to_scenario import Simulated, simulated
from baton.domain.errors import ConfigInvalid, OperatorError
from baton.simulator.faults import Happening
from baton.simulator.fleet.samples import Sample
from baton.simulator.outcome import Objectives, attainment
from baton.simulator.scenario import Run, simulate
from baton.simulator.workloads import scaling
from baton.simulator.workloads.trace import Trace

_SHORT_PATHS = ("policy", "index", "disaggregate", "seed")
"""Keys of the router, which may be compared without saying `router.`."""
_AUTOSCALER = "autoscaler"
"""To be compared as `autoscaler=static`: the policy alone."""


COLOCATED = "colocated"
"""To be compared: nothing is split, and every replica does both, also those meant to prefill."""


class CannotSimulate(OperatorError):
    """What was asked for contradicts itself or the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Which requests to serve: a file, or a workload by name."""

    file: Path | None = None
    workload: str | None = None
    rate_per_s: float | None = None
    duration_s: float | None = None
    most: int | None = None
    """Requests, at most."""
    scales: tuple[float, ...] = ()
    """Mean rates to bring the trace to, one run for each."""
    skip_bad: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that is asked for."""

    files: Sequence[Path]
    requests: Requests
    environ: Mapping[str, str]
    sets: Sequence[str] = ()
    compare: Sequence[str] = ()
    """`policy=random` and the like, each another run of the same requests."""
    model_config: Path | None = None
    happenings: tuple[Happening, ...] = ()
    target: float = 0.9
    scale_sweep: bool = False
    seed: int = 0
    autoscalers: Sequence[str] = ()
    """Scaling policies: that of the first run, and one more run for each other."""
    cold_start_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arm:
    """One configuration among those that are compared."""

    change: str
    """What is different about it; nothing for the first."""
    config: DeploymentConfig
    deployment: Simulated

    @property
    def name(self) -> str:
        """What it is called in a report."""
        if self.change or self.config.autoscaler is None:
            return self.change or str(self.config.router.policy)
        return f"{_AUTOSCALER}={self.config.autoscaler.policy}"

    @property
    def placement(self) -> str:
        """How it places, in words."""
        router = self.config.router
        roles = ", ".join(f"{name} {pool.role}" for name, pool in self.config.pools.items())
        return (
            f"policy {router.policy}, index {router.index}, disaggregate {router.disaggregate};"
            f" roles: {roles}"
        )

    @property
    def scaling(self) -> str:
        """Who scales it, in words; nothing for nobody."""
        scaler = self.config.autoscaler
        if scaler is None:
            return ""
        return f"policy {scaler.policy}, every {seconds_text(scaler.interval_s)}"


Progress = Callable[[float], None]
"""Hears the fraction of all the work that is done."""


def study_of(order: Order, *, command: str, on_progress: Progress = lambda _: None) -> Study:
    """Run everything that was asked for.

    Raises:
        ConfigInvalid: the configuration cannot be used, or its engines cannot be modelled.
        CannotSimulate: something else that was asked for makes no sense.
        TraceUnusable: the requests cannot be read or made.
    """
    order = _with_autoscalers(order)
    traces = _traces(order.requests)
    if order.scale_sweep and len(traces) > 1:
        raise CannotSimulate(
            "--slo-scale-sweep with several rates would take too long to be read",
            "give one --scale, or leave out --slo-scale-sweep",
        )
    arms = [_arm(order, change) for change in ("", *order.compare)]
    first = arms[0]
    objectives = _objectives(first.config)
    if order.scale_sweep and objectives == Objectives():
        raise CannotSimulate(
            "--slo-scale-sweep needs objectives, and slo.default has none",
            "give --ttft or --tpot, or set slo.default in the configuration",
        )
    swept = arms if order.scale_sweep else []
    runs = len(arms) * len(traces) + sum(len(_scales(arm)) for arm in swept)
    done = _Counter(runs, on_progress)
    results = tuple(_result(arm, trace, done) for arm in arms for trace in traces)
    scales = tuple(_sweep(arm, order, traces[0], done) for arm in swept)
    return Study(
        title=f"{', '.join(file.name for file in order.files)} on {traces[0].name}",
        evidence=Evidence.SIMULATED,
        command=command,
        facts=_facts(order, arms, traces),
        notes=(
            *_deployment_notes(arms),
            *_trace_notes(first, traces),
            *_service_notes(arms),
            *_sweep_notes(swept),
            *tail_notes(results),
        ),
        objectives=objectives,
        target=order.target,
        device=first.deployment.device,
        results=results,
        scales=scales,
    )


class _Counter:
    """Turns the fractions of single runs into one of all."""

    def __init__(self, runs: int, tell: Progress) -> None:
        self._runs = runs
        self._done = 0
        self._tell = tell

    def part(self, fraction: float) -> None:
        """So much of the run under way is done."""
        self._tell((self._done + fraction) / self._runs)

    def run_ended(self) -> None:
        """A run is over."""
        self._done += 1
        self.part(0.0)


# ------------------------------------------------------------------ what is compared
def _with_autoscalers(order: Order) -> Order:
    """The first scaling policy for what is run anyway, the others to be compared with it."""
    if not order.autoscalers:
        return order
    first, *others = dict.fromkeys(order.autoscalers)
    return replace(
        order,
        sets=(*order.sets, f"autoscaler.policy={first}"),
        compare=(*order.compare, *(f"{_AUTOSCALER}={one}" for one in others)),
    )


def _arm(order: Order, change: str) -> _Arm:
    """The configuration with a change: `key=value` or `colocated`, several with commas."""
    changes = [path for one in change.split(",") if one for path in _paths(order, one)]
    config = _loaded(order, changes)
    try:
        deployment = simulated(
            config,
            model_config=order.model_config,
            seed=order.seed,
            happenings=order.happenings,
            cold_start_s=order.cold_start_s,
        )
    except ConfigInvalid as error:
        raise _of_arm(error, change) from error
    except ValueError as error:
        raise CannotSimulate(str(error), "correct --kill") from error
    return _Arm(change=change, config=config, deployment=deployment)


def _loaded(order: Order, changes: Sequence[str]) -> DeploymentConfig:
    """The configuration with changes.

    Plain policies do not decide whether to disaggregate. Where the configuration leaves that open,
    and the change says nothing of it, they split whatever they can.
    """
    sets = [*order.sets, *changes]
    try:
        return load_config(order.files, env=order.environ, sets=sets).config
    except ConfigInvalid as error:
        undecided = [line for line in error.findings if "cannot decide about" in line]
        said = any(one.startswith("router.disaggregate=") for one in changes)
        if changes and undecided == list(error.findings) and not said:
            sets.append("router.disaggregate=always")
            return load_config(order.files, env=order.environ, sets=sets).config
        raise _of_arm(error, ",".join(changes)) from error


def _paths(order: Order, change: str) -> list[str]:
    """A change as `--set` takes it."""
    if change == COLOCATED:
        pools = load_config(order.files, env=order.environ, sets=order.sets).config.pools
        return ["router.disaggregate=never", *(f"pools.{name}.role=mixed" for name in pools)]
    key, found, value = change.partition("=")
    if not found or not key or not value:
        raise CannotSimulate(
            f"--compare got {change!r}, wanted a key and a value such as policy=random",
            f"write policy=NAME, disaggregate=never, {COLOCATED}, or any path that --set takes",
        )
    if key == _AUTOSCALER:
        return [f"autoscaler.policy={value}"]
    return [f"router.{key}={value}" if key in _SHORT_PATHS else change]


def _of_arm(error: ConfigInvalid, change: str) -> ConfigInvalid:
    """The same error, saying which of the configurations is meant."""
    if not change:
        return error
    return type(error)(tuple(f"with {change}: {line}" for line in error.findings))


# ------------------------------------------------------------------ which requests
def _traces(wanted: Requests) -> list[Trace]:
    """The requests, once for each rate."""
    if wanted.file is None:
        rates: Sequence[float | None] = wanted.scales or (wanted.rate_per_s,)
        return [_limited(_workload(wanted, rate), wanted) for rate in rates]
    read, scales = _recorded(wanted, wanted.file)
    # Of the file, so that the time is the same one however many requests a scale leaves out.
    begins_s = read.requests[0].at_s if read.requests else 0.0
    if not scales:
        return [_limited(read, wanted, begins_s)]
    if not read.rate_per_s:
        what = f"{wanted.file}: its requests have no rate that could be changed"
        raise CannotSimulate(what, "leave out --rate and --scale")
    return [
        _limited(
            scaling.at_rate(read, rate, Random(wanted.seed)),  # noqa: S311 - a seed
            wanted,
            begins_s,
        )
        for rate in scales
    ]


def _recorded(wanted: Requests, file: Path) -> tuple[Trace, Sequence[float]]:
    """The trace in a file, and the rates to bring it to."""
    rate = wanted.rate_per_s
    read, paced = load_or_pace(file, skip_bad=wanted.skip_bad, rate_per_s=rate, seed=wanted.seed)
    if paced:
        return read, wanted.scales
    return read, wanted.scales or (() if rate is None else (rate,))


def _workload(wanted: Requests, rate_per_s: float | None) -> Trace:
    if rate_per_s is None:
        raise CannotSimulate("--workload needs a rate", "give --rate, in requests per second")
    if wanted.duration_s is None and wanted.most is None:
        raise CannotSimulate("--workload needs an end", "give --duration or --requests")
    return make_workload(
        wanted.workload or "",
        rate_per_s=rate_per_s,
        duration_s=wanted.duration_s,
        most=wanted.most,
        seed=wanted.seed,
    )


def _limited(trace: Trace, wanted: Requests, begins_s: float = 0.0) -> Trace:
    if wanted.duration_s is not None:
        trace = scaling.cut(trace, until_s=begins_s + wanted.duration_s)
    if wanted.most is not None:
        trace = scaling.first(trace, wanted.most)
    if not len(trace):
        raise CannotSimulate("no request is left", "give a longer --duration or more --requests")
    return trace


# ------------------------------------------------------------------ runs
def _result(arm: _Arm, trace: Trace, done: _Counter) -> Result:
    scenario = arm.deployment.scenario
    run = simulate(scenario, trace, on_progress=done.part)
    done.run_ended()
    return Result(
        name=arm.name,
        outcomes=run.outcomes,
        devices=_devices(arm, run),
        offered_per_s=trace.rate_per_s or None,
        moments=tuple(_moments(run)),
        counts={"handoffs": run.handoffs, "resumes": run.resumes},
        scaling=None if scenario.autoscaler is None else _scaling(run),
    )


def _scaling(run: Run) -> Scaling:
    story = run.story
    return Scaling(
        device_hours=story.gpu_hours,
        actions=len(story.changes),
        actions_per_hour=story.actions_per_hour,
        reversals_per_hour=story.reversals_per_hour,
        held_ticks=story.held,
        ticks=story.ticks,
    )


def _devices(arm: _Arm, run: Run) -> float:
    """On average over the run."""
    scenario = arm.deployment.scenario
    changes = scenario.happenings or scenario.autoscaler is not None
    if not changes or not run.ended_at_s:
        return arm.deployment.devices
    workers = {name: pool.parallel.workers for name, pool in arm.config.pools.items()}
    seconds = sum(workers[name] * took_s for name, took_s in run.replica_seconds.items())
    return seconds / run.ended_at_s


def _moments(run: Run) -> Iterator[Moment]:
    start_s = min((one.arrived_at_s for one in run.outcomes), default=0.0)
    for sample in run.timeline:
        if sample.at_s >= start_s:
            yield Moment(
                at_s=sample.at_s - start_s,
                replicas=_by_role(sample),
                queued=sum(pool.queued for pool in sample.pools),
                running=sum(pool.running for pool in sample.pools),
            )


def _by_role(sample: Sample) -> dict[str, int]:
    """Replicas by pool; those of a pool that play another role beside it."""
    counts: dict[str, int] = {}
    for pool in sample.pools:
        counts[pool.pool] = pool.replicas - sum(count for _, count in pool.others)
        counts |= {f"{pool.pool} as {role}": count for role, count in pool.others}
    return counts


def _scales(arm: _Arm) -> list[float]:
    """The scales of the objectives at which these may still be configured."""
    objectives = _objectives(arm.config)
    return [scale for scale in SCALES if _may_be_configured(scaled(objectives, scale))]


def _may_be_configured(limits: Objectives) -> bool:
    return all(limit is None or Wait.hold(limit) for limit in (limits.ttft_s, limits.tpot_s))


def _sweep(arm: _Arm, order: Order, trace: Trace, done: _Counter) -> Curve:
    """Attainment by scale of the objectives, which the policy knows of in each run."""
    objectives = _objectives(arm.config)
    points = []
    for scale in _scales(arm):
        limits = scaled(objectives, scale)
        known = replace(order, sets=[*order.sets, *_slo_sets(limits)])
        there = _arm(known, arm.change).deployment.scenario
        run = simulate(there, trace, on_progress=done.part)
        done.run_ended()
        points.append((scale, attainment(run.outcomes, limits)))
    return Curve(name=arm.name, points=tuple(points))


def _slo_sets(limits: Objectives) -> list[str]:
    named = (("ttft", limits.ttft_s), ("tpot", limits.tpot_s))
    return [
        f"slo.default.{name}={format_quantity(limit, Unit.SECONDS)}"
        for name, limit in named
        if limit is not None
    ]


def _objectives(config: DeploymentConfig) -> Objectives:
    objectives = config.slo.default
    return Objectives(ttft_s=objectives.ttft_s, tpot_s=objectives.tpot_s)


# ------------------------------------------------------------------ in words
def _facts(order: Order, arms: Sequence[_Arm], traces: Sequence[Trace]) -> dict[str, str]:
    first, *others = arms
    return {
        "requests": f"{traces[0].name}: {'; '.join(map(_trace_text, traces))}",
        "model": first.config.models[first.config.model_name].source,
        **{f"pool {name}": text for name, text in first.deployment.pools.items()},
        "placement": first.placement,
        **({"autoscaler": first.scaling} if first.scaling else {}),
        **{f"with {one.name}": one.placement for one in others},
        "seed": str(order.seed),
        "baton": baton.__version__,
    }


def _trace_text(trace: Trace) -> str:
    rate = number_text(trace.rate_per_s)
    return f"{len(trace):,} in {seconds_text(trace.span_s)}, {rate}/s"


def _deployment_notes(arms: Sequence[_Arm]) -> Iterator[str]:
    """Those of the first, and of each other what is to be said of it alone."""
    first, *others = arms
    yield from first.deployment.notes
    for arm in others:
        for note in arm.deployment.notes:
            if note not in first.deployment.notes:
                yield f"With {arm.name}: {note}"


def _service_notes(arms: Sequence[_Arm]) -> Iterator[str]:
    scaled = [one.config for one in arms if one.config.autoscaler is not None]
    if any(
        all(pool.replicas.min == pool.replicas.max for pool in config.pools.values())
        for config in scaled
    ):
        yield "No pool may change its size: min and max are the same everywhere."
    if any(config.autoscaler is not None and config.autoscaler.dry_run for config in scaled):
        yield "The autoscaler only says what it would do (autoscaler.dry_run)."
    if any(one.config.slo.classes for one in arms):
        yield (
            "Figures judge all requests by slo.default; the table by class judges each by its own"
            " class."
        )
    if limited := _limited_tenants(arms):
        yield (
            f"Limits hold for tenants ({limited}): what is beyond them is refused and counts as"
            " failed. Requests of a trace that name no tenant are of 'default'."
        )


def _sweep_notes(arms: Sequence[_Arm]) -> Iterator[str]:
    """Of each configuration whose sweep is not whole."""
    bounds = Wait.describe(lambda limit_s: format_quantity(limit_s, Unit.SECONDS))
    for arm in arms:
        kept = _scales(arm)
        if left_out := ", ".join(f"{scale:g}" for scale in SCALES if scale not in kept):
            yield (
                f"The sweep of objectives of {arm.name} leaves out {left_out} times: each is a"
                f" duration{bounds}."
            )


def _limited_tenants(arms: Sequence[_Arm]) -> str:
    """Tenants with a limit in any of the runs."""
    found = {
        name
        for arm in arms
        for name, one in arm.config.tenants.items()
        if (one.rate.requests_per_s, one.rate.tokens_per_s, one.max_in_flight) != (None,) * 3
    }
    return ", ".join(sorted(found))


def _trace_notes(arm: _Arm, traces: Sequence[Trace]) -> Iterator[str]:
    if skipped := traces[0].skipped_lines:
        lines = "line of the trace was" if skipped == 1 else "lines of the trace were"
        yield f"{skipped:,} {lines} bad and left out."
    longest = min(plan.settings.max_len_tokens for plan in arm.deployment.scenario.pools)
    allowed = arm.config.admission.max_prompt_tokens or longest
    asked = traces[0].requests
    long = sum(one.prompt_tokens >= longest for one in asked)
    refused = sum(allowed < one.prompt_tokens < longest for one in asked)
    cut = sum(one.prompt_tokens + one.output_tokens > longest for one in asked) - long
    if long:
        yield f"{long:,} prompts leave no room for an answer in max_len ({longest:,}): they fail."
    if refused:
        yield f"{refused:,} prompts are longer than max_prompt_tokens ({allowed:,}): refused."
    if cut > refused:
        yield f"Up to {cut - refused:,} answers end early, where max_len ({longest:,}) is reached."
