"""A target that pulls from nobody is told so, and no other is."""

from __future__ import annotations

from collections.abc import Callable

from baton.control.probing.notices import PairNoticeKind
from baton.domain.fleet import Role
from baton.domain.handoff import LegKind
from baton.policy.links.estimates import LinkState
from baton.policy.resilience.failed_agents import AgentRules
from tests.control.pair_world import PairWorld, ReplicaPair

RULES = AgentRules()
ENOUGH_S = 200.0
"""For whole probes of every pair, and for the pauses between those that fail."""

Verdict = Callable[[ReplicaPair], bool]


def live(at: PairWorld, seconds: float, *, arrives: Verdict, answers: Verdict) -> None:
    """Let probes go on: whether a source answers, and whether blocks arrive, by pair."""
    until_s = at.now_s + seconds
    while at.now_s < until_s:
        while at.checks or at.running:
            while at.checks:
                ends = at.checks[0]
                at.answer_check(ok=answers(ends), pair=ends)
            for leg_id, command in tuple(at.running.items()):
                is_pull = command.leg.kind is LegKind.DECODE
                ends = (command.leg.source_id or "", command.replica_id)
                at.finish(leg_id, cached_tokens=0 if is_pull and not arrives(ends) else 16)
        at.advance(0.5)


def any_pair(_: ReplicaPair) -> bool:
    return True


def not_into(*targets: str) -> Verdict:
    return lambda ends: ends[1] not in targets


def fleet(prefill: int, decode: int) -> PairWorld:
    at = PairWorld()
    at.join_prefill_decode(prefill, decode)
    at.complete_all_probes()
    at.prober.pop_notices()
    return at


def agents(at: PairWorld) -> list[tuple[PairNoticeKind, str | None]]:
    kinds = {PairNoticeKind.AGENT_FAILED, PairNoticeKind.AGENT_RECOVERED}
    return [
        (notice.kind, notice.target_id)
        for notice in at.prober.pop_notices()
        if notice.kind in kinds
    ]


def test_only_a_target_that_pulls_from_no_source_is_reported() -> None:
    at = fleet(2, 4)
    live(at, ENOUGH_S, arrives=not_into("d1"), answers=any_pair)
    assert set(at.reported_agents) == {"d1"}
    assert set(at.prober.failed_agents()) == {"d1"}
    assert agents(at) == [(PairNoticeKind.AGENT_FAILED, "d1")]


def test_it_is_told_where_it_was_broken_from_its_start() -> None:
    at = PairWorld()
    at.join_prefill_decode(1, 2)
    live(at, ENOUGH_S, arrives=not_into("d1"), answers=any_pair)
    assert set(at.reported_agents) == {"d1"}


def test_a_source_that_hands_nothing_out_makes_no_target_a_suspect() -> None:
    at = fleet(3, 3)
    live(at, ENOUGH_S, arrives=lambda ends: ends[0] != "p0", answers=any_pair)
    assert not at.reported_agents
    assert at.links.state("p0", "d0") is LinkState.QUARANTINED


def test_a_target_whose_sources_do_not_answer_it_is_no_suspect() -> None:
    at = fleet(2, 4)
    live(at, ENOUGH_S, arrives=not_into("d1"), answers=not_into("d1"))
    assert not at.reported_agents
    assert not at.prober.failed_agents()


def test_where_no_target_pulls_none_is_told() -> None:
    at = fleet(2, 4)
    live(at, ENOUGH_S, arrives=lambda _: False, answers=any_pair)
    assert not at.reported_agents


def test_with_half_of_the_targets_failing_they_are_logged_and_not_replaced() -> None:
    at = fleet(2, 4)
    live(at, ENOUGH_S, arrives=not_into("d0"), answers=any_pair)
    at.disconnect("d0")
    at.reported_agents.clear()
    at.join("d0", Role.DECODE)
    live(at, RULES.replacement_interval_s, arrives=not_into("d1", "d2"), answers=any_pair)
    assert not at.reported_agents
    assert set(at.prober.failed_agents()) == {"d1", "d2"}


def test_one_that_pulls_again_is_no_suspect_any_more() -> None:
    at = fleet(2, 4)
    live(at, ENOUGH_S, arrives=not_into("d1"), answers=any_pair)
    at.prober.pop_notices()
    live(at, ENOUGH_S, arrives=any_pair, answers=any_pair)
    assert not at.prober.failed_agents()
    assert agents(at) == [(PairNoticeKind.AGENT_RECOVERED, "d1")]


def test_after_one_was_replaced_the_next_waits_its_turn() -> None:
    at = fleet(2, 8)
    live(at, ENOUGH_S, arrives=not_into("d1"), answers=any_pair)
    at.disconnect("d1")
    assert not at.prober.failed_agents()
    at.reported_agents.clear()
    live(at, RULES.replacement_interval_s / 2, arrives=not_into("d2"), answers=any_pair)
    assert set(at.prober.failed_agents()) == {"d2"}
    assert not at.reported_agents
    live(at, RULES.replacement_interval_s, arrives=not_into("d2"), answers=any_pair)
    assert set(at.reported_agents) == {"d2"}
