"""Buckets against a slow twin, and limits dealt out to coordinators."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.tenant import RateLimit, Tenant
from baton.policy.admission.rate_limits import TokenBucket, allocate_quotas, max_min_shares
from baton.policy.resilience.retry_budget import RetryBudget, RetryOptions

RATES = st.floats(0.1, 1000.0)
WANTED = st.lists(st.floats(0.0, 2000.0), min_size=1, max_size=8)


class Twin:
    """Steps of a millisecond."""

    def __init__(self, rate_per_s: float, burst_s: float) -> None:
        self.rate_per_s, self.most = rate_per_s, rate_per_s * burst_s
        self.level = self.most

    def pass_ms(self, milliseconds: int) -> None:
        for _ in range(milliseconds):
            self.level = min(self.most, self.level + self.rate_per_s / 1000)


@given(
    st.floats(0.5, 50.0),
    st.floats(0.1, 5.0),
    st.lists(st.tuples(st.integers(0, 300), st.floats(0.0, 40.0)), max_size=20),
)
def test_a_bucket_admits_the_same_as_its_slow_twin(
    rate: float, burst_s: float, asked: list[tuple[int, float]]
) -> None:
    bucket, twin, at_ms = TokenBucket(rate, burst_s=burst_s, now_s=0.0), Twin(rate, burst_s), 0
    for gap_ms, amount in asked:
        at_ms += gap_ms
        twin.pass_ms(gap_ms)
        wait_s = bucket.wait_s(amount, at_ms / 1000)
        missing = min(amount, twin.most) - twin.level
        assert wait_s == pytest.approx(max(0.0, missing / rate), abs=1e-6)
        if wait_s == 0.0:
            bucket.spend(amount)
            twin.level -= amount


def test_a_charge_beyond_the_burst_passes_when_full_and_leaves_a_debt() -> None:
    bucket = TokenBucket(10.0, burst_s=1.0, now_s=0.0)
    assert bucket.wait_s(100.0, 0.0) == 0.0
    bucket.spend(100.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(9.1)
    assert bucket.wait_s(1.0, 9.1) == pytest.approx(0.0, abs=1e-9)


def test_a_clock_that_goes_back_fills_nothing_twice() -> None:
    bucket = TokenBucket(1.0, burst_s=10.0, now_s=0.0)
    bucket.spend(10.0)
    assert bucket.wait_s(5.0, 5.0) == 0.0
    assert bucket.wait_s(5.0, 2.0) == 0.0
    assert bucket.wait_s(6.0, 5.0) == pytest.approx(1.0)


def test_a_bucket_of_no_known_age_is_filled_from_when_it_is_first_asked() -> None:
    bucket = TokenBucket(1.0, burst_s=10.0, now_s=None)
    bucket.spend(10.0)
    assert bucket.wait_s(1.0, 1000.0) == pytest.approx(1.0)
    assert bucket.wait_s(1.0, 1001.0) == pytest.approx(0.0)


def test_another_rate_keeps_what_is_in_the_bucket_as_far_as_it_fits() -> None:
    bucket = TokenBucket(10.0, burst_s=1.0, now_s=0.0)
    bucket.spend(4.0)
    bucket.set_rate(2.0, burst_s=1.0, now_s=0.0)
    assert bucket.wait_s(2.0, 0.0) == 0.0
    bucket.spend(2.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(0.5)


def test_a_bucket_without_a_rate_never_lets_anything_through_again() -> None:
    bucket = TokenBucket(1.0, burst_s=1.0, now_s=0.0)
    bucket.set_rate(0.0, burst_s=1.0)
    bucket.spend(1.0)
    assert bucket.wait_s(0.5, 1e9) == float("inf")


@given(RATES, WANTED)
def test_shares_come_to_the_limit_and_never_to_more(limit: float, wanted: list[float]) -> None:
    shares = max_min_shares(limit, wanted)
    assert sum(shares) == pytest.approx(limit)
    assert min(shares) >= 0.2 * limit / len(wanted) - 1e-9


@given(RATES, WANTED)
def test_no_ingress_has_more_than_its_demand_while_another_has_less(
    limit: float, wanted: list[float]
) -> None:
    shares = max_min_shares(limit, wanted)
    hungry = [got for got, want in zip(shares, wanted, strict=True) if got < want - 1e-6 * limit]
    floor = 0.2 * limit / len(wanted)
    for got, want in zip(shares, wanted, strict=True):
        if hungry and got > floor + 1e-6 * limit:
            assert got <= want + 1e-6 * limit
            assert got <= min(hungry) + 1e-6 * limit or got >= want - 1e-6 * limit


@given(st.integers(1, 50), WANTED)
def test_places_are_dealt_out_whole_and_all_of_them(limit: int, wanted: list[float]) -> None:
    tenant = Tenant(name="t", max_in_flight=limit)
    asked = {f"c{n}": [("t", want, 0.0)] for n, want in enumerate(wanted)}
    places = [shares["t"].max_in_flight for shares in allocate_quotas([tenant], asked).values()]
    assert sum(place for place in places if place is not None) == limit
    assert None not in places


def test_the_one_that_wants_a_place_has_it() -> None:
    tenant = Tenant(name="t", max_in_flight=1)
    asked = {"a": [], "b": [("t", 3.0, 0.0)], "c": []}
    places = {
        name: parts["t"].max_in_flight for name, parts in allocate_quotas([tenant], asked).items()
    }
    assert places == {"a": 0, "b": 1, "c": 0}


def test_a_limit_goes_to_where_it_is_used_and_a_floor_stays_everywhere() -> None:
    tenant = Tenant(name="t", rate=RateLimit(requests_per_s=10.0, tokens_per_s=1000.0))
    dealt = allocate_quotas([tenant], {"a": [("t", 100.0, 50.0)], "b": [("x", 5.0, 5.0)]})
    assert dealt["a"]["t"].requests_per_s == pytest.approx(9.0)
    assert dealt["b"]["t"].requests_per_s == pytest.approx(1.0)
    # 950 tokens per second are wanted by nobody: both have half of those on top.
    assert dealt["a"]["t"].tokens_per_s == pytest.approx(500.0)
    assert dealt["a"]["t"].max_in_flight is None


def test_tenants_without_limits_have_no_shares() -> None:
    assert allocate_quotas([Tenant(name="free")], {"a": [], "b": []}) == {"a": {}, "b": {}}


def test_senseless_rates_count_as_none() -> None:
    tenant = Tenant(name="t", rate=RateLimit(requests_per_s=10.0))
    asked = {"a": [("t", float("nan"), 0.0)], "b": [("t", float("inf"), -1.0)], "c": []}
    dealt = allocate_quotas([tenant], asked)
    for entry in dealt.values():
        assert entry["t"].requests_per_s == pytest.approx(10 / 3)


def test_without_claims_no_share_is_given() -> None:
    limited = Tenant(name="acme", rate=RateLimit(requests_per_s=5.0), max_in_flight=3)
    assert allocate_quotas([limited], {}) == {}


# --------------------------------------------------------------------------- retry budget
OPTIONS = RetryOptions(ratio=0.2, min_retries=4, window_s=10.0)


def taken(budget: RetryBudget, now_s: float, *, carries: bool) -> int:
    """How many may be taken at once."""
    count = 0
    while budget.spend(now_s, has_output=carries):
        count += 1
        assert count < 10_000, "there is no end to it"
    return count


def budget(arrivals: int = 0, now_s: float = 0.0) -> RetryBudget:
    made = RetryBudget(OPTIONS)
    for _ in range(arrivals):
        made.record_arrival(now_s)
    return made


def test_with_nothing_arriving_there_is_the_floor() -> None:
    assert taken(budget(), 0.0, carries=True) == 4


def test_arrivals_add_their_share() -> None:
    assert taken(budget(arrivals=100), 0.0, carries=True) == 24


def test_requests_without_tokens_leave_half_for_those_that_have_some() -> None:
    made = budget(arrivals=100)
    assert taken(made, 0.0, carries=False) == 12
    assert taken(made, 0.0, carries=True) == 12


def test_entries_older_than_the_window_do_not_count() -> None:
    made = budget(arrivals=100)
    taken(made, 0.0, carries=True)
    assert not made.spend(8.9, has_output=True)
    assert taken(made, 10.0, carries=True) == 4


def test_refusals_are_counted_and_cost_nothing() -> None:
    made = budget()
    taken(made, 0.0, carries=True)
    assert made.denied == 1
    made.check_integrity()


def test_another_budget_holds_at_once() -> None:
    made = budget()
    taken(made, 0.0, carries=True)
    made.reconfigure(RetryOptions(ratio=0.2, min_retries=6, window_s=10.0))
    assert taken(made, 0.0, carries=True) == 2
    made.reconfigure(RetryOptions(ratio=0.2, min_retries=6, window_s=1.0))
    assert taken(made, 0.0, carries=True) == 6
    made.check_integrity()


@pytest.mark.parametrize("wrong", [{"ratio": -0.1}, {"min_retries": -1}, {"window_s": 0.0}])
def test_senseless_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"retry_budget: .* expected"):
        RetryOptions(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=200))
def test_no_window_ever_has_more_retries_than_it_allows(
    happenings: list[tuple[bool, float]],
) -> None:
    made, now_s = RetryBudget(OPTIONS), 0.0
    arrivals: list[float] = []
    tries: list[float] = []
    for arrives, after_s in happenings:
        now_s += after_s
        if arrives:
            made.record_arrival(now_s)
            arrivals.append(now_s)
        elif made.spend(now_s, has_output=True):
            tries.append(now_s)
            # What is allowed goes by slots: nine whole ones and the present one, at least.
            recent = sum(at_s > now_s - 10.0 for at_s in arrivals)
            used = sum(at_s > now_s - 9.0 for at_s in tries)
            assert used <= OPTIONS.min_retries + OPTIONS.ratio * recent + 1e-9
        made.check_integrity()


@given(arrivals=st.integers(0, 400), carries=st.booleans())
def test_the_more_arrives_the_more_may_be_tried_again(arrivals: int, *, carries: bool) -> None:
    fewer = taken(budget(arrivals), 0.0, carries=carries)
    assert fewer <= taken(budget(arrivals + 1), 0.0, carries=carries)
