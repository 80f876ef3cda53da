"""Ports that tests are given are none that baton itself takes for something else."""

from __future__ import annotations

from itertools import islice

import pytest

from baton.config.schema.deployment import SIDE_CHANNEL_PORTS, SideChannel
from baton.serving.front.data_path import pick_front_ports
from tests.fakes.free_ports import FIRST_PORT, LAST_PORT, ports_of


def test_no_test_is_given_a_port_of_side_channels() -> None:
    assert SideChannel().port_base + SIDE_CHANNEL_PORTS <= FIRST_PORT


def test_no_test_is_given_a_port_of_ray_serves_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda below: below - 1)
    assert pick_front_ports().replica_http_max < FIRST_PORT


@pytest.mark.parametrize("pid", [1, 156, 32_768, 4_194_303])
def test_a_process_is_given_every_port_once(pid: int) -> None:
    assert sorted(ports_of(pid)) == list(range(FIRST_PORT, LAST_PORT + 1))


def test_processes_started_one_after_the_other_begin_with_other_ports() -> None:
    firsts = [set(islice(ports_of(pid), 32)) for pid in range(5000, 5100)]
    assert len(set.union(*firsts)) == 3200
