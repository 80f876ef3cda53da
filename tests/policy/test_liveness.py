"""Silence: who says nothing is suspected, then given up; and whoever looks late blames itself."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    PlacementDecision,
    Route,
    RouteOption,
    RouteReason,
)
from baton.domain.value import evolve
from baton.policy.resilience.failed_agents import (
    AgentRules,
    PullHistory,
    agent_failure_reason,
    choose_replacement,
)
from baton.policy.resilience.hedging import HedgeOptions, hedge_after_s, is_better_alternative
from baton.policy.resilience.liveness import IDLE_GRACE_S, LivenessTracker

SILENCE_S = 1.5


class Watched:
    """Two replicas, one of which is heard of four times a second."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self.silences = LivenessTracker(silence_s)
        self.silences.on_replica_joined("frozen", 0.0)
        self.silences.on_replica_joined("talks", 0.0)
        self.silences.start_checks(0.0)
        self.now_s = 0.0

    def until(self, at_s: float, *, runs: bool = True) -> None:
        """Let time pass as it does where looks come when they are due."""
        for number in count(round(self.now_s / 0.05) + 1):
            now_s = number * 0.05
            if now_s > at_s:
                return
            self.now_s = now_s
            if number % 5 == 0:
                self.silences.heartbeat("talks", now_s)
            self.silences.check(now_s, has_work=runs)

    def unresponsive_at(self, now_s: float) -> list[str]:
        return list(self.silences.unresponsive(now_s))


def test_a_replica_is_suspect_at_half_of_the_timeout_and_unresponsive_after_it() -> None:
    watched = Watched()
    watched.until(0.7)
    assert not watched.silences.is_suspect("frozen")
    watched.until(1.0)
    assert watched.silences.is_suspect("frozen")
    assert watched.unresponsive_at(1.0) == []
    watched.until(1.6)
    assert watched.unresponsive_at(1.6) == ["frozen"]
    assert not watched.silences.is_suspect("talks")


def test_a_heartbeat_ends_a_suspicion() -> None:
    watched = Watched()
    watched.until(1.6)
    watched.silences.heartbeat("frozen", 1.6)
    assert watched.unresponsive_at(1.7) == []
    assert not watched.silences.is_suspect("frozen")


def test_an_idle_replica_has_a_longer_timeout() -> None:
    watched = Watched()
    watched.silences.set_idle("frozen", 0.0)
    watched.until(0.7 + IDLE_GRACE_S)
    watched.silences.heartbeat("talks", watched.now_s)
    assert not watched.silences.is_suspect("frozen")
    watched.until(1.1 + IDLE_GRACE_S)
    assert watched.silences.is_suspect("frozen")
    assert watched.unresponsive_at(1.1 + IDLE_GRACE_S) == []
    watched.until(1.6 + IDLE_GRACE_S)
    assert watched.unresponsive_at(1.6 + IDLE_GRACE_S) == ["frozen"]


def test_a_rest_is_not_cut_short_by_another_word_but_by_work() -> None:
    watched = Watched()
    watched.silences.set_idle("frozen", 0.0)
    watched.silences.heartbeat("frozen", 0.1)
    watched.until(0.7 + IDLE_GRACE_S)
    assert not watched.silences.is_suspect("frozen")
    watched = Watched()
    watched.silences.set_idle("frozen", 0.0)
    watched.silences.set_busy("frozen", 0.1)
    assert watched.silences.unresponsive_s("frozen", 0.2) == pytest.approx(0.1)
    watched.until(1.1)
    assert watched.silences.is_suspect("frozen")


def test_idle_time_does_not_count_as_missed_heartbeats() -> None:
    silences = LivenessTracker(SILENCE_S)
    silences.on_replica_joined("rests", 0.0)
    silences.set_idle("rests", 1.0)
    assert silences.unresponsive_s("rests", 1.2) == 0.0


def test_unknown_and_removed_replicas_are_never_unresponsive() -> None:
    watched = Watched()
    watched.silences.on_replica_left("frozen")
    watched.silences.heartbeat("frozen", 1.0)
    watched.silences.set_idle("frozen", 1.0)
    watched.silences.set_busy("frozen", 1.0)
    watched.until(3.0)
    assert watched.unresponsive_at(3.0) == []
    assert watched.silences.unresponsive_s("stranger", 9.0) == 0.0


def test_a_late_check_blames_no_replica_for_that_time() -> None:
    """The process of whoever looks was stopped for a minute, and everybody's words wait unread."""
    watched = Watched()
    assert watched.silences.check(60.0, has_work=True)
    assert watched.unresponsive_at(60.0) == []


def test_looks_go_on_while_anything_runs_and_no_longer() -> None:
    silences = LivenessTracker(SILENCE_S)
    silences.start_checks(0.0)
    at_s = silences.next_check_at_s()
    assert at_s == SILENCE_S / 6
    assert not silences.check(at_s - 0.01, has_work=True)
    assert silences.check(at_s, has_work=True)
    assert silences.next_check_at_s() == at_s + SILENCE_S / 6
    assert silences.check(2 * at_s, has_work=False)
    assert silences.next_check_at_s() is None


def test_without_a_timeout_nothing_is_checked() -> None:
    watched = Watched(inf)
    assert watched.silences.next_check_at_s() is None
    assert not watched.silences.is_suspect("frozen")


