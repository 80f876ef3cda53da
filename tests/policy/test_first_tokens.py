"""When a first token goes out before its handoff, and when it is held back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.slo import Slo
from baton.policy.placement.candidates import FirstTokenPlan, plan_first_token

HANDOFF_S = 0.1
PACE_S = 0.01
PREFILLED_S = 0.5


def early(slo: Slo, *, waited_s: float = 0.0, output_tokens: float = 11.0) -> bool:
    return told(slo, waited_s=waited_s, output_tokens=output_tokens).is_early


def told(slo: Slo, *, waited_s: float = 0.0, output_tokens: float = 11.0) -> FirstTokenPlan:
    return plan_first_token(
        slo,
        waited_s=waited_s,
        prefill_done_s=PREFILLED_S,
        handoff_s=HANDOFF_S,
        tpot_s=PACE_S,
        output_tokens=output_tokens,
    )


def test_without_a_tpot_objective_it_is_never_held_back() -> None:
    assert early(Slo())
    assert early(Slo(ttft_s=10.0))


def test_it_is_held_back_where_the_handoff_would_break_the_pace() -> None:
    each_s = (HANDOFF_S + 9 * PACE_S) / 10
    assert early(Slo(tpot_s=each_s + 1e-9))
    assert not early(Slo(tpot_s=each_s - 1e-9))
    assert early(Slo(tpot_s=each_s - 1e-9), output_tokens=21.0), (
        "a longer answer has more to spread"
    )


def test_it_is_held_back_where_the_handoff_would_be_too_long_a_gap() -> None:
    assert early(Slo(itl_p99_s=HANDOFF_S))
    assert not early(Slo(itl_p99_s=HANDOFF_S - 1e-9))
    assert not early(Slo(itl_p99_s=HANDOFF_S - 1e-9), output_tokens=100.0)
    assert early(Slo(itl_p99_s=HANDOFF_S - 1e-9), output_tokens=101.0), "one in a hundred may be"


@pytest.mark.parametrize("other", [Slo(tpot_s=0.012), Slo(itl_p99_s=0.05)])
def test_it_is_not_held_back_where_it_would_then_be_late(other: Slo) -> None:
    in_time_s = PREFILLED_S + HANDOFF_S
    assert not early(replace(other, ttft_s=in_time_s))
    assert told(replace(other, ttft_s=in_time_s - 1e-9)) == FirstTokenPlan(
        is_early=True, breaks_slo=True
    )
    assert early(replace(other, ttft_s=in_time_s), waited_s=1e-6)


@pytest.mark.parametrize("output_tokens", [0.0, 1.0, 1.9])
def test_where_hardly_anything_follows_there_is_nothing_to_break(output_tokens: float) -> None:
    assert early(Slo(tpot_s=1e-6, itl_p99_s=1e-6), output_tokens=output_tokens)


times = st.floats(0.001, 10.0)


@given(
    slo=st.builds(Slo, ttft_s=times, tpot_s=times),
    prefilled_s=times,
    handoff_s=times,
    pace_s=times,
    tokens=st.integers(2, 999),
)
def test_what_would_be_kept_by_holding_it_back_is_never_broken(
    slo: Slo, prefilled_s: float, handoff_s: float, pace_s: float, tokens: int
) -> None:
    found = plan_first_token(
        slo,
        waited_s=0.0,
        prefill_done_s=prefilled_s,
        handoff_s=handoff_s,
        tpot_s=pace_s,
        output_tokens=float(tokens),
    )
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    kept_if_held = prefilled_s + handoff_s <= slo.ttft_s and pace_s <= slo.tpot_s
    each_s = (handoff_s + (tokens - 2) * pace_s) / (tokens - 1)
    if prefilled_s <= slo.ttft_s and each_s <= slo.tpot_s:
        assert found.is_early
    elif kept_if_held:
        assert not found.is_early
    assert found.breaks_slo == (found.is_early and each_s > slo.tpot_s)
