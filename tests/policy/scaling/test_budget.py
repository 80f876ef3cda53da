"""Who gets the GPUs."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.policy.scaling.budget import Claim, within_budget

claims = st.lists(
    st.builds(
        Claim,
        pool=st.sampled_from("abcdef"),
        have=st.integers(0, 8),
        want=st.integers(0, 8),
        least=st.integers(0, 2),
        gpus=st.sampled_from((1.0, 2.0, 4.0, 8.0)),
        leaving=st.integers(0, 2),
        fixed=st.booleans(),
    ),
    unique_by=lambda claim: claim.pool,
    max_size=6,
)


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100))
def test_the_budget_is_kept_but_for_what_is_not_taken_away(
    claims: list[Claim], budget: int
) -> None:
    granted = within_budget(claims, budget)
    used = sum(granted[claim.pool] * claim.gpus for claim in claims)
    least = sum(min(claim.least, claim.have, claim.want) * claim.gpus for claim in claims)
    assert used <= max(budget, least)
    for claim in claims:
        assert min(claim.least, claim.have, claim.want) <= granted[claim.pool] <= claim.want


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100), seed=st.integers(0, 99))
def test_the_order_of_pools_does_not_matter(claims: list[Claim], budget: int, seed: int) -> None:
    mixed = Random(seed).sample(claims, len(claims))
    assert within_budget(mixed, budget) == within_budget(claims, budget)


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100))
def test_no_gpus_are_left_that_somebody_could_have(claims: list[Claim], budget: int) -> None:
    granted = within_budget(claims, budget)
    used = sum((granted[claim.pool] + claim.leaving) * claim.gpus for claim in claims)
    for claim in claims:
        assert granted[claim.pool] == claim.want or used + claim.gpus > budget


@settings(max_examples=40)
@given(claims=claims)
def test_enough_gpus_give_everybody_what_is_wanted(claims: list[Claim]) -> None:
    wanted = {claim.pool: claim.want for claim in claims}
    assert within_budget(claims, None) == wanted
    assert within_budget(claims, 1e6) == wanted


def test_what_an_operator_said_comes_first() -> None:
    claims = [Claim(pool="a", have=1, want=4), Claim(pool="b", have=1, want=4, fixed=True)]
    assert within_budget(claims, 6) == {"a": 2, "b": 4}


def test_what_an_operator_said_is_taken_from_last() -> None:
    claims = [Claim(pool="a", have=3, want=3, least=1), Claim(pool="b", have=3, want=3, fixed=True)]
    assert within_budget(claims, 4) == {"a": 1, "b": 3}
    assert within_budget(claims, 2) == {"a": 1, "b": 1}
