"""Fits a few factors of the roofline to what was measured, and says how well that went.

Theory of operation. Every measured time is predicted as a sum of parts (`StepParts`), and the fit
is for one factor on each part, plus a fixed time before a first token. What kernels take is the
devices': all engines share those factors, and an engine that was seen with one model or type only
brings none of its own to another. What a step and a request cost besides is host code: each engine
has factors of its own, and as much weight in the fit as any other, however many rows it brings,
since rows of one sweep err alike. Parts change a little with the factors, so predicting and fitting
alternate. Each fit is a least-squares one of relative errors, within bounds, held to the factors
that it started from by a small weight, and robust: errors beyond a few times the usual one weigh
less. What conditions were seen is remembered; far outside of them a calibrated model refuses to
answer unless it is told to.

Rows may be times of requests (`perf.closed_loop`), of kernels, or of steps of a running engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from baton.domain.errors import OutOfRange
from baton.domain.fleet import StepTotals
from baton.domain.value import evolve
from baton.perf.capacity.closed_loop import StepPartsTiming
from baton.perf.fitting.least_squares import CoefficientPrior, solve_bounded
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.roofline import StepParts

_ROUNDS = 3
"""Of predicting and fitting; factors move by less than a hundredth in the last."""
_REWEIGHTINGS = 8
_ROBUST_ERRORS = 2.0
"""Errors beyond so many medians weigh less, in proportion. Source: Huber (1964), 1.345 standard
deviations, which are 2 medians of the absolute error of a normal distribution."""
_MAX_EXTRAPOLATION = 2.0
"""A calibrated model answers up to so many times beyond what was seen."""
_MAX_FIRST_TOKEN_OVERHEAD_S = 0.02
"""The most that may lie between an engine's first token and its client, but for queues."""


class MeasurementKind(StrEnum):
    """What was measured."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password
    OUTPUT_TOKEN = "output_token"  # noqa: S105 - not a password
    STEP = "step"
    KERNEL = "kernel"


class Factors(NamedTuple):
    """On the parts of a step; `unscaled_s` has none."""

    step: float = 1.0
    requests: float = 1.0
    gemm: float = 1.0
    gemm_narrow: float = 1.0
    """Of inputs that are narrower than 16 bits."""
    attention: float = 1.0
    communication: float = 1.0


_ENGINE_FACTORS = 2
"""So many of the factors, the first ones, are an engine's own; the time before first tokens is."""
_FACTOR_BOUNDS = Factors(
    step=5.0, requests=10.0, gemm=1.6, gemm_narrow=1.6, attention=2.0, communication=2.5
)
"""Each factor stays within this and its inverse: what tables of kernels say is not off by more."""


class Conditions(NamedTuple):
    """What a row was measured at; what decides whether another is far from it."""

    prompt_tokens: float = 0.0
    context_tokens: float = 0.0
    """Of one request, at its end."""
    requests: float = 0.0
    """At the same time."""
    devices: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured time and its prediction."""

    name: str
    kind: MeasurementKind
    measured_s: float
    parts: StepParts
    conditions: Conditions
    engine: str = ""
    """Whose host code it is."""
    narrow: bool = False
    """Whether its products are of inputs narrower than 16 bits."""


class Residual(NamedTuple):
    """How far off one row is."""

    name: str
    kind: MeasurementKind
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1.0


class ErrorStats(NamedTuple):
    """Of several rows."""

    rows: int
    mape: float
    """Mean of the absolute relative errors."""
    bias: float
    """Mean of the relative errors: above 0, predictions are too long."""


def error_stats(residuals: Sequence[Residual]) -> ErrorStats:
    """Over all of them; zeros for none."""
    if not residuals:
        return ErrorStats(0, 0.0, 0.0)
    errors = [residual.error for residual in residuals]
    return ErrorStats(
        len(errors), sum(abs(error) for error in errors) / len(errors), sum(errors) / len(errors)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a fit has found."""

    efficiency: Efficiency
    first_token_overhead_s: float
    """Between an engine's first token and its client: what no step accounts for."""
    residuals: tuple[Residual, ...]
    min_conditions: Conditions
    max_conditions: Conditions

    def error(self, kind: MeasurementKind) -> ErrorStats:
        """Of the rows of a kind, which it was fitted to."""
        return error_stats([residual for residual in self.residuals if residual.kind is kind])

    def check(self, conditions: Conditions, subject: str) -> None:
        """Accept what is within twice the range that was seen.

        Raises:
            OutOfRange: it is not.
        """
        for name, value, low, high in zip(
            Conditions._fields, conditions, self.min_conditions, self.max_conditions, strict=True
        ):
            if not low / _MAX_EXTRAPOLATION <= value <= high * _MAX_EXTRAPOLATION:
                raise OutOfRange(
                    f"{subject}: {name} {value:g} is more than {_MAX_EXTRAPOLATION:g} times"
                    " beyond the"
                    f" {low:g} to {high:g} that the calibration has seen",
                    "calibrate on rows nearer to it, or allow extrapolation",
                )


