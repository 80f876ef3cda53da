"""The stories of ended requests."""

from __future__ import annotations

import io
import json
import logging
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.commands import RequestRecord
from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    PlacementDecision,
    Route,
    RouteOption,
)
from baton.domain.request import Phase
from baton.domain.value import evolve
from baton.telemetry.logs import LogFormat, configure_logs
from baton.telemetry.requests.request_log import RequestLog, RequestReport, headline, request_report
from tests.fakes.request_records import ALONE, PULL, RECORD


def option(
    prefill: str | None, decode: str, *, queue_s: float = 0.25, prefill_s: float = 0.125
) -> RouteOption:
    return RouteOption(
        mode=HandoffMode.LOCAL if prefill is None else HandoffMode.PULL,
        prefill_replica_id=prefill,
        decode_replica_id=decode,
        hit_tokens=64,
        hit_source=HitSource.REPORTED,
        hit_age_s=0.5,
        queue_s=queue_s,
        prefill_s=prefill_s,
        transfer_s=0.0625,
        decode_s=0.0625,
        interference_s=2.0,
        cost_s=3.0,
        expected_misses=0.75,
    )


def decision(route: Route = PULL, at_s: float = 100.0, *options: RouteOption) -> PlacementDecision:
    return PlacementDecision(
        route=route, policy="predicted", at_s=at_s, options=options, options_considered=7
    )


def record(request_id: str, outcome: Phase = Phase.FINISHED) -> RequestRecord:
    return evolve(
        RECORD,
        request_id=request_id,
        outcome=outcome,
        decisions=(decision(),),
        legs=(),
        resumes=1,
        first_token_at_s=100.5,
        last_token_at_s=100.75,
        ended_at_s=101.0,
        prefill_done_at_s=100.25,
    )


def decisions(told: RequestReport) -> list[RequestReport]:
    return cast("list[RequestReport]", told["decisions"])


def options(told: RequestReport) -> list[RequestReport]:
    return cast("list[RequestReport]", told["options"])


def foresight(told: RequestReport) -> tuple[object, object, object]:
    return (told["predicted_ttft_s"], told["actual_ttft_s"], told["ttft_error_fraction"])


# ------------------------------------------------------------------------------------ the book


@pytest.mark.parametrize(
    "key",
    [
        "mine",
        "chatcmpl-mine",
        "chatcmpl-mine-1a2b3c4d",
        "1_chatcmpl-mine-1a2b3c4d",
        "cmpl-mine-0-1a2b3c4d",
        "1_cmpl-mine-0-1a2b3c4d",
        "chatcmpl-mine_2-1a2b3c4d",
        "mine_0-1a2b3c4d",
        "chatcmpl-mine~20d39a8f4884ade880~gold-1a2b3c4d",
        "cmpl-mine~20d39a8f4884ade880~-1a2b3c4d",
    ],
)
def test_a_record_is_found_by_the_id_that_the_client_gave(key: str) -> None:
    book = RequestLog()
    book.record(record(key))
    assert [r.request_id for r in book.find("mine")] == [key]


@pytest.mark.parametrize(
    "named", ["chatcmpl-mine-1-1a2b3c4d", "chatcmpl-mine-1", "chatcmpl-mine", "mine-1", "mine"]
)
def test_a_record_is_found_by_the_ids_that_the_response_and_the_logs_say(named: str) -> None:
    book = RequestLog()
    book.record(record("chatcmpl-mine-1-1a2b3c4d"))
    assert len(book.find(named)) == 1


@pytest.mark.parametrize("named", ["", "mi", "ine", "1a2b3c4d", "chatcmpl", "m.ne", "min", "mine-"])
def test_a_part_of_an_id_finds_nothing(named: str) -> None:
    book = RequestLog()
    book.record(record("chatcmpl-mine-1a2b3c4d"))
    assert book.find(named) == []


def test_a_request_is_not_found_by_the_last_part_of_another_clients_id() -> None:
    book = RequestLog()
    book.record(record("chatcmpl-theirs-mine-1a2b3c4d"))
    book.record(record("chatcmpl-mine-theirs-1a2b3c4d"))
    assert book.find("mine") == []


