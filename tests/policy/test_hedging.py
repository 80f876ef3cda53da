"""Hedges: when a first token is suspiciously late, and what another replica must be like."""

from __future__ import annotations

import pytest

from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    PlacementDecision,
    Route,
    RouteOption,
    RouteReason,
)
from baton.domain.value import evolve
from baton.policy.resilience.hedging import HedgeOptions, hedge_after_s, is_better_alternative

OPTIONS = HedgeOptions(latency_multiple=4.0, min_delay_s=1.0, max_alternative_queue_s=0.05)


def decision(
    *, ttft_s: float = 0.5, queue_s: float = 0.0, decode_id: str = "d1", predicts: bool = True
) -> PlacementDecision:
    option = RouteOption(
        HandoffMode.LOCAL, None, decode_id, 0, HitSource.NONE, 0.0, queue_s, ttft_s - queue_s,
        0.0, 0.0, 0.0,
    )  # fmt: skip
    route = Route(
        mode=HandoffMode.LOCAL,
        prefill_replica_id=None,
        decode_replica_id=decode_id,
        reason=RouteReason.MIXED_POOL,
    )
    return PlacementDecision(
        route=route, policy="test", at_s=0.0, options=(option,) if predicts else ()
    )


def better(other: PlacementDecision, waited_s: float = 2.0) -> bool:
    return is_better_alternative(
        other, avoid=frozenset({"d0", "p0"}), waited_s=waited_s, options=OPTIONS
    )


def test_late_is_some_times_what_was_predicted_and_what_others_are_late_by() -> None:
    assert hedge_after_s(decision(ttft_s=0.5), 0.0, OPTIONS) == 2.0
    assert hedge_after_s(decision(ttft_s=0.5), 3.0, OPTIONS) == 5.0


def test_short_predictions_are_given_time() -> None:
    assert hedge_after_s(decision(ttft_s=0.01), 0.0, OPTIONS) == 1.0


def test_where_nothing_is_predicted_nothing_is_late() -> None:
    assert hedge_after_s(decision(predicts=False), 0.0, OPTIONS) is None
    assert hedge_after_s(decision(), 0.0, HedgeOptions(latency_multiple=None)) is None


def test_an_idle_replica_that_is_quicker_than_what_was_waited_is_better() -> None:
    assert better(decision(ttft_s=0.5))


def test_one_that_would_take_as_long_is_not() -> None:
    assert not better(decision(ttft_s=2.0))


def test_one_with_a_queue_has_no_capacity_to_spare() -> None:
    assert not better(decision(ttft_s=0.5, queue_s=0.06))


def test_the_silent_replica_is_not_better_than_itself() -> None:
    assert not better(decision(decode_id="d0"))


def test_a_way_over_a_prefill_replica_to_avoid_is_not_better() -> None:
    made = decision()
    route = evolve(made.route, mode=HandoffMode.PULL, prefill_replica_id="p0")
    assert not better(evolve(made, route=route))


def test_a_guess_is_not_better_than_waiting() -> None:
    assert not better(decision(predicts=False))


@pytest.mark.parametrize("wrong", [{"latency_multiple": 1.0}, {"min_delay_s": 0.0}])
def test_senseless_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"hedging: .* expected"):
        HedgeOptions(**wrong)
