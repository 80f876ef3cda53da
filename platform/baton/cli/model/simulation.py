"""The runs of `baton simulate`: one configuration or several, at one rate or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import baton
from baton.bench.formatting import format_number, format_seconds
from baton.bench.report import Curve, Evidence, FleetSample, RunResult, ScalingSummary, Study
from baton.bench.report.summary import (
    OBJECTIVE_SCALES,
    length_notes,
    offered_rate,
    scale_objectives,
)
from baton.cli.model.calibrate import LoadedCalibration, load_calibration
from baton.cli.output import print_warnings
from baton.cli.traces import RequestArgs, requested_traces
from baton.config.language.bounds import Timeout
from baton.config.language.units import Unit, format_quantity
from baton.config.load import LoadedConfig, load_config
from baton.config.schema.deployment import DeploymentConfig
from baton.config.simulation.to_scenario import UNMEASURED, SimulatedDeployment, to_scenario
from baton.domain.errors import ConfigInvalid, OperatorError
from baton.domain.names.words import count_text
from baton.perf.fitting.calibration import Conditions
from baton.perf.fitting.error_bands import TimeErrors, calibrated_errors, shipped_errors
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY
from baton.simulator.faults import ScheduledEvent
from baton.simulator.fleet.samples import Sample
from baton.simulator.outcome import Objectives, attainment
from baton.simulator.scenario import ClosedLoop, SimulationResult, simulate
from baton.simulator.workloads.trace import Trace

_SHORT_PATHS = ("policy", "index", "disaggregate", "seed")
"""Keys of the router that may be compared without `router.`."""
_AUTOSCALER = "autoscaler"
"""In `autoscaler=static`: the policy alone."""


COLOCATED = "colocated"
"""In a comparison: nothing is split, and every replica does both, also prefill replicas."""


class CannotSimulate(OperatorError):
    """The arguments contradict each other or the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArgs:
    """All that is asked for."""

    files: Sequence[Path]
    requests: RequestArgs
    environ: Mapping[str, str]
    sets: Sequence[str] = ()
    compare: Sequence[str] = ()
    """`policy=random` and the like, each another run of the same requests."""
    model_config: Path | None = None
    calibration: tuple[Path, ...] = ()
    """Measured rows to calibrate engines on."""
    scheduled_events: tuple[ScheduledEvent, ...] = ()
    target: float = 0.9
    scale_sweep: bool = False
    seed: int = 0
    autoscalers: Sequence[str] = ()
    """Scaling policies: that of the first run, and one more run for each other."""
    cold_start_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    change: str
    """Its difference from the first; empty for the first."""
    config: DeploymentConfig
    deployment: SimulatedDeployment
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        if self.change or self.config.autoscaler is None:
            return self.change or str(self.config.router.policy)
        return f"{_AUTOSCALER}={self.config.autoscaler.policy}"

    @property
    def placement(self) -> str:
        router = self.config.router
        roles = ", ".join(f"{name} {pool.role}" for name, pool in self.config.pools.items())
        return (
            f"policy {router.policy}, index {router.index}, disaggregate {router.disaggregate};"
            f" roles: {roles}"
        )

    @property
    def scaling(self) -> str:
        scaler = self.config.autoscaler
        if scaler is None:
            return ""
        return f"policy {scaler.policy}, every {format_seconds(scaler.interval_s)}"


Progress = Callable[[float], None]
"""Gets the fraction of all work that is done."""


