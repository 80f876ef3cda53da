"""Who gets the GPUs."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.policy.scaling.budget import GpuClaim, apply_gpu_budget

claims = st.lists(
    st.builds(
        GpuClaim,
        pool=st.sampled_from("abcdef"),
        current_replicas=st.integers(0, 8),
        desired_replicas=st.integers(0, 8),
        min_replicas=st.integers(0, 2),
        gpus_per_replica=st.sampled_from((1.0, 2.0, 4.0, 8.0)),
        draining_replicas=st.integers(0, 2),
        is_overridden=st.booleans(),
    ),
    unique_by=lambda claim: claim.pool,
    max_size=6,
)


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100))
def test_the_budget_is_kept_but_for_what_is_not_taken_away(
    claims: list[GpuClaim], budget: int
) -> None:
    granted = apply_gpu_budget(claims, budget)
    used = sum(granted[claim.pool] * claim.gpus_per_replica for claim in claims)
    least = sum(
        min(claim.min_replicas, claim.current_replicas, claim.desired_replicas)
        * claim.gpus_per_replica
        for claim in claims
    )
    assert used <= max(budget, least)
    for claim in claims:
        assert (
            min(claim.min_replicas, claim.current_replicas, claim.desired_replicas)
            <= granted[claim.pool]
            <= claim.desired_replicas
        )


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100), seed=st.integers(0, 99))
def test_the_order_of_pools_does_not_matter(claims: list[GpuClaim], budget: int, seed: int) -> None:
    mixed = Random(seed).sample(claims, len(claims))
    assert apply_gpu_budget(mixed, budget) == apply_gpu_budget(claims, budget)


@settings(max_examples=40)
@given(claims=claims, budget=st.integers(0, 100))
def test_no_gpus_are_left_that_somebody_could_have(claims: list[GpuClaim], budget: int) -> None:
    granted = apply_gpu_budget(claims, budget)
    used = sum(
        (granted[claim.pool] + claim.draining_replicas) * claim.gpus_per_replica for claim in claims
    )
    for claim in claims:
        assert (
            granted[claim.pool] == claim.desired_replicas or used + claim.gpus_per_replica > budget
        )


@settings(max_examples=40)
@given(claims=claims)
def test_enough_gpus_give_everybody_what_is_wanted(claims: list[GpuClaim]) -> None:
    wanted = {claim.pool: claim.desired_replicas for claim in claims}
    assert apply_gpu_budget(claims, None) == wanted
    assert apply_gpu_budget(claims, 1e6) == wanted


def test_what_an_operator_said_comes_first() -> None:
    claims = [
        GpuClaim(pool="a", current_replicas=1, desired_replicas=4),
        GpuClaim(pool="b", current_replicas=1, desired_replicas=4, is_overridden=True),
    ]
    assert apply_gpu_budget(claims, 6) == {"a": 2, "b": 4}


def test_what_an_operator_said_is_taken_from_last() -> None:
    claims = [
        GpuClaim(pool="a", current_replicas=3, desired_replicas=3, min_replicas=1),
        GpuClaim(pool="b", current_replicas=3, desired_replicas=3, is_overridden=True),
    ]
    assert apply_gpu_budget(claims, 4) == {"a": 1, "b": 3}
    assert apply_gpu_budget(claims, 2) == {"a": 1, "b": 1}
