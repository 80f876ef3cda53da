"""`baton calibrate LOG`: a vLLM engine's log replayed in the simulated engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests.cli.invoked import run_baton

MODEL = "meta-llama/Llama-3.1-8B"
ENGINE: dict[str, object] = {
    "model": MODEL,
    "tensor_parallel_size": 1,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
}
LAST = "lm_head sampler"
GRID = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"


def line(at_s: float, *, first_s: float = 0.1, last_s: float = 0.4, output: int = 31) -> str:
    """A request whose first token came so long after it was queued, and its last."""
    return json.dumps(
        {
            "input_toks": 512,
            "output_toks": output,
            "arrival_time": 1e9 + at_s,
            "queued_ts": 5.0 + at_s,
            "first_token_ts": 5.0 + at_s + first_s,
            "last_token_ts": 5.0 + at_s + last_s,
        }
    )


def written(folder: Path, *lines: str, engine: object = ENGINE) -> Path:
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    meta = json.dumps({"engine_kwargs": engine})
    (folder / "meta.json").write_text(meta, encoding="utf-8")
    return folder


def fit(*arguments: object) -> Result:
    return run_baton("calibrate", *arguments, "--gpu", "H100")


def report_of(*arguments: object) -> dict[str, object]:
    result = fit(*arguments, "-o", "json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert isinstance(report, dict)
    return report


def test_means_of_the_log_stand_beside_those_of_the_same_arrivals_simulated(tmp_path: Path) -> None:
    report = report_of(written(tmp_path, line(0), line(1, first_s=0.3, last_s=0.9)))
    measured, predicted = report["measured"], report["predicted"]
    assert isinstance(measured, dict)
    assert isinstance(predicted, dict)
    assert measured["ttft_s"]["mean"] == pytest.approx(0.2)
    assert measured["tpot_s"]["mean"] == pytest.approx((0.01 + 0.02) / 2)
    for term in ("ttft", "tpot"):
        error = predicted[f"{term}_s"]["mean"] / measured[f"{term}_s"]["mean"] - 1
        assert report[f"{term}_mean_error"] == pytest.approx(error)
    assert 0.001 < predicted["tpot_s"]["mean"] < 0.02


def test_the_log_itself_may_be_named_as_well_as_its_folder(tmp_path: Path) -> None:
    folder = written(tmp_path, line(0))
    assert report_of(folder) == report_of(folder / "requests.jsonl")


def test_answers_of_one_token_have_no_time_per_token(tmp_path: Path) -> None:
    one = line(1, last_s=0.1, output=1)
    alone = report_of(written(tmp_path, line(0)))
    both = report_of(written(tmp_path, line(0), one))
    assert both["requests"] == 2
    assert both["measured"]["tpot_s"] == alone["measured"]["tpot_s"]  # type: ignore[index]


def test_requests_wait_where_the_engine_runs_one_at_a_time(tmp_path: Path) -> None:
    lines = [line(0) for _ in range(4)]
    wide = report_of(written(tmp_path, *lines))
    narrow = report_of(written(tmp_path, *lines, engine={**ENGINE, "max_num_seqs": 1}))
    assert slowest(narrow) > 2 * slowest(wide)


def test_engines_that_share_the_requests_take_them_in_turn(tmp_path: Path) -> None:
    lines = [line(0) for _ in range(4)]
    alone = report_of(written(tmp_path, *lines, engine={**ENGINE, "max_num_seqs": 1}))
    four = {**ENGINE, "max_num_seqs": 1, "data_parallel_size": 4}
    shared = report_of(written(tmp_path, *lines, engine=four))
    assert slowest(shared) < slowest(alone) / 2


def test_engines_that_share_experts_step_together(tmp_path: Path) -> None:
    lines = [line(0) for _ in range(8)]
    experts = {**ENGINE, "model": "Qwen/Qwen3-30B-A3B", "enable_expert_parallel": True}
    alone = report_of(written(tmp_path, *lines, engine=experts))
    group = report_of(written(tmp_path, *lines, engine={**experts, "data_parallel_size": 2}))
    assert group["not_modelled"] == []
    assert group["devices"] == {"tp": 1, "pp": 1, "replicas": 2, "ep": True}
    assert slowest(group) < slowest(alone)


def slowest(report: dict[str, object]) -> float:
    predicted = report["predicted"]
    assert isinstance(predicted, dict)
    return float(predicted["ttft_s"]["p99"])


def test_a_request_too_long_for_the_engine_is_counted_and_does_not_enter_the_means(
    tmp_path: Path,
) -> None:
    short = {**ENGINE, "max_model_len": 600}
    long = json.dumps({**json.loads(line(2)), "input_toks": 601})
    report = report_of(written(tmp_path, line(0), long, engine=short))
    assert report["failed"] == 1
    result = fit(written(tmp_path, long, engine=short))
    assert result.exit_code == 1
    assert "max_model_len" in result.stderr


def test_layer_profiles_of_the_device_replace_the_roofline(tmp_path: Path) -> None:
    folder = written(tmp_path, line(0))
    dense = "embedding layernorm qkv_proj rotary_emb o_proj gate_up_proj act_fn down_proj"
    tables = {"dense": ("tokens", f"{dense} final_layernorm"), "per_sequence": ("sequences", LAST)}
    for table, (by, layers) in tables.items():
        rows = [f"{layer},{count},100" for layer in layers.split() for count in (1, 4096)]
        text = "\n".join((f"layer,{by},time_us", *rows))
        (tmp_path / f"gpu_{table}.csv").write_text(text, encoding="utf-8")
    grid = "\n".join((GRID, "0,0,1,512,50", "512,0,0,0,50", "0,0,8,1024,50"))
    (tmp_path / "gpu_attention.csv").write_text(grid, encoding="utf-8")
    report = report_of(folder, "--profile", tmp_path / "gpu")
    assert report["timing"] == "layer profile"
    assert report["predicted"] != report_of(folder)["predicted"]


def test_a_profile_that_lacks_a_layer_says_which(tmp_path: Path) -> None:
    for table in ("dense", "per_sequence"):
        by = "tokens" if table == "dense" else "sequences"
        text = f"layer,{by},time_us\nembedding,1,100\n"
        (tmp_path / f"gpu_{table}.csv").write_text(text, encoding="utf-8")
    (tmp_path / "gpu_attention.csv").write_text(f"{GRID}\n0,0,1,512,50\n", encoding="utf-8")
    result = fit(written(tmp_path, line(0)), "--profile", tmp_path / "gpu")
    assert result.exit_code == 1
    assert "no rows for" in result.stderr


def test_a_missing_table_of_a_profile_is_named(tmp_path: Path) -> None:
    result = fit(written(tmp_path, line(0)), "--profile", tmp_path / "gpu")
    assert result.exit_code == 1
    assert "gpu_dense.csv: cannot be read" in result.stderr


def test_readable_text_separates_measured_from_simulated_figures(tmp_path: Path) -> None:
    shown = fit(written(tmp_path, line(0))).stdout
    assert "measured (M)   100 ms" in shown
    assert "predicted (S)" in shown
    assert "TTFT mean, predicted against measured: -" in shown


def test_arguments_of_the_engine_that_are_not_modelled_are_named(tmp_path: Path) -> None:
    others = {"speculative_config": {"method": "ngram"}, "enable_eplb": True, "seed": 3}
    folder = written(tmp_path, line(0), engine={**ENGINE, **others, "enforce_eager": False})
    assert report_of(folder)["not_modelled"] == ["enable_eplb", "speculative_config"]
    shown = fit(folder).stdout
    assert "not_modelled" in shown
    assert "speculative_config" in shown
    assert report_of(written(tmp_path, line(0)))["not_modelled"] == []
    assert "not_modelled" not in fit(tmp_path).stdout


def test_a_bad_line_is_named_and_counted_when_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, line(0), "{}")
    result = fit(folder)
    assert result.exit_code == 1
    assert "requests.jsonl, line 2" in result.stderr
    assert "--skip-bad" in result.stderr
    assert report_of(folder, "--skip-bad")["skipped_lines"] == 1


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({**ENGINE, "max_num_seqs": 0}, "max_num_seqs is 0"),
        ({**ENGINE, "max_model_len": "long"}, "max_model_len is 'long'"),
        ({**ENGINE, "dtype": "roman"}, "dtype is 'roman'"),
        ({**ENGINE, "gpu_memory_utilization": 2}, "gpu_memory_utilization is 2"),
        ({**ENGINE, "model": None}, "model is None"),
        ([], "engine_kwargs"),
    ],
)
def test_an_implausible_calibration_is_reported(tmp_path: Path, engine: object, said: str) -> None:
    result = fit(written(tmp_path, line(0), engine=engine))
    assert result.exit_code == 1
    assert f"{tmp_path / 'meta.json'}" in result.stderr
    assert said in result.stderr


def test_without_what_the_engine_was_nothing_is_predicted(tmp_path: Path) -> None:
    folder = written(tmp_path, line(0))
    (folder / "meta.json").unlink()
    result = fit(folder)
    assert result.exit_code == 1
    assert "meta.json: cannot be read: No such file" in result.stderr
    assert "engine_kwargs" in result.stderr


def test_a_log_needs_to_be_told_the_accelerator(tmp_path: Path) -> None:
    folder = written(tmp_path, line(0))
    result = run_baton("calibrate", folder)
    assert result.exit_code == 2
    assert "--gpu" in result.stderr


def test_the_shape_of_an_unknown_model_may_be_given(tmp_path: Path) -> None:
    folder = written(tmp_path, line(0), engine={**ENGINE, "model": "someone/something"})
    assert "someone/something" in fit(folder).stderr
    known = report_of(folder, "--model-config", MODEL)
    assert known["model"] == MODEL