def run_study(args: SimulateArgs, *, command: str, on_progress: Progress = lambda _: None) -> Study:
    """Run every configuration at every rate.

    Raises:
        ConfigInvalid: the configuration cannot be used, or its engines cannot be modelled.
        CannotSimulate: the arguments contradict each other.
        TraceUnusable: the requests cannot be read or made.
    """
    args = _with_autoscalers(args)
    traces = requested_traces(args.requests)
    if args.scale_sweep and len(traces) > 1:
        raise CannotSimulate(
            "--slo-scale-sweep with several rates would take too long to be read",
            "give one --scale, or leave out --slo-scale-sweep",
        )
    calibration = load_calibration(args.calibration)
    variants = [_make_variant(args, change, calibration) for change in ("", *args.compare)]
    print_warnings(dict.fromkeys(chain.from_iterable(arm.warnings for arm in variants)))
    baseline = variants[0]
    objectives = _objectives(baseline.config)
    if args.scale_sweep and objectives == Objectives():
        raise CannotSimulate(
            "--slo-scale-sweep needs objectives, and slo.default has none",
            "give --ttft or --tpot, or set slo.default in the configuration",
        )
    swept_variants = variants if args.scale_sweep else []
    run_count = len(variants) * len(traces) + sum(len(_scales(arm)) for arm in swept_variants)
    progress = _TotalProgress(run_count, on_progress)
    closed_loop = _closed_loop(args.requests)
    results = tuple(
        _result(arm, trace, progress, closed_loop) for arm in variants for trace in traces
    )
    scales = tuple(_sweep(arm, args, traces[0], calibration, progress) for arm in swept_variants)
    errors = _time_errors(variants, traces[0], calibration)
    return Study(
        title=f"{', '.join(file.name for file in args.files)} on {traces[0].name}",
        evidence=Evidence.SIMULATED,
        command=command,
        facts={
            **_facts(args, variants, traces),
            **_user_facts(args.requests, results),
            **{f"error of times, {name}": str(item) for name, item in errors.items()},
        },
        error_bands={name: item.to_dict() for name, item in errors.items()},
        notes=(
            *_deployment_notes(variants, calibration),
            *_trace_notes(baseline, traces),
            *_user_notes(args.requests, traces[0], results),
            *_service_notes(variants),
            *_sweep_notes(swept_variants),
            *length_notes(results),
        ),
        objectives=objectives,
        target=args.target,
        device=baseline.deployment.device,
        results=results,
        scale_curves=scales,
    )


class _TotalProgress:
    """Turns the fractions of single runs into one of all."""

    def __init__(self, runs: int, on_progress: Progress) -> None:
        self._runs = runs
        self._ended_runs = 0
        self._on_progress = on_progress

    def on_run_progress(self, fraction: float) -> None:
        self._on_progress((self._ended_runs + fraction) / self._runs)

    def on_run_ended(self) -> None:
        self._ended_runs += 1
        self.on_run_progress(0.0)


# ------------------------------------------------------------------ what is compared
def _with_autoscalers(args: SimulateArgs) -> SimulateArgs:
    """The first scaling policy for the main run, the others to be compared with it."""
    if not args.autoscalers:
        return args
    first, *others = dict.fromkeys(args.autoscalers)
    return replace(
        args,
        sets=(*args.sets, f"autoscaler.policy={first}"),
        compare=(*args.compare, *(f"{_AUTOSCALER}={other}" for other in others)),
    )


def _make_variant(
    args: SimulateArgs, change: str, calibration: LoadedCalibration | None
) -> _Variant:
    """The configuration with a change: `key=value` or `colocated`, several with commas."""
    changes = [path for part in change.split(",") if part for path in _override_paths(args, part)]
    loaded_config = _load_config(args, changes)
    config = loaded_config.config
    try:
        deployment = to_scenario(
            config,
            model_config=args.model_config,
            seed=args.seed,
            scheduled_events=args.scheduled_events,
            cold_start_s=args.cold_start_s,
            efficiency=DEFAULT_EFFICIENCY if calibration is None else calibration.fit.efficiency,
        )
    except ConfigInvalid as error:
        raise _error_for_variant(error, change) from error
    except ValueError as error:
        raise CannotSimulate(str(error), "correct --kill") from error
    return _Variant(
        change=change, config=config, deployment=deployment, warnings=loaded_config.warnings
    )


def _load_config(args: SimulateArgs, changes: Sequence[str]) -> LoadedConfig:
    """The configuration with changes.

    Plain policies split every request that they can, unless the configuration or the change sets
    `router.disaggregate`.
    """
    sets = [*args.sets, *changes]
    try:
        return load_config(args.files, env=args.environ, sets=sets, for_simulation=True)
    except ConfigInvalid as error:
        undecided = [line for line in error.problems if "cannot decide about" in line]
        has_disaggregate = any(change.startswith("router.disaggregate=") for change in changes)
        if changes and undecided == list(error.problems) and not has_disaggregate:
            sets.append("router.disaggregate=always")
            return load_config(args.files, env=args.environ, sets=sets, for_simulation=True)
        raise _error_for_variant(error, ",".join(changes)) from error


