"""Growth is what goes on after the warm-up, and not a spike or a start."""

from __future__ import annotations

import math
import os

import psutil
import pytest

from tests.chaos.growth import ResourceGrowth, slope

HOUR_S = 3600.0


def sampled(
    growth: ResourceGrowth, *, rises_mb_per_hour: float = 0.0, warms_mb: float = 50.0
) -> ResourceGrowth:
    """An hour, a sample every five seconds, of which the first ten minutes warm up."""
    for at_s in range(0, int(HOUR_S), 5):
        warm_mb = warms_mb * min(1.0, at_s / 600.0)
        growth.add("ingress", at_s, 300.0 + warm_mb + rises_mb_per_hour * at_s / HOUR_S, 40)
    return growth


def test_a_warm_up_is_no_growth() -> None:
    grown = sampled(ResourceGrowth(warm_up_s=600.0)).mb_per_hour()
    assert grown == {"ingress": pytest.approx(0.0, abs=1e-9)}


def test_what_rises_after_it_is() -> None:
    grown = sampled(ResourceGrowth(warm_up_s=600.0), rises_mb_per_hour=2.5).mb_per_hour()
    assert grown["ingress"] == pytest.approx(2.5)


def test_a_spike_is_no_growth() -> None:
    points = [(at_s, 900.0 if at_s % 100 == 0 else 300.0) for at_s in map(float, range(1000))]
    assert slope(points) == 0.0


def test_steps_that_come_rarely_are_growth() -> None:
    points = [(at_s, 300.0 + math.floor(at_s / 600.0)) for at_s in map(float, range(0, 3600, 5))]
    assert slope(points) * HOUR_S == pytest.approx(6.0, rel=0.2)


def test_two_points_make_a_slope_and_one_does_not() -> None:
    assert slope([(0.0, 1.0), (2.0, 5.0)]) == 2.0
    assert slope([(0.0, 1.0)]) == 0.0


def test_descriptors_are_compared_by_quarters() -> None:
    growth = ResourceGrowth(warm_up_s=100.0)
    for at_s in range(500):
        growth.add("flat", at_s, 1.0, 30 + at_s % 3)
        growth.add("leaks", at_s, 1.0, 30 + at_s // 50)
    assert growth.descriptor_growth() == {"flat": 0.0, "leaks": 6.0}


def test_a_busier_quarter_is_no_leak_and_a_leak_shows_in_a_busy_one() -> None:
    growth = ResourceGrowth(warm_up_s=100.0)
    for at_s in range(500):
        requests = at_s % 7 * (2 if at_s >= 400 else 1)
        growth.add("busier", at_s, 1.0, 30 + requests)
        growth.add("leaks", at_s, 1.0, 30 + requests + at_s // 50)
    assert growth.descriptor_growth() == {"busier": 0.0, "leaks": 6.0}
    assert growth.usual_descriptors()["busier"] == 3.0


def test_a_process_that_came_after_the_warm_up_began_is_followed_from_its_start() -> None:
    growth = ResourceGrowth(warm_up_s=100.0)
    growth.add("short", 10.0, 5.0, 3)
    assert (growth.mb_per_hour(), growth.last_mb("short")) == ({"short": 0.0}, 5.0)


def test_a_process_is_looked_at() -> None:
    growth = ResourceGrowth(warm_up_s=0.0)
    growth.sample({"me": psutil.Process(os.getpid())}, 0.0)
    assert growth.last_mb("me") > 1.0
