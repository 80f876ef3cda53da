"""`baton calibrate ROWS.csv`: predictions beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from baton.cli.model.calibrate import evaluate_rows, summarize
from tests.cli.invoked import run_baton

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
    return run_baton("calibrate", *arguments)


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


def test_rows_far_from_the_calibration_are_predicted_and_marked(tmp_path: Path) -> None:
    known = written(tmp_path, PLAIN, name="known.csv")
    asked = written(tmp_path, PLAIN, LONG)
    report = json.loads(run(asked, "--calibration", known, "--json").stdout)
    assert (report["in_the_means"], report["not_judged"]) == (2, [])
    near, far = (row["beyond_the_calibration"] for row in report["judged"])
    assert (near, len(far) > 0) == ([], True)
    assert report["beyond_the_calibration"]["rows"] == 1
    told = run(asked, "--calibration", known, "--extrapolate", "--json")
    assert "--extrapolate: deprecated" in told.stderr
    assert json.loads(told.stdout) == report


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


# -------------------------------------------------------------------- rows that were judged


HEADER = "backend,backend_version,model_path,system,gemm_quant_mode,isl,osl,tp_size,concurrency,"
HEADER += "silicon_ttft_ms,silicon_tpot_ms"
FITTED = [
    "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,4,80.5,11.78",
    "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,8,96.3,12.11",
]
POSSIBLE = "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,6,88,12"
IMPOSSIBLE = "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,5,85,1"
FAR = [POSSIBLE.replace(",4,6,", f",4,{clients},") for clients in (40, 50)]


NO_GPU = [
    POSSIBLE.replace("h100_sxm", "h1000"),
    POSSIBLE.replace("h100_sxm", "h1000").replace(",4,6,", ",4,7,"),
]


def report(folder: Path, rows: list[str]) -> dict[str, Any]:
    asked, on = folder / "asked.csv", folder / "on.csv"
    asked.write_text("\n".join([HEADER, *rows]), encoding="utf-8")
    on.write_text("\n".join([HEADER, *FITTED]), encoding="utf-8")
    shares: list[float] = []
    found = evaluate_rows(asked, [on], ignore_invalid=False, on_progress=shares.append)
    assert shares[-1] == 1.0
    return found


def test_one_reason_for_many_rows_is_said_once(tmp_path: Path) -> None:
    found = report(tmp_path, [POSSIBLE, *NO_GPU])
    assert found["in_the_means"] == 1
    (group,) = found["not_judged"]
    assert group["count"] == 2
    assert "h1000" in group["why"]
    assert [name.rsplit(" ", 1)[-1] for name in group["rows"]] == ["c6", "c7"]


def test_errors_of_rows_far_from_the_calibration_stand_apart(tmp_path: Path) -> None:
    beyond = report(tmp_path, [POSSIBLE, *FAR])["beyond_the_calibration"]
    assert beyond["rows"] == 2
    assert "requests 40, where rows have 4 to 8" in beyond["first"]
    assert beyond["tpot_mape"] > 0
    assert report(tmp_path, [POSSIBLE])["beyond_the_calibration"] is None


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    asked = tmp_path / "asked.csv"
    asked.write_text("\n".join([HEADER, POSSIBLE]), encoding="utf-8-sig")
    found = evaluate_rows(asked, [], ignore_invalid=False, on_progress=lambda _: None)
    assert found["in_the_means"] == 1


def test_in_short_no_row_is_named_that_needs_no_look(tmp_path: Path) -> None:
    short: dict[str, Any] = summarize(report(tmp_path, [POSSIBLE, *NO_GPU]))
    assert "judged" not in short
    assert "rows_that_cannot_be" not in short
    assert list(short["not_judged"][0]) == ["why", "count", "first"]
    assert "not_judged" not in summarize(report(tmp_path, [POSSIBLE]))


def test_errors_are_said_with_and_without_rows_that_cannot_be(tmp_path: Path) -> None:
    found = report(tmp_path, [POSSIBLE, IMPOSSIBLE])
    assert found["in_the_means"] == 2
    assert found["tpot_mape"] > 1
    assert found["without_rows_that_cannot_be"]["tpot_mape"] < 0.1
    (told,) = found["rows_that_cannot_be"]
    assert told["row"].endswith("c5")
    assert "more than its devices can compute" in told["why"]
    assert [name[-2:] for name in found["others_of_the_same_sweeps"]] == ["c6"]
    assert [item["cannot_be"] is None for item in found["judged"]] == [True, False]


# -------------------------------------------------------------------- the former baton fit


MODEL = ("llama-3.1-8b", "--gpu", "H100", "--tp", "2", "-o", "json")


def test_a_model_goes_to_size() -> None:
    result = run_baton("fit", *MODEL)
    assert result.stderr == "warning: baton fit: deprecated, use baton size\n"
    assert result.stdout == run_baton("size", *MODEL).stdout


def test_measurements_go_to_calibrate_with_the_former_option(tmp_path: Path) -> None:
    rows = written(tmp_path, PLAIN)
    result = run_baton("fit", rows, "--calibrate", rows, "--json")
    assert "warning: baton fit: deprecated, use baton calibrate\n" in result.stderr
    assert result.stdout == run_baton("calibrate", rows, "--calibration", rows, "--json").stdout


def test_an_error_of_the_verb_keeps_its_status() -> None:
    assert run_baton("fit", "no/such-model", "--gpu", "H100").exit_code == 1
    assert run_baton("fit", "llama-3.1-8b").exit_code == 2


def test_help_does_not_list_it_and_names_its_successors() -> None:
    assert "\n  fit " not in run_baton("--help").stdout
    assert "`baton size`" in run_baton("fit", "--help").stdout
