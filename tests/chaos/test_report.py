"""The page says of every line what came of it, and is what the results make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos import results
from tests.chaos.case import Engines, Verdict, at_most, exactly
from tests.chaos.report import LINES, PAGE, render_page
from tests.chaos.results import (
    CaseResults,
    MutationOutcome,
    MutationResult,
    MutationResults,
    ResultsByCase,
    Run,
)

RUN = Run(
    verdict=Verdict.PASSED,
    bounds=(exactly("failed streams", 0, 0), at_most("longest stall, s", 0.25, 0.5)),
    began_at="2026-11-22T12:00:00+00:00",
    took_s=61.0,
    revision="0123456789",
    command="python -m tests.chaos --case F1",
)
MISSED = replace(
    RUN,
    verdict=Verdict.MISSED,
    bounds=(at_most("longest stall, s", 0.75, 0.5),),
    note="the link is notified\nby a heartbeat | late",
)
REMOVAL = MutationResult(
    description="the deadline of a pull",
    file="platform/baton/x.py",
    outcome=MutationOutcome.CAUGHT,
    detail="tests/x/test_x.py::test_a_pull_ends",
    tests="tests/x",
)


def lines(run: Run | None = None, key: str = "F1") -> ResultsByCase:
    line = CaseResults(title="a decode replica killed", engines=Engines.SIMULATED, minutes=1.0)
    return {key: line if run is None else line.with_run(run)}


def row(shown: str, key: str) -> str:
    (found,) = [line for line in shown.splitlines() if line.startswith(f"| {key} |")]
    return found


def test_the_page_that_is_committed_is_what_the_results_make() -> None:
    assert PAGE.read_text() == render_page(results.read(), results.read_mutations()), (
        "run: python -m tests.chaos --page"
    )


@pytest.mark.parametrize("key", LINES)
def test_a_line_that_no_case_is_of_is_said_to_be_not_run(key: str) -> None:
    assert "| not run |" in row(render_page({}, MutationResults()), key)


def test_a_case_that_was_never_run_is_said_to_be() -> None:
    assert "| not run |" in row(render_page(lines(), MutationResults()), "F1")


def test_a_line_shows_what_was_seen_what_was_wanted_and_how() -> None:
    shown = row(render_page(lines(RUN), MutationResults()), "F1")
    assert "| passed |" in shown
    assert "failed streams: 0 (== 0)<br>longest stall, s: 0.25 (&lt;= 0.5)" in shown
    assert "M, simulated, 61 s, 2026-11-22, `0123456789`" in shown
    assert "`python -m tests.chaos --case F1`" in shown


def test_a_case_of_one_part_of_a_line_stands_for_the_line() -> None:
    shown = render_page(lines(RUN, "F4-real"), MutationResults())
    assert "| passed |" in row(shown, "F4-real")
    assert "| F4 |" not in shown


def test_a_miss_stands_out_and_says_why_in_one_line() -> None:
    shown = render_page(lines(MISSED), MutationResults())
    assert "| **missed** | **longest stall, s: 0.75 (&lt;= 0.5)** |" in row(shown, "F1")
    (reason,) = [line for line in shown.splitlines() if line.startswith("- **F1**")]
    assert reason.endswith(
        "**longest stall, s: 0.75 (&lt;= 0.5)**. the link is notified by a heartbeat \\| late"
    )
    assert "Nothing that is kept." not in shown


def test_a_miss_is_still_told_when_a_later_run_passed() -> None:
    both = {"F1": lines(MISSED)["F1"].with_run(RUN)}
    shown = render_page(both, MutationResults())
    assert "| passed |" in row(shown, "F1")
    assert "- F1, missed before, on 2026-11-22 at `0123456789`" in shown


def test_a_shortened_run_says_so() -> None:
    short = replace(RUN, figures={"minutes": 20.0, "minutes_in_full": 60.0})
    shown = row(render_page(lines(short, "L4"), MutationResults()), "L4")
    assert "| passed, shortened: 20 of 60 minutes |" in shown


def test_figures_of_the_simulator_are_marked() -> None:
    virtual = {"F1": replace(lines(RUN)["F1"], engines=Engines.VIRTUAL)}
    assert "S, virtual" in row(render_page(virtual, MutationResults()), "F1")


def test_of_a_case_that_broke_the_page_shows_its_last_words_only() -> None:
    broke = replace(RUN, verdict=Verdict.BROKE, bounds=(), note="exit status 1\nKeyError: 'x'\n")
    shown = render_page(lines(broke), MutationResults())
    assert "- **F1**, broke on 2026-11-22: KeyError: 'x'" in shown
    assert "exit status" not in shown


def test_lines_are_counted_by_their_outcome() -> None:
    shown = render_page(lines(RUN) | lines(MISSED, "F2"), MutationResults())
    assert f"Of {len(LINES)} lines: 1 passed, 1 missed, 0 broke, {len(LINES) - 2} not run." in shown


def test_an_unnoticed_removal_of_a_protection_stands_out() -> None:
    survivor = replace(
        REMOVAL,
        description="the lease",
        outcome=MutationOutcome.SURVIVED,
        detail="all passed",
        revision="0123abc",
    )
    shown = render_page(
        {}, MutationResults(rows=(REMOVAL, survivor), began_at="2026-11-22T12", revision="abc")
    )
    assert "1 of 2 caught, the last on 2026-11-22 at `abc`; a row that was not tried" in shown
    assert "0 more not tried." in shown
    assert (
        "| the deadline of a pull | `platform/baton/x.py` | `tests/x/test_x.py::test_a_pull_ends`"
        " | not kept |" in shown
    )
    assert "| the lease | `platform/baton/x.py` | **survived**: all passed | `0123abc` |" in shown
