"""`baton size` as people and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from baton.cli.model.size import prefill_s
from baton.perf.step_timing import StepBatch
from tests.cli.invoked import run_baton

LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
TINY = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}


def run(*arguments: str) -> Result:
    return run_baton("size", *arguments)


def answered(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert isinstance(report, dict)
    return report


def test_people_get_each_term_with_its_unit() -> None:
    result = run(LLAMA_70B, "--gpu", "H100", "--tp", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:6] == [
        "model: meta-llama/Llama-3.1-70B, 70.6 billion parameters, bf16",
        "devices: 4 (tp 4, pp 1) h100_sxm",
        "memory of each device:",
        "  usable: 76.38 GB",
        "  weights: 35.28 GB",
        "  activations: 0.79 GB",
    ]
    assert any(line.startswith("KV cache: ") and "327,680 bytes" in line for line in lines)
    assert "smallest that fits: 2 (tp 2, pp 1)" in lines
    assert any("if heads did not share keys and values" in line for line in lines)
    assert any(line.startswith("prefill of 8,192 tokens: ") for line in lines)


def test_scripts_get_bytes_tokens_and_seconds() -> None:
    report = answered(LLAMA_70B, "--gpu", "H100", "--tp", "4")
    assert report["fits"] is True
    assert (report["weights"], report["kv"]) == ("bf16", "bf16")
    assert report["kv_token_bytes"] == 327_680
    device = report["device"]
    assert isinstance(device, dict)
    terms = ("weights_bytes", "activation_bytes", "runtime_bytes", "kv_bytes")
    assert sum(device[term] for term in terms) == pytest.approx(device["usable_bytes"])
    tokens = report["kv_tokens"]
    assert isinstance(tokens, int)
    assert report["kv_blocks"] == tokens // 16
    assert report["concurrent_requests"] == pytest.approx(tokens / 8192)
    assert report["smallest"] == {"tp": 2, "pp": 1}


def test_a_batch_takes_longer_than_one_request_and_no_more_run_than_may() -> None:
    report = answered(LLAMA_70B, "--gpu", "H100", "--tp", "4", "--max-num-seqs", "7")
    seconds = report["seconds"]
    assert isinstance(seconds, dict)
    assert seconds["running"] == 7
    assert 0 < seconds["decode_step_s"] < seconds["full_decode_step_s"] < seconds["prefill_s"]


def test_a_long_prompt_is_computed_in_chunks_and_takes_longer() -> None:
    def prefill_s(*arguments: str) -> float:
        seconds = answered(LLAMA_70B, "--gpu", "H100", "--tp", "8", *arguments)["seconds"]
        assert isinstance(seconds, dict)
        return float(seconds["prefill_s"])

    whole = prefill_s("--context", "10000", "--max-num-batched-tokens", "16384")
    chunked = prefill_s("--context", "10000", "--max-num-batched-tokens", "1024")
    assert prefill_s("--context", "5000") < whole / 1.9
    assert whole < chunked < 2 * whole


class Recorder:
    """A timing in which each step takes a second; keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def step_s(self, batch: StepBatch) -> float:
        self.batches.append(batch)
        return 1.0


def test_each_chunk_of_a_prompt_attends_to_those_before_it_and_the_last_one_ends_it() -> None:
    timing = Recorder()
    assert prefill_s(timing, 10, 4) == 3.0
    assert [batch.prefill_tokens for batch in timing.batches] == [4, 4, 2]
    assert [batch.prefill_context_tokens for batch in timing.batches] == [0, 4, 8]
    assert sum(batch.prefill_pairs for batch in timing.batches) == 10 * 11 / 2
    assert [batch.finished_prefills for batch in timing.batches] == [0, 0, 1]


def test_a_model_that_does_not_fit_is_refused_with_the_smallest_shape_that_does() -> None:
    result = run("meta-llama/Llama-3.1-405B", "--gpu", "H100", "--tp", "8")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "error: meta-llama/Llama-3.1-405B at tp 8, pp 1 does not fit h100_sxm: with its weights it"
        " needs 101.46 GB of each device, of which 76.38 GB are usable: 25.08 GB too much\n"
        "next: the smallest that fits is tp 8, pp 2\n"
    )


