"""The runner: which cases it chooses, and what it makes of what they saw."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import choose, with_verdict, without_folders
from tests.chaos.case import Case, Engines, Outcome, Verdict, at_most
from tests.chaos.isolated import ProcessExit
from tests.chaos.results import Run

RUN = Run(verdict=Verdict.BROKE, began_at="2026", took_s=1.0, revision="abc", command="it")
WELL = ProcessExit(status=0, took_s=1.0, is_timed_out=False, leftovers=())
HELD = Outcome(bounds=(at_most("stall, s", 0.1, 0.5),), figures={"streams": 9}, note="as usual")


def cases(**minutes: float) -> dict[str, Case]:
    return {
        key.replace("_", "-"): Case(
            key=key.replace("_", "-"),
            title=key,
            engines=Engines.NONE,
            minutes=length,
            run=lambda _: HELD,
        )
        for key, length in minutes.items()
    }


ALL = cases(F10=1, F2=3, F2_real=2, L4=60)


@pytest.mark.parametrize(
    ("patterns", "quick", "keys"),
    [
        ([], False, ["F2", "F2-real", "F10", "L4"]),
        (["F2"], False, ["F2"]),
        (["F2*", "L4"], False, ["F2", "F2-real", "L4"]),
        ([], True, ["F2-real", "F10"]),
        (["F7"], False, []),
    ],
)
def test_cases_are_chosen_by_pattern_and_length(
    patterns: list[str], *, quick: bool, keys: list[str]
) -> None:
    assert [case.key for case in choose(ALL, patterns, quick=quick)] == keys


def test_a_case_whose_bounds_held_passed() -> None:
    run = with_verdict(WELL, HELD, "", RUN)
    assert (run.verdict, run.figures, run.note) == (Verdict.PASSED, {"streams": 9}, "as usual")
    assert run.bounds[0] == HELD.bounds[0]


def test_a_case_that_left_a_process_running_missed() -> None:
    run = with_verdict(
        ProcessExit(status=0, took_s=1, is_timed_out=False, leftovers=("7 sleep 300",)),
        HELD,
        "",
        RUN,
    )
    assert run.verdict is Verdict.MISSED
    assert run.bounds[-1].description == "processes left running"
    assert run.note == "as usual\nleft running: 7 sleep 300"


def test_a_case_that_bounds_nothing_has_not_passed() -> None:
    assert with_verdict(WELL, Outcome(bounds=()), "", RUN).verdict is Verdict.MISSED


def test_a_case_that_did_not_come_to_its_end_broke_and_says_why() -> None:
    run = with_verdict(WELL, None, 'exit status 1\n  File "/some/where/of/mine/x.py", line 3', RUN)
    assert run.verdict is Verdict.BROKE
    assert run.note == 'exit status 1\n  File "x.py", line 3'


def test_addresses_and_ratios_are_not_folders() -> None:
    told = "http://127.0.0.1:8000/v1/models answered 3/4 of platform/baton/x.py"
    assert without_folders(told) == told
