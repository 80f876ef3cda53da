"""Tenants' limits at one coordinator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton.control.queue.tenant_limits import LimitExceeded, TenantLimits
from baton.control.state.admission_terms import Charge
from baton.domain.tenant import QuotaShare, RateLimit, Tenant

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
    assert "acme" in limited.why
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


def test_what_was_used_beyond_what_was_expected_is_owed() -> None:
    here = tenancy(WORDY)
    (charge,) = charges(here, WORDY, 1, tokens=100.0)
    here.settle(charge, used_tokens=1100.0, duration_s=1.0)
    limited = here.acquire(WORDY, 100.0, 0.0)
    assert isinstance(limited, LimitExceeded)
    assert limited.retry_after_s == pytest.approx(2.0)


def test_who_got_nothing_is_given_back_all() -> None:
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


def test_what_ran_before_there_was_a_limit_is_not_owed_under_it() -> None:
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


def test_what_a_lifted_limit_was_owed_is_not_owed_to_the_next_one() -> None:
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


def test_nobody_leaves_an_account_behind_who_is_not_configured() -> None:
    here = tenancy()
    anybody = Tenant()
    for _ in range(10):
        (charge,) = charges(here, anybody, 1, tokens=1.0)
        here.settle(charge, used_tokens=1.0, duration_s=1.0)
    assert not here._accounts


def test_what_limited_tenants_ask_for_is_known_also_what_they_are_refused() -> None:
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