def test_scripts_read_from_stdout_why_a_model_does_not_fit() -> None:
    result = run("meta-llama/Llama-3.1-405B", "--gpu", "H100", "--tp", "8", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["fits"], report["term"]) == (False, "weights")
    assert report["over_bytes"] == pytest.approx(25.08e9, rel=1e-3)
    assert report["smallest"] == {"tp": 8, "pp": 2}


def test_a_context_that_the_kv_cache_does_not_hold_is_refused() -> None:
    fits = ("llama-3.1-8b", "--gpu", "rtx4090", "--context", "40000")
    assert run(*fits).exit_code == 0
    result = run("llama-3.1-8b", "--gpu", "rtx4090", "--context", "60000")
    assert result.exit_code == 1
    assert "KV cache of 60000 tokens" in result.stderr


def test_a_window_makes_room_for_a_longer_context() -> None:
    """Half of the layers keep 128 tokens: 131,072 of them take what 65,600 in full take."""
    arguments = ("openai/gpt-oss-120b", "--gpu", "H100", "--context", "131072")
    report = answered(*arguments)
    tokens = report["kv_tokens"]
    assert isinstance(tokens, int)
    assert 65_600 < tokens < 131_072


@pytest.mark.parametrize(
    ("arguments", "weights", "kv"),
    [
        (("meta-llama/Llama-3.1-70B-FP8",), "fp8", "bf16"),
        (("meta-llama/Llama-3.1-70B-FP8", "--dtype", "bfloat16"), "bf16", "bf16"),
        (("meta-llama/Llama-3.1-70B", "--dtype", "fp8_e4m3", "--kv-dtype", "fp8"), "fp8", "fp8"),
        (("meta-llama/Llama-3.1-70B", "--dtype", "half"), "fp16", "fp16"),
        (("openai/gpt-oss-120b",), "fp4", "bf16"),
    ],
)
def test_types_come_from_the_options_or_from_the_name(
    arguments: tuple[str, ...], weights: str, kv: str
) -> None:
    report = answered(*arguments, "--gpu", "H200", "--tp", "2")
    assert (report["weights"], report["kv"]) == (weights, kv)


@pytest.mark.parametrize("option", ["--dtype", "--kv-dtype"])
def test_a_type_that_is_none_is_a_usage_error(option: str) -> None:
    result = run(LLAMA_70B, "--gpu", "H100", option, "fp77")
    assert result.exit_code == 2
    assert "fp77" in result.stderr


def test_utilization_changes_what_is_usable() -> None:
    def usable(utilization: str) -> float:
        device = answered("llama-3.1-8b", "--gpu", "H100", "--utilization", utilization)["device"]
        assert isinstance(device, dict)
        return float(device["usable_bytes"])

    assert usable("0.45") == pytest.approx(usable("0.9") / 2)


@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_a_model_is_read_from_its_config(tmp_path: Path, *, as_folder: bool) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    report = answered(str(tmp_path if as_folder else path), "--gpu", "L4")
    assert (report["model"], report["weights"]) == (str(path), "fp16")
    assert report["parameters"] == pytest.approx(1.1e9, rel=0.01)
    assert report["context_tokens"] == 2048