def test_the_choices_of_a_request_are_all_found_oldest_first() -> None:
    book = RequestLog()
    for key in ("1_chatcmpl-mine-1a2b3c4d", "chatcmpl-other-11111111", "0_chatcmpl-mine-1a2b3c4d"):
        book.record(record(key))
    found = [r.request_id for r in book.find("mine")]
    assert found == ["1_chatcmpl-mine-1a2b3c4d", "0_chatcmpl-mine-1a2b3c4d"]


@given(st.text(max_size=20))
def test_a_request_is_found_by_every_id_that_a_client_gives_it(named: str) -> None:
    book = RequestLog()
    book.record(record(f"chatcmpl-{named}-00ff00ff"))
    assert len(book.find(named)) == 1


def test_the_oldest_record_makes_room() -> None:
    book = RequestLog(capacity=2)
    for name in "abc":
        book.record(record(name))
    assert [r.request_id for r in book.latest(9)] == ["b", "c"]
    assert book.totals() == {"finished": 3, "resumes": 3}


# ------------------------------------------------------------------------------------ the story


def test_times_are_told_since_arrival() -> None:
    told = request_report(record("r"))
    assert (told["prefill_done_s"], told["first_token_s"], told["ended_s"]) == (0.25, 0.5, 1.0)


def test_a_request_that_ran_locally_was_prefilled_where_it_was_decoded() -> None:
    told = headline(evolve(record("r"), routes=(ALONE,)))
    assert (told["prefill_replica"], told["decode_replica"]) == ("d", "d")


def test_a_decision_tells_what_it_was_made_from() -> None:
    best = option("p", "d")
    told = request_report(evolve(record("r"), decisions=(decision(PULL, 100.125, best),)))
    (one,) = decisions(told)
    assert {name: one[name] for name in ("policy", "reason", "decided_s", "considered")} == {
        "policy": "predicted",
        "reason": "disaggregated",
        "decided_s": 0.125,
        "considered": 7,
    }
    assert options(one) == [
        {
            "mode": "pull",
            "prefill_replica": "p",
            "decode_replica": "d",
            "hit_tokens": 64,
            "hit_source": "reported",
            "hit_age_s": 0.5,
            "queue_s": 0.25,
            "load_s": 0.0,
            "prefill_s": 0.125,
            "transfer_s": 0.0625,
            "decode_s": 0.0625,
            "harm_s": 2.0,
            "cost_s": 3.0,
            "missed": 0.75,
            "ttft_s": 0.5,
            "early": False,
            "chosen": True,
        }
    ]


def test_the_option_that_became_the_route_is_marked_though_it_is_not_the_first() -> None:
    tried = (option(None, "d"), option("p", "other"), option("p", "d", queue_s=0.125))
    told = request_report(evolve(record("r"), decisions=(decision(PULL, 100.0, *tried),)))
    (one,) = decisions(told)
    assert [o["chosen"] for o in options(one)] == [False, False, True]
    assert one["predicted_ttft_s"] == 0.375


def test_only_one_of_two_options_on_the_same_replicas_is_marked() -> None:
    twice = (option("p", "d"), option("p", "d"))
    (one,) = decisions(
        request_report(evolve(record("r"), decisions=(decision(PULL, 100.0, *twice),)))
    )
    assert [o["chosen"] for o in options(one)] == [True, False]


def test_a_local_option_says_that_its_decode_replica_prefills() -> None:
    made = decision(ALONE, 100.0, option(None, "d"))
    told = request_report(evolve(record("r"), routes=(ALONE,), decisions=(made,)))
    ((local,),) = [options(other) for other in decisions(told)]
    assert (local["mode"], local["prefill_replica"], local["decode_replica"]) == ("local", "d", "d")


def test_the_prediction_is_compared_with_the_latency_after_the_decision() -> None:
    made = decision(PULL, 100.25, option("p", "d"))
    told = request_report(evolve(record("r"), decisions=(made,)))
    assert foresight(told) == (0.5, 0.25, 1.0)
    (one,) = decisions(told)
    assert foresight(one) == (0.5, 0.25, 1.0)


def test_a_prediction_that_was_too_short_has_a_negative_error() -> None:
    made = decision(PULL, 100.0, option("p", "d", queue_s=0.0, prefill_s=0.0))
    assert foresight(headline(evolve(record("r"), decisions=(made,)))) == (0.125, 0.5, -0.75)


