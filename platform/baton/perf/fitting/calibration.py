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
from baton.perf.capacity.closed_loop import PartedTiming
from baton.perf.fitting.bounded_least_squares import Unknown, solved
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.step_timing import StepBatch, chunk_pairs
from baton.perf.steps.roofline import StepParts

_ROUNDS = 3
"""Of predicting and fitting; factors move by less than a hundredth in the last."""
_REWEIGHTINGS = 8
_ROBUST_ERRORS = 2.0
"""Errors beyond so many medians weigh less, in proportion. Source: Huber (1964), 1.345 standard
deviations, which are 2 medians of the absolute error of a normal distribution."""
_FURTHEST = 2.0
"""A calibrated model answers up to so many times beyond what was seen."""
_FIRST_TOKEN_S = 0.02
"""The most that may lie between an engine's first token and its client, but for queues."""


class Kind(StrEnum):
    """What was measured."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password
    OUTPUT_TOKEN = "output_token"  # noqa: S105 - not a password
    STEP = "step"
    KERNEL = "kernel"


class Factors(NamedTuple):
    """On the parts of a step; `rest_s` has none."""

    step: float = 1.0
    requests: float = 1.0
    products: float = 1.0
    products_narrow: float = 1.0
    """Of inputs that are narrower than 16 bits."""
    attention: float = 1.0
    wire: float = 1.0


_OWN = 2
"""So many of the factors, the first ones, are an engine's own; the time before first tokens is."""
_BOUNDS = Factors(
    step=5.0, requests=10.0, products=1.6, products_narrow=1.6, attention=2.0, wire=2.5
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
class Observation:
    """One measured time and its prediction."""

    name: str
    kind: Kind
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
    kind: Kind
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1.0


class Error(NamedTuple):
    """Of several rows."""

    rows: int
    mape: float
    """Mean of the absolute relative errors."""
    bias: float
    """Mean of the relative errors: above 0, predictions are too long."""


def error_of(residuals: Sequence[Residual]) -> Error:
    """Over all of them; zeros for none."""
    if not residuals:
        return Error(0, 0.0, 0.0)
    errors = [one.error for one in residuals]
    return Error(
        len(errors), sum(abs(one) for one in errors) / len(errors), sum(errors) / len(errors)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a fit has found."""

    efficiency: Efficiency
    first_token_s: float
    """Between an engine's first token and its client: what no step accounts for."""
    residuals: tuple[Residual, ...]
    least: Conditions
    most: Conditions

    def error(self, kind: Kind) -> Error:
        """Of the rows of a kind, which it was fitted to."""
        return error_of([one for one in self.residuals if one.kind is kind])

    def check(self, conditions: Conditions, what: str) -> None:
        """Accept what is within twice the range that was seen.

        Raises:
            OutOfRange: it is not.
        """
        for name, asked, low, high in zip(
            Conditions._fields, conditions, self.least, self.most, strict=True
        ):
            if not low / _FURTHEST <= asked <= high * _FURTHEST:
                raise OutOfRange(
                    f"{what}: {name} {asked:g} is more than {_FURTHEST:g} times beyond the"
                    f" {low:g} to {high:g} that the calibration has seen",
                    "calibrate on rows nearer to it, or allow extrapolation",
                )


Predict = Callable[[Efficiency], Sequence[Observation]]
PredictAll = Callable[[Mapping[str, Efficiency]], Sequence[Observation]]
"""By engine; each observation names its own."""


def calibrate(predict: Predict, start: Efficiency) -> Calibration:
    """Fit factors to what `predict` makes of all measured rows of one engine at some efficiency.

    Raises:
        ValueError: there are no rows.
    """
    return calibrate_jointly(lambda by_engine: predict(by_engine[""]), {"": start})[""]


def calibrate_jointly(
    predict: PredictAll, start: Mapping[str, Efficiency]
) -> dict[str, Calibration]:
    """Fit factors to what `predict` makes of all measured rows of several engines.

    `start` is where each begins, by engine.

    Raises:
        ValueError: there are no rows of an engine.
    """
    reached, first_token_s = dict(start), dict.fromkeys(start, 0.0)
    for _ in range(_ROUNDS):
        rows = predict(reached)
        absent = set(start) - {row.engine for row in rows}
        if absent or not rows:
            raise ValueError(f"there is nothing to calibrate on: no rows {' '.join(absent)}")
        so_far = {
            engine: factors_between(began, reached[engine]) for engine, began in start.items()
        }
        for engine, (factors, before_s) in fit(rows, so_far=so_far).items():
            reached[engine] = scaled(reached[engine], factors)
            first_token_s[engine] = before_s
    rows = predict(reached)
    return {
        engine: _calibration(
            [row for row in rows if row.engine == engine], reached[engine], first_token_s[engine]
        )
        for engine in start
    }


def _calibration(
    rows: Sequence[Observation], efficiency: Efficiency, first_token_s: float
) -> Calibration:
    conditions = [row.conditions for row in rows]
    return Calibration(
        efficiency=efficiency,
        first_token_s=first_token_s,
        residuals=tuple(_residual(row, first_token_s) for row in rows),
        least=Conditions(*(min(column) for column in zip(*conditions, strict=True))),
        most=Conditions(*(max(column) for column in zip(*conditions, strict=True))),
    )


def scaled(efficiency: Efficiency, factors: Factors) -> Efficiency:
    """An efficiency whose parts take `factors` times as long."""
    return replace(
        efficiency,
        step_s=efficiency.step_s * factors.step,
        request_s=efficiency.request_s * factors.requests,
        gemm=efficiency.gemm * factors.products,
        gemm_narrow=efficiency.gemm_narrow * factors.products_narrow,
        attention=efficiency.attention * factors.attention,
        communication=efficiency.communication * factors.wire,
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


def fit(
    rows: Sequence[Observation], *, so_far: Mapping[str, Factors]
) -> dict[str, tuple[Factors, float]]:
    """The factors on the parts of all rows, and the time before first tokens, by engine.

    `so_far` is what the parts have been multiplied with already: bounds are for both together.
    """
    # Divided by the larger of the two, a row that is far too short does not outweigh all others.
    sizes = [max(row.measured_s, sum(row.parts)) for row in rows]
    relative = [
        [x / size for x in _columns(row, tuple(so_far))]
        for size, row in zip(sizes, rows, strict=True)
    ]
    targets = [
        (row.measured_s - row.parts.rest_s) / size for row, size in zip(rows, sizes, strict=True)
    ]
    unknowns = _unknowns(so_far)
    counts = Counter(row.engine for row in rows)
    shares = [len(rows) / len(counts) / counts[row.engine] for row in rows]
    weights = shares
    solution = [unknown.prior for unknown in unknowns]
    for _ in range(_REWEIGHTINGS):
        solution = solved(relative, targets, weights, unknowns)
        errors = [
            abs(sum(x * s for x, s in zip(row, solution, strict=True)) - target)
            for row, target in zip(relative, targets, strict=True)
        ]
        limit = _ROBUST_ERRORS * max(median(errors), 1e-9)
        weights = [
            share * min(1.0, limit / max(error, 1e-12))
            for share, error in zip(shares, errors, strict=True)
        ]
    return _by_engine(solution, tuple(so_far))


_SHARED = len(Factors._fields) - _OWN


def _columns(row: Observation, engines: Sequence[str]) -> list[float]:
    """A row's parts in the order of unknowns: those of kernels, then each engine's own."""
    parts = row.parts
    products = (0.0, parts.products_s) if row.narrow else (parts.products_s, 0.0)
    columns = [*products, parts.attention_s, parts.wire_s]
    before_s = _FIRST_TOKEN_S if row.kind is Kind.FIRST_TOKEN else 0.0
    for engine in engines:
        own = (parts.step_s, parts.requests_s, before_s)
        columns += own if engine == row.engine else (0.0, 0.0, 0.0)
    return columns


def _unknowns(so_far: Mapping[str, Factors]) -> list[Unknown]:
    """In the order of `_columns`."""
    bounded = {
        engine: [
            Unknown(1.0 / done, 1.0 / (bound * done), bound / done)
            for bound, done in zip(_BOUNDS, factors, strict=True)
        ]
        for engine, factors in so_far.items()
    }
    shared = next(iter(bounded.values()))[_OWN:]
    before = Unknown(0.0, 0.0, 1.0)
    return [*shared, *(one for each in bounded.values() for one in (*each[:_OWN], before))]


def _by_engine(
    solution: Sequence[float], engines: Sequence[str]
) -> dict[str, tuple[Factors, float]]:
    shared, found = solution[:_SHARED], {}
    for number, engine in enumerate(engines):
        at = _SHARED + number * (_OWN + 1)
        own, before = solution[at : at + _OWN], solution[at + _OWN]
        found[engine] = (Factors(*own, *shared), before * _FIRST_TOKEN_S)
    return found


def _residual(row: Observation, first_token_s: float) -> Residual:
    predicted_s = sum(row.parts)
    if row.kind is Kind.FIRST_TOKEN:
        predicted_s += first_token_s
    return Residual(row.name, row.kind, row.measured_s, predicted_s)


def parts_of_totals(timing: PartedTiming, done: StepTotals) -> StepParts:
    """What the steps between two reports of a running engine take, by part.

    Of the steps only totals are known: each is taken to be like the mean of those of its sort, that
    prompts share their steps with decodes as far as there are any, and that chunks begin prompts.
    """
    both = min(done.prefill_steps, done.decode_steps)
    chunk = round(done.prefill_tokens / done.prefill_steps) if done.prefill_steps else 0
    requests = round(done.decode_tokens / done.decode_steps) if done.decode_steps else 0
    context = round(done.context_tokens / done.decode_steps) if done.decode_steps else 0
    prefill = StepBatch(
        prefill_tokens=chunk,
        prefill_requests=1,
        prefill_pairs=chunk_pairs(chunk, 0),
        finished_prefills=1,
    )
    decode = StepBatch(decode_requests=requests, decode_context_tokens=context)
    mixed = evolve(prefill, decode_requests=requests, decode_context_tokens=context)
    sorts = (
        (both, mixed),
        (done.prefill_steps - both, prefill),
        (done.decode_steps - both, decode),
    )
    total = [0.0] * len(StepParts._fields)
    for steps, batch in sorts:
        if steps:
            total = [t + steps * p for t, p in zip(total, timing.parts(batch), strict=True)]
    return StepParts(*total)