def _override_paths(args: SimulateArgs, change: str) -> list[str]:
    """A change as `--set` takes it."""
    if change == COLOCATED:
        pools = load_config(
            args.files, env=args.environ, sets=args.sets, for_simulation=True
        ).config.pools
        return ["router.disaggregate=never", *(f"pools.{name}.role=mixed" for name in pools)]
    key, equals, value = change.partition("=")
    if not equals or not key or not value:
        raise CannotSimulate(
            f"--compare got {change!r}, expected a key and a value such as policy=random",
            f"write policy=NAME, disaggregate=never, {COLOCATED}, or any path that --set takes",
        )
    if key == _AUTOSCALER:
        return [f"autoscaler.policy={value}"]
    return [f"router.{key}={value}" if key in _SHORT_PATHS else change]


def _error_for_variant(error: ConfigInvalid, change: str) -> ConfigInvalid:
    """The same error, with the name of the configuration."""
    if not change:
        return error
    return type(error)(tuple(f"with {change}: {line}" for line in error.problems))


# ------------------------------------------------------------------ runs
def _closed_loop(requests: RequestArgs) -> ClosedLoop | None:
    if requests.users is None:
        return None
    return ClosedLoop(
        load=requests.users,
        duration_s=requests.duration_s,
        max_requests=requests.max_requests,
        seed=requests.seed,
    )


def _result(
    variant: _Variant, trace: Trace, progress: _TotalProgress, closed_loop: ClosedLoop | None
) -> RunResult:
    scenario = variant.deployment.scenario
    run = simulate(scenario, trace, closed_loop=closed_loop, on_progress=progress.on_run_progress)
    progress.on_run_ended()
    return RunResult(
        name=variant.name,
        outcomes=run.outcomes,
        devices=_devices(variant, run),
        offered_per_s=None if closed_loop is not None else trace.rate_per_s or None,
        samples=tuple(_moments(run)),
        event_counts={"handoffs": run.handoffs, "resumes": run.resumes},
        scaling=None if scenario.autoscaler is None else _scaling(run),
    )


def _scaling(run: SimulationResult) -> ScalingSummary:
    scaling_log = run.scaling
    return ScalingSummary(
        device_hours=scaling_log.gpu_hours,
        actions=len(scaling_log.changes),
        actions_per_hour=scaling_log.actions_per_hour,
        reversals_per_hour=scaling_log.reversals_per_hour,
        paused_ticks=scaling_log.paused_ticks,
        ticks=scaling_log.ticks,
    )


def _devices(variant: _Variant, run: SimulationResult) -> float:
    """The mean number of devices in a run."""
    scenario = variant.deployment.scenario
    is_dynamic = scenario.scheduled_events or scenario.autoscaler is not None
    if not is_dynamic or not run.ended_at_s:
        return variant.deployment.devices
    workers = {name: pool.parallel.workers for name, pool in variant.config.pools.items()}
    worker_seconds = sum(workers[name] * took_s for name, took_s in run.replica_seconds.items())
    return worker_seconds / run.ended_at_s


def _moments(run: SimulationResult) -> Iterator[FleetSample]:
    start_s = min((outcome.arrived_at_s for outcome in run.outcomes), default=0.0)
    for sample in run.timeline:
        if sample.at_s >= start_s:
            yield FleetSample(
                at_s=sample.at_s - start_s,
                replicas=_by_role(sample),
                queued=sum(pool.queued for pool in sample.pools),
                running=sum(pool.running for pool in sample.pools),
            )


def _by_role(sample: Sample) -> dict[str, int]:
    """Replicas by pool and, where it differs, by role."""
    counts: dict[str, int] = {}
    for pool in sample.pools:
        counts[pool.pool] = pool.replicas - sum(count for _, count in pool.flipped_roles)
        counts |= {f"{pool.pool} as {role}": count for role, count in pool.flipped_roles}
    return counts


def _scales(variant: _Variant) -> list[float]:
    """The scales of the objectives that the configuration's limits allow."""
    objectives = _objectives(variant.config)
    return [
        scale for scale in OBJECTIVE_SCALES if _is_configurable(scale_objectives(objectives, scale))
    ]


def _is_configurable(limits: Objectives) -> bool:
    return all(limit is None or Timeout.contains(limit) for limit in (limits.ttft_s, limits.tpot_s))


