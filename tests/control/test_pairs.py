"""The pair prober: who is checked, when, what a failure means, and that nothing is left behind."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.control.probing.notices import PairNoticeKind
from baton.control.probing.prober import PROBE_PREFIX, ProbeOptions
from baton.domain.events import SideChannelChecked
from baton.domain.fleet import LinkTotals, Load, Role
from baton.domain.handoff import LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.policy.links.estimates import LinkState
from tests.control.pair_world import NO_RATE_LIMIT, PairWorld

P0D0 = ("p0", "d0")


def world(prefill: int = 1, decode: int = 1, options: ProbeOptions = NO_RATE_LIMIT) -> PairWorld:
    made = PairWorld(options)
    made.join_prefill_decode(prefill, decode)
    return made


def state(at: PairWorld, ends: tuple[str, str] = P0D0) -> LinkState:
    return at.links.state(*ends)


def kinds(at: PairWorld) -> list[PairNoticeKind]:
    return [notice.kind for notice in at.prober.pop_notices()]


def at_pull(prefill: int = 1, decode: int = 1) -> PairWorld:
    """A first probe whose block is about to be pulled."""
    made = world(prefill, decode)
    made.answer_check(pair=P0D0)
    made.finish()
    return made


def steady() -> PairWorld:
    """A pair that was found well."""
    made = world()
    made.complete_all_probes()
    return made


# -------------------------------------------------------------------- who is checked


def test_every_pair_of_one_layout_that_may_hand_over_is_checked_at_once() -> None:
    at = PairWorld(ProbeOptions(max_running=20))
    for replica_id, role in (
        ("p0", Role.PREFILL),
        ("p1", Role.PREFILL),
        ("d0", Role.DECODE),
        ("m0", Role.MIXED),
        ("m1", Role.MIXED),
    ):
        at.join(replica_id, role)
    at.join("x0", Role.DECODE, layout="other")
    wanted = {
        (source_id, target_id) for source_id in ("p0", "p1") for target_id in ("d0", "m0", "m1")
    }
    wanted |= {("m0", "d0"), ("m0", "m1"), ("m1", "d0"), ("m1", "m0")}
    assert len(at.checks) == len(wanted)
    assert set(at.checks) == wanted


def large(prefill: int = 6, decode: int = 6) -> PairWorld:
    """A fleet of more replicas than anyone has partners."""
    at = PairWorld(ProbeOptions(max_per_s=1000.0, max_running=100, max_partners=2))
    at.join_prefill_decode(prefill, decode)
    return at


def test_in_a_large_fleet_each_that_joins_is_paired_with_a_few_others_only() -> None:
    at = large()
    assert len(at.checks) == len(set(at.checks)) == 6 * 2
    assert {source_id for source_id, _ in at.checks} == {f"p{number}" for number in range(6)}
    at.checks.clear()
    at.join("d9", Role.DECODE)
    assert {target_id for _, target_id in at.checks} == {"d9"}
    assert len({source_id for source_id, _ in at.checks}) == 2


def test_an_undrawn_pair_is_watched_from_its_first_failure_until_it_recovers() -> None:
    at = large()
    drawn = set(at.checks)
    ends = next(
        (f"p{p}", f"d{d}") for p in range(6) for d in range(6) if (f"p{p}", f"d{d}") not in drawn
    )
    at.checks.clear()
    for _ in range(3):
        at.links.record_failure(*ends, at.now_s)
        at.execute(at.prober.suspect(*ends, at.now_s))
    assert at.links.transfer_s(*ends, 1) is None, "quarantined"
    assert at.checks == [ends]
    at.answer_check(ok=False, pair=ends)
    at.advance(1.1)
    assert at.checks == [ends], "as long as it is not well, it is tried again"
    at.complete_probe()
    assert at.links.state(*ends) is LinkState.OK
    at.checks.clear()
    at.advance(60.0)
    assert ends not in at.checks


def test_a_pair_from_a_replica_that_only_decodes_is_watched_while_fetches_from_it_fail() -> None:
    at = PairWorld()
    for name in ("d0", "d1"):
        at.join(name, Role.DECODE)
    assert at.checks == [], "it is drawn for nothing"
    for _ in range(3):
        at.links.record_failure("d0", "d1", at.now_s)
        at.execute(at.prober.suspect("d0", "d1", at.now_s))
    assert at.links.transfer_s("d0", "d1", 1) is None, "quarantined"
    at.complete_probe(("d0", "d1"))
    assert at.links.state("d0", "d1") is LinkState.OK
    at.advance(60.0)
    assert at.checks == []


def test_a_source_that_does_not_listen_is_not_watched_after_failures() -> None:
    at = PairWorld()
    at.join("d0", Role.DECODE, has_side_channel=False)
    at.join("d1", Role.DECODE)
    at.execute(at.prober.suspect("d0", "d1", at.now_s))
    assert at.checks == []


def test_a_source_that_hands_nothing_off_is_not_checked() -> None:
    at = PairWorld()
    at.join("d0", Role.DECODE)
    at.join("p0", Role.PREFILL, has_side_channel=False)
    assert at.checks == []
    assert at.prober.next_deadline_at_s() is None


def test_a_pair_is_checked_whichever_of_the_two_joins_last() -> None:
    at = PairWorld()
    at.join("p0", Role.PREFILL)
    assert at.checks == []
    at.join("d0", Role.DECODE)
    assert at.checks == [P0D0]


def test_a_replica_that_joins_again_is_a_new_one() -> None:
    at = steady()
    at.join("p0", Role.PREFILL)
    assert at.checks == [P0D0]


# -------------------------------------------------------------------- a probe's way


def test_the_first_probe_of_a_pair_asks_prefills_pulls_and_finds_it_well() -> None:
    at = world()
    assert (at.checks, at.running) == ([P0D0], {})
    at.answer_check()
    (prefill,) = at.running.values()
    assert (prefill.replica_id, prefill.leg.kind) == ("p0", LegKind.PREFILL)
    assert len(prefill.leg.prompt_token_ids) == 17
    assert all(3 <= token_id <= 66 for token_id in prefill.leg.prompt_token_ids)
    assert prefill.leg.leg_id.startswith(PROBE_PREFIX)
    at.finish()
    (decode,) = at.running.values()
    assert (decode.replica_id, decode.leg.kind) == ("d0", LegKind.DECODE)
    assert decode.leg.prompt_token_ids == prefill.leg.prompt_token_ids
    assert decode.leg.source_id == "p0"
    assert state(at) is LinkState.UNKNOWN
    at.finish()
    assert (at.running, at.leased, at.prober.running_count()) == ({}, {}, 0)
    assert state(at) is LinkState.OK


def test_an_output_that_does_not_finish_a_leg_changes_nothing() -> None:
    at = world()
    at.answer_check()
    (leg_id,) = at.running
    at.deliver("p0", LegOutput(leg_id))
    assert list(at.running) == [leg_id]
    assert at.prober.owns(leg_id)


def test_legs_of_probes_are_charged_to_their_replicas_while_they_run() -> None:
    at = world()
    at.answer_check()
    view = at.fleet.get("p0")
    assert view is not None
    assert (view.inflight_legs, view.inflight_tokens) == (1, 17)
    at.finish()
    at.finish()
    view = at.fleet.get("p0")
    assert view is not None
    assert view.inflight_legs == 0


def test_no_two_probes_have_the_same_prompt_or_leg() -> None:
    at = world(options=ProbeOptions(max_per_s=1000.0, transfer_every_s=1.0))
    for _ in range(20):
        at.complete_all_probes()
        at.advance(5.6)
    assert len(at.prompts) == 20
    assert len(set(at.prompts)) == len(at.prompts)


def test_the_duration_of_a_pull_goes_to_the_link_table() -> None:
    at = world(options=ProbeOptions(max_per_s=1000.0, transfer_every_s=1.0))
    at.complete_all_probes()
    at.advance(5.6)
    at.answer_check()
    at.now_s += 0.9  # the prefill's
    at.finish()
    at.now_s += 0.25
    at.finish()
    took_s = at.links.transfer_s("p0", "d0", 0)
    assert took_s == pytest.approx(0.25, rel=0.01)


# -------------------------------------------------------------------- how often


def test_a_well_pair_is_asked_every_interval_and_moves_blocks_once_a_minute() -> None:
    at = steady()
    for _ in range(2000):
        at.advance(0.1)
        at.complete_all_probes()
    times = [at_s for at_s, _ in at.started_checks]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(4.5 <= gap <= 5.7 for gap in gaps)
    assert max(gaps) - min(gaps) > 0.3, "coordinators would march in step"
    assert len(at.prompts) == 1 + 3


def test_pairs_with_recent_pulls_move_no_blocks_for_a_probe() -> None:
    at = steady()
    for number in range(1, 40):
        totals = LinkTotals("p0", pulls=number, moved_bytes=number * 10**6, busy_s=number * 0.01)
        at.links.observe("d0", totals, at.now_s)
        at.advance(5.6)
        at.complete_all_probes()
    assert len(at.prompts) == 1


def test_a_pair_whose_pulls_became_slow_moves_blocks_at_every_check_until_it_is_well_again() -> (
    None
):
    at, pulls, busy_s = steady(), 0, 0.0

    def pull(took_s: float) -> None:
        nonlocal pulls, busy_s
        pulls, busy_s = pulls + 1, busy_s + took_s
        totals = LinkTotals("p0", pulls=pulls, moved_bytes=pulls * 10**6, busy_s=busy_s)
        at.links.observe("d0", totals, at.now_s)

    def check(took_s: float) -> int:
        before = len(at.prompts)
        at.advance(5.6)
        at.complete_all_probes()
        if len(at.prompts) > before:
            pull(took_s)
        return len(at.prompts) - before

    for _ in range(20):
        pull(0.01)
    assert [check(0.01) for _ in range(4)] == [0] * 4
    for _ in range(3):
        pull(1.0)
    assert [check(1.0) for _ in range(8)] == [1] * 8
    assert sum(check(0.01) for _ in range(8)) < 8
    assert check(0.01) == 0


def test_at_most_eight_probes_run_at_once_and_the_next_begins_when_one_ends() -> None:
    at = world(5, 4)
    assert (len(at.checks), at.prober.running_count()) == (8, 8)
    at.advance(0.1)
    assert at.prober.running_count() == 8
    at.complete_probe()
    assert (len(at.checks), at.prober.running_count()) == (8, 8)
    while at.checks:
        at.complete_all_probes()
        at.advance(0.1)
    assert {ends for _, ends in at.started_checks} == {
        (f"p{p}", f"d{d}") for p in range(5) for d in range(4)
    }


def test_probes_are_begun_at_the_allowed_rate_after_a_burst() -> None:
    at = world(10, 10, ProbeOptions(max_per_s=10.0, max_running=8))
    for _ in range(900):
        at.complete_all_probes()
        at.advance(0.01)
    times = [at_s for at_s, _ in at.started_checks]
    assert len(times) > 80
    for first, at_s in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= 8 + 10.0 * (times[last] - at_s) + 1e-6


def test_a_fleet_too_large_for_the_rate_is_swept_fairly() -> None:
    """A hundred pairs, ten a second: every pair twice before any a third time (or so)."""
    at = world(10, 10, ProbeOptions(max_per_s=10.0))
    while len(at.started_checks) < 500:
        at.complete_all_probes()
        at.advance(0.1)
    counts = {ends: 0 for _, ends in at.started_checks}
    for _, ends in at.started_checks:
        counts[ends] += 1
    assert len(counts) == 100
    assert max(counts.values()) - min(counts.values()) <= 2


# -------------------------------------------------------------------- failures


def test_a_side_channel_that_does_not_answer_quarantines_the_pair_and_says_why() -> None:
    at = world(1, 2)
    at.answer_check(ok=False, reason="no listener at p0:5600", pair=P0D0)
    assert state(at) is LinkState.QUARANTINED
    assert at.links.reason("p0", "d0") == "side channel: no listener at p0:5600"
    assert at.links.transfer_s("p0", "d0", 1) is None
    assert at.running == {}
    assert kinds(at) == [PairNoticeKind.QUARANTINED]


@pytest.mark.parametrize(
    "failure", [LegFailure.KV_LOAD_FAILED, LegFailure.ENGINE_ERROR, LegFailure.REJECTED]
)
def test_a_pull_that_fails_quarantines_the_pair_and_frees_the_blocks(failure: LegFailure) -> None:
    at = at_pull()
    at.fail(failure)
    assert state(at) is LinkState.QUARANTINED
    assert failure in at.links.reason("p0", "d0")
    assert (at.leased, at.prober.running_count()) == ({}, 0)


@pytest.mark.parametrize(
    "failure", [LegFailure.OVERLOADED, LegFailure.UNREACHABLE, LegFailure.DRAINING]
)
def test_a_pull_that_its_target_could_not_take_says_nothing_of_the_pair(
    failure: LegFailure,
) -> None:
    at = at_pull()
    at.fail(failure)
    assert state(at) is LinkState.UNKNOWN
    assert (at.leased, at.prober.running_count()) == ({}, 0)


@pytest.mark.parametrize("failure", list(LegFailure))
def test_a_prefill_that_fails_says_nothing_of_the_pair(failure: LegFailure) -> None:
    at = world()
    at.answer_check()
    at.fail(failure)
    assert state(at) is LinkState.UNKNOWN
    assert failure in at.links.reason("p0", "d0")
    assert at.prober.running_count() == 0


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_pull_that_ends_in_error_quarantines_the_pair_and_frees_the_blocks(
    finish: FinishReason,
) -> None:
    at = at_pull()
    at.finish(finish=finish)
    assert state(at) is LinkState.QUARANTINED
    assert at.leased == {}


def test_a_target_that_computed_the_prompt_itself_did_not_get_the_block() -> None:
    at = at_pull()
    at.finish(cached_tokens=0)
    assert state(at) is LinkState.QUARANTINED
    assert "computed it itself" in at.links.reason("p0", "d0")
    assert at.leased == {}


def test_a_target_that_does_not_say_what_was_cached_is_believed() -> None:
    at = at_pull()
    at.finish(cached_tokens=None)
    assert state(at) is LinkState.OK


def test_a_source_that_hands_out_no_kv_handle_quarantines_the_pair() -> None:
    at = world()
    at.answer_check()
    at.finish(ticket=False)
    assert state(at) is LinkState.QUARANTINED
    assert "without a KV handle" in at.links.reason("p0", "d0")


@pytest.mark.parametrize("ticket", [True, False])
def test_a_source_whose_engine_is_broken_says_nothing_of_the_pair(*, ticket: bool) -> None:
    at = world()
    at.answer_check()
    at.finish(finish=FinishReason.ERROR, ticket=ticket)
    assert state(at) is LinkState.UNKNOWN
    assert (at.leased, at.running) == ({}, {})


# -------------------------------------------------------------------- deadlines


def test_a_check_without_any_answer_says_nothing_of_the_pair() -> None:
    at = world()
    at.advance(3.4)
    assert at.prober.running_count() == 1
    at.advance(0.2)
    assert at.prober.running_count() == 0
    assert state(at) is LinkState.UNKNOWN
    assert at.links.reason("p0", "d0") == "side channel: no answer within 3.5 s"


def test_a_prefill_over_its_deadline_is_aborted_and_says_nothing_of_the_pair() -> None:
    at = world()
    at.answer_check()
    at.advance(2.1)
    assert list(at.aborts) == list(at.running)
    assert state(at) is LinkState.UNKNOWN
    at.finish()  # its KV handle comes late, and is released like any other
    assert at.leased == {}


def test_a_first_pull_has_time_for_the_handshake_and_then_quarantines_the_pair() -> None:
    at = at_pull()
    at.advance(9.9)
    assert state(at) is LinkState.UNKNOWN
    at.advance(0.2)
    assert state(at) is LinkState.QUARANTINED
    assert at.links.reason("p0", "d0") == "pull: no answer within 10 s"
    assert list(at.aborts) == list(at.running)
    at.confirm_aborts()
    assert at.leased == {}


def test_later_pulls_have_no_handshake_to_wait_for() -> None:
    at = steady()
    at.execute(at.prober.suspect("p0", "d0", at.now_s))
    at.advance(5.6)
    at.answer_check()
    at.finish()
    at.advance(2.1)
    assert state(at) is LinkState.QUARANTINED


def test_an_unconfirmed_abort_frees_the_blocks_all_the_same() -> None:
    at = at_pull()
    at.advance(10.1)
    assert at.leased != {}
    at.advance(5.1)
    assert at.leased == {}


@pytest.mark.parametrize("load", [Load(queued_requests=1), Load(step_s=0.6)])
def test_a_pull_that_waits_for_a_busy_target_says_nothing_of_the_pair(load: Load) -> None:
    at = at_pull()
    at.report_load("d0", load)
    at.advance(10.1)
    assert state(at) is LinkState.UNKNOWN
    at.confirm_aborts()
    assert at.leased == {}


def test_a_busy_source_is_no_excuse_for_a_pull() -> None:
    at = at_pull()
    at.report_load("p0", Load(queued_requests=9))
    at.advance(10.1)
    assert state(at) is LinkState.QUARANTINED


# -------------------------------------------------------------------- quarantine


def test_a_quarantined_pair_is_probed_after_1_2_4_and_at_most_30_s() -> None:
    at = world(1, 1)
    at.answer_check(ok=False)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        at.advance(pause_s - 0.01)
        assert at.checks == []
        at.advance(0.02)
        assert at.checks == [P0D0]
        at.answer_check(ok=False)


def test_only_a_whole_probe_ends_a_quarantine_and_the_next_pause_is_short_again() -> None:
    at = steady()
    at.advance(5.6)
    at.answer_check(ok=False)
    at.advance(1.1)
    at.answer_check()
    assert state(at) is LinkState.QUARANTINED
    at.finish()
    at.finish()
    assert state(at) is LinkState.OK
    at.advance(5.6)
    at.answer_check(ok=False)
    at.advance(1.1)
    assert at.checks == [P0D0]


def test_a_quarantined_pair_whose_probe_could_not_tell_stays_quarantined() -> None:
    at = world()
    at.answer_check(ok=False)
    at.advance(1.1)
    at.answer_check()
    at.fail(LegFailure.OVERLOADED)
    assert state(at) is LinkState.QUARANTINED
    at.advance(5.6)
    assert at.checks == [P0D0]


def test_a_quarantine_and_its_end_are_said_once_each() -> None:
    at = steady()
    assert kinds(at) == []
    at.advance(5.6)
    at.answer_check(ok=False)
    at.advance(1.1)
    at.answer_check(ok=False)
    at.advance(2.1)
    at.complete_all_probes()
    assert [k for k in kinds(at) if not k.startswith("source")] == [
        PairNoticeKind.QUARANTINED,
        PairNoticeKind.RECOVERED,
    ]
    assert kinds(at) == []


def test_a_handoff_that_failed_brings_a_whole_probe_at_once() -> None:
    at = steady()
    at.advance(2.0)
    at.links.record_failure("p0", "d0", at.now_s)
    at.execute(at.prober.suspect("p0", "d0", at.now_s))
    assert at.checks == [P0D0]
    at.answer_check()
    assert len(at.running) == 1
    at.finish()
    at.finish()
    at.advance(5.6)
    at.answer_check()
    assert at.running == {}


def test_suspicions_in_quick_succession_cause_one_probe_a_second() -> None:
    at = steady()
    at.advance(2.0)
    begun = len(at.started_checks)
    for _ in range(100):
        at.execute(at.prober.suspect("p0", "d0", at.now_s))
        at.complete_all_probes()
        at.advance(0.1)
    assert len(at.started_checks) - begun <= 11


def test_a_suspicion_during_a_side_channel_probe_causes_another_probe() -> None:
    at = steady()
    at.advance(5.6)
    at.execute(at.prober.suspect("p0", "d0", at.now_s))
    at.answer_check()
    assert at.running == {}
    at.advance(1.1)
    at.answer_check()
    assert len(at.running) == 1


def test_a_suspicion_of_an_unwatched_pair_is_ignored() -> None:
    at = steady()
    at.execute(at.prober.suspect("d0", "p0", at.now_s))
    at.execute(at.prober.suspect("x", "y", at.now_s))
    assert at.checks == []


def test_a_quarantine_by_failed_handoffs_is_said_and_its_end_too() -> None:
    at = steady()
    at.advance(2.0)
    for _ in range(3):
        at.links.record_failure("p0", "d0", at.now_s, "timed out")
        at.execute(at.prober.suspect("p0", "d0", at.now_s))
    (notice,) = at.prober.pop_notices()
    assert notice.kind is PairNoticeKind.QUARANTINED
    assert notice.reason == "3 handoffs failed in a row: timed out"
    at.complete_all_probes()
    assert kinds(at) == [PairNoticeKind.RECOVERED]


# -------------------------------------------------------------------- sources


def test_a_source_that_no_target_reaches_is_said_once() -> None:
    at = world(1, 3)
    at.answer_check(ok=False, pair=("p0", "d0"))
    at.answer_check(ok=False, pair=("p0", "d1"))
    assert PairNoticeKind.SOURCE_UNREACHABLE not in kinds(at)
    at.answer_check(ok=False, pair=("p0", "d2"))
    notices = at.prober.pop_notices()
    (said,) = [n for n in notices if n.kind is PairNoticeKind.SOURCE_UNREACHABLE]
    assert (said.source_id, said.target_id) == ("p0", None)
    assert said.reason == "none of 3 replicas reaches it; the last error: side channel: no listener"
    at.advance(3.1)
    while at.checks:
        at.answer_check(ok=False)
    assert kinds(at) == []


def test_of_a_new_life_of_a_source_it_is_said_again() -> None:
    at = world(1, 1)
    at.answer_check(ok=False)
    assert PairNoticeKind.SOURCE_UNREACHABLE in kinds(at)
    at.disconnect("p0")
    at.join("p0", Role.PREFILL)
    at.answer_check(ok=False)
    assert PairNoticeKind.SOURCE_UNREACHABLE in kinds(at)


def test_a_source_that_is_reached_again_is_said_once_and_all_its_pairs_are_probed() -> None:
    at = world(1, 3)
    while at.checks:
        at.answer_check(ok=False)
    at.prober.pop_notices()
    while not at.checks:
        at.advance(0.1)
    at.answer_check()
    assert kinds(at).count(PairNoticeKind.SOURCE_REACHABLE) == 1
    assert len(at.checks) == 2
    at.complete_all_probes()
    assert kinds(at).count(PairNoticeKind.SOURCE_REACHABLE) == 0


def test_an_unreachable_source_is_tried_about_once_a_second_in_all() -> None:
    at = world(1, 60)
    for _ in range(800):
        at.advance(0.5)
        while at.checks:
            at.answer_check(ok=False)
    lately = [at_s for at_s, _ in at.started_checks if at_s > 200.0]
    assert 160 <= len(lately) <= 240
    for began_s in range(200, 390, 10):
        assert sum(began_s < at_s <= began_s + 10 for at_s in lately) <= 25


def test_pairs_of_other_sources_do_not_make_a_source_unreachable() -> None:
    at = world(2, 1)
    at.answer_check(ok=False, pair=("p1", "d0"))
    (notice,) = [n for n in at.prober.pop_notices() if n.target_id is None]
    assert notice.source_id == "p1"
    at.complete_all_probes()
    assert state(at) is LinkState.OK


# -------------------------------------------------------------------- replicas that go


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["check", "prefill", "pull"])
@pytest.mark.parametrize("replica_id", ["p0", "d0"])
@pytest.mark.parametrize("how", ["lose", "drain"])
def test_a_replica_that_goes_ends_its_probes_and_leaves_nothing(
    how: str, replica_id: str, steps: int
) -> None:
    at = PairWorld()
    at.join_prefill_decode(1, 1)
    if steps >= 1:
        at.answer_check()
    if steps >= 2:
        at.finish()
    if how == "lose":
        at.disconnect(replica_id)
    else:
        at.drain(replica_id)
    assert at.prober.running_count() == 0
    assert not any(at.prober.owns(leg_id) for leg_id in at.running)
    assert set(at.running) <= set(at.aborts)
    at.confirm_aborts()
    at.advance(60.0)
    assert (at.running, at.leased) == ({}, {})
    assert at.prober.next_deadline_at_s() is None


def test_blocks_for_a_lost_target_are_freed_by_way_of_another() -> None:
    at = at_pull(1, 2)
    assert at.leased != {}
    at.disconnect("d0")
    assert at.leased == {}


def test_an_unexpected_answer_is_ignored() -> None:
    at = world()
    at.answer_check()
    for source_id, target_id in (P0D0, ("x", "d0"), ("d0", "p0")):
        event = SideChannelChecked(
            replica_id=target_id, source_id=source_id, is_reachable=False, elapsed_s=0.0
        )
        at.execute(at.prober.on_side_channel_checked(event, at.now_s))
    assert at.prober.ignored_events == 3
    assert state(at) is LinkState.UNKNOWN