def test_an_encoder_whose_weights_are_not_counted_is_named(tmp_path: Path) -> None:
    config = {"text_config": TINY, "vision_config": {"hidden_size": 1024}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert answered(str(tmp_path), "--gpu", "L4")["left_out"] == ["the vision encoder"]
    assert "not counted: the vision encoder" in run(str(tmp_path), "--gpu", "L4").stdout


def test_a_quantization_that_is_not_known_is_asked_for_and_then_taken(tmp_path: Path) -> None:
    config = TINY | {"quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = run(str(tmp_path), "--gpu", "H100")
    assert result.exit_code == 1
    assert "got hqq, expected one of auto-round," in result.stderr
    assert "'--dtype int4'" in result.stderr
    assert answered(str(tmp_path), "--gpu", "H100", "--dtype", "int4")["weights"] == "int4"


@pytest.mark.parametrize(
    ("algorithm", "weights"), [("FP8", "fp8"), ("NVFP4", "fp4"), ("W4A16_AWQ", "int4")]
)
def test_the_quantization_file_beside_a_config_says_how_weights_are_stored(
    tmp_path: Path, algorithm: str, weights: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": []}
    beside = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), encoding="utf-8")
    report = answered(str(tmp_path), "--gpu", "H100")
    assert (report["weights"], report["kv"]) == (weights, "fp8")
    (tmp_path / "hf_quant_config.json").write_text("{}", encoding="utf-8")
    result = run(str(tmp_path), "--gpu", "H100")
    assert "hf_quant_config.json: got no object 'quantization'" in result.stderr


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"{", "expected JSON"),
        (b"\xff\xfe\x00", "expected JSON"),
        (b"[1]", "got a list, expected an object"),
        (b"{}", "its config has no 'hidden_size'"),
        (b'{"hidden_size": "wide"}', "'hidden_size': got 'wide'"),
        (None, "has no config.json"),
    ],
)
def test_a_config_that_says_too_little_is_one_clear_line(
    tmp_path: Path, written: bytes | None, why: str
) -> None:
    if written is not None:
        (tmp_path / "config.json").write_bytes(written)
    result = run(str(tmp_path), "--gpu", "L4")
    assert result.exit_code == 1
    error, following = result.stderr.splitlines()
    assert str(tmp_path) in error
    assert why in error
    assert following.startswith("next: ")


def test_unknown_names_are_answered_with_near_ones() -> None:
    model = run("meta-llama/Llama-3.1-71B", "--gpu", "H100")
    gpu = run(LLAMA_70B, "--gpu", "H2000")
    assert (model.exit_code, gpu.exit_code) == (1, 1)
    assert "meta-llama/Llama-3.1-70B" in model.stderr
    assert "h200_sxm" in gpu.stderr


def test_a_model_needs_an_accelerator() -> None:
    result = run(LLAMA_70B)
    assert result.exit_code == 2
    assert "--gpu" in result.stderr


def test_states_of_a_hybrid_are_shown_beside_its_kv_cache() -> None:
    result = run("Qwen/Qwen3.5-27B", "--gpu", "H200")
    assert "not counted: the vision encoder" in result.stdout
    assert "states: 153.9 MB of each request" in result.stdout
    report = answered("Qwen/Qwen3.5-27B", "--gpu", "H200")
    assert (report["kv_token_bytes"], report["state_bytes"]) == (65_536, 153_944_064)


def test_weights_have_the_bits_that_they_are_published_in(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 3, "group_size": 128}
    config = TINY | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert answered(str(tmp_path), "--gpu", "L4")["weights"] == "int3"


ROW = (
    "backend,model_path,system,gemm_quant_mode,mode,isl,osl,tp_size,pp_size,concurrency,"
    "silicon_ttft_ms,silicon_tpot_ms\n"
    "vllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,bf16,agg,1024,16,1,1,2,60,14\n"
)


def test_a_calibration_changes_the_times_and_brings_their_error(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(ROW, encoding="utf-8")
    asked = ("meta-llama/Llama-3.1-8B", "--gpu", "H100")
    plain, fitted = answered(*asked), answered(*asked, "--calibration", str(rows))
    assert fitted["seconds"]["decode_step_s"] > 1.1 * plain["seconds"]["decode_step_s"]  # type: ignore[index]
    assert "(rows.csv, 1)" in fitted["error_bands"]["source"]  # type: ignore[index]


def test_ranks_that_share_experts_hold_more_requests_than_tensor_parallelism() -> None:
    asked = ("deepseek-ai/DeepSeek-V3", "--gpu", "H200")
    group = answered(*asked, "--dp", "8", "--ep")
    sliced = answered(*asked, "--tp", "8")
    assert (group["dp"], group["ep"]) == (8, True)
    assert "no measured rows of data-parallel groups" in group["error_bands"]["source"]  # type: ignore[index]
    assert group["concurrent_requests"] > 3 * sliced["concurrent_requests"]  # type: ignore[operator]
    assert "devices: 8 (tp 1, pp 1, dp 8, ep) h200_sxm" in run(*asked, "--dp", "8", "--ep").stdout
