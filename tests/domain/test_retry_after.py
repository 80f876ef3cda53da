"""When a refused client may come back: one number, wherever it is said."""

from __future__ import annotations

import math
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import QueueFull, RateLimited, Rejected
from baton.domain.names.retry_after import MAX_RETRY_AFTER_S, retry_after_seconds, retry_after_text
from baton.engine.vllm.gate.errors import Dialect, Problem
from baton.serving.front.gate_maps import shed_entries

WAITS = st.floats(allow_nan=True, allow_infinity=True)
KINDS = Rejected.__subclasses__()


def said_in(text: str) -> str:
    found = re.search(r"retry in (\S+) s\b", text)
    assert found is not None, text
    return found[1]


def header_of(problem: Problem) -> str:
    return dict(problem.headers())[b"retry-after"].decode()


@given(WAITS)
def test_the_number_is_whole_and_within_bounds(wait_s: float) -> None:
    assert 1 <= retry_after_seconds(wait_s) <= MAX_RETRY_AFTER_S


@given(st.floats(min_value=-10, max_value=MAX_RETRY_AFTER_S))
def test_nobody_is_asked_to_come_back_too_early_nor_a_second_late(wait_s: float) -> None:
    assert max(wait_s, 1) <= retry_after_seconds(wait_s) < max(wait_s, 1) + 1


@given(WAITS, WAITS)
def test_a_longer_wait_is_never_told_as_a_shorter_one(one_s: float, other_s: float) -> None:
    if one_s <= other_s:
        assert retry_after_seconds(one_s) <= retry_after_seconds(other_s)


@given(WAITS, st.sampled_from(KINDS), st.text(string.printable))
def test_header_text_and_gate_say_the_same_number(
    wait_s: float, kind: type[Rejected], why: str
) -> None:
    error = kind("r-1", wait_s, why)
    problem = Problem.from_error(error)
    told = header_of(problem)
    assert said_in(str(error)[len(why) :]) == told
    assert retry_after_text(wait_s) == f"retry in {told} s"
    assert shed_entries({("h", None): error.retry_after_s}) == {"h": told}


@given(st.floats(), st.sampled_from(list(Dialect)))
def test_it_is_the_same_number_after_a_problem_rode_on_an_output(
    wait_s: float, dialect: Dialect
) -> None:
    packed = Problem.unpack(Problem.from_error(QueueFull("r-1", wait_s, "full")).pack())
    assert said_in(packed.body(dialect).decode()) == header_of(packed)


@pytest.mark.parametrize(
    ("wait_s", "told"),
    [(0.4, "1"), (1.2, "2"), (2.0, "2"), (2.5, "3"), (30.01, "31"), (math.inf, "3600")],
)
def test_it_is_rounded_up(wait_s: float, told: str) -> None:
    error = RateLimited("r-1", wait_s, "tenant 'a' has used up its requests per second")
    assert str(error).endswith(f"; retry in {told} s")
    assert header_of(Problem.from_error(error)) == told


def test_a_refusal_that_ends_the_connection_says_when_to_come_back_as_well() -> None:
    problem = Problem(status=503, message="going away", retry_after_s=4.2, close=True)
    assert problem.headers() == [(b"connection", b"close"), (b"retry-after", b"5")]
