"""Fits factors of the roofline to measurements, and states the remaining errors.

Theory of operation. Each measured time is predicted as a sum of parts (`StepParts`). The fit finds
one factor for each part, and a fixed time before a first token.

- Kernel times belong to the devices: all engines share those factors. An engine with a single model
  or type therefore brings no factors of its own to another.
- Fixed costs of steps and requests belong to host code: each engine has its own factors.
- Each engine has equal weight, however many rows it has, because rows of one sweep err alike.
- Parts depend slightly on the factors, so prediction and fit alternate.
- Each fit is robust, bounded least squares of relative errors, with a small weight on the initial
  factors.
- The range of conditions is recorded; predictions far outside it are marked.

Rows are times of requests (`capacity/closed_loop.py`) or of kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from baton.perf.fitting.least_squares import CoefficientPrior, solve_bounded
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.steps.roofline import StepParts

_ROUNDS = 3
"""Of prediction and fit; factors change by less than a hundredth in the last."""
_REWEIGHTINGS = 8
_ROBUST_ERRORS = 2.0
"""Errors beyond this multiple of the median weigh less, in proportion. Source: Huber (1964), 1.345
standard deviations, which are 2 medians of the absolute error of a normal distribution."""
_MAX_EXTRAPOLATION = 2.0
"""Predictions further beyond the calibrated conditions are marked."""
_MAX_FIRST_TOKEN_OVERHEAD_S = 0.05
"""Upper bound between an engine's first token and its client, without queues."""


class MeasurementKind(StrEnum):
    """Measured quantities."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password
    OUTPUT_TOKEN = "output_token"  # noqa: S105 - not a password
    KERNEL = "kernel"


class Factors(NamedTuple):
    """On the parts of a step; `unscaled_s` has none."""

    step: float = 1.0
    requests: float = 1.0
    prefill: float = 1.0
    gemm: float = 1.0
    gemm_narrow: float = 1.0
    """Of inputs narrower than 16 bits."""
    experts: float = 1.0
    attention: float = 1.0
    communication: float = 1.0


_ENGINE_FACTORS = 3
"""The first factors, and the time before first tokens, belong to an engine."""
_FACTOR_BOUNDS = Factors(
    step=5.0,
    requests=10.0,
    prefill=10.0,
    gemm=1.6,
    gemm_narrow=1.6,
    experts=1.6,
    attention=2.0,
    communication=2.5,
)
"""Each factor stays between this and its inverse, as tables of kernels are no further off."""


class Conditions(NamedTuple):
    """Conditions of a row, which bound extrapolation."""

    prompt_tokens: float = 0.0
    context_tokens: float = 0.0
    """Of one request, at its end."""
    requests: float = 0.0
    """Concurrent."""
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
    """The engine whose host code ran."""
    narrow: bool = False
    """Whether its products have inputs narrower than 16 bits."""


class Residual(NamedTuple):
    """Error of one row."""

    name: str
    kind: MeasurementKind
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1.0


class ErrorStats(NamedTuple):
    """Errors of several rows."""

    rows: int
    mape: float
    """Mean absolute relative error."""
    bias: float
    """Mean relative error: above 0, predictions are too long."""


def error_stats(residuals: Sequence[Residual]) -> ErrorStats:
    """Over all residuals; zeros for none."""
    if not residuals:
        return ErrorStats(0, 0.0, 0.0)
    errors = [residual.error for residual in residuals]
    return ErrorStats(
        len(errors), sum(abs(error) for error in errors) / len(errors), sum(errors) / len(errors)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Result of a fit."""

    efficiency: Efficiency
    first_token_overhead_s: float
    """Between an engine's first token and its client, outside all steps."""
    residuals: tuple[Residual, ...]
    min_conditions: Conditions
    max_conditions: Conditions

    def error(self, kind: MeasurementKind) -> ErrorStats:
        """Over the fitted rows of a kind."""
        return error_stats([residual for residual in self.residuals if residual.kind is kind])

    def beyond(self, conditions: Conditions) -> tuple[str, ...]:
        """The conditions more than twice beyond those of the rows, as text; zeros are not known."""
        ranges = zip(
            Conditions._fields, conditions, self.min_conditions, self.max_conditions, strict=True
        )
        return tuple(
            f"{name.replace('_', ' ')} {value:,.0f}, where rows have {low:,.0f} to {high:,.0f}"
            for name, value, low, high in ranges
            if value and not low / _MAX_EXTRAPOLATION <= value <= high * _MAX_EXTRAPOLATION
        )


Predict = Callable[[Efficiency], Sequence[Measurement]]
PredictAll = Callable[[Mapping[str, Efficiency]], Sequence[Measurement]]
"""By engine; each measurement names its own."""


def calibrate(predict: Predict, initial: Efficiency) -> Calibration:
    """Fit factors to all measured rows of one engine; `predict` gives these for an efficiency.

    Raises:
        ValueError: there are no rows.
    """
    return calibrate_jointly(lambda by_engine: predict(by_engine[""]), {"": initial})[""]


def calibrate_jointly(
    predict: PredictAll, initial: Mapping[str, Efficiency]
) -> dict[str, Calibration]:
    """Fit factors to the rows of several engines; `initial` is the start of each, by engine.

    Raises:
        ValueError: an engine has no rows.
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
        prefill_layer_s=efficiency.prefill_layer_s * factors.prefill,
        gemm=efficiency.gemm * factors.gemm,
        gemm_narrow=efficiency.gemm_narrow * factors.gemm_narrow,
        experts=efficiency.experts * factors.experts,
        attention=efficiency.attention * factors.attention,
        communication=efficiency.communication * factors.communication,
    )


def factors_between(start: Efficiency, end: Efficiency) -> Factors:
    """The factors from `start` to `end`."""
    return Factors(
        step=end.step_s / start.step_s,
        requests=end.request_s / start.request_s,
        prefill=end.prefill_layer_s / start.prefill_layer_s,
        gemm=end.gemm / start.gemm,
        gemm_narrow=end.gemm_narrow / start.gemm_narrow,
        experts=end.experts / start.experts,
        attention=end.attention / start.attention,
        communication=end.communication / start.communication,
    )


def fit_factors(
    rows: Sequence[Measurement], *, applied_factors: Mapping[str, Factors]
) -> dict[str, tuple[Factors, float]]:
    """The factors on the parts of all rows, and the time before first tokens, by engine.

    The parts already contain `applied_factors`; bounds are for the product of both.
    """
    # Relative to the larger of both, a row with a far too short measured time does not dominate.
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
    """A row's parts in the order of unknowns: kernels, then each engine's own."""
    parts = row.parts
    products = (0.0, parts.gemm_s) if row.narrow else (parts.gemm_s, 0.0)
    columns = [*products, parts.experts_s, parts.attention_s, parts.wire_s]
    overhead_s = _MAX_FIRST_TOKEN_OVERHEAD_S if row.kind is MeasurementKind.FIRST_TOKEN else 0.0
    for engine in engines:
        engine_columns = (parts.fixed_s, parts.requests_s, parts.prefill_s, overhead_s)
        columns += engine_columns if engine == row.engine else (0.0,) * len(engine_columns)
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
    return Residual(
        name=row.name, kind=row.kind, measured_s=row.measured_s, predicted_s=predicted_s
    )
