"""Judging the model by measured rows: every row ends somewhere, each as it was measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.accuracy.accuracy import (
    EvaluatedRow,
    busy_fractions,
    calibrate_engines,
    calibration_of,
    evaluate_rows,
    host_of,
    implausible_reason,
    unfit_reason,
)
from baton.bench.accuracy.kernel_tables import (
    attention_observations,
    compare_all_reduces,
    compare_products,
)
from baton.bench.accuracy.measurements import (
    MeasuredRow,
    WorkerLayout,
    distserve_timing,
    layer_profile,
    read_request_log,
    read_rows,
    splitwise_timing,
)
from baton.bench.accuracy.recipes import recipe_of, weight_dtype
from baton.domain.errors import PreflightFailed, TraceInvalid
from baton.perf.fitting.calibration import Calibration, MeasurementKind
from baton.perf.hardware.accelerators import Dtype
from baton.perf.step_timing import StepBatch, attention_pairs
from tests.perf.shapes import H100

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


def only(
    rows: list[MeasuredRow], calibrations: Mapping[str, Calibration] | None = None
) -> EvaluatedRow:
    judgement = evaluate_rows(rows, calibrations=calibrations)
    assert not judgement.skipped
    (one,) = judgement.evaluated
    return one


def test_a_row_of_a_gpu_that_was_measured_is_met() -> None:
    one = only([ROW])
    assert one.is_simulated
    assert one.tpot.error == pytest.approx(0, abs=0.1)
    assert one.ttft.error == pytest.approx(0, abs=0.4)


def test_the_simulated_engine_and_the_closed_loop_agree_while_there_is_memory() -> None:
    row = replace(ROW, concurrency=8)
    engine, loop = only([row]), only([replace(row, backend="other")])
    assert not loop.is_simulated
    assert loop.tpot.predicted_s == pytest.approx(engine.tpot.predicted_s, rel=0.01)
    assert loop.ttft.predicted_s == pytest.approx(engine.ttft.predicted_s, rel=0.02)


def test_requests_wait_when_memory_is_short() -> None:
    row = replace(ROW, tp=2, prompt_tokens=8192, concurrency=48)
    engine, unknown = only([row]), only([replace(row, backend="other")])
    assert engine.ttft.predicted_s > 5 * unknown.ttft.predicted_s
    reserving = only([replace(row, backend="trtllm", concurrency=96)])
    assert reserving.ttft.predicted_s > 5 * unknown.ttft.predicted_s


def test_many_clients_take_the_closed_loop_with_the_same_room() -> None:
    row = replace(ROW, tp=2, prompt_tokens=8192, concurrency=256)
    engine, loop = only([row]), only([replace(row, concurrency=257)])
    assert (engine.is_simulated, loop.is_simulated) == (True, False)
    assert loop.tpot.predicted_s == pytest.approx(engine.tpot.predicted_s, rel=0.15)
    assert loop.ttft.predicted_s == pytest.approx(engine.ttft.predicted_s, rel=0.15)


def test_rows_that_cannot_be_evaluated_are_named_with_the_reason() -> None:
    rows = [
        replace(ROW, model="nobody/knows"),
        replace(ROW, system="h1000"),
        replace(ROW, tp=1, weights=Dtype.BF16),
        replace(ROW, disaggregated=True),
        replace(ROW, problem="it does not say how many clients"),
        ROW,
    ]
    judgement = evaluate_rows(rows)
    assert [row.row for row in judgement.skipped] == rows[:5]
    reasons = [row.reason for row in judgement.skipped]
    said_in_turn = ("nobody/knows", "h1000", "GB", "pools", "how many clients")
    for reason, said in zip(reasons, said_in_turn, strict=True):
        assert said in reason
    assert [row.row for row in judgement.evaluated] == [ROW]


def test_saturated_rows_are_evaluated_and_left_out_of_the_means() -> None:
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


def test_differences_between_engines_are_not_charged_to_kernels() -> None:
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


def test_evaluated_rows_are_separated_from_those_that_cannot_be() -> None:
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
    assert xqa.tpot.predicted_s < 0.97 * tiles.tpot.predicted_s
    calibrations = calibrate_engines(ROWS)
    borrowed = evaluate_rows([replace(row, backend="trtllm")], calibrations=calibrations).evaluated[
        0
    ]
    assert borrowed.tpot.predicted_s < 0.97 * tiles.tpot.predicted_s


def test_rows_far_from_the_calibration_are_marked() -> None:
    calibrations = calibrate_engines(ROWS)
    far = replace(ROW, concurrency=17)
    judged = evaluate_rows([ROW, far], calibrations=calibrations).evaluated
    assert [row.extrapolated for row in judged] == [
        (),
        ("requests 17, where rows have 4 to 8",),
    ]


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
def test_rows_that_say_nothing_of_the_engine_are_not_fitted(
    row: MeasuredRow, why: str | None
) -> None:
    assert (unfit_reason(row) is None) if why is None else why in (unfit_reason(row) or "")


def test_the_lengths_of_inferencex_are_random_and_the_same_each_time() -> None:
    recipe = recipe_of(ROW)
    lengths = recipe.draw_lengths(ROW)
    assert recipe.is_published
    assert lengths == recipe_of(ROW).draw_lengths(ROW)
    assert len(lengths) == 40
    assert all(819 <= tokens <= 1024 for length in lengths for tokens in length[:2])
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


DEEPSEEK = replace(
    ROW,
    backend="sglang",
    model="deepseek-ai/DeepSeek-R1",
    system="b200_sxm",
    experts=Dtype.FP8,
    tp=8,
    concurrency=64,
)


@pytest.mark.parametrize(
    ("row", "budget", "interval", "kv"),
    [
        (DEEPSEEK, 32768, 30, Dtype.FP8),
        (replace(DEEPSEEK, concurrency=8), 32768, 10, Dtype.FP8),
        (replace(DEEPSEEK, system="h200_sxm"), 32768, 1, Dtype.BF16),
        (replace(DEEPSEEK, model="zai-org/GLM-5-FP8"), 32768, 1, Dtype.FP8),
        (replace(DEEPSEEK, experts=Dtype.FP4), 16384, 30, Dtype.FP8),
        (replace(DEEPSEEK, model=SMALL), 8192, 1, Dtype.FP8),
    ],
)
def test_sglang_takes_chunks_and_looks_for_requests_as_its_script_says(
    row: MeasuredRow, budget: int, interval: int, kv: Dtype
) -> None:
    recipe = recipe_of(row)
    loop = recipe.closed_loop(row)
    assert (loop.max_batched_tokens, loop.receive_interval_steps) == (budget, interval)
    assert recipe.kv is kv
    assert not loop.mixes_steps


def test_requests_that_exceed_the_memory_share_of_sglang_wait() -> None:
    glm = replace(DEEPSEEK, model="zai-org/GLM-5", system="h200_sxm", prompt_tokens=8192)
    few, many = only([replace(glm, concurrency=32)]), only([replace(glm, concurrency=128)])
    assert few.ttft.predicted_s < 5
    assert many.ttft.predicted_s > 60
    assert many.tpot.predicted_s < 1.5 * few.tpot.predicted_s


def test_sglang_has_other_settings_for_deepseek_on_four_gpus() -> None:
    row = replace(DEEPSEEK, tp=4)
    assert recipe_of(row).max_batched_tokens == 8192
    assert recipe_of(row).receive_interval_steps == 10
    assert recipe_of(DEEPSEEK).receive_interval_steps == 30


def test_first_tokens_wait_where_the_script_lets_requests_wait() -> None:
    waiting = only([DEEPSEEK])
    looking = only([replace(DEEPSEEK, model="deepseek-ai/DeepSeek-R1", concurrency=15)])
    assert waiting.ttft.predicted_s - looking.ttft.predicted_s > 8 * waiting.tpot.predicted_s


@pytest.mark.parametrize(
    ("row", "budget"),
    [
        (replace(DEEPSEEK, backend="vllm", model="MiniMaxAI/MiniMax-M2.5"), 2048),
        (replace(DEEPSEEK, backend="vllm", model="openai/gpt-oss-120b"), 8192),
        (replace(DEEPSEEK, backend="trtllm", prompt_tokens=8192), 8192 + 64 + 64),
        (replace(DEEPSEEK, backend="trtllm", model="openai/gpt-oss-120b"), 20000),
    ],
)
def test_step_budgets_are_those_of_the_scripts(row: MeasuredRow, budget: int) -> None:
    assert recipe_of(row).closed_loop(row).max_batched_tokens == budget


def test_experts_on_hopper_keep_keys_and_values_in_16_bits_under_vllm() -> None:
    row = replace(DEEPSEEK, backend="vllm", model="openai/gpt-oss-120b", experts=Dtype.FP4)
    assert recipe_of(row).kv is Dtype.FP8
    assert recipe_of(replace(row, system="h200_sxm")).kv is Dtype.BF16


def test_deepseek_under_tensorrt_llm_waits_for_a_batch_with_some_clients() -> None:
    row = replace(DEEPSEEK, backend="trtllm")
    delays = [
        recipe_of(replace(row, concurrency=clients)).closed_loop(row).max_prefill_delay_steps
        for clients in (32, 64, 255, 256)
    ]
    assert delays == [0, 40, 40, 0]


def test_runs_of_others_with_the_lengths_of_inferencex_have_fixed_lengths() -> None:
    run = replace(ROW, run_id="2026_04_06_llama_3_1_70b_h100_sxm_vllm_fp8_agg_1024x1024_c4_tp4_1")
    of_database = replace(run, run_id="llama_h100_vllm_fp8_agg_1024x1024_c4_cfg494")
    assert recipe_of(run) == recipe_of(of_database) == recipe_of(ROW)
    other = replace(run, run_id="qwen_qwen3_32b_h100_sxm_vllm_agg_1024x1024_c4_tp4_epnone_1")
    assert not recipe_of(other).is_published
    assert {length.prompt_tokens for length in recipe_of(other).draw_lengths(other)} == {1024}


def test_inferencex_unpacks_experts_in_4_bits_on_hopper() -> None:
    row = replace(ROW, model="openai/gpt-oss-120b", weights=Dtype.FP4, experts=Dtype.FP4)
    assert recipe_of(row).experts is Dtype.INT4
    assert recipe_of(replace(row, system="b200_sxm")).experts is None
    assert recipe_of(replace(row, output_tokens=500)).experts is None


def test_tensorrt_quantizes_in_other_kernels_where_checkpoints_have_scales() -> None:
    row = replace(ROW, backend="trtllm", system="h200_sxm")
    assert recipe_of(row).fuses_quantization
    assert (
        only([row]).tpot.predicted_s
        < 0.98 * only([replace(row, run_id="own_epnone_1")]).tpot.predicted_s
    )
    for other in (
        replace(row, backend="vllm"),
        replace(row, weights=Dtype.BF16),
        replace(row, model="deepseek-ai/DeepSeek-R1"),
        replace(row, output_tokens=500),
    ):
        assert not recipe_of(other).fuses_quantization


@pytest.mark.parametrize(
    ("version", "output_tokens", "host"),
    [
        ("0.12.0", 512, "vllm (synchronous)"),
        ("0.12.0", 1024, "vllm"),  # InferenceX asks for overlapped steps
        ("0.14.0", 512, "vllm"),
        ("1.0.0rc3", 512, "vllm"),
        ("", 512, "vllm"),
        ("nightly", 512, "vllm"),
    ],
)
def test_whether_host_code_waits_for_steps_is_told_by_version_and_recipe(
    version: str, output_tokens: int, host: str
) -> None:
    row = replace(ROW, version=version, output_tokens=output_tokens)
    assert host_of(row) == host
    assert host_of(replace(row, backend="sglang")) == "sglang"


def test_modes_of_host_code_differ_in_steps_and_share_the_rest() -> None:
    waiting = [
        replace(row, version="0.12.0", run_id="own_epnone_1", tpot_s=row.tpot_s + 0.002)
        for row in ROWS
    ]
    calibrations = calibrate_engines([*ROWS, *waiting])
    overlapped, synchronous = (calibrations[host] for host in ("vllm", "vllm (synchronous)"))
    step_s = synchronous.efficiency.step_s - overlapped.efficiency.step_s
    assert 0.001 < step_s < 0.0025
    for shared in ("prefill_layer_s", "gemm_narrow"):
        assert getattr(synchronous.efficiency, shared) == pytest.approx(
            getattr(overlapped.efficiency, shared)
        )
    assert synchronous.first_token_overhead_s == overlapped.first_token_overhead_s


def test_a_host_takes_the_calibration_of_its_other_mode_without_the_wait_for_steps() -> None:
    waiting = [replace(row, version="0.12.0", run_id="own_epnone_1") for row in ROWS]
    synchronous, overlapped = calibrate_engines(waiting), calibrate_engines(ROWS)
    assert (set(synchronous), set(overlapped)) == ({"vllm (synchronous)"}, {"vllm"})
    own = overlapped["vllm"].efficiency
    borrowed = calibration_of("vllm (synchronous)", overlapped)
    assert borrowed is not None
    assert borrowed.efficiency == replace(own, request_s=own.request_s + 20e-6)
    returned = calibration_of("vllm", {"vllm (synchronous)": borrowed})
    assert returned is not None
    assert returned.efficiency.request_s == pytest.approx(own.request_s)
    assert calibration_of("vllm", synchronous) is not None
    assert calibration_of("sglang", synchronous) is None


def test_a_step_that_host_code_waits_for_takes_longer_without_a_calibration_too() -> None:
    waiting = replace(ROW, version="0.12.0", run_id="own_epnone_1", concurrency=64)
    overlapping = replace(waiting, version="0.14.0")
    longer = only([waiting]).tpot.predicted_s - only([overlapping]).tpot.predicted_s
    assert longer == pytest.approx(64 * 20e-6, rel=0.2)


def test_tensorrt_rows_wait_to_gather_where_their_script_says_so() -> None:
    row = replace(ROW, backend="trtllm")
    assert recipe_of(row).closed_loop(row).max_prefill_delay_steps == 20
    for other in (replace(row, tp=8), replace(row, output_tokens=8192)):
        assert recipe_of(other).closed_loop(other).max_prefill_delay_steps == 0


def test_sweeps_of_equal_lengths_begin_at_once_with_the_budget_of_their_engine() -> None:
    row = replace(ROW, prompt_tokens=4096, output_tokens=512, concurrency=16)
    loops = {
        engine: recipe_of(replace(row, backend=engine)).closed_loop(row)
        for engine in ("vllm", "trtllm", "sglang")
    }
    assert {engine: loop.max_batched_tokens for engine, loop in loops.items()} == {
        "vllm": 4096 + 16,
        "trtllm": 2 * 4096 + 16,
        "sglang": 8192,
    }
    assert [engine for engine, loop in loops.items() if not loop.mixes_steps] == ["sglang"]
    assert [engine for engine, loop in loops.items() if loop.prepares_ahead] == ["sglang"]
    assert {length.output_tokens for length in recipe_of(row).draw_lengths(row)} == {512}
    assert not recipe_of(row).is_published


def test_tensorrt_s_first_sweep_keeps_fp8_and_waits_for_memory() -> None:
    row = replace(
        ROW, backend="trtllm", model="Qwen/Qwen3-32B", tp=1, prompt_tokens=2048, output_tokens=512
    )
    assert recipe_of(row).kv is Dtype.FP8
    assert recipe_of(replace(row, weights=None)).kv is Dtype.BF16
    fits, full = (
        evaluate_rows([replace(row, concurrency=clients)]).evaluated[0].ttft.predicted_s
        for clients in (96, 128)
    )
    assert full > 2 * fits


def test_frontends_of_sweeps_bound_the_tokens_of_all_clients() -> None:
    row = replace(ROW, model=SMALL, prompt_tokens=4096, output_tokens=512)
    times = {
        engine: recipe_of(replace(row, backend=engine)).closed_loop(row).frontend_token_s
        for engine in ("vllm", "trtllm", "sglang")
    }
    assert times == {"vllm": 0.0, "trtllm": 80e-6, "sglang": 48e-6}
    later = replace(row, backend="trtllm", prompt_tokens=4000)
    assert recipe_of(later).closed_loop(later).frontend_token_s == 0.0
    many = replace(row, backend="sglang", tp=8, concurrency=512, prompt_tokens=1000)
    seen = evaluate_rows([many]).evaluated[0]
    request_s = seen.ttft.predicted_s + 511 * seen.tpot.predicted_s
    assert 512 * 512 / request_s < 1 / 48e-6


def test_prompts_of_later_sweeps_repeat_but_not_under_sglang_or_with_windows() -> None:
    row = replace(ROW, prompt_tokens=4000, output_tokens=1000, concurrency=32)
    lengths = recipe_of(row).draw_lengths(row)
    # Two of each client warm up, with the first of the prompts.
    left = 100 - 2 * row.concurrency
    assert [length.cached_tokens for length in lengths[:left]] == [0] * left
    assert {length.cached_tokens for length in lengths[left:]} == {4000 - 16}
    crowd = replace(row, concurrency=64)
    assert all(length.cached_tokens for length in recipe_of(crowd).draw_lengths(crowd))
    # Rows of TensorRT-LLM show no warm-up, and keys and values in FP8.
    other_engine = replace(crowd, backend="trtllm")
    recipe = recipe_of(other_engine)
    cached = [each.cached_tokens > 0 for each in recipe.draw_lengths(other_engine)]
    assert cached == [False] * 100 + [True] * 540
    assert (recipe.kv, recipe_of(replace(other_engine, weights=None)).kv) == (Dtype.FP8, Dtype.BF16)
    for other in (
        replace(row, backend="sglang"),
        replace(row, backend="trtllm", model="openai/gpt-oss-120b"),
        replace(row, prompt_tokens=4096),
    ):
        assert not any(each.cached_tokens for each in recipe_of(other).draw_lengths(other))


def test_one_model_s_sweep_has_a_waiting_client() -> None:
    row = replace(ROW, backend="trtllm", output_tokens=128, concurrency=16)
    assert recipe_of(row).closed_loop(row).max_running_requests == 16
    small = replace(row, model="meta-llama/Llama-3.1-8B-Instruct")
    assert recipe_of(small).closed_loop(small).max_running_requests == 15


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


# ---------- readers of what others have measured: what is read, and what is said of bad lines
HEADER = (
    "backend,backend_version,model_path,system,precision,mode,isl,osl,gemm_quant_mode,"
    "moe_quant_mode,tp_size,pp_size,silicon_ttft_ms,silicon_tpot_ms,concurrency"
)
GOOD = "vllm,0.12,meta-llama/Llama-3.1-70B,h100_sxm,fp8,agg,1024,512,fp8,,2,1,121.5,17.4,4"


def test_a_row_is_read_with_its_units() -> None:
    (row,), skipped = read_rows([HEADER, GOOD], "rows.csv")
    assert skipped == 0
    assert (row.ttft_s, row.tpot_s) == pytest.approx((0.1215, 0.0174))
    assert (row.prompt_tokens, row.output_tokens, row.concurrency) == (1024, 512, 4)
    assert (row.tp, row.pp, row.weights, row.disaggregated) == (2, 1, Dtype.FP8, False)
    assert (row.line, row.name) == (2, "vllm Llama-3.1-70B h100_sxm tp2 1024/512 c4")


POOLS_HEADER = (
    HEADER + ",attention_dp_size,moe_ep_size,prefill_num_workers,prefill_tp_size,decode_num_workers"
    ",decode_tp_size,decode_attention_dp_size,decode_moe_ep_size"
)
POOLS = (
    "sglang,0.5,deepseek-ai/DeepSeek-R1,h100_sxm,fp8,disagg,1024,1024,fp8,fp8_block,,,211,9.1,1"
    ",,,2,16,1,8,2,16"
)


def test_a_disaggregated_row_is_read_with_its_workers() -> None:
    (row,), _ = read_rows([POOLS_HEADER, POOLS], "rows.csv")
    assert row.disaggregated
    assert row.pools is not None
    assert (row.pools.prefill_workers, row.pools.prefill) == (2, WorkerLayout(tp=16))
    assert (row.pools.decode_workers, row.pools.decode) == (1, WorkerLayout(tp=8, dp=2, ep=16))
    assert row.pools.decode.devices == 16


def test_clients_of_pools_are_those_that_decode_where_they_are_not_said() -> None:
    without = POOLS.replace("fp8_block,,,211,9.1,1,", "fp8_block,,,211,9.1,,") + ",24"
    (row,), _ = read_rows([POOLS_HEADER + ",decode_batch_size", without], "rows.csv")
    assert (row.concurrency, row.problem) == (48, "")
    (unknown,), _ = read_rows([POOLS_HEADER, without.removesuffix(",24")], "rows.csv")
    assert unknown.problem == "it does not say how many clients there were"


def test_pools_are_predicted_by_their_workers() -> None:
    (row,), _ = read_rows([POOLS_HEADER, POOLS], "rows.csv")
    crowd = replace(row, concurrency=64)
    assert crowd.pools is not None
    more = replace(crowd, pools=replace(crowd.pools, prefill_workers=4))
    alone, crowded, spread = evaluate_rows([row, crowd, more]).evaluated
    assert alone.ttft.predicted_s < crowded.ttft.predicted_s
    assert spread.ttft.predicted_s < crowded.ttft.predicted_s
    assert alone.tpot.predicted_s < crowded.tpot.predicted_s
    assert alone.tpot.predicted_s == pytest.approx(9.1e-3, rel=0.3)


def test_a_decode_pool_holds_no_more_requests_than_its_memory() -> None:
    (row,), _ = read_rows([POOLS_HEADER, POOLS], "rows.csv")
    assert row.pools is not None
    pools = replace(row.pools, prefill_workers=200)
    few, many, more = evaluate_rows(
        [replace(row, pools=pools, concurrency=clients) for clients in (300, 4000, 8000)]
    ).evaluated
    # Two ranks of eight devices hold about 450 each: all eight keep every latent.
    assert few.tpot.predicted_s < many.tpot.predicted_s
    assert more.tpot.predicted_s == pytest.approx(many.tpot.predicted_s, rel=0.01)
    # The others wait until places are free.
    decode_s = (row.output_tokens - 1) * more.tpot.predicted_s
    waited = more.ttft.predicted_s - many.ttft.predicted_s
    assert 4000 / 1000 * decode_s < waited < 4000 / 800 * decode_s


def test_prompts_of_short_answers_queue_for_a_prefill_pool() -> None:
    (row,), _ = read_rows([POOLS_HEADER, POOLS], "rows.csv")
    short = replace(row, output_tokens=128, concurrency=24)
    alone, crowded = evaluate_rows([row, short]).evaluated
    # The others that began with it delay a prompt by half of its own time.
    assert crowded.ttft.predicted_s > 2 * alone.ttft.predicted_s


def test_pools_of_unknown_workers_are_not_predicted() -> None:
    (row,), _ = read_rows([POOLS_HEADER, POOLS.replace(",2,16,1,8", ",,16,,8")], "rows.csv")
    (skipped,) = evaluate_rows([row]).skipped
    assert "does not say how many workers" in skipped.reason


@pytest.mark.parametrize(
    ("precision", "quant", "weights"),
    [("fp8", "", Dtype.FP8), ("", "", None), ("fp8", "bfloat16", Dtype.BF16)],
)
def test_the_type_of_the_products_counts_before_that_of_the_model(
    precision: str, quant: str, weights: Dtype | None
) -> None:
    line = GOOD.replace(",fp8,agg", f",{precision},agg").replace(",fp8,,2", f",{quant},,2")
    (row,), _ = read_rows([HEADER, line], "rows.csv")
    assert row.weights is weights


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (GOOD.replace("fp8,agg", "fp7,agg").replace(",fp8,,", ",,,"), "got 'fp7', expected one of"),
        (GOOD.rsplit(",", 1)[0] + ",", "how many clients"),
    ],
)
def test_a_row_with_an_unknown_type_or_no_clients_costs_itself_only(
    line: str, problem: str
) -> None:
    rows, skipped = read_rows([HEADER, GOOD, line], "rows")
    assert skipped == 0
    judgement = evaluate_rows(rows)
    assert [row.row.line for row in judgement.evaluated] == [2]
    assert problem in judgement.skipped[0].reason
    assert unfit_reason(rows[1]) == judgement.skipped[0].reason


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (GOOD.replace(",121.5,", ",soon,"), "silicon_ttft_ms is 'soon', expected a number"),
        (GOOD.replace(",17.4,", ",0,"), "silicon_tpot_ms is 0, expected more than 0"),
        (GOOD.replace(",1024,", ",0,"), "isl is '0'"),
        (GOOD.replace("meta-llama/Llama-3.1-70B", ""), "model_path is missing"),
        ("vllm,0.12", "model_path is missing: the row is too short"),
        (GOOD + ",1,2,3", "more fields than the header has columns"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_may_be_left_out(bad: str, what: str) -> None:
    lines = [HEADER, GOOD, bad, GOOD]
    with pytest.raises(TraceInvalid) as caught:
        read_rows(lines, "rows.csv")
    assert str(caught.value).startswith("rows.csv, line 3: ")
    assert what in str(caught.value)
    rows, skipped = read_rows(lines, "rows.csv", ignore_invalid=True)
    assert (len(rows), skipped) == (2, 1)


def test_a_file_without_the_columns_is_refused_even_when_bad_rows_are_left_out() -> None:
    with pytest.raises(TraceInvalid, match=r"rows.csv, line 1: no column isl, osl"):
        read_rows([HEADER.replace(",isl,osl", ""), GOOD], "rows.csv", ignore_invalid=True)


LOGGED = (
    '{"input_toks": 100, "output_toks": 11, "arrival_time": 1000.5, "queued_ts": 7.0,'
    ' "first_token_ts": 7.25, "last_token_ts": 8.25}'
)


def test_a_log_tells_what_its_requests_waited_for() -> None:
    later = LOGGED.replace("1000.5", "1002.0")
    (first, second), _ = read_request_log([later, LOGGED], "log")
    assert (first.at_s, second.at_s) == (0.0, 1.5)
    assert (first.ttft_s, first.tpot_s) == pytest.approx((0.25, 0.1))


def test_a_log_whose_times_go_back_is_bad() -> None:
    with pytest.raises(TraceInvalid, match=r"log, line 1: .* out of order"):
        read_request_log([LOGGED.replace("7.25", "9.25")], "log")
    with pytest.raises(TraceInvalid, match="holds no requests"):
        read_request_log([LOGGED.replace("7.25", "9.25")], "log", ignore_invalid=True)


def test_splitwises_curves_are_medians_of_their_kind() -> None:
    lines = [
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel",
        "bloom,h100,512,1,128,50,30,8",
        "bloom,h100,512,1,128,52,32,8",
        "bloom,h100,512,1,128,90,34,8",
        "bloom,h100,512,2,128,100,40,8",
        "bloom,a100,512,1,128,999,999,8",
        "bloom,h100,512,1,128,999,999,4",
    ]
    timing = splitwise_timing(lines, "perf", model="bloom", hardware="h100", tp=8)
    assert timing.step_s(StepBatch(prefill_tokens=512)) == pytest.approx(0.052)
    assert timing.step_s(StepBatch(prefill_tokens=768)) == pytest.approx(0.076)
    assert timing.step_s(StepBatch(decode_requests=2)) == pytest.approx(0.040)
    with pytest.raises(TraceInvalid, match="no rows of bloom on b200 with tensor_parallel 8"):
        splitwise_timing(lines, "perf", model="bloom", hardware="b200", tp=8)


FITS = (
    '{"opt": {"2": {"decoding_large_small_bs_threshold": 95, "prefill": [1, 2, 3],'
    ' "decoding_smallbs": [4, 5, 6], "decoding_largebs": [7, 8, 9]}}}'
)


def test_distserves_coefficients_are_found_by_model_and_parallelism() -> None:
    timing = distserve_timing(FITS, "fits", model="opt", tp=2, pp=3)
    assert (timing.prefill, timing.small_batch, timing.large_batch) == (
        (1, 2, 3),
        (4, 5, 6),
        (7, 8, 9),
    )
    assert (timing.large_batch_requests, timing.pipeline_stages) == (95, 3)


@pytest.mark.parametrize("text", [FITS, "{", '{"opt": {"4": {}}}', FITS.replace("1, 2, 3", "1")])
def test_coefficients_that_are_not_there_are_named(text: str) -> None:
    with pytest.raises(TraceInvalid, match=r"fits: (no coefficients of opt at tp|1 coefficients)"):
        distserve_timing(text, "fits", model="opt", tp=4 if text == FITS else 2, pp=1)


def test_a_layer_profile_is_three_tables() -> None:
    parts = "layernorm qkv_proj rotary_emb o_proj gate_up_proj act_fn down_proj"
    names = [*parts.split(), "embedding", "final_layernorm"]
    profile = layer_profile(
        ["layer,tokens,time_us", *(f"{name},{n},10" for name in names for n in (1, 100))],
        [
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us",
            "0,0,1,16,5",
            "0,0,2,16,7",
            "64,0,0,0,20",
            "128,0,0,0,40",
        ],
        ["layer,sequences,time_us", "lm_head,1,100", "sampler,1,50"],
        layers=2,
    )
    decode = StepBatch(decode_requests=2, decode_context_tokens=32)
    overhead_s = profile.step_overhead_s
    assert profile.step_s(decode) - overhead_s == pytest.approx((2 * 80 + 20 + 14 + 150) * 1e-6)
    prompt = StepBatch(prefill_tokens=96, prefill_requests=1, prefill_pairs=attention_pairs(96, 0))
    assert profile.step_s(prompt) - overhead_s == pytest.approx((2 * 80 + 20 + 60) * 1e-6)


# ---------- rows that no device could have computed are told from those that are only good
PLAUSIBILITY_ROW = MeasuredRow(
    line=2,
    backend="vllm",
    version="0.12.0",
    model="nvidia/Llama-3.1-8B-Instruct-FP8",
    system="h200_sxm",
    weights=Dtype.FP8,
    experts=None,
    disaggregated=False,
    prompt_tokens=1000,
    output_tokens=100,
    tp=1,
    pp=1,
    concurrency=112,
    ttft_s=0.0719,
    tpot_s=0.01125,
)
"""94.5 requests a second of 1,099 tokens through 7 billion parameters: 1.45 PFLOP/s of 1.98, and
112 clients' keys and values are read besides."""


