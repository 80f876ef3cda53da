"""The error of predicted times: how large, and where it is known from."""

from __future__ import annotations

import json

import pytest

from baton.perf.fitting.calibration import Calibration, Conditions, MeasurementKind, Residual
from baton.perf.fitting.error_bands import (
    SHIPPED_ERRORS,
    ErrorBand,
    TimeErrors,
    calibrated_errors,
    shipped_errors,
)
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY
from benchmarks import shipped_errors as generator

SEEN = Conditions(prompt_tokens=1000, context_tokens=2000, requests=16, devices=2)


def fitted(*errors: float, kind: MeasurementKind = MeasurementKind.OUTPUT_TOKEN) -> Calibration:
    """A fit whose rows took this much longer than predicted, as a fraction."""
    return Calibration(
        efficiency=DEFAULT_EFFICIENCY,
        residuals=tuple(Residual("row", kind, 1 + error, 1.0) for error in errors),
        min_conditions=SEEN,
        max_conditions=SEEN,
    )


def test_the_errors_that_are_shipped_are_those_that_were_measured() -> None:
    text = generator.MODULE.read_text(encoding="utf-8")
    results = json.loads(generator.RESULTS.read_text(encoding="utf-8"))
    assert text == generator.render(text, results), "python -m benchmarks.shipped_errors"
    assert SHIPPED_ERRORS


def test_a_gpu_with_measured_rows_has_their_error_and_their_number() -> None:
    (row,) = [row for row in SHIPPED_ERRORS if (row.gpu, row.engine) == ("h200", "vllm")]
    errors = shipped_errors("h200_sxm", has_experts=False)
    assert errors.ttft == ErrorBand(low=-row.ttft_mape, high=row.ttft_mape)
    assert f"{row.rows} rows of H200 under vLLM" in errors.source


@pytest.mark.parametrize(
    ("gpu", "has_experts", "times"),
    [
        ("l4", False, "kernels measured on h100_sxm"),
        ("h200_sxm", True, "kernels measured on h200_sxm"),
        ("mi300x", False, "data sheet"),
    ],
)
def test_a_gpu_or_a_kind_of_model_without_rows_has_no_band(
    gpu: str, times: str, *, has_experts: bool
) -> None:
    errors = shipped_errors(gpu, has_experts=has_experts)
    assert (errors.ttft, errors.tpot) == (None, None)
    assert str(errors).startswith(f"not known: {times}: no measured rows of ")
    assert ("H200" in errors.source) is not has_experts


@pytest.mark.parametrize("has_experts", [False, True])
def test_on_the_gpu_of_the_fit_each_model_is_compared_with_a_fit_without_it(
    *, has_experts: bool
) -> None:
    (row,) = [
        row
        for row in SHIPPED_ERRORS
        if (row.gpu, row.engine, row.has_experts) == ("h100", "vllm", has_experts)
    ]
    errors = shipped_errors("h100_sxm", has_experts=has_experts)
    assert errors.tpot == ErrorBand(low=-row.tpot_mape, high=row.tpot_mape)
    assert row.fitted_without
    assert f"({row.fitted_without}, each predicted by a fit without it)" in errors.source


def test_errors_of_several_left_out_models_are_means_over_their_rows() -> None:
    metrics = {
        f"h100_without_{model}_vllm_{name}": value
        for model, values in (("Llama-3.1-70B", (30, 0.1, 0.2)), ("Qwen3-32B", (10, 0.5, 0.6)))
        for name, value in zip(("rows", "ttft_mape", "tpot_mape"), values, strict=True)
    }
    (error,) = generator.left_out_entries(metrics)
    assert error.rows == 40
    assert error.ttft_mape == pytest.approx(0.2)
    assert error.tpot_mape == pytest.approx(0.3)


def test_a_calibrations_band_holds_eight_of_ten_of_its_rows() -> None:
    errors = [-0.5, *(number / 100 for number in range(18)), 9.0]
    band = calibrated_errors(fitted(*errors), name="mine.csv", conditions=[SEEN]).tpot
    assert band is not None
    inside = sum(band.low <= error <= band.high for error in errors)
    assert inside == 16
    few = calibrated_errors(fitted(-0.1, 0.3), name="mine.csv", conditions=[SEEN])
    assert few.ttft is None
    assert few.tpot is not None
    assert (few.tpot.low, few.tpot.high) == pytest.approx((-0.1, 0.3))
    assert few.source == "all of the rows that were fitted on lie within (mine.csv, 2)"


def test_conditions_far_from_the_rows_of_a_calibration_are_named_as_extrapolated() -> None:
    long = Conditions(prompt_tokens=9000, context_tokens=9100, devices=2)
    source = calibrated_errors(fitted(0.1), name="mine.csv", conditions=[SEEN, long]).source
    assert "extrapolated" in source
    assert "prompt tokens 9,000, where rows have 1,000 to 1,000" in source
    assert "devices" not in source


def test_errors_are_the_same_after_json() -> None:
    for errors in (
        shipped_errors("h200", has_experts=False),
        shipped_errors("l4", has_experts=False),
    ):
        plain = json.loads(json.dumps(errors.to_dict()))
        assert TimeErrors.from_dict(plain) == errors
