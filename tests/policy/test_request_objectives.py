from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import Load, Role
from baton.domain.handoff import HandoffMode, PlacementDecision
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.placement.port import PlacementContext, PlacementQuery
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.placement.replica_cost import ReplicaCost, replica_cost
from baton.policy.placement.slo_impact import SloImpact
from tests.fakes.timings import FixedTimings, LinearTiming, placement_context, replica_view

FAST = LinearTiming(per_step_s=0.01, per_token_s=0.0001, per_stream_s=0.0)
QUERY = PlacementQuery(prompt_tokens=1600, max_tokens=100)
objectives = st.none() | st.floats(0.001, 3.0)


def pair(queued_tokens: int = 0) -> PlacementContext:
    decode = replica_view("d0", load=Load(running_requests=20))
    prefill = replica_view("p0", Role.PREFILL, Load(queued_tokens=queued_tokens))
    timings = FixedTimings(timing=FAST, output_tokens=100.0)
    return placement_context(prefill, decode, timings=timings)


def placed(slo: Slo | None, around: PlacementContext, **options: float) -> PlacementDecision:
    placer = PredictedPlacer(PredictedOptions(**options))  # type: ignore[arg-type]
    decision = placer.place(evolve(QUERY, slo=slo), around)
    assert isinstance(decision, PlacementDecision)
    return decision


def cost(running: int) -> ReplicaCost:
    view = replica_view("d0", load=Load(running_requests=running))
    return replica_cost(QUERY, view, FAST, output_tokens=100.0, at_s=0.0)


@given(ttft=objectives, tpot=objectives, queued=st.integers(0, 60_000))
def test_a_requests_objectives_count_as_if_the_placer_had_been_made_with_them(
    ttft: float | None, tpot: float | None, queued: int
) -> None:
    around = pair(queued)
    made_with = PredictedPlacer(PredictedOptions(ttft_slo_s=ttft, tpot_slo_s=tpot))
    brought = Slo(ttft_s=ttft, tpot_s=tpot)
    assert placed(brought, around) == made_with.place(QUERY, around)


def test_a_request_that_brings_none_is_served_for_the_placers_own() -> None:
    around = pair(queued_tokens=3000)
    assert placed(None, around, ttft_slo_s=0.2).route.mode is HandoffMode.LOCAL
    assert placed(Slo(ttft_s=5.0), around, ttft_slo_s=0.2).route.mode is HandoffMode.PULL
    assert placed(Slo(), around, ttft_slo_s=0.2).route.mode is HandoffMode.PULL


def test_a_request_with_lax_objectives_does_not_break_streams_with_a_tpot_objective() -> None:
    around = pair(queued_tokens=2000)
    patient = Slo(tpot_s=30.0, ttft_s=60.0)
    alone = placed(patient, around)
    beside = placed(patient, around, tpot_slo_s=0.0105)
    assert alone.route.mode is HandoffMode.LOCAL  # nobody there is promised anything better
    assert beside.route.mode is HandoffMode.PULL


def test_the_pace_of_a_request_without_a_tpot_objective_breaks_nothing() -> None:
    slow = SloImpact(None, None, 0.005)
    assert slow.expected_misses(cost(running=0)) == 0
    assert SloImpact(0.005, None, 1.0).expected_misses(cost(running=0)) == 1
    assert SloImpact(1.0, None, 0.005).expected_misses(cost(running=0)) == 0


def test_running_streams_are_evaluated_by_their_objectives() -> None:
    stalled = SloImpact(1.0, None, 0.0105).expected_misses(cost(running=20), 1600)
    assert stalled > 1
    assert SloImpact(0.0105, None, 1.0).expected_misses(cost(running=20), 1600) < 1
    assert SloImpact(0.0105).expected_misses(cost(running=20), 1600) == pytest.approx(stalled)


def test_the_price_of_a_miss_is_what_the_request_itself_may_take() -> None:
    assert SloImpact(0.02, 1.0, 0.5).miss_penalty_s(cost(1)) == pytest.approx(
        4 * (1.0 + 100 * 0.02)
    )
    assert SloImpact(None, None, 0.5).miss_penalty_s(cost(1)) == pytest.approx(4 * 100 * 0.5)


def test_an_impact_without_a_tpot_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="got no TPOT objective"):
        SloImpact(None, 1.0, None)
