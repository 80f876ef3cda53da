"""What is said of judged rows: errors, rows that cannot be, and each reason to refuse once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.cli.model.calibrate import CalibrationArgs, evaluate_rows, summarize

HEADER = "backend,backend_version,model_path,system,gemm_quant_mode,isl,osl,tp_size,concurrency,"
HEADER += "silicon_ttft_ms,silicon_tpot_ms"
FITTED = [
    "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,4,80.5,11.78",
    "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,8,96.3,12.11",
]
POSSIBLE = "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,6,88,12"
IMPOSSIBLE = "vllm,,meta-llama/Llama-3.1-70B,h100_sxm,fp8,1024,1024,4,5,85,1"
FAR = [POSSIBLE.replace(",4,6,", f",4,{clients},") for clients in (40, 50)]


def report(folder: Path, rows: list[str]) -> dict[str, Any]:
    asked, on = folder / "asked.csv", folder / "on.csv"
    asked.write_text("\n".join([HEADER, *rows]), encoding="utf-8")
    on.write_text("\n".join([HEADER, *FITTED]), encoding="utf-8")
    shares: list[float] = []
    known = CalibrationArgs(rows_path=on)
    found = evaluate_rows(asked, known, ignore_invalid=False, on_progress=shares.append)
    assert shares[-1] == 1.0
    return found


def test_one_reason_for_many_rows_is_said_once(tmp_path: Path) -> None:
    found = report(tmp_path, [POSSIBLE, *FAR])
    assert found["in_the_means"] == 1
    (group,) = found["not_judged"]
    assert group["count"] == 2
    assert group["why"] == "far from what the calibration has seen"
    assert "c40: requests 40 is more than 2 times beyond the 4 to 8" in group["first"]
    assert [name.rsplit(" ", 1)[-1] for name in group["rows"]] == ["c40", "c50"]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    asked = tmp_path / "asked.csv"
    asked.write_text("\n".join([HEADER, POSSIBLE]), encoding="utf-8-sig")
    found = evaluate_rows(
        asked, CalibrationArgs(), ignore_invalid=False, on_progress=lambda _: None
    )
    assert found["in_the_means"] == 1


def test_in_short_no_row_is_named_that_needs_no_look(tmp_path: Path) -> None:
    short: dict[str, Any] = summarize(report(tmp_path, [POSSIBLE, *FAR]))
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
