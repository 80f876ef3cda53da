"""Bytes as no client library would send them, and what a server makes of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Address = tuple[str, int]
HIDDEN = b"hidden"
"""A word in the id of every request that hides in another."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response, as it was read from the wire."""

    status: int
    head: bytes
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """All that came back over one connection."""

    responses: tuple[Response, ...]
    is_closed: bool
    """The server ended the connection; False where it was given up on."""
    took_s: float

    @property
    def statuses(self) -> tuple[int, ...]:
        return tuple(answer.status for answer in self.responses)


def exchange(address: Address, data: bytes, *, timeout_s: float = 5.0) -> Exchange:
    """Send bytes over a connection of their own and read until it ends."""
    started_s = time.monotonic()
    received, is_closed = bytearray(), False
    with socket.create_connection(address, timeout=timeout_s) as connection:
        with contextlib.suppress(
            OSError
        ):  # refused meanwhile: the answer may be there all the same
            connection.sendall(data)
        while not is_closed and (remaining_s := started_s + timeout_s - time.monotonic()) > 0:
            connection.settimeout(remaining_s)
            try:
                part = connection.recv(65536)
            except TimeoutError:
                break
            except OSError:
                part = b""
            is_closed = not part
            received += part
    responses = tuple(parse_responses(bytes(received)))
    return Exchange(responses=responses, is_closed=is_closed, took_s=time.monotonic() - started_s)


def parse_responses(data: bytes) -> Iterator[Response]:
    """The responses in a byte string, one after the other; informational ones are left out."""
    while data.startswith(b"HTTP/"):
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status < 200:  # 100 Continue
            data = rest
            continue
        body, data = _body(head.lower(), rest)
        yield Response(status, head, body)


def _body(head: bytes, rest: bytes) -> tuple[bytes, bytes]:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            length = int(value)
            return rest[:length], rest[length:]
        if name == b"transfer-encoding":
            return _chunks(rest)
    return rest, b""


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not size:
            return body, b""
        length = int(size.split(b";")[0], 16)
        if not length:
            return body, rest.removeprefix(b"\r\n")
        body, rest = body + rest[:length], rest[length + 2 :]


def request(
    line: bytes = b"GET /v1/models HTTP/1.1",
    headers: Sequence[bytes] = (b"Host: front.example",),
    body: bytes = b"",
    *,
    key: str = "",
) -> bytes:
    """A request whose every line is as given."""
    authorization = [b"Authorization: Bearer " + key.encode()] if key else []
    return b"\r\n".join([line, *headers, *authorization, b"", b""]) + body


def closing_request(key: str = "") -> bytes:
    """A good request after which the server ends the connection: it marks the end of answers."""
    return request(b"GET /health HTTP/1.1", (b"Host: front.example", b"Connection: close"), key=key)


def is_closing_response(answer: Response) -> bool:
    """Whether that is what `closing_request` is answered with."""
    return answer.status in {200, 503} and not answer.body