def test_a_row_that_implies_more_than_the_device_can_compute_is_told() -> None:
    share = busy_fractions(PLAUSIBILITY_ROW)
    assert share.products == pytest.approx(94.5 * 1099 * 2 * 6.98e9 / (0.85 * 1.979e15), rel=0.02)
    assert share.kv_reads == pytest.approx(94.5 * 100 * 1050 * 65_536 / 4.8e12, rel=0.02)
    assert share.links == 0
    said = implausible_reason(PLAUSIBILITY_ROW)
    assert said is not None
    assert "more than its devices can compute" in said
    assert f"{share.total:.0%}" in said


@pytest.mark.parametrize(
    "slower",
    [
        replace(PLAUSIBILITY_ROW, tpot_s=0.0125),
        replace(PLAUSIBILITY_ROW, ttft_s=0.4),
        replace(PLAUSIBILITY_ROW, concurrency=80),
    ],
)
def test_the_same_row_a_little_slower_can_be(slower: MeasuredRow) -> None:
    assert implausible_reason(slower) is None


def test_reading_the_weights_faster_than_memory_is_impossible() -> None:
    row = replace(
        PLAUSIBILITY_ROW, model="meta-llama/Llama-3.1-70B", concurrency=1, prompt_tokens=8
    )
    assert busy_fractions(replace(row, tpot_s=0.015)).products == pytest.approx(
        68.5e9 / 0.015 / 4.8e12, rel=0.01
    )
    assert implausible_reason(replace(row, tpot_s=0.015)) is None
    assert implausible_reason(replace(row, tpot_s=0.014)) is not None