Predict = Callable[[Efficiency], Sequence[Measurement]]
PredictAll = Callable[[Mapping[str, Efficiency]], Sequence[Measurement]]
"""By engine; each observation names its own."""


def calibrate(predict: Predict, initial: Efficiency) -> Calibration:
    """Fit factors to what `predict` makes of all measured rows of one engine at some efficiency.

    Raises:
        ValueError: there are no rows.
    """
    return calibrate_jointly(lambda by_engine: predict(by_engine[""]), {"": initial})[""]


def calibrate_jointly(
    predict: PredictAll, initial: Mapping[str, Efficiency]
) -> dict[str, Calibration]:
    """Fit factors to what `predict` makes of all measured rows of several engines.

    `initial` is where each begins, by engine.

    Raises:
        ValueError: there are no rows of an engine.
    """
    efficiencies, first_token_overhead_s = dict(initial), dict.fromkeys(initial, 0.0)
    for _ in range(_ROUNDS):
        rows = predict(efficiencies)
        missing_engines = set(initial) - {row.engine for row in rows}
        if missing_engines or not rows:
            raise ValueError(
                f"there is nothing to calibrate on: no rows {' '.join(missing_engines)}"
            )
        applied_factors = {
            engine: factors_between(initial_efficiency, efficiencies[engine])
            for engine, initial_efficiency in initial.items()
        }
        for engine, (factors, overhead_s) in fit_factors(
            rows, applied_factors=applied_factors
        ).items():
            efficiencies[engine] = scale_efficiency(efficiencies[engine], factors)
            first_token_overhead_s[engine] = overhead_s
    rows = predict(efficiencies)
    return {
        engine: _build_calibration(
            [row for row in rows if row.engine == engine],
            efficiencies[engine],
            first_token_overhead_s[engine],
        )
        for engine in initial
    }


def _build_calibration(
    rows: Sequence[Measurement], efficiency: Efficiency, first_token_overhead_s: float
) -> Calibration:
    conditions = [row.conditions for row in rows]
    return Calibration(
        efficiency=efficiency,
        first_token_overhead_s=first_token_overhead_s,
        residuals=tuple(_residual(row, first_token_overhead_s) for row in rows),
        min_conditions=Conditions(*(min(column) for column in zip(*conditions, strict=True))),
        max_conditions=Conditions(*(max(column) for column in zip(*conditions, strict=True))),
    )


def scale_efficiency(efficiency: Efficiency, factors: Factors) -> Efficiency:
    """An efficiency whose parts take `factors` times as long."""
    return replace(
        efficiency,
        step_s=efficiency.step_s * factors.step,
        request_s=efficiency.request_s * factors.requests,
        gemm=efficiency.gemm * factors.gemm,
        gemm_narrow=efficiency.gemm_narrow * factors.gemm_narrow,
        attention=efficiency.attention * factors.attention,
        communication=efficiency.communication * factors.communication,
    )


def factors_between(start: Efficiency, end: Efficiency) -> Factors:
    """Those that make `end` of `start`."""
    return Factors(
        end.step_s / start.step_s,
        end.request_s / start.request_s,
        end.gemm / start.gemm,
        end.gemm_narrow / start.gemm_narrow,
        end.attention / start.attention,
        end.communication / start.communication,
    )


def fit_factors(
    rows: Sequence[Measurement], *, applied_factors: Mapping[str, Factors]
) -> dict[str, tuple[Factors, float]]:
    """The factors on the parts of all rows, and the time before first tokens, by engine.

    `applied_factors` is what the parts have been multiplied with already: bounds are for both
    together.
    """
    # Divided by the larger of the two, a row that is far too short does not outweigh all others.
    sizes = [max(row.measured_s, sum(row.parts)) for row in rows]
    relative_rows = [
        [x / size for x in _columns(row, tuple(applied_factors))]
        for size, row in zip(sizes, rows, strict=True)
    ]
    targets = [
        (row.measured_s - row.parts.unscaled_s) / size
        for row, size in zip(rows, sizes, strict=True)
    ]
    unknowns = _unknowns(applied_factors)
    counts = Counter(row.engine for row in rows)
    shares = [len(rows) / len(counts) / counts[row.engine] for row in rows]
    weights = shares
    solution = [unknown.prior for unknown in unknowns]
    for _ in range(_REWEIGHTINGS):
        solution = solve_bounded(relative_rows, targets, weights, unknowns)
        errors = [
            abs(sum(x * s for x, s in zip(row, solution, strict=True)) - target)
            for row, target in zip(relative_rows, targets, strict=True)
        ]
        limit = _ROBUST_ERRORS * max(median(errors), 1e-9)
        weights = [
            share * min(1.0, limit / max(error, 1e-12))
            for share, error in zip(shares, errors, strict=True)
        ]
    return _split_by_engine(solution, tuple(applied_factors))


