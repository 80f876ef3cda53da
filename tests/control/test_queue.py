"""Bands, turns and how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.queue.admission_controller import Estimate, RecentEstimates, WaitQueue
from baton.control.queue.tenant_limits import LimitExceeded, TenantLimits
from baton.control.request.pull_permits import PullPermits
from baton.control.state.admission_terms import Charge, PriorityBand
from baton.domain.tenant import QuotaShare, RateLimit, Tenant
from baton.policy.admission.fair_queue import QueuedRequest

HIGH, LOW = PriorityBand(1, is_attainable=True), PriorityBand(0, is_attainable=True)
_IDS = count()


def one(work: float = 1.0, *, flow: str = "a", name: str = "", by_s: float = 1e9) -> QueuedRequest:
    return QueuedRequest(name or f"r{next(_IDS)}", flow, 1.0, work, by_s)


def let_in(here: WaitQueue, request_id: str, band: PriorityBand, work: float, now_s: float) -> None:
    here.admit(band, QueuedRequest(request_id, "a", 1.0, work, 1e9), replicas=1, now_s=now_s)


def test_a_higher_band_always_comes_first() -> None:
    here = WaitQueue()
    here.add(LOW, one(name="low"), 0.0)
    here.add(PriorityBand(0, is_attainable=False), one(name="hopeless"), 0.0)
    here.add(HIGH, one(name="high"), 0.0)
    order = []
    while (head := here.head()) is not None:
        order.append(head)
        here.remove(head, 0.0)
        here.check_integrity()
    assert order == ["high", "low", "hopeless"]


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=20))
def test_the_first_is_of_the_highest_band(bands: list[tuple[int, bool]]) -> None:
    here, known = WaitQueue(), {}
    for band in (PriorityBand(priority, is_attainable=met) for priority, met in bands):
        waiting = one()
        here.add(band, waiting, 0.0)
        known[waiting.request_id] = band
    while (head := here.head()) is not None:
        assert known[head] == max(known.values())
        here.admit(known.pop(head), one(name=head), replicas=1, now_s=0.0)
        here.check_integrity()
    assert not known
    assert not here


def test_the_newest_of_the_lowest_band_makes_room_and_only_for_a_higher_one() -> None:
    here = WaitQueue()
    for name in ("low 1", "low 2"):
        here.add(LOW, one(name=name), 0.0)
    here.add(HIGH, one(name="high"), 0.0)
    assert here.victim(HIGH) == "low 2"
    assert here.victim(LOW) is None
    assert here.count_below(HIGH) == 2
    here.remove("low 2", 0.0)
    here.remove("low 1", 0.0)
    assert here.victim(HIGH) is None
    assert here.victim(PriorityBand(2, is_attainable=True)) == "high"
    assert WaitQueue().victim(HIGH) is None


def test_a_request_that_finds_an_empty_queue_is_first() -> None:
    here = WaitQueue()
    assert here.position(LOW, one(), replicas=1, now_s=0.0) is None
    here.add(LOW, one(), 0.0)
    assert here.position(HIGH, one(), replicas=1, now_s=0.0) is None
    assert here.position(LOW, one(), replicas=1, now_s=0.0) is not None


def test_before_anything_was_measured_each_replica_does_a_second_a_second() -> None:
    here = WaitQueue()
    for _ in range(6):
        here.add(LOW, one(0.5), 0.0)
    turn = here.position(LOW, one(), replicas=3, now_s=0.0)
    assert turn is not None
    assert turn.wait_s == pytest.approx(1.0)
    assert here.drain_s(replicas=3) == pytest.approx(1.0)


def test_queue_waits_are_predicted_by_departures_while_requests_waited() -> None:
    here = WaitQueue()
    for number in range(400):
        here.add(LOW, one(0.1, name=f"n{number}"), 0.0)
    for number in range(200):  # a tenth of a second of work each 50 ms: two seconds a second
        let_in(here, f"n{number}", LOW, 0.1, 0.05 * (number + 1))
    turn = here.position(LOW, one(), replicas=1, now_s=10.0)
    assert turn is not None
    assert turn.wait_s == pytest.approx(20.0 / 2.0, rel=0.1)


def test_immediate_placements_say_nothing_about_the_queues_speed() -> None:
    here = WaitQueue()
    for number in range(500):
        here.admit(LOW, one(1.0), replicas=1, now_s=number / 100)
    here.add(LOW, one(3.0), 5.0)
    assert here.drain_s(replicas=1) == pytest.approx(3.0)


def test_time_with_an_empty_queue_says_nothing_about_its_speed() -> None:
    here = WaitQueue()
    for number in range(100):
        here.add(LOW, one(0.2, name=f"n{number}"), 0.0)
    for number in range(100):
        let_in(here, f"n{number}", LOW, 0.2, 0.1 * (number + 1))
    here.add(LOW, one(1.0), 1000.0)
    turn = here.position(LOW, one(), replicas=1, now_s=1000.0)
    assert turn is not None
    assert turn.wait_s == pytest.approx(1.0 / 2.0, rel=0.1)


def test_twice_the_replicas_are_taken_to_be_twice_as_fast() -> None:
    here = WaitQueue()
    here.add(LOW, one(6.0), 0.0)
    turns = [here.position(LOW, one(), replicas=n, now_s=0.0) for n in (1, 2)]
    assert [turn.wait_s for turn in turns if turn] == pytest.approx([6.0, 3.0])


def test_arrivals_of_higher_bands_are_subtracted_from_the_rate() -> None:
    alone, beside = WaitQueue(), WaitQueue()
    for here in (alone, beside):
        for number in range(200):
            here.add(LOW, one(0.05, name=f"n{number}"), 0.0)
    for number in range(100):
        at_s = 0.1 * (number + 1)
        let_in(alone, f"n{number}", LOW, 0.1, at_s)
        let_in(beside, f"n{number}", LOW, 0.05, at_s)
        beside.admit(HIGH, one(0.05), replicas=1, now_s=at_s)
    turns = [here.position(LOW, one(), replicas=1, now_s=10.0) for here in (alone, beside)]
    assert [turn.wait_s for turn in turns if turn] == pytest.approx([5.0, 10.0], rel=0.15)


def test_all_of_a_higher_band_is_ahead_and_nothing_of_a_lower_one() -> None:
    here = WaitQueue()
    here.add(HIGH, one(2.0), 0.0)
    here.add(LOW, one(4.0), 0.0)
    own = PriorityBand(0, is_attainable=False)
    here.add(own, one(8.0), 0.0)
    middle = here.position(LOW, one(flow="b"), replicas=1, now_s=0.0)
    last = here.position(own, one(), replicas=1, now_s=0.0)
    assert middle is not None
    assert last is not None
    # A newcomer of another flow of its band shares with who waits there: nothing is before it.
    assert middle.wait_s * here._service_rate(LOW, replicas=1, now_s=0.0) == pytest.approx(2.0)
    assert last.wait_s * here._service_rate(own, replicas=1, now_s=0.0) == pytest.approx(14.0)


def test_an_absent_request_can_be_removed_from_the_queue() -> None:
    here = WaitQueue()
    here.remove("nobody", 1.0)
    here.check_integrity()
    assert len(here) == 0
    assert "nobody" not in here
    assert list(here) == []


def test_predicted_waits_grow_after_timeouts_behind_a_blocked_head() -> None:
    here = WaitQueue()
    for name in ("first", "second"):
        here.add(LOW, one(name=name), 0.0)

    def after_s(band: PriorityBand) -> float:
        turn = here.position(band, one(), replicas=1, now_s=0.0)
        assert turn is not None
        return turn.wait_s

    before_s = after_s(LOW)
    here.record_timeout("second")
    assert after_s(LOW) == before_s, "it was prompts that they waited for"
    here.head_blocked_on_decode = True
    here.record_timeout("second")
    here.record_timeout("nobody")
    stretched_s = after_s(LOW)
    assert stretched_s == pytest.approx(1.1 * before_s)
    for _ in range(100):
        here.record_timeout("second")
    assert after_s(LOW) == pytest.approx(2.5 * before_s)


def test_a_queue_timeout_raises_the_misprediction_rate_of_its_band_and_turns_lower_it() -> None:
    here = WaitQueue()
    assert here.misprediction_rate(LOW) == 0.0
    here.add(LOW, one(name="first"), 0.0)
    here.record_timeout("nobody")
    assert here.misprediction_rate(LOW) == 0.0
    here.record_timeout("first")
    assert here.misprediction_rate(LOW) == 1.0
    assert here.misprediction_rate(HIGH) == 0.0
    let_in(here, "first", LOW, 1.0, 0.0)
    assert here.misprediction_rate(LOW) == pytest.approx(0.998)
    for number in range(600):
        here.add(LOW, one(name=f"r{number}"), 0.0)
        let_in(here, f"r{number}", LOW, 1.0, 0.0)
    assert here.misprediction_rate(LOW) == 0.0


def test_each_one_that_had_its_turn_makes_predictions_shorter_again() -> None:
    after_s = []
    for disappointed in (0, 1):
        here = WaitQueue()
        here.head_blocked_on_decode = True
        for name in ("first", "second"):
            here.add(LOW, one(name=name), 0.0)
        for _ in range(disappointed):
            here.record_timeout("first")
        let_in(here, "first", LOW, 1.0, 0.0)
        turn = here.position(LOW, one(), replicas=1, now_s=0.0)
        assert turn is not None
        after_s.append(turn.wait_s)
    assert after_s[1] == pytest.approx(1.1 * 0.9998 * after_s[0], rel=1e-6)


# ---------- what requests of each kind needed of late
def needed(
    at_s: float = 0.0, *, alone_s: float = 0.2, queue_s: float = 0.0, work: float = 1.0
) -> Estimate:
    return Estimate(at_s, alone_s, queue_s, work)


def test_the_lightest_stands_for_its_kind() -> None:
    here = RecentEstimates()
    for alone_s in (0.4, 0.1, 0.3):
        here.note("acme", "chat", needed(alone_s=alone_s))
    here.note("acme", "batch", needed(alone_s=0.01))
    found = here.lightest("acme", "chat", 0.0)
    assert found is not None
    assert found.unqueued_ttft_s == 0.1


def test_a_queue_moves_on_and_is_the_last_one_seen() -> None:
    here = RecentEstimates()
    here.note("acme", "chat", needed(0.0, alone_s=0.1, queue_s=9.0))
    here.note("acme", "chat", needed(0.1, alone_s=0.5, queue_s=0.3))
    found = here.lightest("acme", "chat", 0.2)
    assert found is not None
    assert found.unqueued_ttft_s == 0.1
    assert found.engine_queue_s == pytest.approx(0.2)
    gone = here.lightest("acme", "chat", 0.6)
    assert gone is not None
    assert gone.engine_queue_s == 0.0


def test_a_rate_of_a_second_ago_is_forgotten() -> None:
    here = RecentEstimates()
    here.note("acme", "chat", needed(0.0, alone_s=0.1))
    here.note("acme", "chat", needed(0.5, alone_s=0.4))
    found = here.lightest("acme", "chat", 1.1)
    assert found is not None
    assert found.unqueued_ttft_s == 0.4
    assert here.recent_classes(1.1) == [("acme", "chat")]
    assert here.lightest("acme", "chat", 1.6) is None
    assert here.recent_classes(1.6) == []


def test_there_is_no_estimate_without_requests() -> None:
    assert RecentEstimates().lightest("acme", "chat", 0.0) is None


def test_the_number_of_kinds_and_of_entries_of_each_is_bounded() -> None:
    here = RecentEstimates()
    for number in range(3000):
        here.note(f"t{number}", "chat", needed(float(number)))
        here.note("t0", "batch", needed(float(number)))
    assert len(here._by_class) <= 1024
    assert all(len(kind) <= 16 for kind in here._by_class.values())


# ---------- tenants' limits at one coordinator
ACME = Tenant(name="acme", rate=RateLimit(requests_per_s=2.0, burst_s=1.0))
WORDY = Tenant(name="wordy", rate=RateLimit(tokens_per_s=100.0, burst_s=10.0))
NARROW = Tenant(name="narrow", max_in_flight=4)


def tenancy(*tenants: Tenant, coordinators: int = 1) -> TenantLimits:
    return TenantLimits({tenant.name: tenant for tenant in tenants}, coordinators=coordinators)


def taken(
    at: TenantLimits, tenant: Tenant, times: int, *, tokens: float = 10.0, now_s: float = 0.0
) -> int:
    """How many of so many requests are taken in."""
    return len(charges(at, tenant, times, tokens=tokens, now_s=now_s))


def charges(
    at: TenantLimits, tenant: Tenant, times: int, *, tokens: float = 10.0, now_s: float = 0.0
) -> list[Charge]:
    """What those of so many requests are charged that are taken in."""
    told = [at.acquire(tenant, tokens, now_s) for _ in range(times)]
    return [charge for charge in told if isinstance(charge, Charge)]


def in_flight(**counts: int) -> Mapping[str, int]:
    return counts


def test_a_tenant_over_its_rate_is_told_when_to_come_back() -> None:
    here = tenancy(ACME)
    assert taken(here, ACME, 5) == 2
    limited = here.acquire(ACME, 1.0, 0.0)
    assert isinstance(limited, LimitExceeded)
    assert "acme" in limited.reason
    assert limited.retry_after_s == 1.0
    assert isinstance(here.acquire(ACME, 1.0, 0.6), Charge)


def test_the_wait_is_as_long_as_the_bucket_says() -> None:
    slow = Tenant(name="slow", rate=RateLimit(requests_per_s=0.1, burst_s=10.0))
    here = tenancy(slow)
    assert taken(here, slow, 1) == 1
    limited = here.acquire(slow, 1.0, 2.0)
    assert isinstance(limited, LimitExceeded)
    assert limited.retry_after_s == pytest.approx(8.0)


def test_tokens_are_charged_as_expected_and_settled_at_the_end() -> None:
    here = tenancy(WORDY)
    first, _ = charges(here, WORDY, 3, tokens=500.0)
    here.settle(first, used_tokens=100.0, duration_s=1.0)
    assert taken(here, WORDY, 1, tokens=400.0) == 1
    assert isinstance(here.acquire(WORDY, 1.0, 0.0), LimitExceeded)


def test_use_beyond_the_estimate_is_charged_afterwards() -> None:
    here = tenancy(WORDY)
    (charge,) = charges(here, WORDY, 1, tokens=100.0)
    here.settle(charge, used_tokens=1100.0, duration_s=1.0)
    limited = here.acquire(WORDY, 100.0, 0.0)
    assert isinstance(limited, LimitExceeded)
    assert limited.retry_after_s == pytest.approx(2.0)


def test_a_request_without_output_is_refunded_in_full() -> None:
    here = tenancy(ACME)
    first, _ = charges(here, ACME, 9)
    here.settle(first, used_tokens=0.0, duration_s=0.1)
    assert isinstance(here.acquire(ACME, 10.0, 0.0), Charge)


def test_no_more_are_in_flight_than_may_be() -> None:
    here = tenancy(NARROW)
    first, *others = charges(here, NARROW, 6)
    assert len(others) == 3
    here.check_integrity(in_flight(narrow=4))
    here.settle(first, used_tokens=10.0, duration_s=8.0)
    assert taken(here, NARROW, 2) == 1
    limited = here.acquire(NARROW, 1.0, 0.0)
    assert isinstance(limited, LimitExceeded)
    # Requests of 8 s, four at a time: one ends every two seconds.
    assert limited.retry_after_s == pytest.approx(2.0)


def test_before_anything_was_dealt_out_each_coordinator_has_an_equal_share() -> None:
    here = tenancy(ACME, WORDY, NARROW, coordinators=2)
    assert taken(here, NARROW, 9) == 2
    assert taken(here, ACME, 9) == 1
    assert taken(here, WORDY, 9, tokens=250.0) == 2


def test_one_place_is_left_where_there_are_more_coordinators_than_places() -> None:
    here = tenancy(NARROW, coordinators=10)
    assert taken(here, NARROW, 3) == 1


def test_a_share_replaces_the_equal_one_and_may_be_nothing() -> None:
    here = tenancy(ACME, NARROW, coordinators=4)
    here.apply_shares(
        {
            "narrow": QuotaShare(max_in_flight=3),
            "acme": QuotaShare(requests_per_s=2.0),
            "unknown": QuotaShare(requests_per_s=9.0),
        },
        0.0,
    )
    assert taken(here, NARROW, 9) == 3
    assert taken(here, ACME, 9, now_s=1.0) == 2
    here.apply_shares({"narrow": QuotaShare(max_in_flight=0)}, 1.0)
    limited = here.acquire(NARROW, 1.0, 1.0)
    assert isinstance(limited, LimitExceeded)
    assert limited.retry_after_s == 2.0


def test_a_share_is_never_more_than_the_limit() -> None:
    here = tenancy(NARROW)
    here.apply_shares({"narrow": QuotaShare(max_in_flight=400)}, 0.0)
    assert taken(here, NARROW, 9) == 4


def test_other_limits_hold_at_once_and_shares_of_them_stay_shares() -> None:
    here = tenancy(NARROW)
    here.apply_shares({"narrow": QuotaShare(max_in_flight=2)}, 0.0)
    assert taken(here, NARROW, 9) == 2
    wider = Tenant(name="narrow", max_in_flight=8)
    here.reconfigure({"narrow": wider})
    assert taken(here, wider, 9) == 2
    here.check_integrity(in_flight(narrow=4))


def test_a_tenant_that_gets_a_cap_while_it_runs_has_those_counted_that_run() -> None:
    free = Tenant(name="narrow")
    here = tenancy(free)
    assert taken(here, free, 3) == 3
    here.reconfigure({"narrow": NARROW})
    assert taken(here, NARROW, 3) == 1


def test_use_before_a_limit_is_not_charged_to_it() -> None:
    free, here = Tenant(name="wordy"), tenancy(Tenant(name="wordy"))
    before = charges(here, free, 100, tokens=500.0)
    here.reconfigure({"wordy": WORDY})
    for charge in before[1:]:
        here.settle(charge, used_tokens=4000.0, duration_s=60.0)
    assert here.check(WORDY, 60.0) is None
    (charge,) = charges(here, WORDY, 1, tokens=1000.0, now_s=60.0)
    here.settle(before[0], used_tokens=0.0, duration_s=1.0)
    assert here.check(WORDY, 60.0) is not None, "nor is it given back"
    here.settle(charge, used_tokens=400.0, duration_s=1.0)
    assert here.check(WORDY, 60.0) is None


def test_debt_of_a_removed_limit_is_not_charged_to_the_next_one() -> None:
    here = tenancy(WORDY)
    (charge,) = charges(here, WORDY, 1, tokens=100.0)
    here.reconfigure({"wordy": Tenant(name="wordy")})
    here.reconfigure({"wordy": WORDY})
    here.settle(charge, used_tokens=9000.0, duration_s=1.0)
    assert here.check(WORDY, 0.0) is None


def test_a_limit_that_is_lifted_holds_no_more() -> None:
    here = tenancy(ACME)
    assert taken(here, ACME, 9) == 2
    here.reconfigure({"acme": Tenant(name="acme")})
    assert taken(here, Tenant(name="acme"), 9) == 9


def test_an_account_of_a_removed_tenant_is_kept_until_its_last_request_has_ended() -> None:
    here = tenancy(NARROW)
    (charge,) = charges(here, NARROW, 1)
    here.reconfigure({})
    here.check_integrity(in_flight(narrow=1))
    here.settle(charge, used_tokens=10.0, duration_s=1.0)
    here.check_integrity(in_flight())
    assert not here._accounts


def test_an_unlimited_tenant_leaves_no_account_behind() -> None:
    here = tenancy()
    anybody = Tenant()
    for _ in range(10):
        (charge,) = charges(here, anybody, 1, tokens=1.0)
        here.settle(charge, used_tokens=1.0, duration_s=1.0)
    assert not here._accounts


def test_requested_rates_of_limited_tenants_include_rejected_requests() -> None:
    here = tenancy(ACME, Tenant(name="free"))
    for tenth in range(1000):
        here.acquire(ACME, 50.0, tenth / 10)
        here.acquire(Tenant(name="free"), 1.0, tenth / 10)
    ((name, requests, tokens),) = here.requested_rates(100.0)
    assert name == "acme"
    assert requests == pytest.approx(10.0, rel=0.05)
    assert tokens == pytest.approx(500.0, rel=0.05)


def test_one_can_look_whether_a_tenant_would_be_refused_without_being_charged() -> None:
    here = tenancy(ACME)
    assert here.check(ACME, 0.0) is None
    assert taken(here, ACME, 2) == 2
    assert here.check(ACME, 0.0) is not None
    assert here.check(ACME, 1.0) is None
    assert taken(here, ACME, 9, now_s=1.0) == 2


def test_there_is_at_least_one_coordinator() -> None:
    with pytest.raises(ValueError, match="coordinators is 0"):
        tenancy(coordinators=0)


# --------------------------------------------------------------------------- pull permits
def test_no_more_pulls_begin_than_the_limit_until_one_ends() -> None:
    permits = PullPermits(limit=2, max_pull_s=10.0)
    for leg_id in "ab":
        assert permits.can_begin(0.0)
        permits.begin(leg_id, 0.0)
    assert not permits.can_begin(1.0)
    permits.end("a")
    assert permits.can_begin(1.0)


def test_a_pull_that_never_ends_stops_to_count_after_a_while() -> None:
    permits = PullPermits(limit=1, max_pull_s=10.0)
    permits.begin("a", 5.0)
    assert permits.next_at_s == 15.0
    assert not permits.can_begin(14.9)
    assert permits.can_begin(15.0)
    permits.begin("b", 15.0)
    permits.end("a")  # long forgotten
    assert not permits.can_begin(16.0)


def test_without_a_limit_none_waits_and_nothing_is_remembered() -> None:
    permits = PullPermits(limit=None, max_pull_s=10.0)
    for number in range(100):
        permits.begin(str(number), 0.0)
    assert permits.can_begin(0.0)
    assert permits.next_at_s is None
