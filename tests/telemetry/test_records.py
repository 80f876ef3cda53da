"""The stories of ended requests."""

from __future__ import annotations

import io
import json
import logging

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.handoff import HandoffMode, Route, RouteReason
from baton.domain.request import Phase
from baton.telemetry.logs import LogFormat, configure_logs
from baton.telemetry.records import RecordBook, story


def record(request_id: str, outcome: Phase = Phase.FINISHED) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        outcome=outcome,
        reason="stop",
        routes=(
            Route(
                mode=HandoffMode.PULL,
                prefill_replica_id="p",
                decode_replica_id="d",
                reason=RouteReason.DISAGGREGATED,
            ),
        ),
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=3,
        resumes=1,
        arrived_at_s=100.0,
        first_token_at_s=100.5,
        last_token_at_s=100.75,
        ended_at_s=101.0,
        prefill_done_at_s=100.25,
        handed_off_blocks=1,
    )


def test_a_record_is_found_by_the_id_that_the_client_gave() -> None:
    book = RecordBook()
    book.record(record("chatcmpl-mine-1a2b"))
    book.record(record("chatcmpl-other-3c4d"))
    assert [r.request_id for r in book.find("mine")] == ["chatcmpl-mine-1a2b"]


def test_the_oldest_record_makes_room() -> None:
    book = RecordBook(capacity=2)
    for name in "abc":
        book.record(record(name))
    assert [r.request_id for r in book.latest(9)] == ["b", "c"]
    assert book.totals() == {"finished": 3, "resumes": 3}


def test_times_are_told_since_arrival() -> None:
    told = story(record("r"))
    assert (told["prefill_done_s"], told["first_token_s"], told["ended_s"]) == (0.25, 0.5, 1.0)


def test_a_request_that_ran_locally_was_prefilled_where_it_was_decoded() -> None:
    local = Route(
        mode=HandoffMode.LOCAL,
        prefill_replica_id=None,
        decode_replica_id="d",
        reason=RouteReason.LOCAL_ONLY,
    )
    base = record("r")
    told = story(
        RequestRecord(
            **{name: getattr(base, name) for name in base.__slots__} | {"routes": (local,)}
        )
    )
    assert (told["prefill_replica"], told["decode_replica"]) == ("d", "d")


@pytest.mark.parametrize("log_format", LogFormat)
def test_an_ended_request_is_one_line_in_the_log(log_format: LogFormat) -> None:
    configure_logs(log_format, "info")
    (handler,) = logging.getLogger("baton").handlers
    assert isinstance(handler, logging.StreamHandler)
    stream = handler.setStream(io.StringIO()) or handler.stream
    try:
        RecordBook().record(record("r", Phase.FAILED))
        (line,) = handler.stream.getvalue().splitlines()
    finally:
        handler.setStream(stream)
        logging.getLogger("baton").handlers = []
        logging.getLogger("baton").propagate = True
    if log_format is LogFormat.JSON:
        parsed = json.loads(line)
        assert (parsed["event"], parsed["outcome"]) == ("request_ended", "failed")
    else:
        assert "request_ended" in line
        assert "outcome=failed" in line
