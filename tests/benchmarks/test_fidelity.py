from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fidelity import PARTS, Figures, data_folder, keep, run_all


def _fine(folder: Path) -> Figures:
    return {"fine_s": 1.5}


def _broken(folder: Path) -> Figures:
    raise ValueError("no such table")


def test_a_part_that_fails_costs_its_own_figures_only(tmp_path: Path) -> None:
    runs = run_all({"broken": _broken, "fine": _fine}, tmp_path)
    assert runs["fine"].figures == {"fine_s": 1.5}
    assert runs["fine"].failed is None
    assert runs["broken"].figures == {}
    assert runs["broken"].failed == "ValueError: no such table"


def test_parts_that_did_not_run_keep_what_the_file_has_of_them(tmp_path: Path) -> None:
    file = tmp_path / "results" / "fidelity.json"
    keep(file, run_all(dict.fromkeys(PARTS[:2], _fine), tmp_path))
    keep(file, run_all({PARTS[1]: lambda _: {"finer_s": 2.0}}, tmp_path))
    parts = json.loads(file.read_text())["parts"]
    assert parts[PARTS[0]]["figures"] == {"fine_s": 1.5}
    assert parts[PARTS[1]]["figures"] == {"finer_s": 2.0}
    assert parts[PARTS[0]]["versions"]["python"]


def test_the_data_are_found_from_the_folder_or_from_the_traces_in_it(tmp_path: Path) -> None:
    for name in ("perf", "traces"):
        (tmp_path / name).mkdir()
    traces = {"BATON_TRACES": str(tmp_path / "traces")}
    assert data_folder(tmp_path, {}) == tmp_path
    assert data_folder(None, traces) == tmp_path
    assert data_folder(None, {}) is None
    assert data_folder(tmp_path / "perf", {}) == tmp_path


def test_a_folder_without_measurements_is_not_the_data(tmp_path: Path) -> None:
    nested = tmp_path / "one" / "two"
    nested.mkdir(parents=True)
    assert data_folder(nested, {}) is None