def _sweep(
    variant: _Variant,
    args: SimulateArgs,
    trace: Trace,
    calibration: LoadedCalibration | None,
    progress: _TotalProgress,
) -> Curve:
    """Attainment by scale of the objectives; the policy of each run uses the scaled objectives."""
    objectives = _objectives(variant.config)
    points = []
    for scale in _scales(variant):
        limits = scale_objectives(objectives, scale)
        scaled_args = replace(args, sets=[*args.sets, *_slo_overrides(limits)])
        scenario = _make_variant(scaled_args, variant.change, calibration).deployment.scenario
        run = simulate(
            scenario,
            trace,
            closed_loop=_closed_loop(args.requests),
            on_progress=progress.on_run_progress,
        )
        progress.on_run_ended()
        points.append((scale, attainment(run.outcomes, limits)))
    return Curve(name=variant.name, points=tuple(points))


def _slo_overrides(limits: Objectives) -> list[str]:
    bounds = (("ttft", limits.ttft_s), ("tpot", limits.tpot_s))
    return [
        f"slo.default.{name}={format_quantity(limit, Unit.SECONDS)}"
        for name, limit in bounds
        if limit is not None
    ]


def _objectives(config: DeploymentConfig) -> Objectives:
    objectives = config.slo.default
    return Objectives(ttft_s=objectives.ttft_s, tpot_s=objectives.tpot_s)


# ------------------------------------------------------------------ in words
def _facts(
    args: SimulateArgs, variants: Sequence[_Variant], traces: Sequence[Trace]
) -> dict[str, str]:
    baseline, *others = variants
    return {
        "requests": f"{traces[0].name}: {_requests_text(args.requests, traces)}",
        **({"arrival times": traces[0].times} if traces[0].times else {}),
        "model": baseline.config.models[baseline.config.model_name].source,
        **{f"pool {name}": text for name, text in baseline.deployment.pools.items()},
        "placement": baseline.placement,
        **({"autoscaler": baseline.scaling} if baseline.scaling else {}),
        **{f"with {other.name}": other.placement for other in others},
        "seed": str(args.seed),
        "baton": baton.__version__,
    }


def _requests_text(requests: RequestArgs, traces: Sequence[Trace]) -> str:
    if requests.users is not None:
        count = min(len(traces[0]), requests.max_requests or len(traces[0]))
        return f"{count:,}, as users send them"
    return "; ".join(map(_trace_text, traces))


def _user_facts(requests: RequestArgs, results: Sequence[RunResult]) -> dict[str, str]:
    users = requests.users
    if users is None:
        return {}
    rates = ", ".join(f"{format_number(offered_rate(result))}/s" for result in results)
    think = format_seconds(users.think_s) if users.think_s else "0 s"
    return {
        "users": f"{count_text(users.users, 'user')}, who think for {think} in the mean"
        f" (exponential), send {rates}"
    }


def _user_notes(requests: RequestArgs, trace: Trace, results: Sequence[RunResult]) -> Iterator[str]:
    if requests.users is None:
        return
    sessions = len({request.session_id or number for number, request in enumerate(trace.requests)})
    if sessions < requests.users.users:
        yield (
            f"Only {sessions} of {count_text(requests.users.users, 'user')} send: each user needs a"
            " request or a session of its own. Give more requests."
        )
    for result in results:
        last_s = max((outcome.arrived_at_s for outcome in result.outcomes), default=0.0)
        all_sent = len(result.outcomes) == len(trace)
        if requests.duration_s is not None and all_sent and last_s < requests.duration_s:
            yield (
                f"All requests were sent after {format_seconds(last_s)} of"
                f" {format_seconds(requests.duration_s)}: give more requests."
            )


def _trace_text(trace: Trace) -> str:
    rate = format_number(trace.rate_per_s)
    return f"{len(trace):,} in {format_seconds(trace.span_s)}, {rate}/s"


