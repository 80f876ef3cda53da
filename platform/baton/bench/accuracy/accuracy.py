"""Judges the model by measured rows: predicts each, and says how far off it is, and which way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from baton.bench.accuracy.measurements import MeasuredRow
from baton.bench.accuracy.plausibility import implausible_reason
from baton.bench.accuracy.recipes import recipe_of, weight_dtype
from baton.domain.errors import BatonError, OutOfRange
from baton.perf.capacity import closed_loop
from baton.perf.fitting.calibration import (
    Calibration,
    Conditions,
    ErrorStats,
    Measurement,
    MeasurementKind,
    Residual,
    calibrate_jointly,
    error_stats,
)
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.hardware.efficiency import Efficiency, engine_efficiency
from baton.perf.model import memory
from baton.perf.model.known_models import find_shape
from baton.perf.steps.roofline import Roofline, compute_dtype, is_narrow
from baton.simulator.outcome import mean
from baton.simulator.single_engine import simulate_engine
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest

SATURATED_TTFT_S = 4.0
"""Rows with longer times to first tokens tell of queues for memory, not of the engine's speed."""
_BLOCK_SIZE_TOKENS = 16
_FIRST_TOKEN_S = 0.007
"""From an engine's first token to its client where nothing was calibrated.
Source: fit to vLLM's rows on H100 (InferenceX)."""


class EvaluatedRow(NamedTuple):
    """One row and what the model makes of it."""

    row: MeasuredRow
    ttft: Residual
    tpot: Residual
    is_simulated: bool
    """By the simulated engine; else by the closed loop that calibration uses."""
    implausible_reason: str | None = None
    """Why it cannot be, whatever the model says; see `bench.plausibility`."""

    @property
    def is_saturated(self) -> bool:
        """Whether it is left out of the headline."""
        return self.row.ttft_s >= SATURATED_TTFT_S


class SkippedRow(NamedTuple):
    """One row that nothing can be said of."""

    row: MeasuredRow
    reason: str
    """The same for all rows of a kind."""
    detail: str = ""
    """What of this row it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Of all rows: none is dropped, each is in one of the two."""

    evaluated: tuple[EvaluatedRow, ...]
    skipped: tuple[SkippedRow, ...]

    @property
    def unsaturated(self) -> tuple[EvaluatedRow, ...]:
        """Those that are not saturated."""
        return tuple(row for row in self.evaluated if not row.is_saturated)

    @property
    def plausible(self) -> tuple[EvaluatedRow, ...]:
        """Those of the counted that can be."""
        return tuple(row for row in self.unsaturated if row.implausible_reason is None)

    def plausible_in_suspect_sweeps(self) -> tuple[EvaluatedRow, ...]:
        """Those that can be, of sweeps of which others cannot: what spoiled those may be in them.

        A sweep is the rows of one engine, version, model and device.
        """
        suspect_sweeps = {
            _sweep_key(row.row) for row in self.unsaturated if row.implausible_reason is not None
        }
        return tuple(row for row in self.plausible if _sweep_key(row.row) in suspect_sweeps)

    def errors(self, rows: Iterable[EvaluatedRow] | None = None) -> tuple[ErrorStats, ErrorStats]:
        """Of times to first tokens and per output token; of all rows that are not saturated."""
        evaluated = self.unsaturated if rows is None else list(rows)
        return error_stats([row.ttft for row in evaluated]), error_stats(
            [row.tpot for row in evaluated]
        )

    def groups(self) -> dict[tuple[str, str, str], tuple[EvaluatedRow, ...]]:
        """The rows that are not saturated, by engine, model and device."""
        grouped: dict[tuple[str, str, str], list[EvaluatedRow]] = defaultdict(list)
        for other in self.unsaturated:
            row = other.row
            engine = f"{row.backend} {row.version}".strip()
            grouped[engine, row.model, f"{row.system} tp{row.tp}"].append(other)
        return {key: tuple(rows) for key, rows in sorted(grouped.items())}


def _sweep_key(row: MeasuredRow) -> tuple[str, str, str, str]:
    return row.backend, row.version, row.model, row.system


Calibrations = Mapping[str, Calibration]
"""By engine ("vllm", "trtllm"): what kernels take is alike in all of them."""


def calibrate_engines(rows: Sequence[MeasuredRow]) -> dict[str, Calibration]:
    """One calibration for each engine that has rows which can be fitted to, fitted together."""
    usable = [row for row in rows if unfit_reason(row) is None]
    engines = sorted({row.backend for row in usable})
    if not engines:
        return {}
    return calibrate_jointly(
        partial(_build_observations, usable),
        {engine: engine_efficiency(engine) for engine in engines},
    )


def unfit_reason(row: MeasuredRow) -> str | None:
    """Why nothing is fitted to a row; None when it is."""
    if row.disaggregated:
        return "it measured separate pools"
    if row.ttft_s >= SATURATED_TTFT_S:
        return f"its time to first token of {row.ttft_s:.1f} s is a queue's"
    try:
        if implausible_reason(row) is not None:
            return "it implies more than its devices can compute"
    except BatonError as error:
        return str(error)
    if not recipe_of(row).is_engine_bound(row):
        return "the server in front of the engine was more than half busy"
    return None


