"""Membership against a real Serve controller; one run of a program, seen from several sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.serving.front.data_path import pick_front_ports

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "membership_app.py"
SOURCES = Path(__file__).parents[2] / "platform"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAM),
            str(pick_front_ports().stats),
            str(tmp_path_factory.mktemp("notes")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_first_view_has_every_replica_with_its_published_address(
    report: dict[str, Any],
) -> None:
    assert len({member["id"] for member in report["first"]}) == 2
    assert all(member["link"] == f"tcp://127.0.0.1:{member['pid']}" for member in report["first"])


def test_a_replica_knows_its_rank_when_it_is_constructed(report: dict[str, Any]) -> None:
    assert sorted(member["rank_at_init"] for member in report["first"]) == [0, 1]
    assert all(member["rank"] == member["rank_at_init"] for member in report["first"])


def test_a_killed_replica_leaves_the_view_and_a_new_one_comes(report: dict[str, Any]) -> None:
    assert report["kill_seen_s"] < 5
    assert report["replaced_s"] < 30


def test_scaling_up_is_seen(report: dict[str, Any]) -> None:
    assert report["scaled_up_s"] < 30


def test_the_view_stands_while_the_controller_is_gone_and_goes_on_after(
    report: dict[str, Any],
) -> None:
    assert set(report["views_around_restart"]) == {3}
    assert report["scaled_down_s"] < 15
    assert report["smallest_view_after_restart"] == 2


def test_a_replica_that_is_told_to_stop_leaves_the_view_at_once_and_may_drain(
    report: dict[str, Any],
) -> None:
    assert report["scaled_down_s"] < report["drained_s"] < report["exited_s"]
    assert report["drained_s"] - report["stop_told_s"] == pytest.approx(2.0, abs=1.0)
    assert report["left"] == []