def test_devices_of_a_group_compute_together_and_send_each_number_once() -> None:
    alone, group = busy_fractions(PLAUSIBILITY_ROW), busy_fractions(replace(PLAUSIBILITY_ROW, tp=4))
    assert group.products == pytest.approx(alone.products / 4)
    assert group.kv_reads == pytest.approx(alone.kv_reads / 4)
    assert group.links == pytest.approx(94.5 * 1099 * 2 * 32 * 4096 * 2 / 450e9, rel=0.02)


def test_attention_grows_with_the_square_of_prompts() -> None:
    long = replace(PLAUSIBILITY_ROW, prompt_tokens=8000, output_tokens=2, tpot_s=0.01, ttft_s=1.0)
    longer = replace(long, prompt_tokens=16_000)
    assert busy_fractions(longer).attention == pytest.approx(
        4 * busy_fractions(long).attention, rel=0.01
    )
    assert busy_fractions(long).attention == pytest.approx(
        112 / 1.01 * 4 * 32 * 4096 * 8000**2 / 2 / (0.8 * 1.979e15), rel=0.01
    )


def test_random_lengths_count_as_their_mean() -> None:
    fixed = replace(
        PLAUSIBILITY_ROW, prompt_tokens=1025, output_tokens=1024, tpot_s=0.05, ttft_s=0.01
    )
    varied = replace(fixed, prompt_tokens=1024)
    # Little's law: shorter requests end sooner, so there are as many tokens a second.
    assert busy_fractions(varied).products == pytest.approx(
        busy_fractions(fixed).products, rel=0.01
    )
    assert busy_fractions(varied).kv_reads == pytest.approx(
        0.9 * busy_fractions(fixed).kv_reads, rel=0.01
    )