def evaluate_rows(
    rows: Sequence[MeasuredRow],
    *,
    calibrations: Calibrations | None = None,
    extrapolate: bool = False,
) -> Evaluation:
    """Predict every row; by an engine that was not calibrated as if it were vLLM."""
    evaluated, skipped = [], []
    for row in rows:
        try:
            evaluated.append(_evaluate_row(row, calibrations or {}, extrapolate=extrapolate))
        except OutOfRange as error:
            skipped.append(SkippedRow(row, "far from what the calibration has seen", str(error)))
        except (BatonError, ValueError) as error:
            skipped.append(SkippedRow(row, str(error)))
    return Evaluation(evaluated=tuple(evaluated), skipped=tuple(skipped))


def _evaluate_row(
    row: MeasuredRow, calibrations: Calibrations, *, extrapolate: bool
) -> EvaluatedRow:
    if row.disaggregated:
        raise ValueError("it measured separate pools: simulate them with `baton simulate`")
    calibration = calibrations.get(row.backend) or calibrations.get("vllm")
    default_efficiency = engine_efficiency(row.backend)
    efficiency, first_token_s = default_efficiency, _FIRST_TOKEN_S
    if calibration is not None:
        first_token_s = calibration.first_token_overhead_s
        efficiency = replace(calibration.efficiency, decode_tile=default_efficiency.decode_tile)
        if not extrapolate:
            calibration.check(_conditions(row), row.name)
    is_simulated = row.backend == "vllm"
    predict = _predict_simulated if is_simulated else _predict_closed_loop
    ttft_s, tpot_s = predict(row, efficiency)
    return EvaluatedRow(
        row,
        Residual(row.name, MeasurementKind.FIRST_TOKEN, row.ttft_s, ttft_s + first_token_s),
        Residual(row.name, MeasurementKind.OUTPUT_TOKEN, row.tpot_s, tpot_s),
        is_simulated,
        implausible_reason(row),
    )


def _predict_simulated(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    """Mean latencies of the simulated engine, which schedules as vLLM does and runs out of memory.

    Raises:
        InsufficientMemory: the model does not fit the row's devices.
    """
    recipe, shape = recipe_of(row), find_shape(row.model)
    loop = recipe.closed_loop(row)
    memory_fit = memory.fit(
        shape,
        find_accelerator(row.system),
        tp=row.tp,
        pp=row.pp,
        weights=weight_dtype(row),
        kv=recipe.kv,
        max_batched_tokens=loop.max_batched_tokens,
        max_running_requests=loop.max_running_requests,
    )
    settings = V1Settings(
        timing=_roofline(row, efficiency),
        kv_blocks=memory_fit.kv_blocks(_BLOCK_SIZE_TOKENS),
        kv_block_bytes=int(_BLOCK_SIZE_TOKENS * shape.kv_token_bytes(recipe.kv)),
        block_size_tokens=_BLOCK_SIZE_TOKENS,
        max_running_requests=loop.max_running_requests,
        max_batched_tokens=loop.max_batched_tokens,
        prefix_caching=False,
        pipeline_stages=row.pp,
    )
    requests = [TraceRequest(0.0, *lengths) for lengths in recipe.draw_lengths(row)]
    outcomes = simulate_engine(settings, requests, clients=loop.clients, think_s=loop.think_time_s)[
        loop.warm_up_requests :
    ]
    ttft_s = mean([outcome.ttft_s for outcome in outcomes]) + loop.think_time_s
    return ttft_s, mean([outcome.tpot_s for outcome in outcomes])


def _predict_closed_loop(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    loop_result = _run_closed_loop(row, efficiency)
    return sum(loop_result.ttft), sum(loop_result.tpot)


def _run_closed_loop(row: MeasuredRow, efficiency: Efficiency) -> closed_loop.MeanLatencies:
    recipe = recipe_of(row)
    return closed_loop.simulate_closed_loop(
        _roofline(row, efficiency), recipe.draw_lengths(row), recipe.closed_loop(row)
    )


def _build_observations(
    rows: Sequence[MeasuredRow], efficiencies: Mapping[str, Efficiency]
) -> list[Measurement]:
    observations = []
    for row in rows:
        loop_result, conditions = _run_closed_loop(row, efficiencies[row.backend]), _conditions(row)
        narrow = is_narrow(compute_dtype(weight_dtype(row), find_accelerator(row.system)))
        for kind, measured_s, parts in (
            (MeasurementKind.FIRST_TOKEN, row.ttft_s, loop_result.ttft),
            (MeasurementKind.OUTPUT_TOKEN, row.tpot_s, loop_result.tpot),
        ):
            observations.append(
                Measurement(
                    name=row.name,
                    kind=kind,
                    measured_s=measured_s,
                    parts=parts,
                    conditions=conditions,
                    engine=row.backend,
                    narrow=narrow,
                )
            )
    return observations


def _conditions(row: MeasuredRow) -> Conditions:
    return Conditions(
        prompt_tokens=row.prompt_tokens,
        context_tokens=row.prompt_tokens + row.output_tokens,
        requests=row.concurrency,
        devices=row.tp * row.pp,
    )


def _roofline(row: MeasuredRow, efficiency: Efficiency) -> Roofline:
    return Roofline(
        find_shape(row.model),
        find_accelerator(row.system),
        tp=row.tp,
        pp=row.pp,
        weights=weight_dtype(row),
        kv=recipe_of(row).kv,
        efficiency=efficiency,
    )