@given(st.lists(st.floats(0.0, 0.4), min_size=1, max_size=80))
def test_a_replica_with_frequent_heartbeats_is_never_unresponsive(gaps_s: list[float]) -> None:
    silences, now_s = LivenessTracker(SILENCE_S), 0.0
    silences.on_replica_joined("talks", now_s)
    silences.start_checks(now_s)
    for gap_s in gaps_s:
        now_s += gap_s
        silences.check(now_s, has_work=True)
        assert list(silences.unresponsive(now_s)) == []
        silences.heartbeat("talks", now_s)


# ---------- hedges: when a first token is suspiciously late, and what another replica must be like
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


def test_the_hedge_delay_is_a_multiple_of_the_prediction_plus_the_usual_lateness() -> None:
    assert hedge_after_s(decision(ttft_s=0.5), 0.0, OPTIONS) == 2.0
    assert hedge_after_s(decision(ttft_s=0.5), 3.0, OPTIONS) == 5.0


def test_short_predictions_are_given_time() -> None:
    assert hedge_after_s(decision(ttft_s=0.01), 0.0, OPTIONS) == 1.0


def test_where_nothing_is_predicted_nothing_is_late() -> None:
    assert hedge_after_s(decision(predicts=False), 0.0, OPTIONS) is None
    assert hedge_after_s(decision(), 0.0, HedgeOptions(latency_multiple=None)) is None


def test_an_idle_replica_faster_than_the_time_waited_is_better() -> None:
    assert better(decision(ttft_s=0.5))


def test_one_that_would_take_as_long_is_not() -> None:
    assert not better(decision(ttft_s=2.0))


def test_one_with_a_queue_has_no_capacity_to_spare() -> None:
    assert not better(decision(ttft_s=0.5, queue_s=0.06))


def test_the_unresponsive_replica_is_not_better_than_itself() -> None:
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


# ---------- whose transfer agent is broken, and who may be replaced for it
RULES = AgentRules()
NOW_S = 1000.0


def failing(
    source_id: str = "p0",
    failed: int = RULES.failures,
    since_s: float = NOW_S - RULES.min_duration_s,
    proven_at_s: float | None = None,
) -> PullHistory:
    return PullHistory(source_id, failed, since_s, proven_at_s)


def suspect_among(*pairs: PullHistory, served: dict[str, float] | None = None) -> str | None:
    served_at_s = {pair.source_id: NOW_S for pair in pairs} if served is None else served
    return agent_failure_reason(pairs, served_at_s, NOW_S, RULES)


def test_a_target_whose_pulls_fail_from_sources_that_serve_others_is_broken() -> None:
    reason = suspect_among(failing("p1"), failing("p0"))
    assert reason is not None
    assert "for 30 s every pull from p0, p1 has failed" in reason


def test_a_target_with_one_source_is_evaluated_by_that_one() -> None:
    assert suspect_among(failing()) is not None


@pytest.mark.parametrize(
    "pairs",
    [
        (failing("p0"),),
        (failing("p0"), failing("p1", failed=RULES.failures - 1)),
        (failing("p0"), failing("p1", since_s=NOW_S - RULES.min_duration_s + 1.0)),
    ],
)
def test_it_takes_two_sources_where_there_are_two(pairs: tuple[PullHistory, ...]) -> None:
    others = (PullHistory("p9", 0, float("-inf"), None),) if len(pairs) == 1 else ()
    assert suspect_among(*pairs, *others) is None


def test_a_target_that_pulls_from_any_source_is_well() -> None:
    well = PullHistory("p2", 0, float("-inf"), NOW_S - 1.0)
    assert suspect_among(failing("p0"), failing("p1"), well) is None
    before = PullHistory("p2", 0, float("-inf"), NOW_S - 500.0)
    assert suspect_among(failing("p0"), failing("p1"), before) is not None


def test_a_source_that_serves_no_other_target_is_no_witness() -> None:
    pairs = (failing("p0"), failing("p1"))
    assert suspect_among(*pairs, served={"p0": NOW_S}) is None
    long_ago = NOW_S - RULES.min_duration_s - 1.0
    assert suspect_among(*pairs, served={"p0": NOW_S, "p1": long_ago}) is None


def test_a_target_without_a_pair_is_not_evaluated() -> None:
    assert suspect_among() is None


def chosen(
    suspects: set[str], targets: int = 8, *, told: str | None = None, since_s: float | None = None
) -> str | None:
    return choose_replacement(
        suspects, targets, last_notified=told, since_last_s=since_s, rules=RULES
    )


def test_every_coordinator_chooses_the_same() -> None:
    assert chosen({"d3", "d1"}) == "d1"
    assert chosen(set()) is None


@pytest.mark.parametrize(
    ("suspects", "targets", "any_is"),
    [(1, 2, True), (2, 4, False), (2, 8, True), (3, 8, False), (8, 8, False)],
)
def test_where_many_look_broken_none_is_replaced(
    suspects: int, targets: int, *, any_is: bool
) -> None:
    assert (chosen({f"d{n}" for n in range(suspects)}, targets) is not None) is any_is


def test_the_next_one_waits() -> None:
    assert chosen({"d2"}, told="d1", since_s=RULES.replacement_interval_s - 1.0) is None
    assert chosen({"d2"}, told="d1", since_s=RULES.replacement_interval_s) == "d2"


def test_a_target_that_missed_the_order_is_told_again() -> None:
    assert chosen({"d1", "d0"}, told="d1", since_s=1.0) == "d1"