# ---------- tables of kernel times: which rows count, and what is said when they cannot be read
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_products_of_models_one_would_serve_are_compared(tmp_path: Path) -> None:
    row = {"gemm_dtype": "bfloat16", "m": 4096, "n": 10240, "k": 8192, "latency": 0.8763}
    rows = [
        row,
        row | {"gemm_dtype": "fp8", "latency": 0.5956},
        row | {"n": 64},
        row | {"gemm_dtype": "fp8_block"},
        row | {"k": 51200},
    ]
    found = compare_products(table(tmp_path / "gemm.parquet", rows), H100)
    assert [residual.name for residual in found] == [
        "bfloat16 4096x10240x8192",
        "fp8 4096x10240x8192",
    ]
    assert all(abs(residual.error) < 0.1 for residual in found)


def test_all_reduces_in_graphs_are_compared_by_their_bytes(tmp_path: Path) -> None:
    row = {"backend": "vllm_graph", "num_gpus": 8, "message_size": 67108864, "latency": 0.5774}
    rows = [
        row,
        row | {"message_size": 128, "latency": 0.0047},
        row | {"backend": "vllm_eager"},
    ]
    found = compare_all_reduces(table(tmp_path / "reduce.parquet", rows), H100)
    assert [residual.name for residual in found] == ["8 x 134217728 bytes", "8 x 256 bytes"]
    assert found[0].error == pytest.approx(0.32, abs=0.05)
    assert found[1].error == pytest.approx(0.13, abs=0.05)


