"""Whose transfer agent is broken, and who may be replaced for it."""

from __future__ import annotations

import pytest

from baton.policy.resilience.failed_agents import (
    AgentRules,
    PullHistory,
    agent_failure_reason,
    choose_replacement,
)

RULES = AgentRules()
NOW_S = 1000.0


def failing(
    source_id: str = "p0",
    failed: int = RULES.failures,
    since_s: float = NOW_S - RULES.min_duration_s,
    proven_at_s: float | None = None,
) -> PullHistory:
    return PullHistory(source_id, failed, since_s, proven_at_s)


def judged(*pairs: PullHistory, served: dict[str, float] | None = None) -> str | None:
    served_at_s = {pair.source_id: NOW_S for pair in pairs} if served is None else served
    return agent_failure_reason(pairs, served_at_s, NOW_S, RULES)


def test_a_target_whose_pulls_fail_from_sources_that_serve_others_is_broken() -> None:
    why = judged(failing("p1"), failing("p0"))
    assert why is not None
    assert "for 30 s every pull from p0, p1 has failed" in why


def test_one_that_has_one_source_only_is_judged_by_that_one() -> None:
    assert judged(failing()) is not None


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
    assert judged(*pairs, *others) is None


def test_a_target_that_pulls_from_anyone_is_well() -> None:
    well = PullHistory("p2", 0, float("-inf"), NOW_S - 1.0)
    assert judged(failing("p0"), failing("p1"), well) is None
    before = PullHistory("p2", 0, float("-inf"), NOW_S - 500.0)
    assert judged(failing("p0"), failing("p1"), before) is not None


def test_a_source_that_serves_nobody_else_is_no_witness() -> None:
    pairs = (failing("p0"), failing("p1"))
    assert judged(*pairs, served={"p0": NOW_S}) is None
    long_ago = NOW_S - RULES.min_duration_s - 1.0
    assert judged(*pairs, served={"p0": NOW_S, "p1": long_ago}) is None


def test_whoever_has_no_pair_is_not_judged() -> None:
    assert judged() is None


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


def test_one_that_has_not_heard_it_is_told_again() -> None:
    assert chosen({"d1", "d0"}, told="d1", since_s=1.0) == "d1"
