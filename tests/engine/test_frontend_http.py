"""Heads of requests that could be read in two ways, and those that only look odd."""

from __future__ import annotations

import pytest

from baton.engine.vllm.gate.http import MAX_HEAD_BYTES, MAX_HEADERS, check_head

Headers = list[tuple[bytes, bytes]]
HOST = (b"host", b"front.example:8000")


def why(headers: Headers, *, version: str = "1.1") -> str | None:
    problem = check_head({"headers": headers, "http_version": version})
    if problem is None:
        return None
    assert problem.status in {400, 431, 505}
    assert (b"connection", b"close") in problem.headers()
    return problem.message


@pytest.mark.parametrize(
    "host", [b"a", b"a.b-c_d", b"127.0.0.1", b"127.0.0.1:8000", b"[::1]", b"[fe80::1]:80", b" a "]
)
def test_one_host_is_right(host: bytes) -> None:
    assert why([(b"Host", host)]) is None


@pytest.mark.parametrize(
    "host",
    [b"", b"a b", b"a,b", b"a/b", b"u@a", b"a:", b"a:b", b"a:123456", b"\xff", b"[::1", b"a\x00"],
)
def test_what_names_no_host_is_refused(host: bytes) -> None:
    assert why([(b"host", host)]) is not None


def test_a_host_is_named_once() -> None:
    assert why([HOST, (b"HOST", HOST[1])]) == "2 Host header fields, expected one"
    assert why([HOST, (b"host", b"other")]) is not None
    assert why([]) == "no Host header field, expected one"
    assert why([], version="1.0") is None
    assert why([HOST, HOST], version="1.0") is not None


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ([(b"content-length", b"0")], None),
        ([(b"content-length", b"17")], None),
        ([(b"transfer-encoding", b"chunked")], None),
        ([(b"Transfer-Encoding", b"Chunked")], None),
        ([(b"content-length", b"5"), (b"transfer-encoding", b"chunked")], "both Content-Length"),
        ([(b"Content-Length", b"5"), (b"content-length", b"5")], "2 Content-Length"),
        ([(b"content-length", b"5"), (b"content-length", b"6")], "2 Content-Length"),
        *(
            ([(b"content-length", value)], "no number")
            for value in (b"", b"+5", b"-5", b"5, 5", b"0x5", b"5 5", b"1e3", b"\xb2", b"9" * 19)
        ),
        *(
            ([(b"transfer-encoding", value)], "not 'chunked'")
            for value in (
                b"identity",
                b"gzip, chunked",
                b"chunked, chunked",
                b"xchunked",
                b"",
                b"\xff",
            )
        ),
        ([(b"transfer-encoding", b"chunked")] * 2, "not 'chunked'"),
    ],
)
def test_where_a_body_ends_is_said_in_one_way(headers: Headers, refused: str | None) -> None:
    said = why([HOST, *headers])
    assert said is None if refused is None else refused in (said or "")


@pytest.mark.parametrize("version", ["0.9", "2.0", "9.9", ""])
def test_a_version_that_nobody_speaks_is_refused(version: str) -> None:
    assert why([HOST], version=version) is not None
    assert why([HOST], version="1.0") is why([HOST], version="2") is None


@pytest.mark.parametrize("value", [b"a\x00b", b"a\nb", b"a\rb", b"\x1b[31m", b"\x7f"])
def test_no_header_has_a_control_character(value: bytes) -> None:
    assert why([HOST, (b"x-any", value)]) == "a header field has a control character in it"
    assert why([HOST, (b"x-any", b"a\tb \xc3\xa9")]) is None


def test_a_head_has_a_size() -> None:
    room = MAX_HEAD_BYTES - len(HOST[0] + HOST[1]) - 1
    assert why([HOST, (b"x", b"v" * room)]) is None
    assert why([HOST, (b"x", b"v" * (room + 1))]) is not None
    assert why([HOST] + [(b"x", b"")] * (MAX_HEADERS - 1)) is None
    assert why([HOST] + [(b"x", b"")] * MAX_HEADERS) is not None
