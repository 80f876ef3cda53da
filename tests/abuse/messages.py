"""Messages in which another may hide, paths that mean another, and heads that are too much.

Each says what may come of it: which statuses, and how many answers at most. More answers than
requests mean that somebody read a second request where there is one. `REJECTED_STATUSES` are those
that a server must not serve whoever stands in front; the others have one right reading, which may
be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.abuse.raw import HIDDEN, request

MODEL = b"tiny"
HOST = b"Host: front.example"
JSON = b"Content-Type: application/json"
BODY = b'{"model": "%b", "prompt": "x", "max_tokens": 1}' % MODEL
POST = b"POST /v1/completions HTTP/1.1"

REJECTED_STATUSES = frozenset({400, 404, 405, 408, 411, 413, 414, 417, 421, 431, 501, 505})
ALLOWED_STATUSES = REJECTED_STATUSES | {200}


@dataclass(frozen=True, slots=True)
class Message:
    """One hostile message, to be sent by somebody with a good key."""

    name: str
    make: Callable[[str], bytes]
    allowed: frozenset[int] = REJECTED_STATUSES
    max_answers: int = 1
    """Answers to it."""
    is_answered_immediately: bool = True
    """Whether an answer comes at once; where not, a server waits for more, and then gives up."""


def hidden(key: str) -> bytes:
    """The request that must not be found."""
    return request(
        b"GET /v1/models HTTP/1.1", (b"Host: hidden", b"X-Request-Id: " + HIDDEN), key=key
    )


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def _length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def lengths() -> Iterator[Message]:
    """Where does the body end?"""
    length, chunked_header = _length(BODY), b"Transfer-Encoding: chunked"

    def post(*headers: bytes, body: bytes = BODY) -> Callable[[str], bytes]:
        return lambda key: request(POST, (HOST, JSON, *headers), body, key=key)

    def smuggling(*headers: bytes) -> Callable[[str], bytes]:
        """By one reading the body is all that follows; by the other it ends before."""

        def make(key: str) -> bytes:
            smuggled = hidden(key)
            body = b"0\r\n\r\n" + smuggled
            filled_headers = [header.replace(b"LENGTH", b"%d" % len(body)) for header in headers]
            return request(POST, (HOST, JSON, *filled_headers), body, key=key)

        return make

    # A proxy may take the length away, and read chunks: then the hidden one is a request that the
    # client itself sent after the first, with the client's own key, and two answers are right.
    both = (b"Content-Length: LENGTH", chunked_header)
    yield Message("length and chunks", smuggling(*both), max_answers=2, allowed=ALLOWED_STATUSES)
    yield Message(
        "chunks and length", smuggling(*reversed(both)), max_answers=2, allowed=ALLOWED_STATUSES
    )
    yield Message(
        "length, chunked body",
        post(length, chunked_header, body=chunked(BODY)),
        allowed=ALLOWED_STATUSES,
    )
    yield Message("two lengths that differ", post(length, b"Content-Length: 3"))
    yield Message("two lengths, the lesser first", post(b"Content-Length: 3", length))
    yield Message("two lengths that agree", post(length, length), allowed=ALLOWED_STATUSES)
    for value in (b"+3", b"-3", b"0x3", b"3, 4", b"3 3", b"1e1", b"", b"99999999999999999999"):
        yield Message(f"length {value.decode()!r}", post(b"Content-Length: " + value, body=b"{}1"))
    for value in (b"identity", b"chunked, identity", b"xchunked", b"chunked, chunked", b"cow"):
        header = b"Transfer-Encoding: " + value
        yield Message(f"coding {value.decode()!r}", post(header, body=chunked(BODY)))
    yield Message(
        "two codings", post(chunked_header, b"Transfer-Encoding: identity", body=chunked(BODY))
    )
    yield Message("a coding with a length", post(length, b"Transfer-Encoding: identity"))
    for header in (b"Transfer-Encoding : chunked", b"Transfer-Encoding\t: chunked"):
        yield Message(
            f"{header!r} and length", smuggling(b"Content-Length: LENGTH", header), max_answers=2
        )
    for header in (b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: chunked\x00", b"X: y\rz"):
        yield Message(f"{header!r}", post(length, header))
    yield Message("a folded header", post(length, b"X-Any: a\r\n b"), allowed=ALLOWED_STATUSES)
    yield Message(
        "a folded coding",
        smuggling(b"Content-Length: LENGTH", b"X: y\r\n\tTransfer-Encoding: chunked"),
        allowed=ALLOWED_STATUSES,
    )
    for size in (b"-1", b"0x10", b"FFFFFFFFFFFFFFFFF", b"zz", b" 5", b"5 5", b""):
        body = size + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
        yield Message(
            f"chunk size {size!r}",
            post(chunked_header, body=body),
            is_answered_immediately=size != b"FFFFFFFFFFFFFFFFF",
        )
    yield Message(
        "a chunk that is longer than it says",
        post(chunked_header, body=b"3\r\n" + BODY + b"\r\n0\r\n\r\n"),
    )
    yield Message(
        "a trailer that says another length",
        post(
            chunked_header, body=b"%x\r\n%b\r\n0\r\nContent-Length: 99\r\n\r\n" % (len(BODY), BODY)
        ),
        allowed=ALLOWED_STATUSES,
    )
    extended = b"%x;%b\r\n%b\r\n0\r\n\r\n" % (len(BODY), b"x" * 200_000, BODY)
    yield Message(
        "a chunk extension of 200 kB",
        post(chunked_header, body=extended),
        allowed=ALLOWED_STATUSES,
        is_answered_immediately=False,
    )
    yield Message(
        "a GET with a request for a body",
        lambda key: request(
            b"GET /v1/models HTTP/1.1", (HOST, _length(hidden(key))), hidden(key), key=key
        ),
        allowed=ALLOWED_STATUSES,
    )
    yield Message(
        "less body than was said",
        post(b"Content-Length: 500", body=b"{"),
        is_answered_immediately=False,
    )


def hosts() -> Iterator[Message]:
    """Whom is it for?"""

    def get(*headers: bytes, line: bytes = b"GET /v1/models HTTP/1.1") -> Callable[[str], bytes]:
        return lambda key: request(line, headers, key=key)

    yield Message("no host", get())
    yield Message("two hosts", get(HOST, b"Host: other.example"))
    yield Message("the same host twice", get(HOST, HOST), allowed=ALLOWED_STATUSES)
    for value in (b"", b"a b", b"a@b", b"a/b", b"a,b", b"\xff"):
        yield Message(f"host {value!r}", get(b"Host: " + value))
    yield Message("a host with a space before the colon", get(b"Host : front.example"))
    yield Message(
        "another host in the target",
        get(HOST, line=b"GET http://other.example/v1/models HTTP/1.1"),
        allowed=ALLOWED_STATUSES,
    )


def heads() -> Iterator[Message]:
    """Too much, or no head at all."""

    def get(*headers: bytes, line: bytes = b"GET /v1/models HTTP/1.1") -> Callable[[str], bytes]:
        return lambda key: request(line, (HOST, *headers), key=key)

    yield Message("a NUL in a header", get(b"X-Any: a\x00b"))
    yield Message("a NUL in a header's name", get(b"X-\x00Any: a"))
    yield Message(
        "a line feed of its own",
        lambda key: get()(key).replace(b"\r\n", b"\n"),
        allowed=ALLOWED_STATUSES,
    )
    yield Message("no name of a header", get(b": a"))
    yield Message("no colon", get(b"nothing"))
    yield Message("a header of 70 kB", get(b"X-Any: " + b"a" * 70_000))
    yield Message("300 headers", get(*(b"X-%d: a" % number for number in range(300))))
    yield Message("a target of 70 kB", get(line=b"GET /v1/models?%b HTTP/1.1" % (b"a" * 70_000)))
    yield Message("a method of 10 kB", get(line=b"%b /v1/models HTTP/1.1" % (b"A" * 10_000)))
    yield Message("a method in small letters", get(line=b"get /v1/models HTTP/1.1"))
    yield Message("a method with a control character", get(line=b"GE\x00T /v1/models HTTP/1.1"))
    # HAProxy takes them for 1.1, and says so to whoever is behind it.
    yield Message("HTTP 9.9", get(line=b"GET /v1/models HTTP/9.9"), allowed=ALLOWED_STATUSES)
    yield Message("HTTP 2 by word", get(line=b"GET /v1/models HTTP/2.0"), allowed=ALLOWED_STATUSES)
    yield Message("no version", get(line=b"GET /v1/models"))
    yield Message("four words", get(line=b"GET /v1/models HTTP/1.1 HTTP/1.1"))
    yield Message(
        "HTTP 2 by preface", lambda _key: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", max_answers=2
    )
    yield Message(
        "an upgrade to h2c",
        get(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAA"),
        allowed=ALLOWED_STATUSES,
        is_answered_immediately=False,
    )
    yield Message(
        "TLS where there is none",
        lambda _key: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        max_answers=2,
    )
    yield Message("noise", lambda _key: bytes(range(256)) * 8 + b"\r\n\r\n", max_answers=2)


PATHS = (
    b"/v1/../v1/models", b"/v1/./models", b"/v1/%2e%2e/v1/models", b"/v1/x/../models",
    b"//v1/models", b"/v1//models", b"/v1%2fmodels", b"/v1%2Fmodels", b"/%761/models",
    b"/v1/models/", b"/v1/models/.", b"/v1/models;x=1", b"/v1/models%00", b"/v1/models%20",
    b"/v1/models%0d%0aX:1", b"/V1/MODELS", b"/v1\\models", b"/v1/models%252e", b"/v1/models\x00",
    b"/v1/m\xc3\xb6dels", b"/..%2f..%2fetc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"/", b"*",
    b"front.example:443", b"/invocations", b"/docs", b"/openapi.json", b"/redoc", b"/version",
    b"/load", b"/server_info", b"/ping", b"/v1/load%5flora_adapter", b"/v1/embeddings", b"/pause",
    b"/internal/route", b"/collective_rpc", b"/reset_prefix_cache", b"/sleep", b"/abort_requests",
    b"/inference/v1/generate", b"/v1/chat/completions/batch", b"/rerank", b"/classify", b"/score",
)  # fmt: skip


def paths() -> Iterator[Message]:
    """Other spellings of what is served, and what vLLM and Serve have besides."""
    for path in PATHS:

        def make(key: str, path: bytes = path) -> bytes:
            return request(b"GET %b HTTP/1.1" % path, (HOST,), key=key)

        yield Message(f"path {path.decode('latin-1')!r}", make)


def messages() -> Iterator[Message]:
    yield from lengths()
    yield from hosts()
    yield from heads()
    yield from paths()