_SHARED_FACTORS = len(Factors._fields) - _ENGINE_FACTORS


def _columns(row: Measurement, engines: Sequence[str]) -> list[float]:
    """A row's parts in the order of unknowns: those of kernels, then each engine's own."""
    parts = row.parts
    products = (0.0, parts.gemm_s) if row.narrow else (parts.gemm_s, 0.0)
    columns = [*products, parts.attention_s, parts.wire_s]
    overhead_s = _MAX_FIRST_TOKEN_OVERHEAD_S if row.kind is MeasurementKind.FIRST_TOKEN else 0.0
    for engine in engines:
        engine_columns = (parts.fixed_s, parts.requests_s, overhead_s)
        columns += engine_columns if engine == row.engine else (0.0, 0.0, 0.0)
    return columns


def _unknowns(applied_factors: Mapping[str, Factors]) -> list[CoefficientPrior]:
    """In the order of `_columns`."""
    bounded = {
        engine: [
            CoefficientPrior(1.0 / done, 1.0 / (bound * done), bound / done)
            for bound, done in zip(_FACTOR_BOUNDS, factors, strict=True)
        ]
        for engine, factors in applied_factors.items()
    }
    shared = next(iter(bounded.values()))[_ENGINE_FACTORS:]
    overhead = CoefficientPrior(0.0, 0.0, 1.0)
    return [
        *shared,
        *(value for each in bounded.values() for value in (*each[:_ENGINE_FACTORS], overhead)),
    ]


def _split_by_engine(
    solution: Sequence[float], engines: Sequence[str]
) -> dict[str, tuple[Factors, float]]:
    shared, factors_by_engine = solution[:_SHARED_FACTORS], {}
    for index, engine in enumerate(engines):
        offset = _SHARED_FACTORS + index * (_ENGINE_FACTORS + 1)
        engine_factors, overhead = (
            solution[offset : offset + _ENGINE_FACTORS],
            solution[offset + _ENGINE_FACTORS],
        )
        factors_by_engine[engine] = (
            Factors(*engine_factors, *shared),
            overhead * _MAX_FIRST_TOKEN_OVERHEAD_S,
        )
    return factors_by_engine


def _residual(row: Measurement, first_token_overhead_s: float) -> Residual:
    predicted_s = sum(row.parts)
    if row.kind is MeasurementKind.FIRST_TOKEN:
        predicted_s += first_token_overhead_s
    return Residual(row.name, row.kind, row.measured_s, predicted_s)


def estimate_step_parts(timing: StepPartsTiming, totals: StepTotals) -> StepParts:
    """What the steps between two reports of a running engine take, by part.

    Of the steps only totals are known: each is taken to be like the mean of those of its sort, that
    prompts share their steps with decodes as far as there are any, and that chunks begin prompts.
    """
    mixed_steps = min(totals.prefill_steps, totals.decode_steps)
    chunk = round(totals.prefill_tokens / totals.prefill_steps) if totals.prefill_steps else 0
    requests = round(totals.decode_tokens / totals.decode_steps) if totals.decode_steps else 0
    context = round(totals.context_tokens / totals.decode_steps) if totals.decode_steps else 0
    prefill = StepBatch(
        prefill_tokens=chunk,
        prefill_requests=1,
        prefill_pairs=attention_pairs(chunk, 0),
        finished_prefills=1,
    )
    decode = StepBatch(decode_requests=requests, decode_context_tokens=context)
    mixed = evolve(prefill, decode_requests=requests, decode_context_tokens=context)
    step_groups = (
        (mixed_steps, mixed),
        (totals.prefill_steps - mixed_steps, prefill),
        (totals.decode_steps - mixed_steps, decode),
    )
    total = [0.0] * len(StepParts._fields)
    for steps, batch in step_groups:
        if steps:
            total = [t + steps * p for t, p in zip(total, timing.parts(batch), strict=True)]
    return StepParts(*total)
