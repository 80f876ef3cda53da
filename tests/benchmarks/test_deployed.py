"""The figures of the benchmark of whole deployments."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from benchmarks._load import Exchange
from benchmarks.deployed.closed_loop import (
    Answer,
    Load,
    answers,
    attainment,
    back_s,
    started_in_s,
    steady_s,
)
from benchmarks.deployed.from_zero import Wake, summary
from benchmarks.deployed.handoff_waits import CASES, Group, chosen, compare, is_right, requests
from benchmarks.deployed.handoff_waits import Answer as Tokens

WELL = Wake(slo_class="chat", statuses=(200, 200), first_token_s=4.0)

# ------------------------------------------------------------------ closed-loop


def sent(*spans: tuple[float, float, bool]) -> list[tuple[float, bool]]:
    """Two requests a second, good or not, over each span."""
    return [
        (begin + half / 2, good)
        for begin, end, good in spans
        for half in range(round((end - begin) * 2))
    ]


def row(at_s: float, **pools: tuple[int, int]) -> dict[str, object]:
    rows = [
        {"pool": name, "desired": want, "ready": ready} for name, (want, ready) in pools.items()
    ]
    return {"at_s": at_s, "pools": rows}


def test_attainment_is_the_share_of_requests_sent_in_a_span() -> None:
    got = [(0.0, True), (1.0, False), (2.0, True), (3.0, True)]
    assert attainment(got, 0.0, 2.0) == 0.5
    assert attainment(got, 2.0, 9.0) == 1.0
    assert attainment(got, 5.0, 9.0) is None


def test_a_step_is_served_again_from_where_the_next_window_and_the_rest_attain() -> None:
    got = sent((0, 40, True), (40, 48, False), (48, 100, True))
    assert back_s(got, 40.0, 100.0, 0.95) == steady_s(got, 40.0, 100.0, 0.95) == 8.0


def test_a_burst_that_is_missed_breaks_a_window_and_not_the_rest() -> None:
    got = sent((40, 70, True), (70, 72, False), (72, 100, True))
    assert back_s(got, 40.0, 100.0, 0.95) == 0.0
    assert steady_s(got, 40.0, 100.0, 0.95) == 32.0


def test_a_second_drop_postpones_the_time_of_recovery() -> None:
    got = sent((40, 70, True), (70, 80, False), (80, 100, True))
    assert back_s(got, 40.0, 100.0, 0.95) == steady_s(got, 40.0, 100.0, 0.95) == 40.0


def test_a_step_that_is_never_served_is_said() -> None:
    got = sent((40, 100, False))
    assert back_s(got, 40.0, 100.0, 0.95) is None
    assert steady_s(got, 40.0, 100.0, 0.95) is None


def test_a_step_that_is_served_at_once_took_no_time() -> None:
    got = sent((40, 100, True))
    assert back_s(got, 40.0, 100.0, 0.95) == steady_s(got, 40.0, 100.0, 0.95) == 0.0


def test_a_start_takes_from_being_wanted_until_all_are_ready() -> None:
    rows = [
        row(0.0, decode=(1, 1), prefill=(2, 2)),
        row(1.0, decode=(3, 1), prefill=(2, 2)),
        row(4.0, decode=(3, 2), prefill=(1, 2)),
        row(6.0, decode=(3, 3), prefill=(1, 1)),
        row(9.0, decode=(2, 3), prefill=(1, 1)),
    ]
    assert started_in_s(rows) == [5.0]


@pytest.mark.parametrize(
    ("problem", "refused", "failed"),
    [
        ("HTTP/1.1 429 Too Many Requests\r\n", True, False),
        ("HTTP/1.1 503 Service Unavailable\r\n", True, False),
        ("HTTP/1.1 500 Internal Server Error\r\n", False, True),
        ("the connection was lost: None", False, True),
        ("", False, True),
    ],
)
def test_a_request_without_its_tokens_was_refused_or_failed(
    problem: str, *, refused: bool, failed: bool
) -> None:
    (answer,) = answers(Load(), [Exchange(send_delay_s=0.0, error=problem)], [3.0])
    assert (answer.at_s, answer.refused, bool(answer.failed)) == (3.0, refused, failed)
    assert not answer.attains(10.0, 10.0)


def test_both_objectives_have_to_be_met() -> None:
    answer = Answer(at_s=0.0, ttft_s=1.0, tpot_s=0.1)
    assert answer.attains(1.0, 0.1)
    assert not answer.attains(0.9, 0.1)
    assert not answer.attains(1.0, 0.09)


# ------------------------------------------------------------------ from-zero


def test_both_requests_of_a_wake_up_have_to_be_served() -> None:
    refused = replace(WELL, statuses=(200, 503), first_token_s=5.0, reason="no replica")
    figures = summary([WELL, refused], 0, [])
    assert (figures["wakes"], figures["served"], figures["problems"]) == (2, 1, ["no replica"])
    assert (figures["first_token_min_s"], figures["first_token_max_s"]) == (4.0, 5.0)


def test_a_stream_that_broke_off_was_not_served() -> None:
    assert not replace(WELL, reason="data: {}").served


@pytest.mark.parametrize("downs", [0, 3])
def test_a_deployment_that_a_balancer_took_out_is_told_of(downs: int) -> None:
    assert summary([WELL], downs, [7])["balancer_downs"] == downs


# ------------------------------------------------------------------ handoff-waits


def test_an_answer_that_differs_or_failed_or_was_not_handed_over_makes_a_case_wrong() -> None:
    right, wrong = Tokens(tokens=(1, 2), took_s=1.0), Tokens(tokens=(1, 3), took_s=2.0)
    failed = replace(right, problem="HTTP 500")
    assert is_right(compare([right], [right]) | {"pulls": 1})
    assert not is_right(compare([right], [right]) | {"pulls": 0})
    assert not is_right(compare([right, wrong], [right, right]) | {"pulls": 2})
    assert not is_right(compare([failed], [right]) | {"pulls": 1})


def test_the_requests_of_a_case_are_those_of_its_groups_and_the_same_each_time() -> None:
    case = replace(CASES["short"], groups=(Group(count=3, prompt_tokens=400, output_tokens=5),))
    asked = requests(case, "a")
    assert asked == requests(case, "a") != requests(case, "b")
    assert [(asked_request.output_tokens, asked_request.after_s) for asked_request in asked] == [
        (5, 0.0)
    ] * 3
    assert all(360 <= len(asked_request.prompt) < 440 for asked_request in asked)


def test_cases_are_chosen_by_name() -> None:
    assert list(chosen("early,short")) == ["early", "short"]
    with pytest.raises(argparse.ArgumentTypeError, match="got nothing, expected short"):
        chosen("short,nothing")
