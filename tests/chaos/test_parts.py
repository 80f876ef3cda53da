"""What cases of whole deployments are made of, as far as it needs none."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.chaos.clients import streams_cut_by
from tests.chaos.deployment_processes import (
    KilledProcess,
    environment,
    find_alive,
    kill_to_restart,
    wait_until,
)
from tests.chaos.history import Ending, Exchange


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
    told = KilledProcess(["gcs", "--port=0", "--ports=9"], {}).with_option("port", "1")
    assert told.command == ["gcs", "--ports=9", "--port=1"]


def test_an_environment_is_as_it_was_afterwards() -> None:
    before = dict(os.environ)
    with environment(PATH="/nowhere", BATON_TEST_NEW="1"):
        assert os.environ["BATON_TEST_NEW"] == "1"
    assert dict(os.environ) == before
