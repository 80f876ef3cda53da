"""What a request was promised and got, as its story tells it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.handoff import LegKind, LegTimes
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase
from baton.domain.slo import Slo, SloResult
from baton.domain.value import evolve
from baton.telemetry.requests.error_budget import missed_objectives, objective_rows, ttft_parts
from baton.telemetry.requests.recorders import Recorders
from baton.telemetry.requests.request_log import headline
from tests.fakes import request_records

RECORD = evolve(
    request_records.RECORD,
    decisions=(),
    legs=(),
    first_token_at_s=101.0,
    last_token_at_s=101.5,
    ended_at_s=102.0,
    prefill_done_at_s=None,
    handed_off_blocks=0,
)
DECODE = evolve(request_records.DECODE, leg_id="r~1", cached_tokens=None, engine_times=None)


def leg(kind: LegKind, began_at_s: float, ended_at_s: float, **changes: object) -> LegRecord:
    decodes = kind is not LegKind.PREFILL
    told: dict[str, Any] = {
        "kind": kind,
        "replica_id": "d" if decodes else "p",
        "started_at_s": began_at_s,
        "first_output_at_s": ended_at_s,
        "last_output_at_s": ended_at_s if decodes else None,
        "ended_at_s": ended_at_s,
        "fetched_tokens": 10 if kind is LegKind.DECODE else 0,
        "output_tokens": 3 if decodes else 0,
    }
    return evolve(DECODE, **told | changes)


HANDED_OFF = (
    leg(LegKind.PREFILL, 100.25, 100.75, engine_times=LegTimes(0.25, 0.125)),
    leg(
        LegKind.DECODE, 100.75, 101.5, first_output_at_s=101.0, engine_times=LegTimes(0.125, 0.0625)
    ),
)


def test_the_parts_of_a_ttft_are_what_engines_said() -> None:
    assert ttft_parts(evolve(RECORD, legs=HANDED_OFF)) == {
        "ingress_wait_s": 0.25,
        "lost_s": 0.0,
        "queue_s": 0.375,
        "prefill_s": 0.125,
        "transfer_s": 0.1875,
        "decode_s": 0.0625,
    }


def test_time_after_the_first_token_is_no_part_of_ttft() -> None:
    (one,) = (leg(LegKind.LOCAL, 100.0, 140.0, first_output_at_s=101.0),)
    parts = ttft_parts(evolve(RECORD, legs=(one,), ended_at_s=140.0))
    assert parts is not None
    assert sum(parts.values()) == 1.0
    assert parts["decode_s"] == 0.0


def test_a_leg_that_came_to_nothing_before_the_first_token_was_lost() -> None:
    broken = leg(
        LegKind.LOCAL,
        100.0,
        100.5,
        outcome=LegOutcome.FAILED,
        first_output_at_s=None,
        output_tokens=0,
    )
    again = leg(LegKind.LOCAL, 100.5, 101.5, route_index=1, first_output_at_s=101.0)
    told = evolve(RECORD, legs=(broken, again), routes=(request_records.PULL,) * 2, resumes=1)
    parts = ttft_parts(told)
    assert parts is not None
    assert (parts["lost_s"], parts["prefill_s"]) == (0.5, 0.5)


def test_without_a_first_token_there_are_no_parts() -> None:
    assert ttft_parts(evolve(RECORD, first_token_at_s=None, legs=HANDED_OFF)) is None


def test_only_limits_that_are_set_are_objectives() -> None:
    told = evolve(RECORD, slo=Slo(name="chat", tpot_s=0.5))
    assert objective_rows(told) == [
        {"objective": "tpot", "objective_s": 0.5, "actual_s": 0.25, "met": True}
    ]


def test_slow_gaps_are_told_with_how_many_were_allowed() -> None:
    told = evolve(
        RECORD, slo=Slo(itl_p99_s=0.5), output_tokens=301, itl_violations=2, max_itl_s=0.7
    )
    (row,) = objective_rows(told)
    assert (row["actual_s"], row["slow_gaps"], row["allowed_gaps"]) == (0.7, 2, 3)


def test_the_headline_names_the_tenant_and_the_slo_result() -> None:
    judgement = SloResult(was_served=False, ttft_met=False, tpot_met=True, itl_met=True)
    told = headline(
        evolve(
            RECORD,
            tenant="acme",
            slo=Slo(name="chat"),
            slo_result=judgement,
            queue_wait_s=0.5,
            gpu_s=2.0,
        )
    )
    assert (told["tenant"], told["slo_class"]) == ("acme", "chat")
    assert (told["verdict"], told["missed"]) == ("missed", "served,ttft")
    assert (told["queue_wait_s"], told["gpu_s"], told["tpot_s"]) == (0.5, 2.0, 0.25)


def test_each_objective_that_was_broken_is_named() -> None:
    none_met = SloResult(was_served=False, ttft_met=False, tpot_met=False, itl_met=False)
    assert missed_objectives(evolve(RECORD, slo_result=none_met)) == (
        "served",
        "ttft",
        "tpot",
        "itl",
    )
    assert missed_objectives(RECORD) == ()


def test_a_client_error_is_neither_good_nor_a_miss() -> None:
    refused = evolve(
        RECORD,
        outcome=Phase.SHED,
        slo_result=SloResult(was_served=False, ttft_met=True, tpot_met=True, itl_met=True),
    )
    assert (headline(refused)["verdict"], missed_objectives(refused)) == ("missed", ("served",))
    barred = evolve(refused, is_client_error=True)
    assert (headline(barred)["verdict"], missed_objectives(barred)) == ("client_error", ())


# -------------------------------------------------------------------- recorders


class Keeper:
    def __init__(self, error: Exception | None = None) -> None:
        self.kept: list[RequestRecord] = []
        self._error = error

    def record(self, record: RequestRecord) -> None:
        self.kept.append(record)
        if self._error is not None:
            raise self._error


def test_one_that_fails_keeps_no_record_from_the_others_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, broken, last = Keeper(), Keeper(ZeroDivisionError("no")), Keeper()
    recorders = Recorders(first, broken, last)
    for _ in range(3):
        recorders.record(RECORD)
    assert len(first.kept) == len(broken.kept) == len(last.kept) == 3
    assert recorders.failures == 3
    assert [record.message for record in caplog.records] == ["Keeper cannot keep request r"]


def test_each_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    recorders = Recorders(Keeper(ValueError("a")), Keeper(ValueError("b")))
    recorders.record(RECORD)
    recorders.record(RECORD)
    assert len(caplog.records) == 2