def test_only_the_placement_that_brought_the_first_token_has_an_actual_ttft() -> None:
    best = option("p", "d")
    made = tuple(decision(PULL, at_s, best) for at_s in (100.0, 100.375, 100.625))
    told = request_report(evolve(record("r"), routes=(PULL,) * 3, decisions=made))
    assert [other["actual_ttft_s"] for other in decisions(told)] == [None, 0.125, None]
    assert [other["predicted_ttft_s"] for other in decisions(told)] == [0.5] * 3
    assert told["actual_ttft_s"] == 0.125


def test_without_a_first_token_there_is_no_actual_ttft() -> None:
    made = decision(PULL, 100.0, option("p", "d"))
    failed = evolve(record("r"), decisions=(made,), first_token_at_s=None)
    (one,) = decisions(request_report(failed))
    assert foresight(one) == (0.5, None, None)
    assert foresight(headline(failed)) == (None, None, None)


def test_a_first_token_that_took_no_time_has_no_error_fraction() -> None:
    made = decision(PULL, 100.5, option("p", "d"))
    assert foresight(headline(evolve(record("r"), decisions=(made,)))) == (0.5, 0.0, None)


def test_a_policy_that_predicts_nothing_has_no_prediction_but_an_actual_ttft() -> None:
    assert foresight(headline(record("r"))) == (None, 0.5, None)


def test_a_route_that_changed_since_it_was_decided_is_told_as_both() -> None:
    changed = evolve(PULL, decode_replica_id="d-2")
    (one,) = decisions(request_report(evolve(record("r"), routes=(changed,))))
    decided, became = cast("RequestReport", one["route"]), cast("RequestReport", one["became"])
    assert (decided["decode_replica"], became["decode_replica"]) == ("d", "d-2")


def test_a_rejected_request_has_a_report_without_decisions() -> None:
    refused = evolve(record("r", Phase.SHED), routes=(), decisions=(), first_token_at_s=None)
    told = request_report(refused)
    assert (told["decisions"], told["routes"], told["mode"]) == ([], [], None)


def test_a_request_report_names_the_reason_of_each_resume() -> None:
    resumed = evolve(record("r"), resumes=2, resume_reasons=("lost", "stalled"))
    assert request_report(resumed)["resume_reasons"] == ["lost", "stalled"]


def test_a_request_report_is_strict_json_even_when_a_prediction_is_endless() -> None:
    endless = decision(PULL, 100.0, option("p", "d", queue_s=float("inf")))
    told = request_report(evolve(record("r"), decisions=(endless,)))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert foresight(told) == (None, 0.5, None)


# -------------------------------------------------------------------------------------- the log


@pytest.mark.parametrize("log_format", LogFormat)
def test_an_ended_request_is_one_line_in_the_log(log_format: LogFormat) -> None:
    configure_logs(log_format, "info")
    (handler,) = logging.getLogger("baton").handlers
    assert isinstance(handler, logging.StreamHandler)
    stream = handler.setStream(io.StringIO()) or handler.stream
    try:
        RequestLog().record(record("r", Phase.FAILED))
        (line,) = handler.stream.getvalue().splitlines()
    finally:
        handler.setStream(stream)
        logging.getLogger("baton").handlers = []
        logging.getLogger("baton").propagate = True
    if log_format is LogFormat.JSON:
        parsed = json.loads(line)
        assert (parsed["event"], parsed["outcome"]) == ("request_ended", "failed")
        assert (parsed["actual_ttft_s"], "decisions" in parsed) == (0.5, False)
    else:
        assert "request_ended" in line
        assert "outcome=failed" in line


def test_each_placement_and_each_resume_is_a_debug_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twice = evolve(record("r"), decisions=(decision(), decision()), resume_reasons=("d: lost",))
    caplog.set_level(logging.DEBUG)
    RequestLog().record(twice)
    said = [other.getMessage() for other in caplog.records]
    assert said == ["request_ended", "route", "route", "resume"]
    caplog.clear()
    logging.getLogger("baton").setLevel(logging.INFO)
    RequestLog().record(twice)
    assert [other.getMessage() for other in caplog.records] == ["request_ended"]
