"""Fits factors of the roofline to measurements, and states the remaining errors.

Theory of operation. Each measured time is predicted as a sum of parts (`StepParts`). The fit finds
one factor for each part, and a fixed time before a first token.

- Kernel times belong to the devices: all engines share those factors. An engine with a single model
  or type therefore brings no factors of its own to another. They are held to 1, because kernels are
  measured: left free, they absorb what one model's host costs leave, and mislead for the next.
- Fixed costs of steps and requests belong to host code: each engine has its own factors. Host code
  that waits for each step has others than code that does not.
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


_HOST_FACTORS = frozenset({"step", "requests"})
"""Of an engine's host code in one mode."""
_ENGINE_FACTORS = frozenset({"prefill"})
"""Of an engine; so is the time before first tokens."""
_KERNEL_WEIGHT = 0.1
"""Of the prior of kernels' factors, relative to all rows of requests. These do not tell kernels
from host code, and unknowns of few rows absorbed one model's host costs. Models that the fit has
not seen had TPOT up to 18 % off on H100 with the weight of other priors. Results are alike from
0.01 to 0.2."""
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
    host: str = ""
    """The engine and the mode of its host code."""
    engine: str = ""
    """The engine whose host code it is."""
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
    """With the fitted `first_token_s`."""
    residuals: tuple[Residual, ...]
    min_conditions: Conditions
    max_conditions: Conditions

    @property
    def first_token_overhead_s(self) -> float:
        """Between an engine's first token and its client, outside all steps."""
        return self.efficiency.first_token_s

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
"""By host; each measurement names its own."""


def calibrate(predict: Predict, initial: Efficiency) -> Calibration:
    """Fit factors to all measured rows of one engine; `predict` gives these for an efficiency.

    Raises:
        ValueError: there are no rows.
    """
    return calibrate_jointly(lambda by_engine: predict(by_engine[""]), {"": initial})[""]


def calibrate_jointly(
    predict: PredictAll, initial: Mapping[str, Efficiency]
) -> dict[str, Calibration]:
    """Fit factors to the rows of several hosts; `initial` is the start of each, by host.

    Raises:
        ValueError: a host has no rows.
    """
    efficiencies, first_token_overhead_s = dict(initial), dict.fromkeys(initial, 0.0)
    for _ in range(_ROUNDS):
        rows = predict(efficiencies)
        missing_hosts = set(initial) - {row.host for row in rows}
        if missing_hosts or not rows:
            raise ValueError(f"there is nothing to calibrate on: no rows {' '.join(missing_hosts)}")
        applied_factors = {
            host: factors_between(initial_efficiency, efficiencies[host])
            for host, initial_efficiency in initial.items()
        }
        for host, (factors, overhead_s) in fit_factors(
            rows, applied_factors=applied_factors
        ).items():
            efficiencies[host] = scale_efficiency(efficiencies[host], factors)
            first_token_overhead_s[host] = overhead_s
    rows = predict(efficiencies)
    return {
        host: _build_calibration(
            [row for row in rows if row.host == host],
            efficiencies[host],
            first_token_overhead_s[host],
        )
        for host in initial
    }


def _build_calibration(
    rows: Sequence[Measurement], efficiency: Efficiency, first_token_overhead_s: float
) -> Calibration:
    conditions = [row.conditions for row in rows]
    return Calibration(
        efficiency=replace(efficiency, first_token_s=first_token_overhead_s),
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
    """The factors on the parts of all rows, and the time before first tokens, by host.

    The parts already contain `applied_factors`; bounds are for the product of both.
    """
    unknowns = _unknowns(rows, applied_factors)
    # Relative to the larger of both, a row with a far too short measured time does not dominate.
    sizes = [max(row.measured_s, sum(row.parts)) for row in rows]
    columns = [_columns(row) for row in rows]
    relative_rows = [
        [column.get(unknown, 0.0) / size for unknown in unknowns]
        for size, column in zip(sizes, columns, strict=True)
    ]
    targets = [
        (row.measured_s - row.parts.unscaled_s) / size
        for row, size in zip(rows, sizes, strict=True)
    ]
    priors = list(unknowns.values())
    requests = sum(row.kind is not MeasurementKind.KERNEL for row in rows) / len(rows)
    held = {
        i: _KERNEL_WEIGHT * requests for i, (owner, _) in enumerate(unknowns) if owner == _KERNELS
    }
    counts = Counter(row.engine for row in rows)
    shares = [len(rows) / len(counts) / counts[row.engine] for row in rows]
    weights = shares
    solution = [unknown.prior for unknown in priors]
    for _ in range(_REWEIGHTINGS):
        solution = solve_bounded(relative_rows, targets, weights, priors, held=held)
        errors = [
            abs(sum(x * s for x, s in zip(row, solution, strict=True)) - target)
            for row, target in zip(relative_rows, targets, strict=True)
        ]
        limit = _ROBUST_ERRORS * max(median(errors), 1e-9)
        weights = [
            share * min(1.0, limit / max(error, 1e-12))
            for share, error in zip(shares, errors, strict=True)
        ]
    found = dict(zip(unknowns, solution, strict=True))
    engines = {row.host: row.engine for row in rows}
    return {
        host: (
            Factors(*(found[_owner(name, host, engine), name] for name in Factors._fields)),
            found[engine, _OVERHEAD] * _MAX_FIRST_TOKEN_OVERHEAD_S,
        )
        for host, engine in engines.items()
    }


_Unknown = tuple[str, str]
"""Whose factor, and its name."""
_OVERHEAD = "overhead"
_KERNELS = "kernels"


def _owner(factor: str, host: str, engine: str) -> str:
    if factor in _HOST_FACTORS:
        return f"host {host}"
    return engine if factor in _ENGINE_FACTORS else _KERNELS


def _columns(row: Measurement) -> dict[_Unknown, float]:
    """A row's parts by the factor on each."""
    parts = row.parts
    seconds = {
        "step": parts.fixed_s,
        "requests": parts.requests_s,
        "prefill": parts.prefill_s,
        "gemm_narrow" if row.narrow else "gemm": parts.gemm_s,
        "experts": parts.experts_s,
        "attention": parts.attention_s,
        "communication": parts.wire_s,
    }
    columns = {(_owner(name, row.host, row.engine), name): s for name, s in seconds.items()}
    if row.kind is MeasurementKind.FIRST_TOKEN:
        columns[row.engine, _OVERHEAD] = _MAX_FIRST_TOKEN_OVERHEAD_S
    return columns


def _unknowns(
    rows: Sequence[Measurement], applied_factors: Mapping[str, Factors]
) -> dict[_Unknown, CoefficientPrior]:
    """Priors and bounds of all factors, relative to the applied factors."""
    unknowns: dict[_Unknown, CoefficientPrior] = {}
    for host, engine in {row.host: row.engine for row in rows}.items():
        for name, bound, done in zip(
            Factors._fields, _FACTOR_BOUNDS, applied_factors[host], strict=True
        ):
            prior = CoefficientPrior(1.0 / done, 1.0 / (bound * done), bound / done)
            unknowns[_owner(name, host, engine), name] = prior
        unknowns[engine, _OVERHEAD] = CoefficientPrior(0.0, 0.0, 1.0)
    return unknowns


def _residual(row: Measurement, first_token_overhead_s: float) -> Residual:
    predicted_s = sum(row.parts)
    if row.kind is MeasurementKind.FIRST_TOKEN:
        predicted_s += first_token_overhead_s
    return Residual(
        name=row.name, kind=row.kind, measured_s=row.measured_s, predicted_s=predicted_s
    )
