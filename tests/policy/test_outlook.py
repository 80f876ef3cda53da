"""Decode load by the time a prompt is computed."""

from __future__ import annotations

from math import exp

import pytest

from baton.domain.fleet import FleetView, Load, Role
from baton.domain.value import evolve
from baton.policy.admission.decode_forecast import (
    DecodeForecast,
    IncomingRequest,
    decode_forecast,
    predicted_tpot_s,
)
from tests.fakes.timings import LinearTiming, replica_view

TIMING = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.001)


def newcomer(
    horizon_s: float = 0.0, *, share: float = 0.0, output: float = 100.0
) -> IncomingRequest:
    return IncomingRequest(horizon_s, 1000, output, share)


def streams(pace: float) -> float:
    """How many streams a replica has whose step takes so long."""
    return (pace - 0.01) / 0.001


def test_a_look_adds_up_who_decodes_and_whose_prompts_are_computed() -> None:
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
    assert seen == DecodeForecast(2, 5 + 4 + 2 * 1.5, 5.0, seen.context_tokens, tokens)
    assert seen.context_tokens == pytest.approx(tokens / 4)


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
    assert streams(predicted_tpot_s(seen, newcomer(), TIMING)) == pytest.approx(11)


def test_prompts_that_are_computed_before_it_are_streams_by_then() -> None:
    seen = DecodeForecast(replicas=2, streams=20.0, prefilling=16.0)
    assert streams(predicted_tpot_s(seen, newcomer(), TIMING)) == pytest.approx(19)


def test_streams_that_end_before_its_prompt_is_computed_do_not_count() -> None:
    seen = DecodeForecast(replicas=1, streams=100.0)
    life_s = 100.0 * (0.01 + 0.101)
    left = 100 * exp(-0.5)
    found = streams(predicted_tpot_s(seen, newcomer(life_s / 2), TIMING))
    assert found == pytest.approx(left + 1, abs=1.0)


def test_what_prompts_take_from_streams_makes_them_slower() -> None:
    seen = DecodeForecast(replicas=1, streams=10.0)
    alone, beside = (predicted_tpot_s(seen, newcomer(share=share), TIMING) for share in (0.0, 0.5))
    assert beside == pytest.approx(2 * alone)


def test_where_there_is_no_room_for_it_there_is_no_pace() -> None:
    seen = DecodeForecast(
        replicas=2, streams=20.0, context_tokens=20_000.0, kv_capacity_tokens=40_000.0
    )
    assert predicted_tpot_s(seen, newcomer(), TIMING) < 1.0
    full = seen._replace(kv_capacity_tokens=21_000.0)
    assert predicted_tpot_s(full, newcomer(), TIMING) == float("inf")


def test_an_empty_fleet_has_a_pace_too() -> None:
    assert predicted_tpot_s(DecodeForecast(), newcomer(1.0), TIMING) == pytest.approx(0.011)
