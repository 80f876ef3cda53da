"""Accelerators by name, and what their figures have to agree on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from baton.domain.errors import UnknownAccelerator
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
from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import CATALOGUE, find_accelerator
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.roofline import Roofline
from tests.perf.shapes import H100, LLAMA_70B

ALL = pytest.mark.parametrize("one", CATALOGUE.values(), ids=list(CATALOGUE))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H100", "h100_sxm"),
        ("h100-sxm", "h100_sxm"),
        ("h100-80gb", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("a100", "a100_sxm"),
        ("a100-80gb", "a100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("A800", "a800_sxm"),
        ("H800", "h800_sxm"),
        ("H200", "h200_sxm"),
        ("b200_sxm", "b200_sxm"),
        ("B300", "b300_sxm"),
        ("GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("l4", "l4"),
        ("RTXPRO6000", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI325X", "mi325x"),
        ("mi355x", "mi355x"),
        ("rtx_pro_6000_server", "rtx_pro_6000"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("gb200_sxm", "gb200"),
        ("GB300", "gb300"),
        ("cpu", "cpu"),
    ],
)
def test_an_accelerator_is_found_as_people_and_drivers_call_it(said: str, name: str) -> None:
    assert find_accelerator(said) is CATALOGUE[name]


def test_an_unknown_accelerator_is_answered_with_near_names() -> None:
    with pytest.raises(UnknownAccelerator) as caught:
        find_accelerator("H2000")
    assert "'H2000'" in caught.value.reason
    assert "h200_sxm" in caught.value.remedy


def test_an_accelerator_like_none_is_answered_with_all_names() -> None:
    with pytest.raises(UnknownAccelerator) as caught:
        find_accelerator("???")
    assert all(name in caught.value.remedy for name in CATALOGUE)


@ALL
def test_each_accelerator_says_where_its_figures_come_from(one: Accelerator) -> None:
    assert one.source


@ALL
def test_the_figures_of_an_accelerator_are_of_one_order(one: Accelerator) -> None:
    """A slip in a power of ten would leave these ranges."""
    assert 20e9 < one.memory_bytes < 320e9
    assert 0.2e12 < one.memory_bytes_per_s < 10e12
    assert 100e12 <= one.flops_of(Dtype.BF16) < 3e15
    assert 1e9 < one.network_bytes_per_s <= 100e9
    assert one.network_bytes_per_s <= one.peer_bytes_per_s <= 900e9
    assert 20e9 < one.host_bytes_per_s <= 450e9
    assert one.price_per_hour is None or 0.3 < one.price_per_hour < 20


@ALL
def test_narrower_floating_point_is_never_slower(one: Accelerator) -> None:
    types = (Dtype.FP32, Dtype.BF16, Dtype.FP8, Dtype.FP4)
    speeds = [one.flops_of(dtype) for dtype in types]
    assert speeds == sorted(speeds)


def test_a_type_without_arithmetic_of_its_own_runs_as_the_next_wider_one() -> None:
    a100, h100 = find_accelerator("A100"), find_accelerator("H100")
    assert a100.flops_of(Dtype.FP8) == a100.flops_of(Dtype.FP16) == 312e12
    assert a100.flops_of(Dtype.INT8) == 624e12
    assert h100.flops_of(Dtype.FP4) == h100.flops_of(Dtype.FP8) == 1979e12
    assert h100.flops_of(Dtype.INT4) == h100.flops_of(Dtype.BF16)


def test_a_type_that_nothing_wider_stands_for_is_refused() -> None:
    bare = Accelerator(
        name="bare",
        memory_bytes=1.0,
        memory_bytes_per_s=1.0,
        flops_by_dtype={Dtype.BF16: 1.0},
        peer_bytes_per_s=1.0,
        network_bytes_per_s=1.0,
    )
    with pytest.raises(ValueError, match=r"bare.*fp32"):
        bare.flops_of(Dtype.FP32)


def test_the_figures_that_published_work_is_built_on_are_those() -> None:
    h100, h200, a100 = find_accelerator("H100"), find_accelerator("H200"), find_accelerator("A100")
    assert (h100.memory_bytes_per_s, h200.memory_bytes_per_s) == (3.35e12, 4.8e12)
    assert a100.memory_bytes_per_s == 2.039e12
    assert h100.flops_by_dtype == h200.flops_by_dtype
    assert (h100.memory_bytes, h200.memory_bytes) == (80 * 2**30, 141 * 2**30)
    assert find_accelerator("H800").peer_bytes_per_s < h100.peer_bytes_per_s


def test_every_type_has_a_size() -> None:
    assert set(DTYPE_BYTES) == set(Dtype)


# --------------------------------------------------------------------------- calibration
START = Efficiency(step_s=3e-3, request_s=5e-6, prefill_layer_s=20e-6)
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
                efficiency=scale_efficiency(START, truth),
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
    found = calibrate(steps_as(TRUTH), START)
    factors = factors_between(START, found.efficiency)
    # What a factor moves little is held to where it began, as that of steps' 1 ms in 20.
    assert 1.1 < factors.step < 1.7
    assert factors.gemm_narrow == pytest.approx(0.9, rel=0.03)
    assert factors.gemm == pytest.approx(1.0, abs=1e-6)
    assert (factors.attention, factors.communication) == pytest.approx((1.3, 0.7), rel=0.15)
    assert found.error(MeasurementKind.KERNEL).mape < 0.02
    assert found.first_token_overhead_s == 0


def test_rows_of_requests_move_kernels_less_and_few_hardly() -> None:
    def predict(kind: MeasurementKind, count: int) -> Callable[[Efficiency], list[Measurement]]:
        def rows(efficiency: Efficiency) -> list[Measurement]:
            far = steps_as(Factors(gemm_narrow=0.7))(efficiency)[:count]
            usual = [replace(row, narrow=False) for row in steps_as(Factors())(efficiency)]
            return [replace(row, kind=kind) for row in (*far, *usual)]

        return rows

    kernels, many, few = (
        factors_between(START, calibrate(predict(kind, count), START).efficiency).gemm_narrow
        for kind, count in (
            (MeasurementKind.KERNEL, len(BATCHES)),
            (MeasurementKind.OUTPUT_TOKEN, len(BATCHES)),
            (MeasurementKind.OUTPUT_TOKEN, 4),
        )
    )
    assert kernels == pytest.approx(0.7, rel=0.05)
    assert kernels + 0.05 < many < few < 1.0


def test_a_few_rows_that_are_far_off_do_not_decide() -> None:
    found = calibrate(steps_as(TRUTH, lambda number: 0.2 if number % 8 == 3 else 1.0), START)
    good = [residual for residual in found.residuals if residual.error < 1.0]
    assert len(good) == len(BATCHES) * 2 * 7 // 8
    assert error_stats(good).mape < 0.03


def test_noise_is_not_learned() -> None:
    rng = random.Random(3)
    noise = [rng.uniform(0.95, 1.05) for _ in BATCHES]
    found = calibrate(steps_as(Factors(), noise.__getitem__), START)
    factors = factors_between(START, found.efficiency)
    assert factors.gemm_narrow == pytest.approx(1.0, abs=0.03)
    assert (factors.attention, factors.communication) == pytest.approx((1.0, 1.0), abs=0.1)
    learned, real = (
        [sum(row.parts) for row in steps_as(Factors())(efficiency)]
        for efficiency in (found.efficiency, START)
    )
    assert learned == pytest.approx(real, rel=0.035)


def test_factors_stay_where_kernels_can_be() -> None:
    found = calibrate(steps_as(Factors(gemm_narrow=9.0)), START)
    assert factors_between(START, found.efficiency).gemm_narrow == pytest.approx(1.6)
    assert found.error(MeasurementKind.KERNEL).bias < -0.2


def test_time_before_first_tokens_only_is_separated_from_the_rest() -> None:
    def predict(efficiency: Efficiency) -> Sequence[Measurement]:
        rows = steps_as(TRUTH)(efficiency)
        firsts = [
            replace(row, kind=MeasurementKind.FIRST_TOKEN, measured_s=row.measured_s + 0.012)
            for row in rows
        ]
        return [*rows, *firsts]

    found = calibrate(predict, START)
    assert found.first_token_overhead_s == pytest.approx(0.012, rel=0.15)
    assert found.error(MeasurementKind.FIRST_TOKEN).mape < 0.03


def test_nothing_cannot_be_calibrated_on() -> None:
    with pytest.raises(ValueError, match="no rows"):
        calibrate(lambda _: [], START)


def test_an_engine_without_rows_cannot_be_calibrated() -> None:
    start = {"": START, "missing": START}
    with pytest.raises(ValueError, match="no rows missing"):
        calibrate_jointly(lambda by_engine: steps_as(TRUTH)(by_engine[""]), start)


def test_engines_share_kernels_and_nothing_else() -> None:
    quick, slow = TRUTH, TRUTH._replace(step=4.0)

    def predict(by_engine: Mapping[str, Efficiency]) -> list[Measurement]:
        observed = []
        for engine, truth in (("quick", quick), ("slow", slow)):
            rows = [
                replace(row, host=engine, engine=engine)
                for row in steps_as(truth)(by_engine[engine])
            ]
            observed += rows if engine == "quick" else rows[: len(rows) // 2]
        return observed

    found = calibrate_jointly(predict, {"quick": START, "slow": START})
    factors = {
        engine: factors_between(START, calibration.efficiency)
        for engine, calibration in found.items()
    }
    shared = ("gemm", "gemm_narrow", "experts", "attention", "communication")
    assert [getattr(factors["quick"], name) for name in shared] == pytest.approx(
        [getattr(factors["slow"], name) for name in shared]
    )
    assert factors["quick"].gemm_narrow == pytest.approx(0.9, rel=0.03)
    assert factors["quick"].step == pytest.approx(1.6, rel=0.2)
    assert factors["slow"].step == pytest.approx(4.0, rel=0.3)
    assert found["slow"].max_conditions.devices == 1
    assert found["quick"].max_conditions.devices == 4
    assert len(found["quick"].residuals) == 2 * len(found["slow"].residuals)


def test_efficiency_learned_at_16_bits_says_nothing_of_narrower_products() -> None:
    def predict(efficiency: Efficiency) -> list[Measurement]:
        return [replace(row, narrow=False) for row in steps_as(TRUTH)(efficiency)]

    factors = factors_between(START, calibrate(predict, START).efficiency)
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
def test_conditions_far_from_all_measurements_are_named(asked: dict[str, float]) -> None:
    found = calibrate(steps_as(TRUTH), START)
    near = Conditions(prompt_tokens=16_000, requests=400, devices=8)
    assert found.beyond(near) == ()
    (beyond,) = found.beyond(near._replace(**asked))
    assert beyond.startswith(next(iter(asked)).replace("_", " "))


def test_errors_have_a_size_and_a_sign() -> None:
    residuals = [
        Residual("a", MeasurementKind.KERNEL, 2.0, 1.0),
        Residual("b", MeasurementKind.KERNEL, 1.0, 1.2),
    ]
    assert error_stats(residuals) == pytest.approx((2, 0.35, -0.15))
    assert error_stats([]) == (0, 0.0, 0.0)
