"""Needs are raised when requests are late for no reason that is known, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.fleet import Role
from baton.policy.scaling.observation import ServiceLevel
from baton.policy.scaling.slo import CapacityCorrection, is_miss_unexplained
from tests.policy.scaling.simulated_pools import decode_pool, demand, observe, prefill_pool


def unexplained(service: ServiceLevel, role: Role, *, load: float = 3.0) -> bool:
    observation = observe(0.0, demand(load, 1.0), prefill_pool(4), decode_pool(2), service=service)
    return is_miss_unexplained(replace(observation, attainment_target=0.9), role)


def test_a_factor_goes_up_a_tenth_a_minute_up_to_its_bound() -> None:
    correction = CapacityCorrection(1.3)
    for second in range(0, 59, 2):
        correction.update(float(second), is_unexplained=True)
    assert correction.factor == 1.0
    correction.update(60.0, is_unexplained=True)
    assert correction.factor == pytest.approx(1.1)
    for second in range(62, 1200, 2):
        correction.update(float(second), is_unexplained=True)
    assert correction.factor == 1.3


def test_a_factor_fades_in_half_an_hour() -> None:
    correction = CapacityCorrection(2.0)
    for second in range(0, 400, 10):
        correction.update(float(second), is_unexplained=True)
    raised = correction.factor
    for second in range(400, 2200, 10):
        correction.update(float(second), is_unexplained=False)
    assert correction.factor - 1.0 == pytest.approx((raised - 1.0) / 2.718, rel=0.02)


def test_a_moment_without_trouble_begins_the_minute_anew() -> None:
    correction = CapacityCorrection(2.0)
    for second in range(0, 600, 10):
        correction.update(float(second), is_unexplained=second % 50 != 0)
    assert correction.factor == 1.0


def test_whose_objective_is_kept_worse_is_to_blame() -> None:
    slow_start = ServiceLevel(attainment=0.8, ttft_p90_s=3.0, tpot_p90_s=0.04)
    slow_stream = ServiceLevel(attainment=0.8, ttft_p90_s=1.0, tpot_p90_s=0.06)
    assert unexplained(slow_start, Role.PREFILL)
    assert not unexplained(slow_start, Role.DECODE)
    assert unexplained(slow_stream, Role.DECODE)
    assert not unexplained(slow_stream, Role.PREFILL)
    assert unexplained(slow_stream, Role.MIXED)


def test_nothing_is_wrong_while_the_target_is_met_or_hardly_anybody_came() -> None:
    late = ServiceLevel(attainment=0.89, ttft_p90_s=3.0)
    assert unexplained(late, Role.PREFILL)
    assert not unexplained(replace(late, attainment=0.9), Role.PREFILL)
    assert not unexplained(replace(late, attainment=None), Role.PREFILL)
    assert not unexplained(late, Role.PREFILL, load=0.05)