def _time_errors(
    variants: Sequence[_Variant], trace: Trace, calibration: LoadedCalibration | None
) -> dict[str, TimeErrors]:
    """Of the engines that are modelled, by accelerator."""
    engines = dict.fromkeys(chain.from_iterable(arm.deployment.modelled for arm in variants))
    if calibration is None:
        grouped = {engine.accelerator for engine in engines if engine.has_ranks}
        return {
            engine.accelerator: shipped_errors(
                engine.accelerator,
                has_experts=engine.has_experts,
                has_ranks=engine.accelerator in grouped,
            )
            for engine in engines
        }
    prompt_tokens = fmean(request.prompt_tokens for request in trace.requests)
    output_tokens = fmean(request.output_tokens for request in trace.requests)
    conditions: dict[str, list[Conditions]] = {}
    for engine in engines:
        conditions.setdefault(engine.accelerator, []).append(
            Conditions(
                prompt_tokens=prompt_tokens,
                context_tokens=prompt_tokens + output_tokens,
                devices=engine.devices,
            )
        )
    return {
        name: calibrated_errors(calibration.fit, name=calibration.name, conditions=items)
        for name, items in conditions.items()
    }


def _deployment_notes(
    variants: Sequence[_Variant], calibration: LoadedCalibration | None
) -> Iterator[str]:
    """The first deployment's notes, and those of the others that it lacks."""
    baseline, *others = variants
    notes = [note for note in baseline.deployment.notes if note != UNMEASURED or not calibration]
    yield from ([] if calibration is None else [calibration.note()])
    yield from notes
    for variant in others:
        for note in variant.deployment.notes:
            if note not in baseline.deployment.notes:
                yield f"With {variant.name}: {note}"


def _service_notes(variants: Sequence[_Variant]) -> Iterator[str]:
    autoscaled_configs = [
        variant.config for variant in variants if variant.config.autoscaler is not None
    ]
    if any(
        all(pool.replicas.min == pool.replicas.max for pool in config.pools.values())
        for config in autoscaled_configs
    ):
        yield "No pool may change its size: min and max are the same everywhere."
    if any(
        config.autoscaler is not None and config.autoscaler.dry_run for config in autoscaled_configs
    ):
        yield "The autoscaler only says what it would do (autoscaler.dry_run)."
    if any(variant.config.slo.classes for variant in variants):
        yield (
            "Figures evaluate all requests by slo.default; the table by class evaluates each by its"
            " own class."
        )
    if tenant_names := _limited_tenants(variants):
        yield (
            f"Limits hold for tenants ({tenant_names}): what is beyond them is refused and"
            " counts as"
            " failed. Requests of a trace that name no tenant are of 'default'."
        )


def _sweep_notes(variants: Sequence[_Variant]) -> Iterator[str]:
    bounds = Timeout.describe(lambda limit_s: format_quantity(limit_s, Unit.SECONDS))
    for variant in variants:
        used_scales = _scales(variant)
        if left_out := ", ".join(
            f"{scale:g}" for scale in OBJECTIVE_SCALES if scale not in used_scales
        ):
            yield (
                f"The sweep of objectives of {variant.name} leaves out {left_out} times: each is a"
                f" duration{bounds}."
            )


def _limited_tenants(variants: Sequence[_Variant]) -> str:
    """Tenants with a limit in any of the runs."""
    names = {
        name
        for variant in variants
        for name, tenant in variant.config.tenants.items()
        if (tenant.rate.requests_per_s, tenant.rate.tokens_per_s, tenant.max_in_flight)
        != (None,) * 3
    }
    return ", ".join(sorted(names))


def _trace_notes(variant: _Variant, traces: Sequence[Trace]) -> Iterator[str]:
    if skipped := traces[0].skipped_lines:
        subject = count_text(skipped, "line of the trace was", "lines of the trace were")
        yield f"{subject} bad and left out."
    longest = min(plan.settings.max_len_tokens for plan in variant.deployment.scenario.pools)
    allowed = variant.config.admission.max_prompt_tokens or longest
    requests = traces[0].requests
    too_long = sum(request.prompt_tokens >= longest for request in requests)
    rejected = sum(allowed < request.prompt_tokens < longest for request in requests)
    truncated = (
        sum(request.prompt_tokens + request.output_tokens > longest for request in requests)
        - too_long
    )
    if too_long:
        subject = count_text(too_long, "prompt leaves", "prompts leave")
        yield f"{subject} no room for an answer in max_len ({longest:,}): failed."
    if rejected:
        subject = count_text(rejected, "prompt is", "prompts are")
        yield f"{subject} longer than max_prompt_tokens ({allowed:,}): rejected."
    if truncated > rejected:
        yield (
            f"Up to {count_text(truncated - rejected, 'answer')} may end early, where max_len"
            f" ({longest:,}) is reached."
        )
