"""Judging the model by measured rows: every row ends somewhere, each as it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.bench.accuracy.accuracy import Judged, calibrated, judge, unfit
from baton.bench.accuracy.measurements import MeasuredRow
from baton.bench.accuracy.recipes import recipe_of, weights_of
from baton.perf.fitting.calibration import Kind
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


def only(rows: list[MeasuredRow]) -> Judged:
    judgement = judge(rows)
    assert not judgement.not_judged
    (one,) = judgement.judged
    return one


def test_a_row_of_a_gpu_that_was_measured_is_met() -> None:
    one = only([ROW])
    assert one.simulated
    assert one.tpot.error == pytest.approx(0, abs=0.05)
    assert one.ttft.error == pytest.approx(0, abs=0.15)


def test_the_simulated_engine_and_the_closed_loop_agree_while_there_is_memory() -> None:
    row = replace(ROW, concurrency=8)
    engine, loop = only([row]), only([replace(row, backend="other")])
    assert not loop.simulated
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
    judgement = judge(rows)
    assert [one.row for one in judgement.not_judged] == rows[:4]
    reasons = [one.why for one in judgement.not_judged]
    for reason, said in zip(reasons, ("nobody/knows", "h1000", "GB", "pools"), strict=True):
        assert said in reason
    assert [one.row for one in judgement.judged] == [ROW]


def test_saturated_rows_are_judged_and_not_in_the_means() -> None:
    judgement = judge([ROW, replace(ROW, ttft_s=4.0)])
    assert [one.saturated for one in judgement.judged] == [False, True]
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
    calibrations = calibrated([*ROWS, *slow])
    assert set(calibrations) == {"vllm", "slow"}
    quick, late = (calibrations[name].efficiency for name in ("vllm", "slow"))
    assert late.step_s - quick.step_s == pytest.approx(0.002, rel=0.3)
    for shared in ("gemm", "gemm_narrow", "attention", "communication"):
        assert getattr(late, shared) == pytest.approx(getattr(quick, shared))
    assert calibrations["vllm"].error(Kind.OUTPUT_TOKEN).mape < 0.03
    assert calibrations["slow"].error(Kind.OUTPUT_TOKEN).mape < 0.03
    known, borrowed = (
        judge([replace(ROW, backend=name)], calibrations=calibrations).judged[0]
        for name in ("slow", "unheard_of")
    )
    assert known.tpot.predicted_s - borrowed.tpot.predicted_s == pytest.approx(0.002, rel=0.3)


def test_an_engine_with_many_rows_does_not_outweigh_the_others() -> None:
    other = [replace(row, backend="other", tpot_s=0.9 * row.tpot_s) for row in ROWS]
    few, many = (calibrated([*ROWS, *other * count])["vllm"].efficiency for count in (1, 4))
    assert many.gemm_narrow == pytest.approx(few.gemm_narrow, rel=0.02)


def test_nothing_usable_is_no_calibration() -> None:
    assert calibrated([replace(ROW, disaggregated=True)]) == {}


def test_rows_that_cannot_be_are_judged_and_told_from_those_that_can() -> None:
    cached = replace(ROW, tpot_s=0.001)
    beside, elsewhere = replace(ROW, concurrency=8), replace(ROW, version="another")
    judgement = judge([cached, beside, elsewhere])
    assert [one.impossible is None for one in judgement.judged] == [False, True, True]
    assert judgement.errors()[0].rows == 3
    assert [one.row for one in judgement.plausible] == [beside, elsewhere]
    assert [one.row for one in judgement.beside_impossible()] == [beside]


def test_a_saturated_row_that_cannot_be_spoils_no_sweep() -> None:
    cached = replace(ROW, tpot_s=0.001, prompt_tokens=8192, concurrency=4096, ttft_s=5.0)
    judgement = judge([ROW])
    spoiled = judgement.judged[0]._replace(row=cached, impossible="so")
    judgement = replace(judgement, judged=(*judgement.judged, spoiled))
    assert judgement.beside_impossible() == ()


def test_decodes_of_tensorrt_llm_are_bound_by_bytes() -> None:
    row = replace(ROW, system="h200_sxm", tp=2, output_tokens=8192, concurrency=64)
    xqa, tiles = only([replace(row, backend="trtllm")]), only([replace(row, backend="other")])
    assert xqa.tpot.predicted_s < 0.93 * tiles.tpot.predicted_s
    calibrations = calibrated(ROWS)
    borrowed = judge(
        [replace(row, backend="trtllm")], calibrations=calibrations, extrapolate=True
    ).judged[0]
    assert borrowed.tpot.predicted_s < 0.93 * tiles.tpot.predicted_s


def test_far_rows_are_refused_unless_told() -> None:
    calibrations = calibrated(ROWS)
    far = replace(ROW, concurrency=17)
    refused = judge([far], calibrations=calibrations)
    assert refused.not_judged[0].why == "far from what the calibration has seen"
    assert "requests 17 is more than 2 times beyond the 4 to 8" in refused.not_judged[0].at
    assert judge([far], calibrations=calibrations, extrapolate=True).judged


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
    assert (unfit(row) is None) if why is None else why in (unfit(row) or "")


def test_the_lengths_of_inferencex_are_random_and_the_same_each_time() -> None:
    recipe = recipe_of(ROW)
    lengths = recipe.lengths(ROW)
    assert recipe.published
    assert lengths == recipe_of(ROW).lengths(ROW)
    assert len(lengths) == 40
    assert all(819 <= tokens <= 1024 for one in lengths for tokens in one)
    assert len({one.prompt_tokens for one in lengths}) > 20


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
    assert recipe_of(row).loop(row).gather_steps == 20
    for other in (replace(row, tp=8), replace(row, output_tokens=8192)):
        assert recipe_of(other).loop(other).gather_steps == 0


def test_clients_that_are_under_way_end_their_first_requests_at_any_time() -> None:
    row = replace(ROW, backend="trtllm", output_tokens=128, concurrency=16)
    recipe = recipe_of(row)
    lengths, loop = recipe.lengths(row), recipe.loop(row)
    assert len({one.output_tokens for one in lengths[:16]}) > 8
    assert {one.output_tokens for one in lengths[16:]} == {128}
    assert (loop.skipped, loop.max_running_requests) == (32, 15)


def test_engines_that_mix_are_measured_under_way_and_sglang_from_the_start() -> None:
    row = replace(ROW, output_tokens=500)
    mixing, sglang = recipe_of(row), recipe_of(replace(row, backend="sglang"))
    assert (mixing.under_way, mixing.loop(row).skipped) == (True, 8)
    assert (sglang.under_way, sglang.loop(row).skipped) == (False, 0)
    assert not mixing.published
    assert not sglang.published


def test_the_simulated_engine_leaves_out_what_is_not_measured() -> None:
    row = replace(ROW, model=SMALL, weights=Dtype.BF16, tp=1, prompt_tokens=4000, concurrency=32)
    row = replace(row, output_tokens=200)
    engine, loop = only([row]), only([replace(row, backend="other")])
    assert engine.ttft.predicted_s == pytest.approx(loop.ttft.predicted_s, rel=0.05)


def test_experts_decide_what_weights_a_mixture_is_stored_in() -> None:
    mixture = replace(ROW, model="mistralai/Mixtral-8x7B-v0.1", experts=Dtype.FP4)
    assert weights_of(mixture) is Dtype.FP4
    assert weights_of(replace(ROW, experts=Dtype.FP4)) is Dtype.FP8
    assert weights_of(replace(ROW, weights=None)) is Dtype.BF16
