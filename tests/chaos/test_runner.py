"""The runner: which cases it chooses, and what it makes of what they saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.__main__ import choose, with_verdict, without_folders
from tests.chaos.case import Case, Engines, Outcome, Verdict, at_most
from tests.chaos.clients import streams_cut_by
from tests.chaos.deployment_processes import (
    KilledProcess,
    environment,
    find_alive,
    kill_to_restart,
    wait_until,
)
from tests.chaos.history import Ending, Exchange
from tests.chaos.isolated import ProcessExit, run_isolated
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
    text = "http://127.0.0.1:8000/v1/models answered 3/4 of platform/baton/x.py"
    assert without_folders(text) == text


# -------------------------------------------------------------------- programs apart


ORPHAN = """
import subprocess, sys
# Of a session of its own, and without a parent as soon as this program ends.
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(child.pid, flush=True)
"""
STUCK = """
import signal, sys, time
# What a shell starts in the background is born deaf to interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    time.sleep(300)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
    sys.exit(3)
"""
ORPHANED_ZOMBIE = """
import subprocess, sys, time
# A grandchild that loses its parent, then ends: a process has to reap it.
pid = int(subprocess.run(
    [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '0.2'],"
     " stdout=subprocess.DEVNULL).pid)"],
    capture_output=True, check=True).stdout)
import os
deadline = time.monotonic() + 10
while os.path.exists(f"/proc/{pid}"):
    assert time.monotonic() < deadline, "a zombie stays forever"
    time.sleep(0.02)
"""


def ran(program: str, log: Path, *, deadline_s: float = 20.0, grace_s: float = 5.0) -> ProcessExit:
    return run_isolated(
        [sys.executable, "-c", program],
        log=log,
        deadline_s=deadline_s,
        environment=os.environ,
        grace_s=grace_s,
    )


def test_a_program_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    ended = ran("print('done'); raise SystemExit(7)", tmp_path / "log")
    assert (ended.status, ended.is_timed_out, ended.leftovers) == (7, False, ())
    assert (tmp_path / "log").read_text() == "done\n"


def test_processes_that_a_program_leaves_are_named_and_ended(tmp_path: Path) -> None:
    ended = ran(ORPHAN, tmp_path / "log", grace_s=0.2)
    pid = int((tmp_path / "log").read_text())
    assert ended.leftovers == (f"{pid} sleep 300",)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_program_that_takes_too_long_may_clean_up(tmp_path: Path) -> None:
    ended = ran(STUCK, tmp_path / "log", deadline_s=0.7)
    assert (ended.status, ended.is_timed_out) == (3, True)
    assert (tmp_path / "log").read_text() == "cleaned up\n"


def test_an_orphan_that_ends_is_laid_to_rest_meanwhile(tmp_path: Path) -> None:
    ended = ran(ORPHANED_ZOMBIE, tmp_path / "log")
    assert (ended.status, ended.leftovers) == (0, ()), (tmp_path / "log").read_text()


def test_a_zombie_child_does_not_keep_an_orphan_alive(
    tmp_path: Path,
) -> None:
    before = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, before.pid, os.WEXITED | os.WNOWAIT)
    try:
        ended = ran(ORPHANED_ZOMBIE, tmp_path / "log")
    finally:
        assert before.wait() == 0, "its owner still gets its status"
    assert (ended.status, ended.leftovers) == (0, ()), (tmp_path / "log").read_text()


# -------------------------------------------------------------------- parts of a deployment


def exchange(
    sent_at_s: float, ending: Ending | None, ended_at_s: float = 0.0, status: int | None = 200
) -> Exchange:
    made = Exchange(request_id="r", prompt=(1,), max_tokens=1, sent_at_s=sent_at_s, status=status)
    if ending is not None:
        made.end(ending, ended_at_s)
    return made


@pytest.mark.parametrize(
    ("one", "lost"),
    [
        (exchange(9.0, Ending.CUT, 10.1), True),
        (exchange(9.0, Ending.FAILED, 10.1), True),
        (exchange(9.0, Ending.CUT, 10.1, None), False),
        (exchange(9.0, Ending.FAILED, 10.1, 502), False),
        (exchange(9.0, Ending.FINISHED, 10.1), False),
        (exchange(10.5, Ending.CUT, 10.6), False),
        (exchange(9.0, Ending.CUT, 13.0), False),
        (exchange(8.0, Ending.CUT, 9.0), False),
        (exchange(9.0, None), False),
    ],
)
def test_only_a_stream_that_its_ingress_took_along_is_lost_with_it(
    one: Exchange, *, lost: bool
) -> None:
    assert (streams_cut_by([one], 10.0) == [one]) is lost


def test_a_process_that_was_killed_starts_again_as_it_was() -> None:
    program = [sys.executable, "-c", "import time; time.sleep(60)", "--port=0", "--name=x"]
    first = subprocess.Popen(program)
    killed = kill_to_restart(first.pid).with_option("port", "7")
    assert first.wait(5) == -9
    second = killed.restart()
    try:
        assert find_alive([first.pid, second.pid]) == [second.pid]
        wait_until(lambda: bool(psutil.Process(second.pid).cmdline()), 5.0)
        assert psutil.Process(second.pid).cmdline()[-2:] == ["--name=x", "--port=7"]
    finally:
        second.kill()
        second.wait()


def test_an_option_is_replaced_and_no_other() -> None:
    text = KilledProcess(["gcs", "--port=0", "--ports=9"], {}).with_option("port", "1")
    assert text.command == ["gcs", "--ports=9", "--port=1"]


def test_an_environment_is_as_it_was_afterwards() -> None:
    before = dict(os.environ)
    with environment(PATH="/nowhere", BATON_TEST_NEW="1"):
        assert os.environ["BATON_TEST_NEW"] == "1"
    assert dict(os.environ) == before
