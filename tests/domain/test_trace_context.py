"""What `traceparent` and `tracestate` say, and what is made of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.names.trace_context import (
    MAX_STATE_CHARS,
    TraceContext,
    is_in_sample,
    parse_traceparent,
    span_id,
    trace_headers,
)

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


def test_a_caller_says_its_trace_its_span_and_whether_it_keeps_it() -> None:
    assert parse_traceparent(PARENT, "a=1") == TraceContext(
        TRACE_ID, PARENT_ID, sampled=True, state="a=1"
    )
    unsampled = parse_traceparent(PARENT[:-1] + "2")
    assert unsampled == TraceContext(TRACE_ID, PARENT_ID)


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent("cc" + PARENT[2:] + "-what") is not None


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00-1-2-01",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        PARENT + "\n00",
        "x" * 10_000,
    ],
)
def test_what_cannot_be_trusted_was_not_said(parent: str) -> None:
    assert parse_traceparent(parent) is None


@pytest.mark.parametrize("state", ["a" * (MAX_STATE_CHARS + 1), "a=\x00", "a=1\nx: y", "é"])
def test_a_state_that_is_none_is_left_out(state: str) -> None:
    assert parse_traceparent(PARENT, state) == TraceContext(TRACE_ID, PARENT_ID, sampled=True)


@given(st.text(max_size=80), st.text(max_size=80))
def test_headers_may_say_anything(parent: str, state: str) -> None:
    context = parse_traceparent(parent, state)
    assert context is None or parse_traceparent(trace_headers(context, PARENT_ID)["traceparent"])


@given(st.booleans(), st.sampled_from(["", "a=1"]))
def test_what_is_passed_on_is_read_back_as_it_was(sampled: bool, state: str) -> None:  # noqa: FBT001
    context = TraceContext(TRACE_ID, "", sampled, state)
    own = span_id(TRACE_ID, "r")
    headers = trace_headers(context, own)
    found = parse_traceparent(headers["traceparent"], headers.get("tracestate", ""))
    assert found == context._replace(parent_id=own)


def test_a_span_has_one_id_wherever_it_is_asked_for() -> None:
    assert span_id(TRACE_ID, "r") == span_id(TRACE_ID, "r")
    names = {span_id(TRACE_ID, f"r~{number}") for number in range(100)} | {span_id(PARENT_ID, "r")}
    assert len(names) == 101
    assert all(len(name) == 16 for name in names)


def test_a_share_of_traces_is_about_that_many_and_larger_shares_keep_what_smaller_keep() -> None:
    ids = [span_id(str(number), "t") + span_id(str(number), "u") for number in range(2000)]
    tenth = {id_ for id_ in ids if is_in_sample(id_, 0.1)}
    assert 140 < len(tenth) < 260
    assert tenth < {id_ for id_ in ids if is_in_sample(id_, 0.5)}
    assert not any(is_in_sample(id_, 0.0) for id_ in ids)
    assert all(is_in_sample(id_, 1.0) for id_ in ids)
