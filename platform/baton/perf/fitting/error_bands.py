"""The error of predicted times, and where it is known from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles

from baton.perf.fitting.calibration import Calibration, Conditions, MeasurementKind
from baton.perf.fitting.shipped_errors import SHIPPED_ERRORS, ShippedError

_ENGINE = "vllm"
_MIN_ROWS = 10
"""Fewer rows have no tenth percentile: the band is from their least to their greatest error."""
_MAX_EXTRAPOLATION = 2.0
"""Beyond this factor, `baton calibrate` refuses to predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """Measured over predicted time, minus 1: -0.1 to 0.3 for 10 % less to 30 % more.

    A mean absolute error is both.
    """

    low: float
    high: float

    def __str__(self) -> str:
        if self.low == -self.high:
            return f"±{self.high:.0%}"
        return f"{self.low:+.0%} to {self.high:+.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeErrors:
    """Error bands of predicted latencies; None where no measured rows tell them."""

    ttft: ErrorBand | None
    tpot: ErrorBand | None
    source: str

    def __str__(self) -> str:
        if self.ttft is None or self.tpot is None:
            return f"not known: {self.source}"
        return f"TTFT {self.ttft}, TPOT {self.tpot}: {self.source}"

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> TimeErrors:
        """Inverse of `to_dict`."""
        ttft, tpot = (
            None if not isinstance(band, Mapping) else ErrorBand(**band)
            for band in (values["ttft"], values["tpot"])
        )
        return TimeErrors(ttft=ttft, tpot=tpot, source=str(values["source"]))

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def shipped_errors(accelerator: str, *, has_experts: bool) -> TimeErrors:
    """The errors of the shipped model on an accelerator under vLLM."""
    judged = [] if has_experts else [row for row in SHIPPED_ERRORS if row.engine == _ENGINE]
    for row in judged:
        if accelerator.split("_", maxsplit=1)[0] == row.gpu:
            return TimeErrors(
                ttft=ErrorBand(low=-row.ttft_mape, high=row.ttft_mape),
                tpot=ErrorBand(low=-row.tpot_mape, high=row.tpot_mape),
                source=f"mean absolute error on {_rows_text(row)}",
            )
    subject = f"{accelerator} with experts" if has_experts else accelerator
    nearest = "".join(
        f"; on {_rows_text(row)} TTFT ±{row.ttft_mape:.0%}, TPOT ±{row.tpot_mape:.0%}"
        for row in judged
    )
    return TimeErrors(
        ttft=None,
        tpot=None,
        source=f"roofline: no measured rows of {subject} were compared{nearest}",
    )


def _rows_text(row: ShippedError) -> str:
    return f"{row.rows} rows of {row.gpu.upper()} under vLLM, dense models"


def calibrated_errors(
    calibration: Calibration, *, name: str, conditions: Sequence[Conditions]
) -> TimeErrors:
    """The spread of a calibration's rows.

    Args:
        calibration: the fit.
        name: the files of its rows.
        conditions: those to predict; the source names those beyond the calibration.
    """
    rows = sum(residual.kind is MeasurementKind.OUTPUT_TOKEN for residual in calibration.residuals)
    share = "all" if rows < _MIN_ROWS else "8 of 10"
    source = f"{share} of the rows that were fitted on lie within ({name}, {rows})"
    if beyond := ", ".join(_beyond(calibration, conditions)):
        source = f"{source}; extrapolated, so that it may be more: {beyond}"
    return TimeErrors(
        ttft=_spread(calibration, MeasurementKind.FIRST_TOKEN),
        tpot=_spread(calibration, MeasurementKind.OUTPUT_TOKEN),
        source=source,
    )


def _spread(calibration: Calibration, kind: MeasurementKind) -> ErrorBand | None:
    errors = sorted(
        residual.measured_s / residual.predicted_s - 1
        for residual in calibration.residuals
        if residual.kind is kind and residual.predicted_s > 0
    )
    if not errors:
        return None
    if len(errors) < _MIN_ROWS:
        return ErrorBand(low=errors[0], high=errors[-1])
    deciles = quantiles(errors, n=10, method="inclusive")
    return ErrorBand(low=deciles[0], high=deciles[-1])


def _beyond(calibration: Calibration, conditions: Sequence[Conditions]) -> list[str]:
    """The conditions far from those of the calibration's rows, each once."""
    found: dict[str, None] = {}
    for condition in conditions:
        for name, value, low, high in zip(
            Conditions._fields,
            condition,
            calibration.min_conditions,
            calibration.max_conditions,
            strict=True,
        ):
            if value and not low / _MAX_EXTRAPOLATION <= value <= high * _MAX_EXTRAPOLATION:
                what = name.replace("_", " ")
                found[f"{what} {value:,.0f}, where rows have {low:,.0f} to {high:,.0f}"] = None
    return list(found)
