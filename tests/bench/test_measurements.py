"""Readers of what others have measured: what is read, and what is said of bad lines."""

from __future__ import annotations

import pytest

from baton.bench.accuracy.measurements import (
    distserve_timing,
    layer_profile,
    read_request_log,
    read_rows,
    splitwise_timing,
)
from baton.domain.errors import TraceInvalid
from baton.perf.hardware.accelerators import Dtype
from baton.perf.step_timing import StepBatch, attention_pairs

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
    ("bad", "what"),
    [
        (GOOD.replace(",121.5,", ",soon,"), "silicon_ttft_ms is 'soon', expected a number"),
        (GOOD.replace(",17.4,", ",0,"), "silicon_tpot_ms is 0, expected more than 0"),
        (GOOD.replace(",1024,", ",0,"), "isl is '0'"),
        (GOOD.replace("fp8,agg", "fp7,agg").replace(",fp8,,", ",,,"), "is 'fp7', expected one of"),
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
