"""Checks of a request's head, before any other work.

Servers and proxies in front refuse most of this, each differently. A request can hide in another
one where two of them read a message differently. So the gate refuses ambiguous heads, and closes
the connection.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

from baton.engine.vllm.gate.errors import Problem

MAX_HEAD_BYTES = 32 * 1024
"""Of all header names and values; HAProxy's own limit is 64 KiB."""
MAX_HEADERS = 100

# As ASGI names them: "HTTP/2.0" in a request line is not HTTP/2.
_VERSIONS = frozenset({"1.0", "1.1", "2", "3"})
# A name, an IPv4 address or an IPv6 address in brackets, and perhaps a port.
HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
_HOST = re.compile(HOST.encode())
NO_HOST = "no Host header field, expected one"
BAD_HOST = "the Host header field names no host"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH = re.compile(rb"[0-9]{1,18}")


def check_head(scope: Mapping[str, Any]) -> Problem | None:
    """Why a request is refused for its head alone, or None."""
    headers: Collection[tuple[bytes, bytes]] = scope["headers"]
    if scope.get("http_version", "1.1") not in _VERSIONS:
        return _reject(
            "this version of HTTP is not supported, expected 1.1",
            status=HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
        )
    if len(headers) > MAX_HEADERS:
        return _reject(
            f"{len(headers)} header fields, at most {MAX_HEADERS} are taken",
            status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        )
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        return _reject(
            f"the header fields are larger than {MAX_HEAD_BYTES} bytes",
            status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        )
    reason = _bad_host(scope, headers) or _bad_length(headers)
    if reason is None and any(_CONTROL.search(value) for _, value in headers):
        reason = "a header field has a control character in it"
    return None if reason is None else _reject(reason)


def _bad_host(scope: Mapping[str, Any], headers: Collection[tuple[bytes, bytes]]) -> str | None:
    """Source: RFC 9112 §3.2."""
    hosts = _values(headers, b"host")
    if len(hosts) > 1:
        return f"{len(hosts)} Host header fields, expected one"
    if not hosts:
        return NO_HOST if scope.get("http_version") == "1.1" else None
    return None if _HOST.fullmatch(hosts[0]) else BAD_HOST


def _bad_length(headers: Collection[tuple[bytes, bytes]]) -> str | None:
    """Why the end of the body is ambiguous. Source: RFC 9112 §6."""
    lengths = _values(headers, b"content-length")
    codings = _values(headers, b"transfer-encoding")
    if lengths and codings:
        return "both Content-Length and Transfer-Encoding, expected one of them"
    if len(lengths) > 1:
        return f"{len(lengths)} Content-Length header fields, expected one"
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        return "Content-Length is no number of bytes"
    if codings and [coding.lower() for coding in codings] != [b"chunked"]:
        return "Transfer-Encoding is not 'chunked'"
    return None


def _values(headers: Collection[tuple[bytes, bytes]], header: bytes) -> list[bytes]:
    return [value.strip() for name, value in headers if name.lower() == header]


def _reject(message: str, *, status: int = HTTPStatus.BAD_REQUEST) -> Problem:
    return Problem(status=status, message=message, close=True)
