"""When an ingress takes its first request."""

from __future__ import annotations

from baton.serving.ingress.model_ingress import FleetReadiness


def test_an_ingress_is_not_ready_before_it_knows_a_replica_of_each_pool() -> None:
    view = FleetReadiness(["prefill", "decode"], wait_s=10.0)
    assert not view.is_ready([], 0.0)
    assert not view.is_ready(["decode"], 1.0)
    assert view.is_ready(["decode", "decode", "prefill"], 2.0)


def test_an_ingress_stays_ready_when_a_pool_goes_missing() -> None:
    view = FleetReadiness(["prefill", "decode"], wait_s=10.0)
    assert view.is_ready(["decode", "prefill"], 0.0)
    assert view.is_ready(["decode"], 1.0)
    assert view.is_ready([], 2.0)  # whether anybody can serve is asked elsewhere


def test_a_pool_that_stays_missing_holds_an_ingress_back_for_a_while_only() -> None:
    view = FleetReadiness(["prefill", "decode"], wait_s=10.0)
    assert not view.is_ready([], 100.0)  # nobody could serve: that time does not count
    assert not view.is_ready(["decode"], 200.0)
    assert not view.is_ready(["decode"], 209.9)
    assert view.is_ready(["decode"], 210.0)