def test_attention_of_prompts_and_of_decodes_is_compared(tmp_path: Path) -> None:
    row = {
        "op_name": "context_attention",
        "batch_size": 1,
        "isl": 8192,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "kv_cache_dtype": "bfloat16",
        "step": 0,
        "window_size": 0,
        "latency": 0.912,
    }
    decode = row | {"op_name": "generation_attention", "batch_size": 32, "isl": 1, "step": 4095}
    rows = [
        row,
        decode | {"latency": 0.1859},
        decode | {"latency": 0.114, "kv_cache_dtype": "fp8"},
        row | {"window_size": 128},
        row | {"head_dim": 64},
        row | {"num_heads": 12},
    ]
    found = attention_observations(table(tmp_path / "attention.parquet", rows), H100)
    assert len(found) == 3
    for measurement in found:
        assert sum(measurement.parts) == pytest.approx(measurement.measured_s, rel=0.12)


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gemm.parquet"
    path.write_text("no parquet")
    with pytest.raises(TraceInvalid, match=r"gemm\.parquet: not a parquet table"):
        compare_products(path, H100)
    with pytest.raises(TraceInvalid, match="no column gemm_dtype, k, latency"):
        compare_products(table(path, [{"m": 1, "n": 2}]), H100)


def test_without_pyarrow_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        PreflightFailed, match=r"needs pyarrow: run pip install 'baton-llm\[report\]'"
    ):
        compare_products(tmp_path / "gemm.parquet", H100)
