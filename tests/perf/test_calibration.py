"""Calibration: known factors come back, outliers and bounds hold, far questions are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from baton.domain.errors import OutOfRange
from baton.perf.fitting.calibration import (
    Conditions,
    Factors,
    Measurement,
    MeasurementKind,
    Residual,
    calibrate,
    calibrate_jointly,
    error_stats,
    factors_between,
    scale_efficiency,
)
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.roofline import Roofline
from tests.perf.shapes import H100, LLAMA_70B

TRUTH = Factors(step=1.6, requests=2.5, gemm_narrow=0.9, attention=1.3, communication=0.7)
BATCHES = [
    StepBatch(
        prefill_tokens=chunk,
        prefill_requests=min(chunk, 1),
        prefill_pairs=attention_pairs(chunk, 0),
        decode_requests=requests,
        decode_context_tokens=requests * context,
        finished_prefills=min(chunk, 1),
    )
    for chunk in (0, 128, 2048, 8000)
    for requests in (1, 16, 200)
    for context in (100, 4000)
]


def steps_as(
    truth: Factors, spoil: Callable[[int], float] = lambda _: 1.0
) -> Callable[[Efficiency], list[Measurement]]:
    """What `calibrate` asks of steps whose real parts take `truth` times the default."""

    def predict(efficiency: Efficiency) -> list[Measurement]:
        observed = []
        for tp in (1, 4):
            model = Roofline(LLAMA_70B, H100, tp=tp, weights=Dtype.FP8, efficiency=efficiency)
            real = Roofline(
                LLAMA_70B,
                H100,
                tp=tp,
                weights=Dtype.FP8,
                efficiency=scale_efficiency(DEFAULT_EFFICIENCY, truth),
            )
            for number, batch in enumerate(BATCHES):
                observed.append(
                    Measurement(
                        name=f"tp{tp} {number}",
                        kind=MeasurementKind.KERNEL,
                        measured_s=real.step_s(batch) * spoil(number),
                        parts=model.parts(batch),
                        conditions=Conditions(
                            prompt_tokens=batch.prefill_tokens + 1,
                            requests=batch.decode_requests,
                            devices=tp,
                        ),
                        narrow=True,
                    )
                )
        return observed

    return predict


def test_factors_that_made_the_measurements_come_back() -> None:
    found = calibrate(steps_as(TRUTH), DEFAULT_EFFICIENCY)
    factors = factors_between(DEFAULT_EFFICIENCY, found.efficiency)
    # What a factor moves little is held to where it began, as that of steps' 1 ms in 20.
    assert 1.1 < factors.step < 1.7
    assert factors.gemm_narrow == pytest.approx(0.9, rel=0.03)
    assert factors.gemm == pytest.approx(1.0, abs=1e-6)
    assert (factors.attention, factors.communication) == pytest.approx((1.3, 0.7), rel=0.15)
    assert found.error(MeasurementKind.KERNEL).mape < 0.02
    assert found.first_token_overhead_s == 0


def test_a_few_rows_that_are_far_off_do_not_decide() -> None:
    found = calibrate(
        steps_as(TRUTH, lambda number: 0.2 if number % 8 == 3 else 1.0), DEFAULT_EFFICIENCY
    )
    good = [residual for residual in found.residuals if residual.error < 1.0]
    assert len(good) == len(BATCHES) * 2 * 7 // 8
    assert error_stats(good).mape < 0.03


def test_noise_is_not_learned() -> None:
    rng = random.Random(3)
    noise = [rng.uniform(0.95, 1.05) for _ in BATCHES]
    found = calibrate(steps_as(Factors(), noise.__getitem__), DEFAULT_EFFICIENCY)
    factors = factors_between(DEFAULT_EFFICIENCY, found.efficiency)
    assert factors.gemm_narrow == pytest.approx(1.0, abs=0.03)
    assert (factors.attention, factors.communication) == pytest.approx((1.0, 1.0), abs=0.1)
    learned, real = (
        [sum(row.parts) for row in steps_as(Factors())(efficiency)]
        for efficiency in (found.efficiency, DEFAULT_EFFICIENCY)
    )
    assert learned == pytest.approx(real, rel=0.035)


def test_factors_stay_where_kernels_can_be() -> None:
    found = calibrate(steps_as(Factors(gemm_narrow=9.0)), DEFAULT_EFFICIENCY)
    assert factors_between(DEFAULT_EFFICIENCY, found.efficiency).gemm_narrow == pytest.approx(1.6)
    assert found.error(MeasurementKind.KERNEL).bias < -0.2


def test_what_is_before_first_tokens_only_is_told_from_the_rest() -> None:
    def predict(efficiency: Efficiency) -> Sequence[Measurement]:
        rows = steps_as(TRUTH)(efficiency)
        firsts = [
            replace(row, kind=MeasurementKind.FIRST_TOKEN, measured_s=row.measured_s + 0.012)
            for row in rows
        ]
        return [*rows, *firsts]

    found = calibrate(predict, DEFAULT_EFFICIENCY)
    assert found.first_token_overhead_s == pytest.approx(0.012, rel=0.15)
    assert found.error(MeasurementKind.FIRST_TOKEN).mape < 0.02


def test_nothing_cannot_be_calibrated_on() -> None:
    with pytest.raises(ValueError, match="no rows"):
        calibrate(lambda _: [], DEFAULT_EFFICIENCY)


def test_an_engine_without_rows_cannot_be_calibrated() -> None:
    start = {"": DEFAULT_EFFICIENCY, "missing": DEFAULT_EFFICIENCY}
    with pytest.raises(ValueError, match="no rows missing"):
        calibrate_jointly(lambda by_engine: steps_as(TRUTH)(by_engine[""]), start)


def test_engines_share_kernels_and_nothing_else() -> None:
    quick, slow = TRUTH, TRUTH._replace(step=4.0)

    def predict(by_engine: Mapping[str, Efficiency]) -> list[Measurement]:
        observed = []
        for engine, truth in (("quick", quick), ("slow", slow)):
            rows = [replace(row, engine=engine) for row in steps_as(truth)(by_engine[engine])]
            observed += rows if engine == "quick" else rows[: len(rows) // 2]
        return observed

    found = calibrate_jointly(predict, {"quick": DEFAULT_EFFICIENCY, "slow": DEFAULT_EFFICIENCY})
    factors = {
        engine: factors_between(DEFAULT_EFFICIENCY, calibration.efficiency)
        for engine, calibration in found.items()
    }
    assert factors["quick"][2:] == pytest.approx(factors["slow"][2:])
    assert factors["quick"].gemm_narrow == pytest.approx(0.9, rel=0.03)
    assert factors["quick"].step == pytest.approx(1.6, rel=0.15)
    assert factors["slow"].step == pytest.approx(4.0, rel=0.3)
    assert found["slow"].max_conditions.devices == 1
    assert found["quick"].max_conditions.devices == 4
    assert len(found["quick"].residuals) == 2 * len(found["slow"].residuals)


def test_what_was_learned_of_16_bits_says_nothing_of_narrower_products() -> None:
    def predict(efficiency: Efficiency) -> list[Measurement]:
        return [replace(row, narrow=False) for row in steps_as(TRUTH)(efficiency)]

    factors = factors_between(DEFAULT_EFFICIENCY, calibrate(predict, DEFAULT_EFFICIENCY).efficiency)
    assert factors.gemm_narrow == 1.0
    assert factors.gemm != pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "asked",
    [
        {"requests": 401},
        {"devices": 9},
        {"prompt_tokens": 16_003},
        {"devices": 0.4},
        {"requests": 0.4},
    ],
)
def test_what_is_far_from_all_that_was_seen_is_refused(asked: dict[str, float]) -> None:
    found = calibrate(steps_as(TRUTH), DEFAULT_EFFICIENCY)
    near = Conditions(prompt_tokens=16_000, requests=400, devices=8)
    found.check(near, "near")
    with pytest.raises(OutOfRange, match=f"far: {next(iter(asked))} .* more than 2 times beyond"):
        found.check(near._replace(**asked), "far")


def test_errors_have_a_size_and_a_sign() -> None:
    residuals = [
        Residual("a", MeasurementKind.KERNEL, 2.0, 1.0),
        Residual("b", MeasurementKind.KERNEL, 1.0, 1.2),
    ]
    assert error_stats(residuals) == pytest.approx((2, 0.35, -0.15))
    assert error_stats([]) == (0, 0.0, 0.0)
