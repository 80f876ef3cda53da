"""What drafting gains, against the paper's figures and against rolling dice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.model.speculative import best_draft_length, expected_tokens, speedup, step_cost


@pytest.mark.parametrize(
    ("acceptance", "drafted", "tokens"),
    [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5), (0.8, 5, 3.68928), (0.6, 3, 2.176)],
)
def test_a_step_yields_a_geometric_series(acceptance: float, drafted: int, tokens: float) -> None:
    assert expected_tokens(acceptance, drafted) == pytest.approx(tokens)


@given(st.floats(0, 1), st.integers(0, 12))
def test_the_closed_form_is_the_sum_of_its_terms(acceptance: float, drafted: int) -> None:
    """The token behind the k-th accepted one is there with probability a^k."""
    terms = sum(acceptance**k for k in range(drafted + 1))
    assert expected_tokens(acceptance, drafted) == pytest.approx(terms, rel=1e-9)


def test_rolling_dice_yields_as_many_tokens() -> None:
    rng = random.Random(5)
    acceptance, drafted, steps = 0.7, 4, 40_000
    tokens = 0
    for _ in range(steps):
        tokens += 1
        for _ in range(drafted):
            if rng.random() >= acceptance:
                break
            tokens += 1
    assert tokens / steps == pytest.approx(expected_tokens(acceptance, drafted), rel=0.01)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "draft_cost", "times"),
    [(0.6, 2, 0.02, 1.88), (0.8, 5, 0.02, 3.35), (0.9, 10, 0.02, 5.72), (0.8, 5, 0.1, 2.46)],
)
def test_tokens_come_as_many_times_faster_as_the_formula_says(
    acceptance: float, drafted: int, draft_cost: float, times: float
) -> None:
    assert speedup(acceptance, drafted, draft_cost=draft_cost) == pytest.approx(times, abs=0.01)


def test_a_full_batch_pays_for_checking_and_then_drafting_may_lose() -> None:
    assert step_cost(4, draft_cost=0.05) == pytest.approx(1.2)
    assert step_cost(4, draft_cost=0.05, verify_cost=3.0) == pytest.approx(3.2)
    assert speedup(0.7, 4, draft_cost=0.05) > 2
    assert speedup(0.7, 4, draft_cost=0.05, verify_cost=5.0) < 1


def test_without_drafting_nothing_changes() -> None:
    assert speedup(0.9, 0, draft_cost=0.5) == 1.0


@given(st.floats(0, 0.99), st.floats(0.001, 1))
def test_the_best_number_is_the_best_of_all(acceptance: float, draft_cost: float) -> None:
    gains = [speedup(acceptance, drafted, draft_cost=draft_cost) for drafted in range(17)]
    assert gains[best_draft_length(acceptance, draft_cost=draft_cost)] == pytest.approx(max(gains))


def test_drafting_that_costs_more_than_it_is_accepted_does_not_pay() -> None:
    assert best_draft_length(0.2, draft_cost=0.3) == 0
    assert best_draft_length(0.99, draft_cost=0.01) == 16


@pytest.mark.parametrize(("acceptance", "drafted"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_senseless_figures_are_refused(acceptance: float, drafted: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1, at least 0"):
        expected_tokens(acceptance, drafted)
