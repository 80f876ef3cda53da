"""`baton calibrate ROWS.csv`: predictions beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.main import build_app

COLUMNS = (
    "backend,model_path,system,gemm_quant_mode,mode,isl,osl,tp_size,pp_size,concurrency,"
    "silicon_ttft_ms,silicon_tpot_ms"
)
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PLAIN = f"vllm,{LLAMA},h100_sxm,bf16,agg,1024,16,1,1,2,60,9"
SATURATED = f"vllm,{LLAMA},h100_sxm,bf16,agg,1024,16,1,1,4,5000,9"
UNKNOWN = "vllm,someone/something,h100_sxm,bf16,agg,1024,16,1,1,4,60,9"
BAD = f"vllm,{LLAMA},h100_sxm,bf16,agg,many,16,1,1,2,60,9"
LONG = f"vllm,{LLAMA},h100_sxm,bf16,agg,8192,16,1,1,2,300,9"


def written(folder: Path, *rows: str, name: str = "rows.csv") -> str:
    path = folder / name
    path.write_text("\n".join((COLUMNS, *rows)) + "\n", encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ("calibrate", *arguments))


def test_each_row_is_predicted_and_the_errors_are_those_of_the_rows(tmp_path: Path) -> None:
    result = run(written(tmp_path, PLAIN), "-o", "json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    (row,) = report["judged"]
    assert row["line"] == 2
    assert (row["measured_ttft_s"], row["measured_tpot_s"]) == pytest.approx((0.06, 0.009))
    bias = row["predicted_tpot_s"] / 0.009 - 1
    assert report["tpot_bias"] == pytest.approx(bias, abs=1e-4)
    assert report["tpot_mape"] == pytest.approx(abs(bias), abs=1e-4)
    assert (report["in_the_means"], report["not_judged"]) == (1, [])


def test_no_row_is_dropped_without_a_word(tmp_path: Path) -> None:
    report = json.loads(run(written(tmp_path, PLAIN, SATURATED, UNKNOWN), "--json").stdout)
    assert report["in_the_means"] == 1
    assert [row["saturated"] for row in report["judged"]] == [False, True]
    assert len(report["not_in_the_means_for_ttft_of_4_s_and_more"]) == 1
    (refused,) = report["not_judged"]
    assert "someone/something" in refused["why"]


def test_people_get_the_errors_by_engine_model_and_devices(tmp_path: Path) -> None:
    result = run(written(tmp_path, PLAIN, UNKNOWN))
    assert "ttft_mape: " in result.stdout
    assert any("h100_sxm tp1" in line and "vllm" in line for line in result.stdout.splitlines())
    assert "not_judged:" in result.stdout
    assert "predicted_ttft_s" not in result.stdout


def test_a_bad_row_is_named_by_its_line_and_left_out_when_told(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN, BAD)
    result = run(path)
    assert result.exit_code == 1
    assert "rows.csv, line 3" in result.stderr
    assert "--skip-bad" in result.stderr
    report = json.loads(run(path, "--skip-bad", "--json").stdout)
    assert (report["skipped_lines"], report["in_the_means"]) == (1, 1)


def test_a_calibration_does_not_speak_of_what_is_far_from_it_unless_told(tmp_path: Path) -> None:
    known = written(tmp_path, PLAIN, name="known.csv")
    asked = written(tmp_path, PLAIN, LONG)
    report = json.loads(run(asked, "--calibration", known, "--json").stdout)
    assert report["in_the_means"] == 1
    (refused,) = report["not_judged"]
    assert "beyond" in refused["first"]
    told = json.loads(run(asked, "--calibration", known, "--extrapolate", "--json").stdout)
    assert (told["in_the_means"], told["not_judged"]) == (2, [])


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n"])
def test_a_file_that_is_missing_or_no_table_of_rows_is_one_clear_line(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    result = run(str(path))
    assert result.exit_code == 1
    error, following = result.stderr.splitlines()
    assert "rows.csv" in error
    assert following.startswith("next: ")


def test_a_model_is_nothing_to_compare_with() -> None:
    result = run(LLAMA)
    assert result.exit_code == 2
    assert "use 'baton size'" in result.stderr
