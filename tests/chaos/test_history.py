"""The history checker finds each violation that is planted, and nothing in a clean run."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.handoff import LegKind
from baton.domain.leg_record import LegRecord
from baton.domain.request import Phase
from baton.domain.value import evolve
from tests.chaos.history import (
    Ending,
    Exchange,
    ExcludedReplica,
    History,
    Invariant,
    check_invariants,
    describe_difference,
    endings,
    find_violations,
    longest_stall,
)
from tests.fakes.records import leg_record, request_record

WANTED = [7, 8, 9, 10, 11, 12]


def finished(request_id: str = "a", tokens: Sequence[int] = WANTED) -> Exchange:
    exchange = Exchange(request_id=request_id, prompt=(1,), max_tokens=len(WANTED))
    for number, token in enumerate(tokens):
        exchange.add_tokens([token], 1.0 + number)
    exchange.end(Ending.FINISHED, 9.0)
    return exchange


def refused(status: int | None, retry_after_s: float | None) -> Exchange:
    exchange = Exchange(request_id="a", prompt=(1,), max_tokens=4)
    exchange.status, exchange.retry_after_s = status, retry_after_s
    exchange.end(Ending.REJECTED, 1.0)
    return exchange


def leg(replica_id: str, began_at_s: float) -> LegRecord:
    times = {"started_at_s": began_at_s, "first_output_at_s": None, "ended_at_s": began_at_s + 1}
    return leg_record(kind=LegKind.LOCAL, replica_id=replica_id, **times)


def record(request_id: str = "a", *, legs: tuple[LegRecord, ...] = ()) -> RequestRecord:
    return request_record(
        request_id=request_id, reason="length", output_tokens=len(WANTED), legs=legs
    )


def broken(history: History) -> list[Invariant]:
    return [violation.invariant for violation in find_violations(history)]


def of(*exchanges: Exchange) -> History:
    return History(exchanges=exchanges, expected_tokens=lambda _: WANTED)


def test_a_clean_run_breaks_nothing_and_every_rule_was_asked_about() -> None:
    history = History(
        exchanges=[finished(), finished("b")],
        expected_tokens=lambda _: WANTED,
        records=[record(), record("b")],
        counters={"legs": 0},
        excluded_replicas=[ExcludedReplica(replica_id="r", from_s=0.0, reason="its drain")],
    )
    bounds, note = check_invariants(history)
    assert [bound.is_met for bound in bounds] == [True] * len(Invariant)
    assert note == ""


def test_unknown_history_does_not_hold() -> None:
    bounds, _ = check_invariants(History(exchanges=[finished()]))
    asked = {bound.description for bound in bounds}
    assert asked == {
        Invariant.ENDS_ONCE.value,
        Invariant.FINISHES.value,
        Invariant.REJECTIONS.value,
    }


def test_a_request_that_never_ends_is_found() -> None:
    hanging = Exchange(request_id="a", prompt=(1,), max_tokens=6)
    hanging.add_tokens(WANTED[:3], 1.0)
    assert broken(of(hanging)) == [Invariant.ENDS_ONCE]
    assert endings([hanging, finished()]) == {"never": 1, "finished": 1}


def test_a_request_that_ends_twice_is_found() -> None:
    twice = finished()
    twice.end(Ending.FINISHED, 9.5)
    assert broken(of(twice)) == [Invariant.ENDS_ONCE]


def test_tokens_after_the_end_are_found() -> None:
    late = finished()
    late.add_tokens([13], 9.5)
    assert broken(of(late)) == [Invariant.ENDS_ONCE]


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.CUT])
def test_a_request_that_was_let_in_and_failed_is_found(ending: Ending) -> None:
    failed = Exchange(request_id="a", prompt=(1,), max_tokens=6)
    failed.add_tokens(WANTED[:2], 1.0)
    failed.end(ending, 2.0)
    assert broken(of(failed)) == [Invariant.FINISHES]


@pytest.mark.parametrize(
    ("tokens", "how"),
    [
        (WANTED[:4], "lost: it ends there, after 4 of 6"),
        ([7, 8, 10, 11, 12], "lost: tokens are missing there, after 2"),
        ([7, 8, 9, 8, 9, 10, 11, 12], "repeated: tokens come again, after 3"),
        ([7, 9, 8, 10, 11, 12], "out of order, after 1"),
        ([7, 8, 9, 10, 11, 99], r"wrong: got \[99\], expected \[12\], after 5"),
        ([*WANTED, 13], "1 tokens too many, after 6"),
        ([], "lost: it ends there, after 0"),
    ],
)
def test_tokens_that_differ_are_found_and_it_is_said_how(tokens: list[int], how: str) -> None:
    (violation,) = find_violations(of(finished(tokens=tokens)))
    assert violation.invariant is Invariant.TOKENS
    assert re.search(how, violation.description), violation.description


def test_a_client_that_left_may_have_fewer_tokens_but_no_others() -> None:
    assert describe_difference(WANTED[:3], WANTED, is_whole=False) == ""
    assert describe_difference([7, 9], WANTED, is_whole=False) != ""


@pytest.mark.parametrize(
    ("status", "retry_after_s"), [(500, 1.0), (503, None), (429, 0.0), (None, 1.0)]
)
def test_a_refusal_without_its_status_or_when_to_come_back_is_found(
    status: int | None, retry_after_s: float | None
) -> None:
    history = History(exchanges=[refused(status, retry_after_s)])
    assert broken(history) == [Invariant.REJECTIONS]


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_as_it_should_be_breaks_nothing(status: int) -> None:
    assert broken(of(refused(status, 2.0))) == []


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(), record()],
        [evolve(record(), outcome=Phase.FAILED)],
        [evolve(record(), output_tokens=5)],
    ],
    ids=["none", "two", "another outcome", "another count"],
)
def test_records_that_disagree_with_clients_are_found(records: list[RequestRecord]) -> None:
    assert broken(History(exchanges=[finished()], records=records)) == [Invariant.RECORDS]


def test_a_counter_that_does_not_return_to_zero_is_found() -> None:
    history = History(
        exchanges=[], counters={"legs at d0": 1, "leases": 0, "unknown": float("nan")}
    )
    assert broken(history) == [Invariant.COUNTERS, Invariant.COUNTERS]


def test_a_leg_that_was_sent_to_an_excluded_replica_is_found_and_an_earlier_leg_is_not() -> None:
    barred = [ExcludedReplica(replica_id="r", from_s=10.0, to_s=20.0, reason="its drain")]

    def run(replica_id: str, began_at_s: float) -> list[Invariant]:
        records = [record(legs=(leg(replica_id, began_at_s),))]
        return broken(History(exchanges=[finished()], records=records, excluded_replicas=barred))

    assert run("r", 11.0) == [Invariant.ROUTES]
    assert run("r", 9.0) == run("r", 21.0) == run("other", 11.0) == []


def test_the_longest_stall_is_between_tokens_and_can_be_that_over_a_moment() -> None:
    exchange = finished()
    exchange.times_s = [1.0, 1.5, 4.5, 5.0, 7.0]
    stall = longest_stall([exchange])
    assert stall is not None
    assert (stall.from_s, stall.took_s) == (1.5, 3.0)
    later = longest_stall([exchange], over_s=6.0)
    assert later is not None
    assert (later.from_s, later.took_s) == (5.0, 2.0)
    assert longest_stall([exchange], over_s=9.0) is None


def test_a_note_tells_of_a_few_and_counts_the_rest() -> None:
    bounds, note = check_invariants(of(*(finished(f"r{n}", WANTED[:2]) for n in range(5))))
    (tokens,) = [bound for bound in bounds if bound.description == Invariant.TOKENS.value]
    assert (tokens.actual, tokens.is_met) == (5, False)
    assert "r0: lost" in note
    assert "and 2 more streams that differ" in note
