from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fidelity import (
    PARTS,
    Metrics,
    find_data_folder,
    load_part,
    run_parts,
    write_results,
)


def _fine(folder: Path) -> Metrics:
    return {"fine_s": 1.5}


def _broken(folder: Path) -> Metrics:
    raise ValueError("no such table")


def test_a_part_that_fails_costs_its_own_figures_only(tmp_path: Path) -> None:
    runs = run_parts({"broken": _broken, "fine": _fine}, tmp_path)
    assert runs["fine"].metrics == {"fine_s": 1.5}
    assert runs["fine"].failure is None
    assert runs["broken"].metrics == {}
    assert runs["broken"].failure == "ValueError: no such table"


@pytest.mark.parametrize("part", [part for part in PARTS if part != "architectures"])
def test_a_part_computes_from_its_folder(part: str, tmp_path: Path) -> None:
    run = run_parts({part: load_part(part)}, tmp_path)[part]
    assert run.failure is not None
    assert run.failure.startswith("FileNotFoundError")


def test_parts_that_did_not_run_keep_what_the_file_has_of_them(tmp_path: Path) -> None:
    file = tmp_path / "results" / "fidelity.json"
    write_results(file, run_parts(dict.fromkeys(PARTS[:2], _fine), tmp_path))
    write_results(file, run_parts({PARTS[1]: lambda _: {"finer_s": 2.0}}, tmp_path))
    parts = json.loads(file.read_text())["parts"]
    assert parts[PARTS[0]]["metrics"] == {"fine_s": 1.5}
    assert parts[PARTS[1]]["metrics"] == {"finer_s": 2.0}
    assert parts[PARTS[0]]["versions"]["python"]


def test_the_data_are_found_from_the_folder_or_from_the_traces_in_it(tmp_path: Path) -> None:
    for name in ("perf", "traces"):
        (tmp_path / name).mkdir()
    traces = {"BATON_TRACES": str(tmp_path / "traces")}
    assert find_data_folder(tmp_path, {}) == tmp_path
    assert find_data_folder(None, traces) == tmp_path
    assert find_data_folder(None, {}) is None
    assert find_data_folder(tmp_path / "perf", {}) == tmp_path


def test_a_folder_without_measurements_is_not_the_data(tmp_path: Path) -> None:
    nested = tmp_path / "one" / "two"
    nested.mkdir(parents=True)
    assert find_data_folder(nested, {}) is None
