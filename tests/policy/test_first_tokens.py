"""When a first token goes out before its handoff, and when it is held back."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import FleetView, Load, Role
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.decode_forecast import (
    DecodeForecast,
    IncomingRequest,
    decode_forecast,
    predicted_tpot_s,
    pull_queue_s,
)
from baton.policy.placement.candidates import FirstTokenPlan, plan_first_token
from tests.fakes.timings import LinearTiming, replica_view

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
def test_an_early_first_token_breaks_no_objective_that_a_late_one_meets(
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


# ---------- decode load by the time a prompt is computed
TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.001)


def incoming(
    horizon_s: float = 0.0, *, share: float = 0.0, output: float = 100.0
) -> IncomingRequest:
    return IncomingRequest(horizon_s, 1000, output, share)


def streams(pace: float) -> float:
    """How many streams a replica has whose step takes so long."""
    return (pace - 0.01) / 0.001


def test_an_observation_adds_up_decoding_streams_and_prompts_in_prefill() -> None:
    views = [
        replica_view("p0", role=Role.PREFILL, load=Load(running_requests=2, queued_requests=3)),
        replica_view("d0", load=Load(running_requests=5, kv_used_fraction=0.5)),
        replica_view("d1", load=Load(running_requests=1, pulling_requests=2, queued_requests=1)),
    ]
    views[2] = evolve(views[2], unreported_legs=2)
    seen = decode_forecast(
        FleetView(at_s=0.0, replicas={v.replica_id: v for v in views}, peer_load_factor=1.5)
    )
    tokens = sum(v.facts.kv_blocks * v.facts.block_size_tokens for v in views[1:])
    assert seen == DecodeForecast(
        2, 5 + 4 + 2 * 1.5, 5.0, seen.context_tokens, tokens, unstarted=3 + 2 * 1.5
    )
    assert seen.context_tokens == pytest.approx(tokens / 4)


def test_prompts_on_their_way_to_decode_are_the_sent_legs_that_have_not_ended() -> None:
    stale = Load(running_requests=9)
    prefill = evolve(replica_view("p0", role=Role.PREFILL, load=stale), inflight_legs=3)
    decode = evolve(replica_view("d0"), load_received_at_s=-0.25)
    seen = decode_forecast(FleetView(at_s=0.0, replicas={"p0": prefill, "d0": decode}))
    assert (seen.prefilling, seen.sent_prompts, seen.load_age_s) == (9.0, 3.0, 0.25)


def test_streams_that_stay_where_they_were_prefilled_do_not_come_to_decode() -> None:
    staying = replica_view("p0", role=Role.PREFILL, load=Load(running_requests=5))
    views = {"p0": evolve(staying, inflight_legs=3, inflight_streams=3), "d0": replica_view("d0")}
    assert decode_forecast(FleetView(at_s=0.0, replicas=views)).prefilling == 2.0


def test_without_a_decode_pool_prefill_replicas_decode() -> None:
    view = replica_view("p0", role=Role.PREFILL, load=Load(running_requests=2))
    seen = decode_forecast(FleetView(at_s=0.0, replicas={"p0": view}))
    assert (seen.replicas, seen.streams, seen.prefilling) == (1, 2.0, 0.0)


def test_at_once_the_pace_is_that_of_the_present_streams_and_one_more() -> None:
    seen = DecodeForecast(replicas=2, streams=20.0)
    assert streams(predicted_tpot_s(seen, incoming(), TIMING)) == pytest.approx(11)


def test_prompts_that_are_computed_before_it_are_streams_by_then() -> None:
    seen = DecodeForecast(replicas=2, streams=20.0, prefilling=16.0)
    assert streams(predicted_tpot_s(seen, incoming(), TIMING)) == pytest.approx(19)


def test_streams_that_end_before_its_prompt_is_computed_do_not_count() -> None:
    seen = DecodeForecast(replicas=1, streams=100.0)
    life_s = 100.0 * (0.01 + 0.101)
    left = 100 * exp(-0.5)
    found = streams(predicted_tpot_s(seen, incoming(life_s / 2), TIMING))
    assert found == pytest.approx(left + 1, abs=1.0)


def test_device_time_of_prompts_slows_streams_down() -> None:
    seen = DecodeForecast(replicas=1, streams=10.0)
    alone, beside = (predicted_tpot_s(seen, incoming(share=share), TIMING) for share in (0.0, 0.5))
    assert beside == pytest.approx(2 * alone)


def test_where_there_is_no_room_for_it_there_is_no_pace() -> None:
    seen = DecodeForecast(
        replicas=2, streams=20.0, context_tokens=20_000.0, kv_capacity_tokens=40_000.0
    )
    assert predicted_tpot_s(seen, incoming(), TIMING) < 1.0
    full = seen._replace(kv_capacity_tokens=21_000.0)
    assert predicted_tpot_s(full, incoming(), TIMING) == float("inf")


def test_an_empty_fleet_has_a_pace_too() -> None:
    assert predicted_tpot_s(DecodeForecast(), incoming(1.0), TIMING) == pytest.approx(0.011)


# ---------- pulls that wait by the time a prompt is computed
PULLS_PER_S = 2 * 8 / 0.02
"""Two replicas with ten streams each, so steps of 20 ms."""


def queue_s(
    unstarted: float,
    *,
    horizon_s: float = 0.0,
    load_age_s: float = 0.0,
    sent_prompts: float = 0.0,
    transfer_s: float = 0.0,
) -> float:
    seen = DecodeForecast(
        replicas=2,
        streams=20.0 + unstarted,
        unstarted=unstarted,
        load_age_s=load_age_s,
        sent_prompts=sent_prompts,
    )
    return pull_queue_s(seen, TIMING, horizon_s=horizon_s, transfer_s=transfer_s, max_pulls=8)


def test_pulls_that_run_at_once_do_not_queue() -> None:
    assert queue_s(15.0) == 0.0
    assert queue_s(16.0) == pytest.approx(1 / PULLS_PER_S)


def test_more_pulls_than_run_at_once_wait_for_steps_of_the_engine() -> None:
    assert queue_s(815.0) == pytest.approx(800 / PULLS_PER_S)
    assert queue_s(815.0, transfer_s=0.01) == pytest.approx(800 / PULLS_PER_S)


def test_pulls_that_take_longer_than_a_step_hold_their_places_for_longer() -> None:
    assert queue_s(815.0, transfer_s=0.04) == pytest.approx(2 * 800 / PULLS_PER_S)


def test_pulls_go_on_while_a_prompt_is_computed_and_after_a_report() -> None:
    assert queue_s(815.0, horizon_s=0.4) == pytest.approx(0.6)
    assert queue_s(815.0, load_age_s=0.25) == pytest.approx(0.75)


def test_an_old_report_takes_no_pulls_off_prompts_that_are_yet_to_come() -> None:
    assert queue_s(0.0, load_age_s=10.0, sent_prompts=815.0) == pytest.approx(1.0)
