"""Rows of layouts, names and values that few benchmarks have: each is read as it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.bench.accuracy.accuracy import EvaluatedRow, evaluate_rows
from baton.bench.accuracy.measurements import MeasuredRow, WorkerLayout, read_rows
from baton.bench.accuracy.recipes import product_dtype, recipe_of, stored_shape, weight_dtype
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.known_models import find_shape

ROW = {
    "id": "2026_03_25_deepseek_r1_8",
    "silicon_data_source": "source_file=runs.csv; wip=False",
    "backend": "sglang",
    "backend_version": "0.5.9",
    "model_path": "deepseek-ai/DeepSeek-R1-0528",
    "system": "b200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "gemm_quant_mode": "fp8_block",
    "moe_quant_mode": "fp8_block",
    "tp_size": "8",
    "attention_dp_size": "1",
    "moe_tp_size": "8",
    "moe_ep_size": "1",
    "silicon_ttft_ms": "300",
    "silicon_tpot_ms": "14",
    "concurrency": "16",
}
"""InferenceX, DeepSeek-R1 on eight B200."""
RANKS = {"tp_size": "1", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}
"""Eight ranks of data-parallel attention."""


def read(**columns: str) -> MeasuredRow:
    fields = {**ROW, **columns}
    (row,), _ = read_rows([",".join(fields), ",".join(fields.values())], "rows.csv")
    return row


def predict(row: MeasuredRow) -> EvaluatedRow:
    judgement = evaluate_rows([row])
    assert [skipped.reason for skipped in judgement.skipped] == []
    return judgement.evaluated[0]


@pytest.mark.parametrize("backend", ["sglang", "trtllm", "vllm"])
@pytest.mark.parametrize("system", ["h200_sxm", "b200_sxm", "gb200"])
def test_ranks_that_share_experts_are_predicted_wherever_one_engine_is(
    backend: str, system: str
) -> None:
    ranks = predict(read(backend=backend, system=system, **RANKS))
    one = predict(read(backend=backend, system=system))
    assert 0.5 < ranks.tpot.predicted_s / one.tpot.predicted_s < 2


def test_a_measured_engine_had_room_for_its_activations() -> None:
    one = {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "backend": "vllm"}
    sizes = {"tp_size": "1", "moe_tp_size": "1", "isl": "17", "osl": "2", "concurrency": "4096"}
    types = {"gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16"}
    # The logits of 4,096 requests are estimated at 15 GB, beside weights of 66 GB.
    row = read(**one, **sizes, **types)
    assert predict(row).ttft.predicted_s > predict(replace(row, tp=2)).ttft.predicted_s
    (too_large,) = evaluate_rows([replace(row, model="meta-llama/Llama-3.1-70B")]).skipped
    assert "with its weights it needs" in too_large.reason


def test_ranks_of_sglang_share_one_chunk() -> None:
    (one, ranks) = (recipe_of(row).closed_loop(row) for row in (read(), read(**RANKS)))
    assert one.max_batched_tokens == ranks.max_batched_tokens == 32768
    others = read(**RANKS, isl="1000")
    assert recipe_of(others).closed_loop(others).max_batched_tokens == 8192
    tensorrt = read(**RANKS, backend="trtllm")
    assert recipe_of(tensorrt).closed_loop(tensorrt).max_batched_tokens == 8 * 8192


def test_only_prompts_of_dense_models_wait_for_a_batch_on_few_devices() -> None:
    four = {"tp_size": "4", "moe_tp_size": "4", "backend": "trtllm"}
    dense = read(**four, model_path="meta-llama/Llama-3.3-70B-Instruct")
    assert recipe_of(dense).gather_steps == 20
    for experts in ("Qwen/Qwen3-235B-A22B-FP8", "MiniMaxAI/MiniMax-M2.5"):
        assert recipe_of(read(**four, model_path=experts)).gather_steps == 0
        assert recipe_of(read(**{**four, **RANKS}, model_path=experts)).gather_steps == 0


@pytest.mark.parametrize(
    ("columns", "layout"),
    [
        (RANKS, WorkerLayout(tp=1, dp=8, ep=8)),
        ({**RANKS, "tp_size": "8"}, WorkerLayout(tp=1, dp=8, ep=8)),
        ({**RANKS, "tp_size": "8", "attention_dp_size": "4"}, WorkerLayout(tp=2, dp=4, ep=8)),
        ({**RANKS, "tp_size": "2", "moe_ep_size": "16"}, WorkerLayout(tp=2, dp=8, ep=16)),
        ({**RANKS, "attention_dp_size": ""}, WorkerLayout(tp=1, dp=8, ep=8)),
        ({"moe_tp_size": "4", "moe_ep_size": "2"}, WorkerLayout(tp=8, dp=1, ep=2)),
        ({**RANKS, "moe_tp_size": "0", "moe_ep_size": "0"}, WorkerLayout(tp=1, dp=8, ep=1)),
    ],
)
def test_devices_of_attention_are_those_of_the_experts(
    columns: dict[str, str], layout: WorkerLayout
) -> None:
    assert read(**columns).layout == layout


def test_prefill_ranks_that_compute_at_once_share_the_experts() -> None:
    pools = {
        f"{pool}_{column}": value
        for pool in ("prefill", "decode")
        for column, value in {**RANKS, "num_workers": "1"}.items()
    }
    row = read(mode="disagg", isl="8192", concurrency="1024", **pools)
    assert row.pools is not None
    # One rank alone takes 0.5 s for a prompt, eight at once 1.5 s. Eight devices that compute one
    # prompt after another take 2.0 s for eight.
    one = replace(row, pools=replace(row.pools, prefill=WorkerLayout(tp=8, ep=8)))
    assert 0.4 < predict(row).ttft.predicted_s / predict(one).ttft.predicted_s < 1


@pytest.mark.parametrize(
    ("columns", "plain"),
    [
        ({"backend": "SGLang"}, {}),
        ({"backend": "dynamo-sglang"}, {}),
        ({"backend": "TRT"}, {"backend": "trtllm"}),
        ({"backend": "tensorrt_llm"}, {"backend": "trtllm"}),
        ({"system": "B200"}, {}),
        ({"system": "H200"}, {"system": "h200_sxm"}),
        ({"mode": "AGG"}, {}),
        (
            {"backend": "vllm", "backend_version": "v0.12.0"},
            {"backend": "vllm", "backend_version": "0.12.0"},
        ),
        ({"moe_quant_mode": "None", "attention_dp_size": "nan"}, {"moe_quant_mode": ""}),
        ({"tp_size": "8.0", "concurrency": "16.0"}, {}),
        ({"spec_decoding": "none"}, {}),
        ({"silicon_data_source": "wip=False; mtp=0"}, {}),
    ],
)
def test_spellings_of_one_run_are_one_row(columns: dict[str, str], plain: dict[str, str]) -> None:
    odd, row = read(**columns), read(**plain)
    assert odd == row
    assert recipe_of(odd) == recipe_of(row)


@pytest.mark.parametrize(
    "columns",
    [
        {"spec_decoding": "mtp"},
        {"nextn": "3"},
        {"silicon_data_source": "source_file=runs.csv; spec_decoding=eagle"},
        {"id": "2026_03_25_deepseek_r1_mtp_8"},
    ],
)
def test_speculative_decoding_is_not_predicted_as_if_there_were_none(
    columns: dict[str, str],
) -> None:
    (skipped,) = evaluate_rows([read(**columns)]).skipped
    assert "speculative decoding" in skipped.reason
    assert any(value in skipped.reason or "eagle" in skipped.reason for value in columns.values())


@pytest.mark.parametrize("run", ["2026_03_25_deepseek_r1_mtp0_8", "2026_03_25_specialist_8"])
def test_a_run_whose_name_says_that_it_did_not_speculate_is_predicted(run: str) -> None:
    assert not evaluate_rows([read(id=run)]).skipped


@pytest.mark.parametrize("count", ["", "0", "nan"])
def test_pools_of_an_unknown_number_of_workers_cost_their_row_only(count: str) -> None:
    pools = {"prefill_tp_size": "4", "decode_tp_size": "8", "decode_num_workers": "1"}
    row = read(**pools, mode="disagg", prefill_num_workers=count)
    assert "does not say how many workers" in evaluate_rows([row]).skipped[0].reason


def test_a_folder_of_a_model_is_read_as_its_name() -> None:
    assert find_shape("/models/DeepSeek-R1-0528/") == find_shape("deepseek-ai/DeepSeek-R1-0528")


def test_products_keep_their_own_type_beside_packed_experts() -> None:
    packed = {"moe_quant_mode": "nvfp4"}
    assert product_dtype(read(**packed)) is Dtype.FP8
    assert weight_dtype(read(**packed)) is Dtype.FP4
    both = read(**packed, gemm_quant_mode="nvfp4")
    assert product_dtype(both) is Dtype.FP4
    narrow, wide = (predict(read(**packed, gemm_quant_mode=name)) for name in ("fp8", "bfloat16"))
    assert narrow.tpot.predicted_s != wide.tpot.predicted_s
    assert predict(both).tpot.predicted_s == wide.tpot.predicted_s


def test_a_checkpoint_in_4_bits_weighs_the_same_under_each_name() -> None:
    packed = {"gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4"}
    named = read(**packed, model_path="nvidia/DeepSeek-R1-0528-FP4-v2")
    plain = read(**packed)
    assert stored_shape(named).stored == stored_shape(plain).stored
    assert stored_shape(read()) == find_shape(read().model)
    in_int4 = read(model_path="moonshotai/Kimi-K2.5", moe_quant_mode="int4_wo")
    assert stored_shape(in_int4) == find_shape(in_int4.model)


def test_kernels_that_stand_for_others_are_named() -> None:
    rows = [read(), read(system="b300_sxm"), read(backend="trtllm"), read(system="mi300x")]
    assert evaluate_rows(rows).stand_ins() == (
        "sglang on b300_sxm: kernels of sglang on b200_sxm, scaled by data sheets",
        "sglang on mi300x: no kernels were measured: times are by data sheets",
        "trtllm on b200_sxm: kernels of vllm on b200_sxm",
    )
