"""Who is let in, held and turned away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.slo import NO_SLO, Slo
from baton.policy.admission.decision import (
    AdmissionDecision,
    AdmissionForecast,
    AdmissionOptions,
    AdmissionReason,
    Admit,
    Enqueue,
    Shed,
    decide,
    decide_without_slo,
    ttft_limit,
)

OPTIONS = AdmissionOptions(max_engine_queue_delay_s=0.05, slo_safety_margin_fraction=0.1)
CHAT = Slo(name="chat", ttft_s=1.0, tpot_s=0.05)
PATIENCE_S = 30.0


def decision_of(
    slo: Slo = CHAT,
    *,
    overrun_s: float = 0.0,
    idle_elsewhere: bool = False,
    held: bool = False,
    **seen: float | None,
) -> AdmissionDecision:
    fields = {"waited_s": 0.0, "unqueued_ttft_s": 0.2, "engine_queue_s": 0.0, **seen}
    prospect = AdmissionForecast(**fields, has_idle_alternative=idle_elsewhere, was_queued=held)  # type: ignore[arg-type]  # tests name them right
    latest = ttft_limit(
        slo,
        prospect.unqueued_ttft_s,
        overrun_s=overrun_s,
        options=OPTIONS,
        queue_timeout_s=PATIENCE_S,
    )
    return decide(slo, prospect, latest, options=OPTIONS)


def test_one_that_is_predicted_to_be_in_time_is_let_in() -> None:
    assert decision_of() == Admit(AdmissionReason.MEETS_SLO)


def test_a_request_predicted_late_is_rejected_with_its_delay() -> None:
    found = decision_of(engine_queue_s=1.2)
    assert isinstance(found, Shed)
    assert found.ttft_s == pytest.approx(1.4)
    assert found.ttft_limit_s == pytest.approx(0.9)
    assert found.retry_after_s == pytest.approx(0.5)


def test_time_already_waited_counts() -> None:
    assert isinstance(decision_of(waited_s=0.65), Admit)
    assert isinstance(decision_of(waited_s=0.75), Shed)


def test_one_that_can_wait_for_the_engine_waits_here() -> None:
    found = decision_of(engine_queue_s=0.3)
    assert isinstance(found, Enqueue)
    assert found.reason is AdmissionReason.ENGINE_QUEUE
    assert found.reevaluate_after_s == pytest.approx(0.25)
    assert found.slack_s == pytest.approx(0.975 - 0.2)


def test_a_queued_request_stays_until_its_objective_is_hardly_attainable() -> None:
    assert isinstance(decision_of(waited_s=0.75), Shed)
    assert isinstance(decision_of(waited_s=0.75, held=True), Admit)
    assert isinstance(decision_of(waited_s=0.65, held=True, overrun_s=0.4), Admit)
    assert isinstance(decision_of(waited_s=0.78, held=True), Shed)


def test_after_queue_timeouts_a_request_must_be_earlier_to_be_queued() -> None:
    assert isinstance(decision_of(engine_queue_s=0.69), Enqueue)
    assert isinstance(decision_of(waited_s=0.69, misprediction_rate=1.0), Admit)
    assert isinstance(decision_of(engine_queue_s=0.64, misprediction_rate=0.5), Enqueue)
    assert isinstance(decision_of(engine_queue_s=0.66, misprediction_rate=0.5), Shed)
    assert isinstance(decision_of(engine_queue_s=0.59, misprediction_rate=1.0), Enqueue)
    found = decision_of(engine_queue_s=0.61, misprediction_rate=1.0)
    assert isinstance(found, Shed)
    assert found.ttft_limit_s == pytest.approx(0.8)
    assert isinstance(decision_of(engine_queue_s=0.61, misprediction_rate=1.0, held=True), Enqueue)


def test_a_request_waits_here_while_pulls_of_its_blocks_would_queue() -> None:
    found = decision_of(pull_queue_s=0.3)
    assert isinstance(found, Enqueue)
    assert found.reason is AdmissionReason.PULL_QUEUE
    assert found.reevaluate_after_s == pytest.approx(0.25)
    assert isinstance(decision_of(pull_queue_s=0.04), Admit)


def test_a_request_whose_blocks_would_be_pulled_too_late_is_rejected() -> None:
    assert isinstance(decision_of(pull_queue_s=0.69), Enqueue)
    found = decision_of(pull_queue_s=0.71)
    assert isinstance(found, Shed)
    assert found.ttft_s == pytest.approx(0.91)


def test_the_step_that_an_engine_is_in_is_no_queue() -> None:
    assert isinstance(decision_of(engine_queue_s=0.3, current_step_s=0.25), Admit)


def test_a_chosen_engine_queue_beside_idle_replicas_delays_no_admission() -> None:
    assert isinstance(decision_of(engine_queue_s=0.3, idle_elsewhere=True), Admit)


def test_one_whose_turn_is_yet_to_come_waits_or_goes_by_how_long_that_takes() -> None:
    held = decision_of(queue_wait_s=0.4, engine_queue_s=0.1)
    assert isinstance(held, Enqueue)
    assert held.reason is AdmissionReason.BEHIND_OTHERS
    # Turns are taken to last a quarter longer; the first of them begins when the engine is free.
    assert held.ttft_s == pytest.approx(0.1 + 0.4 * 1.25 + 0.2)
    assert isinstance(decision_of(queue_wait_s=0.57, engine_queue_s=0.0), Shed)


def test_one_that_would_not_get_its_pace_waits_for_streams_to_end() -> None:
    found = decision_of(tpot_s=0.0471, unloaded_tpot_s=0.02)
    assert isinstance(found, Enqueue)
    assert found.reason is AdmissionReason.TPOT_UNATTAINABLE
    assert isinstance(decision_of(tpot_s=0.0469, unloaded_tpot_s=0.02), Admit)


def test_a_tpot_that_an_idle_fleet_misses_too_rejects_no_request() -> None:
    assert isinstance(decision_of(tpot_s=0.3, unloaded_tpot_s=0.1), Admit)


def test_one_that_would_break_streams_of_its_rank_waits() -> None:
    found = decision_of(streams_broken=0.6)
    assert isinstance(found, Enqueue)
    assert found.reason is AdmissionReason.INTERFERENCE
    assert isinstance(decision_of(streams_broken=0.4), Admit)


def test_a_prompt_too_long_for_its_objective_is_served_when_there_is_room() -> None:
    assert isinstance(decision_of(unqueued_ttft_s=1.5), Admit)
    found = decision_of(unqueued_ttft_s=1.5, engine_queue_s=1.0)
    assert isinstance(found, Enqueue)
    assert found.slack_s == pytest.approx(PATIENCE_S)
    assert isinstance(decision_of(unqueued_ttft_s=1.5, waited_s=PATIENCE_S + 0.1), Shed)


def test_a_request_without_objectives_is_never_rejected_by_prediction() -> None:
    assert isinstance(decision_of(NO_SLO, engine_queue_s=1000.0), Enqueue)
    assert isinstance(decision_of(NO_SLO, queue_wait_s=1000.0), Enqueue)
    assert isinstance(decision_of(NO_SLO), Admit)


def test_without_objectives_only_a_queue_causes_a_rejection() -> None:
    found = decide_without_slo(31.0, queue_s=30.5, first_token_timeout_s=27.0)
    assert found == Shed(AdmissionReason.SLO_UNATTAINABLE, 31.0, 27.0, 4.0)
    assert isinstance(decide_without_slo(26.0, queue_s=25.5, first_token_timeout_s=27.0), Admit)
    assert isinstance(decide_without_slo(500.0, queue_s=0.0, first_token_timeout_s=27.0), Admit)


def test_where_first_tokens_come_late_more_is_kept_free() -> None:
    assert isinstance(decision_of(waited_s=0.5), Admit)
    assert isinstance(decision_of(waited_s=0.5, overrun_s=0.35), Shed)


def test_half_of_the_remaining_time_is_for_waiting_however_bad_predictions_are() -> None:
    found = ttft_limit(CHAT, 0.2, overrun_s=99.0, options=OPTIONS, queue_timeout_s=PATIENCE_S)
    assert found.limit_s == pytest.approx(1.0 - 0.4)
    assert isinstance(decision_of(overrun_s=99.0), Admit)


def test_one_that_just_misses_its_margin_cannot_be_met() -> None:
    at_it = ttft_limit(CHAT, 0.89, overrun_s=0.0, options=OPTIONS, queue_timeout_s=PATIENCE_S)
    over_it = ttft_limit(CHAT, 0.91, overrun_s=0.0, options=OPTIONS, queue_timeout_s=PATIENCE_S)
    assert (at_it.is_attainable, over_it.is_attainable) == (True, False)
    assert at_it.limit_s == pytest.approx(0.9)
    assert over_it.limit_s == pytest.approx(30.91)


SECONDS = st.floats(0.0, 5.0)
RANK = {Admit: 0, Enqueue: 1, Shed: 2}


@given(SECONDS, SECONDS, SECONDS, st.one_of(st.none(), SECONDS), SECONDS)
def test_a_longer_wait_never_makes_admission_more_likely(
    waited_s: float, alone_s: float, queue_s: float, turn_s: float | None, more_s: float
) -> None:
    before = decision_of(
        waited_s=waited_s, unqueued_ttft_s=alone_s, engine_queue_s=queue_s, queue_wait_s=turn_s
    )
    for change in ("waited_s", "engine_queue_s", "queue_wait_s"):
        seen = {
            "waited_s": waited_s,
            "unqueued_ttft_s": alone_s,
            "engine_queue_s": queue_s,
            "queue_wait_s": turn_s,
        }
        old = seen[change]
        if old is not None:
            after = decision_of(CHAT, **{**seen, change: old + more_s})  # type: ignore[arg-type]  # as above
            assert RANK[type(after)] >= RANK[type(before)], change


@given(SECONDS, SECONDS, SECONDS, st.one_of(st.none(), SECONDS))
def test_no_request_is_admitted_before_its_turn_or_late(
    waited_s: float, alone_s: float, queue_s: float, turn_s: float | None
) -> None:
    found = decision_of(
        waited_s=waited_s, unqueued_ttft_s=alone_s, engine_queue_s=queue_s, queue_wait_s=turn_s
    )
    if isinstance(found, Admit):
        assert turn_s is None
        assert waited_s + alone_s + queue_s <= 0.9 or alone_s > 0.9
    if isinstance(found, Shed):
        assert found.retry_after_s > 0


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_engine_queue_delay_s"):
        AdmissionOptions(max_engine_queue_delay_s=-1.0)
    with pytest.raises(ValueError, match="margin_fraction"):
        AdmissionOptions(slo_safety_margin_fraction=1.0)
