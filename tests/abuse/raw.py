"""Bytes as no client library would send them, and what a server makes of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Address = tuple[str, int]
HIDDEN = b"hidden"
"""A word in the id of every request that hides in another."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, as it was read from the wire."""

    status: int
    head: bytes
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """All that came back over one connection."""

    answers: tuple[Answer, ...]
    closed: bool
    """The server ended the connection; False where it was given up on."""
    took_s: float

    @property
    def statuses(self) -> tuple[int, ...]:
        return tuple(answer.status for answer in self.answers)


def converse(address: Address, data: bytes, *, within_s: float = 5.0) -> Heard:
    """Send bytes over a connection of their own and read until it ends."""
    began_s = time.monotonic()
    received, closed = bytearray(), False
    with socket.create_connection(address, timeout=within_s) as connection:
        with contextlib.suppress(
            OSError
        ):  # refused meanwhile: the answer may be there all the same
            connection.sendall(data)
        while not closed and (left_s := began_s + within_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            try:
                part = connection.recv(65536)
            except TimeoutError:
                break
            except OSError:
                part = b""
            closed = not part
            received += part
    answers = tuple(parse_answers(bytes(received)))
    return Heard(answers=answers, closed=closed, took_s=time.monotonic() - began_s)


def parse_answers(data: bytes) -> Iterator[Answer]:
    """The responses in a byte string, one after the other; informational ones are left out."""
    while data.startswith(b"HTTP/"):
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status < 200:  # 100 Continue
            data = rest
            continue
        body, data = _body(head.lower(), rest)
        yield Answer(status, head, body)


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
    shown = [b"Authorization: Bearer " + key.encode()] if key else []
    return b"\r\n".join([line, *headers, *shown, b"", b""]) + body


def last_word(key: str = "") -> bytes:
    """A good request after which the server ends the connection: it marks the end of answers."""
    return request(b"GET /health HTTP/1.1", (b"Host: front.example", b"Connection: close"), key=key)


def is_last_word(answer: Answer) -> bool:
    """Whether that is what `last_word` is answered with."""
    return answer.status in {200, 503} and not answer.body


Attack = Callable[[str], bytes]
"""From a good key to what is sent."""
