"""Addresses as text: made and taken apart at one place."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

IPV4_EVERYWHERE = "0.0.0.0"  # noqa: S104 - a value of a configuration
HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z]([a-z0-9-]{0,9}[a-z0-9])?(\.[a-z]{1,4})?", fullmatch=True),
    st.ip_addresses(v=4).map(lambda address: f"::ffff:{address}"),
)
PORTS = st.integers(0, 65_535)


@given(host=HOSTS, port=PORTS)
def test_what_is_made_of_a_host_and_a_port_is_taken_apart_into_both(host: str, port: int) -> None:
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
def test_what_is_no_address_is_refused_with_what_was_wanted(text: str) -> None:
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
