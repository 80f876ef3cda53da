"""Judging the model by measured rows: every row ends somewhere, each as it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.bench.accuracy.accuracy import (
    EvaluatedRow,
    calibrate_engines,
    evaluate_rows,
    recipe_of,
    unfit_reason,
    weight_dtype,
)
from baton.bench.accuracy.measurements import MeasuredRow
from baton.perf.fitting.calibration import MeasurementKind
from baton.perf.hardware.accelerators import Dtype

ROW = MeasuredRow(
    line=2,
    backend="vllm",
    version="",
    model="meta-llama/Llama-3.1-70B",
    system="h100_sxm",
    weights=Dtype.FP8,
    experts=None,
    disaggregated=False,
    prompt_tokens=1024,
    output_tokens=1024,
    tp=4,
    pp=1,
    concurrency=4,
    ttft_s=0.0805,
    tpot_s=0.01178,
)
"""InferenceX, vLLM on four H100."""


SMALL = "meta-llama/Llama-3.1-8B-Instruct"


def only(rows: list[MeasuredRow]) -> EvaluatedRow:
    judgement = evaluate_rows(rows)
    assert not judgement.skipped
    (one,) = judgement.evaluated
    return one


def test_a_row_of_a_gpu_that_was_measured_is_met() -> None:
    one = only([ROW])
    assert one.is_simulated
    assert one.tpot.error == pytest.approx(0, abs=0.05)
    assert one.ttft.error == pytest.approx(0, abs=0.15)


def test_the_simulated_engine_and_the_closed_loop_agree_while_there_is_memory() -> None:
    row = replace(ROW, concurrency=8)
    engine, loop = only([row]), only([replace(row, backend="other")])
    assert not loop.is_simulated
    assert loop.tpot.predicted_s == pytest.approx(engine.tpot.predicted_s, rel=0.01)
    assert loop.ttft.predicted_s == pytest.approx(engine.ttft.predicted_s, rel=0.02)


def test_only_the_simulated_engine_knows_when_memory_is_short() -> None:
    row = replace(ROW, tp=2, prompt_tokens=8192, concurrency=48)
    engine, loop = only([row]), only([replace(row, backend="other")])
    assert engine.ttft.predicted_s > 5 * loop.ttft.predicted_s


def test_rows_that_cannot_be_judged_are_named_with_why() -> None:
    rows = [
        replace(ROW, model="nobody/knows"),
        replace(ROW, system="h1000"),
        replace(ROW, tp=1, weights=Dtype.BF16),
        replace(ROW, disaggregated=True),
        ROW,
    ]
    judgement = evaluate_rows(rows)
    assert [row.row for row in judgement.skipped] == rows[:4]
    reasons = [row.reason for row in judgement.skipped]
    for reason, said in zip(reasons, ("nobody/knows", "h1000", "GB", "pools"), strict=True):
        assert said in reason
    assert [row.row for row in judgement.evaluated] == [ROW]


def test_saturated_rows_are_judged_and_not_in_the_means() -> None:
    judgement = evaluate_rows([ROW, replace(ROW, ttft_s=4.0)])
    assert [row.is_saturated for row in judgement.evaluated] == [False, True]
    ttft, tpot = judgement.errors()
    assert (ttft.rows, tpot.rows) == (1, 1)
    ((key, rows),) = judgement.groups().items()
    assert key == ("vllm", "meta-llama/Llama-3.1-70B", "h100_sxm tp4")
    assert len(rows) == 1


ROWS = [
    replace(ROW, tp=tp, concurrency=clients, ttft_s=ttft_s, tpot_s=tpot_s)
    for tp, clients, ttft_s, tpot_s in (
        (2, 4, 0.1213, 0.01741),
        (2, 8, 0.1502, 0.01822),
        (4, 4, 0.0805, 0.01178),
        (4, 8, 0.0963, 0.01211),
        (8, 4, 0.0704, 0.00911),
        (8, 8, 0.0758, 0.00936),
    )
]


def test_what_differs_between_engines_is_their_own_and_not_the_kernels() -> None:
    slow = [replace(row, backend="slow", tpot_s=row.tpot_s + 0.002) for row in ROWS]
    calibrations = calibrate_engines([*ROWS, *slow])
    assert set(calibrations) == {"vllm", "slow"}
    quick, late = (calibrations[name].efficiency for name in ("vllm", "slow"))
    assert late.step_s - quick.step_s == pytest.approx(0.002, rel=0.3)
    for shared in ("gemm", "gemm_narrow", "attention", "communication"):
        assert getattr(late, shared) == pytest.approx(getattr(quick, shared))
    assert calibrations["vllm"].error(MeasurementKind.OUTPUT_TOKEN).mape < 0.03
    assert calibrations["slow"].error(MeasurementKind.OUTPUT_TOKEN).mape < 0.03
    known, borrowed = (
        evaluate_rows([replace(ROW, backend=name)], calibrations=calibrations).evaluated[0]
        for name in ("slow", "unheard_of")
    )
    assert known.tpot.predicted_s - borrowed.tpot.predicted_s == pytest.approx(0.002, rel=0.3)


def test_an_engine_with_many_rows_does_not_outweigh_the_others() -> None:
    other = [replace(row, backend="other", tpot_s=0.9 * row.tpot_s) for row in ROWS]
    few, many = (calibrate_engines([*ROWS, *other * count])["vllm"].efficiency for count in (1, 4))
    assert many.gemm_narrow == pytest.approx(few.gemm_narrow, rel=0.02)


def test_nothing_usable_is_no_calibration() -> None:
    assert calibrate_engines([replace(ROW, disaggregated=True)]) == {}


def test_rows_that_cannot_be_are_judged_and_told_from_those_that_can() -> None:
    cached = replace(ROW, tpot_s=0.001)
    beside, elsewhere = replace(ROW, concurrency=8), replace(ROW, version="another")
    judgement = evaluate_rows([cached, beside, elsewhere])
    assert [row.implausible_reason is None for row in judgement.evaluated] == [False, True, True]
    assert judgement.errors()[0].rows == 3
    assert [row.row for row in judgement.plausible] == [beside, elsewhere]
    assert [row.row for row in judgement.plausible_in_suspect_sweeps()] == [beside]


def test_a_saturated_row_that_cannot_be_spoils_no_sweep() -> None:
    cached = replace(ROW, tpot_s=0.001, prompt_tokens=8192, concurrency=4096, ttft_s=5.0)
    judgement = evaluate_rows([ROW])
    spoiled = judgement.evaluated[0]._replace(row=cached, implausible_reason="so")
    judgement = replace(judgement, evaluated=(*judgement.evaluated, spoiled))
    assert judgement.plausible_in_suspect_sweeps() == ()


def test_decodes_of_tensorrt_llm_are_bound_by_bytes() -> None:
    row = replace(ROW, system="h200_sxm", tp=2, output_tokens=8192, concurrency=64)
    xqa, tiles = only([replace(row, backend="trtllm")]), only([replace(row, backend="other")])
    assert xqa.tpot.predicted_s < 0.93 * tiles.tpot.predicted_s
    calibrations = calibrate_engines(ROWS)
    borrowed = evaluate_rows(
        [replace(row, backend="trtllm")], calibrations=calibrations, extrapolate=True
    ).evaluated[0]
    assert borrowed.tpot.predicted_s < 0.93 * tiles.tpot.predicted_s


def test_far_rows_are_refused_unless_told() -> None:
    calibrations = calibrate_engines(ROWS)
    far = replace(ROW, concurrency=17)
    refused = evaluate_rows([far], calibrations=calibrations)
    assert refused.skipped[0].reason == "far from what the calibration has seen"
    assert "requests 17 is more than 2 times beyond the 4 to 8" in refused.skipped[0].detail
    assert evaluate_rows([far], calibrations=calibrations, extrapolate=True).evaluated


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (ROW, None),
        (replace(ROW, disaggregated=True), "separate pools"),
        (replace(ROW, ttft_s=4.0), "a queue's"),
        (
            replace(ROW, backend="trtllm", output_tokens=128, tpot_s=0.0046, model=SMALL, tp=8),
            None,
        ),
        (
            replace(
                ROW,
                backend="trtllm",
                output_tokens=128,
                tpot_s=0.0046,
                model=SMALL,
                tp=8,
                concurrency=16,
            ),
            "in front of the engine",
        ),
        (replace(ROW, tpot_s=0.001), "more than its devices can compute"),
        (replace(ROW, model="nobody/knows"), "nobody/knows"),
        (replace(ROW, system="h1000"), "h1000"),
    ],
)
def test_what_does_not_tell_of_the_engine_is_not_fitted_to(
    row: MeasuredRow, why: str | None
) -> None:
    assert (unfit_reason(row) is None) if why is None else why in (unfit_reason(row) or "")


def test_the_lengths_of_inferencex_are_random_and_the_same_each_time() -> None:
    recipe = recipe_of(ROW)
    lengths = recipe.draw_lengths(ROW)
    assert recipe.is_published
    assert lengths == recipe_of(ROW).draw_lengths(ROW)
    assert len(lengths) == 40
    assert all(819 <= tokens <= 1024 for length in lengths for tokens in length)
    assert len({length.prompt_tokens for length in lengths}) > 20


@pytest.mark.parametrize(
    ("row", "kv"),
    [
        (ROW, Dtype.BF16),
        (replace(ROW, system="h200_sxm"), Dtype.FP8),
        (replace(ROW, backend="trtllm"), Dtype.FP8),
        (replace(ROW, system="b200_sxm", weights=Dtype.BF16), Dtype.BF16),
        (replace(ROW, output_tokens=500), Dtype.BF16),
        (replace(ROW, output_tokens=500, model="nvidia/Llama-3.1-8B-Instruct-FP8"), Dtype.FP8),
    ],
)
def test_keys_and_values_are_kept_as_the_benchmark_says(row: MeasuredRow, kv: Dtype) -> None:
    assert recipe_of(row).kv is kv


def test_tensorrt_rows_wait_to_gather_where_their_script_says_so() -> None:
    row = replace(ROW, backend="trtllm")
    assert recipe_of(row).closed_loop(row).max_prefill_delay_steps == 20
    for other in (replace(row, tp=8), replace(row, output_tokens=8192)):
        assert recipe_of(other).closed_loop(other).max_prefill_delay_steps == 0


def test_clients_that_are_under_way_end_their_first_requests_at_any_time() -> None:
    row = replace(ROW, backend="trtllm", output_tokens=128, concurrency=16)
    recipe = recipe_of(row)
    lengths, loop = recipe.draw_lengths(row), recipe.closed_loop(row)
    assert len({length.output_tokens for length in lengths[:16]}) > 8
    assert {length.output_tokens for length in lengths[16:]} == {128}
    assert (loop.warm_up_requests, loop.max_running_requests) == (32, 15)


def test_engines_that_mix_are_measured_under_way_and_sglang_from_the_start() -> None:
    row = replace(ROW, output_tokens=500)
    mixing, sglang = recipe_of(row), recipe_of(replace(row, backend="sglang"))
    assert (mixing.starts_warm, mixing.closed_loop(row).warm_up_requests) == (True, 8)
    assert (sglang.starts_warm, sglang.closed_loop(row).warm_up_requests) == (False, 0)
    assert not mixing.is_published
    assert not sglang.is_published


def test_the_simulated_engine_leaves_out_what_is_not_measured() -> None:
    row = replace(ROW, model=SMALL, weights=Dtype.BF16, tp=1, prompt_tokens=4000, concurrency=32)
    row = replace(row, output_tokens=200)
    engine, loop = only([row]), only([replace(row, backend="other")])
    assert engine.ttft.predicted_s == pytest.approx(loop.ttft.predicted_s, rel=0.05)


def test_experts_decide_what_weights_a_mixture_is_stored_in() -> None:
    mixture = replace(ROW, model="mistralai/Mixtral-8x7B-v0.1", experts=Dtype.FP4)
    assert weight_dtype(mixture) is Dtype.FP4
    assert weight_dtype(replace(ROW, experts=Dtype.FP4)) is Dtype.FP8
    assert weight_dtype(replace(ROW, weights=None)) is Dtype.BF16
