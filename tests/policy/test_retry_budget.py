"""The retry budget: a share of what arrives and a floor, and streams come before newcomers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.resilience.retry_budget import RetryBudget, RetryOptions

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


def test_what_is_older_than_the_window_does_not_count() -> None:
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
