"""A whole baton on Ray that goes to zero, and the requests that come then."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.serving.front.data_path import find_haproxy
from benchmarks.deployed.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]


def test_requests_to_a_fleet_at_zero_are_served_behind_a_balancer(tmp_path: Path) -> None:
    if find_haproxy(os.environ) is None:
        pytest.skip("no HAProxy for a balancer")
    assert main(["--part", "from-zero", "--wakes", "2", "--results", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "from_zero.json").read_text())["figures"]
    assert (figures["wakes"], figures["served"], figures["balancer_downs"]) == (2, 2, 0)
    assert not figures["left_behind"]
