"""When a refused client may come back: one number, wherever it is said."""

from __future__ import annotations

import ipaddress
import math
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import QueueFull, RateLimited, Rejected
from baton.domain.names.addresses import (
    Address,
    any_address,
    connectable_host,
    format_address,
    format_endpoint,
    is_ipv6,
    is_loopback_address,
    parse_address,
    parse_host_header,
    same_host,
)
from baton.domain.names.retry_after import MAX_RETRY_AFTER_S, retry_after_seconds, retry_after_text
from baton.domain.names.trace_context import (
    MAX_STATE_CHARS,
    TraceContext,
    is_in_sample,
    parse_traceparent,
    span_id,
    trace_headers,
)
from baton.domain.names.words import few
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
def test_a_retry_time_is_neither_early_nor_a_second_late(wait_s: float) -> None:
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


# --------------------------------------------------------------------------- lists in messages
def test_a_long_list_is_cut_and_counted() -> None:
    assert few(["a", "b"]) == "a; b"
    assert few(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"
    assert few(["a", "b", "c"], 2, separator=", ") == "a, b, and 1 more"


# ---------- what `traceparent` and `tracestate` say, and what is made of it
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
def test_an_untrusted_trace_parent_is_ignored(parent: str) -> None:
    assert parse_traceparent(parent) is None


@pytest.mark.parametrize("state", ["a" * (MAX_STATE_CHARS + 1), "a=\x00", "a=1\nx: y", "é"])
def test_a_state_that_is_none_is_left_out(state: str) -> None:
    assert parse_traceparent(PARENT, state) == TraceContext(TRACE_ID, PARENT_ID, sampled=True)


@given(st.text(max_size=80), st.text(max_size=80))
def test_headers_may_say_anything(parent: str, state: str) -> None:
    context = parse_traceparent(parent, state)
    assert context is None or parse_traceparent(trace_headers(context, PARENT_ID)["traceparent"])


@given(st.booleans(), st.sampled_from(["", "a=1"]))
def test_a_forwarded_trace_context_is_read_back_unchanged(sampled: bool, state: str) -> None:  # noqa: FBT001
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


# ---------- addresses as text: made and taken apart at one place
IPV4_EVERYWHERE = "0.0.0.0"  # noqa: S104 - a value of a configuration
HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z]([a-z0-9-]{0,9}[a-z0-9])?(\.[a-z]{1,4})?", fullmatch=True),
    st.ip_addresses(v=4).map(lambda address: f"::ffff:{address}"),
)
PORTS = st.integers(0, 65_535)


@given(host=HOSTS, port=PORTS)
def test_a_joined_host_and_port_are_split_into_both(host: str, port: int) -> None:
    assert parse_address(format_address(host, port)) == Address(host, port)
    assert parse_address(format_endpoint("tcp", host, port)) == Address(host, port)
    assert parse_address(format_endpoint("http", host, port) + "/") == Address(host, port)


@given(host=HOSTS, port=PORTS)
def test_a_host_is_found_in_the_header_that_names_it(host: str, port: int) -> None:
    assert parse_host_header(format_address(host, port)) == host


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("::1", "[::1]:80"),
        ("::", "[::]:80"),
        ("fd00::2", "[fd00::2]:80"),
        ("::ffff:127.0.0.1", "[::ffff:127.0.0.1]:80"),
        ("[::1]", "[::1]:80"),
        ("127.0.0.1", "127.0.0.1:80"),
        ("front.example", "front.example:80"),
    ],
)
def test_only_addresses_of_ipv6_stand_in_brackets(host: str, text: str) -> None:
    assert format_address(host, 80) == text


@pytest.mark.parametrize(
    "text",
    [
        *("::1:8000", "tcp://::1:0", "fd00::2:6379", "[::1]", "::1", "[::1]:", "[::1]:x", "[]:1"),
        *("[::1:8000", "::1]:8000", "[front]:80", "host", "host:", ":80", "host:65536", "host:-1"),
        *("", "host:8 ", "a b:80", "http://", "host:80/path", "user@host:80", "[::1]x:80"),
        "host:\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_an_invalid_address_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT") as refused:
        parse_address(text)
    assert repr(text) in str(refused.value)
    assert "[::1]:8000" in str(refused.value)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:6379", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:6379", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("[::ffff:10.0.0.7]:1", False),
        ("[fd00::2]:6379", False),
        ("10.0.0.7:6379", False),
        ("head:1", False),
        ("auto", False),
    ],
)
def test_loopback_addresses_are_told_from_others(address: str, *, expected: bool) -> None:
    assert is_loopback_address(address) is expected


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("10.0.0.7", "10.0.0.7"),
        (IPV4_EVERYWHERE, "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::ffff:0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("::1", "::1"),
        ("front.example", "front.example"),
    ],
)
def test_a_server_is_asked_from_its_own_machine_where_it_listens(host: str, shown: str) -> None:
    assert connectable_host(host) == shown


def test_all_addresses_are_meant_in_the_version_that_was_used() -> None:
    assert (any_address("127.0.0.1"), any_address("localhost")) == (IPV4_EVERYWHERE,) * 2
    assert (any_address("::1"), any_address("::")) == ("::", "::")


def test_one_address_is_known_again_however_it_is_written() -> None:
    assert same_host("::1", "0:0:0:0:0:0:0:1")
    assert same_host("FD00::2", "fd00:0::2")
    assert same_host("::ffff:10.0.0.7", "10.0.0.7")
    assert same_host("Node-1", "node-1")
    assert not same_host("::1", "127.0.0.1")
    assert not same_host("localhost", "127.0.0.1")


@pytest.mark.parametrize("header", ["[::1", "[x]:80", "[::1]x", "[]", "", ":80", "::1"])
def test_a_header_that_names_no_host_names_none(header: str) -> None:
    assert parse_host_header(header) == ""


@given(st.ip_addresses(v=6))
def test_addresses_of_ipv6_are_known_as_such(address: ipaddress.IPv6Address) -> None:
    assert is_ipv6(str(address))
    assert not is_ipv6("127.0.0.1")
    assert not is_ipv6("front.example")
