"""What came of cases is kept whole, the runs that missed among it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import results
from tests.chaos.case import MINUTES, Case, Engines, Outcome, Verdict, at_most, requested_minutes
from tests.chaos.results import AlreadyRunningError, CaseResults, Run, exclusive_lock

PASSED = Run(
    verdict=Verdict.PASSED,
    bounds=(at_most("longest stall, s", 0.2, 0.5),),
    figures={"streams": 1000},
    began_at="2026-11-22T12:00:00+00:00",
    took_s=61.0,
    revision="0123456789",
    command="python -m tests.chaos --case F1",
)
MISSED = replace(PASSED, verdict=Verdict.MISSED, bounds=(at_most("longest stall, s", 0.9, 0.5),))
SHORT = replace(PASSED, figures={"minutes": 2.0, "minutes_in_full": 60.0})
FULL = replace(PASSED, figures={"minutes": 60.0, "minutes_in_full": 60.0})
LINE = CaseResults(title="a decode replica killed", engines=Engines.SIMULATED, minutes=1.0)


def case(key: str) -> Case:
    return Case(
        key=key, title=key, engines=Engines.NONE, minutes=1, run=lambda _: Outcome(bounds=())
    )


def test_written_results_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "reliability.json"
    lines = {"F1": LINE.with_run(MISSED).with_run(PASSED), "F10": LINE}
    results.write(lines, file)
    assert results.read(file) == lines
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_without_a_file_nothing_was_run(tmp_path: Path) -> None:
    assert results.read(tmp_path / "none.json") == {}


def test_the_last_run_stands() -> None:
    assert LINE.current_run is None
    assert LINE.with_run(PASSED).with_run(MISSED).current_run == MISSED
    assert LINE.with_run(MISSED).with_run(PASSED).current_run == PASSED


def test_a_run_that_missed_stays_beside_those_that_passed() -> None:
    line = LINE.with_run(MISSED)
    for number in range(10):
        line = line.with_run(replace(PASSED, took_s=number))
    assert line.earlier_misses == (MISSED,)
    assert len(line.runs) == 2


def test_of_many_misses_the_latest_stay() -> None:
    misses = [replace(MISSED, note=str(number)) for number in range(9)]
    line = LINE
    for miss in misses:
        line = line.with_run(miss)
    assert [run.note for run in line.with_run(PASSED).earlier_misses] == ["6", "7", "8"]


def test_a_shortened_run_that_passed_does_not_stand_for_one_in_full() -> None:
    assert LINE.with_run(FULL).with_run(SHORT).current_run == FULL
    assert LINE.with_run(SHORT).current_run == SHORT
    assert LINE.with_run(SHORT).with_run(FULL).current_run == FULL


def test_a_shortened_run_that_missed_does() -> None:
    short_miss = replace(SHORT, verdict=Verdict.MISSED)
    assert LINE.with_run(FULL).with_run(short_miss).current_run == short_miss


def test_a_case_that_is_new_has_a_line_and_one_that_is_gone_has_none() -> None:
    before = {"F1": LINE.with_run(PASSED), "F9": LINE}
    after = results.for_cases(before, {"F1": case("F1"), "F2": case("F2")})
    assert list(after) == ["F1", "F2"]
    assert (after["F1"].title, after["F1"].runs) == ("F1", (PASSED,))
    assert after["F2"].runs == ()


def test_a_cause_that_was_found_afterwards_is_added_to_the_run() -> None:
    noted = results.add_note(LINE.with_run(MISSED).with_run(PASSED), "the disk was full")
    assert [run.note for run in noted.runs] == ["", "the disk was full"]


def test_keys_are_sorted_as_people_count() -> None:
    keys = ["F10", "F2-real", "B3-link", "F2", "L1"]
    assert sorted(keys, key=results.sort_key) == ["B3-link", "F2", "F2-real", "F10", "L1"]


def test_two_do_not_run_cases_at_the_same_time(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.chaos.results import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1])): print('have it', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"have it\n"
        with pytest.raises(AlreadyRunningError, match="--wait"), exclusive_lock(tmp_path):
            pass
        other.stdin.close()
        other.wait(10)
    with exclusive_lock(tmp_path):
        pass


def test_a_case_runs_as_long_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MINUTES, raising=False)
    assert requested_minutes(60) == {"minutes": 60, "minutes_in_full": 60}
    monkeypatch.setenv(MINUTES, "2.5")
    assert requested_minutes(60) == {"minutes": 2.5, "minutes_in_full": 60}
