"""Ray Serve runs this in HAProxy's place: it closes what Serve leaves open, then becomes HAProxy.

Theory of operation: Serve writes HAProxy's configuration from a template of its own, which has
metrics and statistics listen on every address, opens the socket for administrators to every user,
waits an hour for what a client wants, and knows no TLS. All of Serve listens where it is told to
have HAProxy listen, which is loopback; here that becomes the address where clients come. Serve
starts HAProxy anew, with that file, for each change. This program reads the file, writes it again
with what a deployment's guard says, and hands its process over to the real HAProxy with the same
arguments, so that Serve finds the process id that it started. A file that does not look as expected
starts no HAProxy at all, rather than an open one.

What HAProxy says by itself is JSON here, in the shape of the client's API. Serve has it say HTML,
and a 500 in plain text where no ingress is there: that is a 503 with `Retry-After`, as is what
Serve's own proxy says in plain text while it stands in for the ingress.

It is run by path and without packages: nothing of baton may be imported here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

Guard = Mapping[str, str | bool | None]
"""As `front_guard.Guard` writes it."""
MARK: Final = "# guarded by baton"
_SECTION = re.compile(r"(global|defaults|frontend|backend|listen)\b *(\S*)")
_BIND = re.compile(r"( *bind )(\S*:)(\d+)( .*)?")
_ADMIN = re.compile(r"( *stats socket .*\bmode )666\b(.*)")
_HERE: Final = "127.0.0.0/8 ::1"
_HEALTH: Final = "/health"
_REQUEST_S: Final = 10
"""Until its head and as much of its body as a buffer holds have come."""


OPENAI, ANTHROPIC = "openai", "anthropic"
_NO_INGRESS = "no ingress is there to take the request; retry in a few seconds"
_NO_INGRESS_S: Final = 5
"""As clients are told to wait; another one is there in seconds, on a busy machine in a minute."""
_NO_PATH = "nothing is served by this name, wanted a path that begins with /"
MOST_FIELDS_READ: Final = "tune.http.maxhdr 4096"
"""Or HAProxy would refuse a request with over 100 header fields before a rule sees it, in HTML."""
_MAX_FIELDS, _MAX_HEAD_BYTES = 100, 32 * 1024
"""As the gate in Python takes them."""
UNREAD: Final[Mapping[int, str]] = {
    400: "the request cannot be read",
    408: "the first part of the request's body was not complete in time",
}
"""Errors that HAProxy finds before rules have said whose shape to use."""
TYPES: Final[Mapping[int, Mapping[str, str]]] = {
    403: {OPENAI: "PermissionDeniedError", ANTHROPIC: "permission_error"},
    404: {OPENAI: "NotFoundError", ANTHROPIC: "not_found_error"},
    431: {OPENAI: "BadRequestError", ANTHROPIC: "invalid_request_error"},
    500: {OPENAI: "InternalServerError", ANTHROPIC: "api_error"},
    501: {OPENAI: "NotImplementedError", ANTHROPIC: "api_error"},
    502: {OPENAI: "InternalServerError", ANTHROPIC: "api_error"},
    503: {OPENAI: "ServiceUnavailableError", ANTHROPIC: "overloaded_error"},
    504: {OPENAI: "GatewayTimeoutError", ANTHROPIC: "timeout_error"},
}
"""What either API calls these; as `frontend_errors.error_type` has it."""
_ITS_OWN: Final[Mapping[int, str]] = {
    500: "the front could not go on; the same request may succeed",
    501: "this is not understood here, wanted HTTP/1.1 and a body in chunks or of a known length",
    502: "the ingress broke off before its answer began; the same request may succeed",
    503: _NO_INGRESS,
    504: "no answer came in time",
}
_COME_BACK: Final = frozenset({502, 503})
"""What is said while the only ingress ends, and when it is gone: another one comes."""
_ERROR_FILE = re.compile(r" *errorfile \d+ .*")


class UnknownConfiguration(Exception):
    """The configuration is not as Serve's template of the known version has it."""


def guarded(text: str, guard: Guard) -> str:
    """A configuration of Serve's, closed; one that is closed already stays as it is.

    Raises:
        UnknownConfiguration: a line that must be changed is not there, or is there twice.
    """
    if text.startswith(MARK):
        return text
    lines = [MARK]
    done: list[str] = []
    for section, line in _by_section(text.splitlines()):
        if _ERROR_FILE.fullmatch(line):
            continue  # Serve's, in plain text
        change = _CHANGES.get(section)
        changed = None if change is None else change(line, guard)
        if changed is None:
            lines.append(line)
        else:
            lines += changed
            done.append(section)
    if sorted(done) != sorted(_CHANGES):
        raise UnknownConfiguration(
            f"changed {', '.join(sorted(done)) or 'nothing'}, wanted each of"
            f" {', '.join(sorted(_CHANGES))} once: another version of Ray Serve?"
        )
    return "\n".join(lines) + "\n"


def _by_section(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    section = ""
    for line in lines:
        begun = _SECTION.match(line)
        if begun is not None:
            section = f"{begun[1]} {begun[2]}".strip()
        yield section, line


def _admin_socket(line: str, _guard: Guard) -> list[str] | None:
    found = _ADMIN.fullmatch(line)
    return None if found is None else [f"{found[1]}600{found[2]}", f"    {MOST_FIELDS_READ}"]


def _slow_requests(line: str, _guard: Guard) -> list[str] | None:
    """Without it a client may take an hour to say what it wants, and hold a connection so long.

    Waiting for as much of a request as HAProxy can hold lets it ask another ingress when one ends.
    """
    if line.strip() != "mode http":
        return None
    return [
        line,
        f"    timeout http-request {_REQUEST_S}s",
        "    option http-buffer-request",
        *(f"    {rule}" for rule in own_errors(_ITS_OWN, retry_after_s=_NO_INGRESS_S)),
    ]


def _on_this_machine(line: str, _guard: Guard) -> list[str] | None:
    found = _BIND.fullmatch(line)
    return None if found is None else [f"{found[1]}127.0.0.1:{found[3]}{found[4] or ''}"]


def _public(line: str, guard: Guard) -> list[str] | None:
    found = _BIND.fullmatch(line)
    if found is None:
        return None
    # No address of IPv6 comes here without brackets: `front_guard` has written it.
    line = f"{found[1]}{guard['host']}:{found[3]}{found[4] or ''}{guard['options']}"
    rules = [*whose_shape(), *readable_head(), *who_may_come(guard), *_serves_own_answers()]
    return [line + over_tls(guard), *(f"    {rule}" for rule in rules)]


def _no_application(line: str, _guard: Guard) -> list[str] | None:
    """What is said while Serve knows no application, or none any more.

    And of what no application could serve: `OPTIONS *`, or the name that is behind a CONNECT.
    """
    if not line.strip().startswith("http-request return status 404 "):
        return None
    return [
        f"    http-request return {_no_ingress()} if {{ path_beg / }}",
        f"    http-request return {_answer(404, _NO_PATH)}",
    ]


def _serves_own_answers() -> Iterator[str]:
    """In place of what Serve's proxy says while no ingress is there; ours answer in JSON."""
    plain = "{ res.hdr(content-type) -m beg text/ }"
    for status in ("{ status ge 500 }", "{ status 404 }"):
        yield f"http-response return {_no_ingress()} if {status} {plain}"


def _no_ingress() -> str:
    return _answer(503, _NO_INGRESS, retry_after_s=_NO_INGRESS_S)


def whose_shape() -> Iterator[str]:
    """Note, before all else, which API's shape an error is to have; `shaped` goes by it."""
    yield "acl baton_anthropic req.hdr(anthropic-version) -m found"
    yield "acl baton_anthropic path /v1/messages"
    yield "acl baton_anthropic path_beg /v1/messages/"
    yield "http-request set-var(txn.anthropic) bool(true) if baton_anthropic"
    yield "http-request set-var(txn.anthropic) bool(false) if !baton_anthropic"


def readable_head() -> Iterator[str]:
    """Refuse heads that the gate in Python would refuse; HAProxy itself can read larger ones."""
    fields = f"more than {_MAX_FIELDS} header fields, at most {_MAX_FIELDS} are taken"
    yield f"http-request return {_answer(431, fields)} if {{ req.fhdr_cnt gt {_MAX_FIELDS} }}"
    large = f"the header fields are larger than {_MAX_HEAD_BYTES} bytes"
    yield f"http-request return {_answer(431, large)} if {{ req.hdrs,length gt {_MAX_HEAD_BYTES} }}"


def own_errors(messages: Mapping[int, str], *, retry_after_s: int) -> Iterator[str]:
    """What HAProxy says of its own accord, by its status, where it would say it in HTML."""
    for status, message in UNREAD.items():
        # What either API's clients can read.
        error = {"type": "invalid_request_error", "message": message, "param": None, "code": status}
        body = quoted(json.dumps({"type": "error", "error": error}))
        yield f"http-error status {status} content-type application/json string {body}"
    for status, message in messages.items():
        wait_s = retry_after_s if status in _COME_BACK else None
        yield f"http-error {_answer(status, message, retry_after_s=wait_s)}"


def _answer(status: int, message: str, *, retry_after_s: int | None = None) -> str:
    body = shaped(status, message, TYPES[status])
    said = f"status {status} content-type application/json lf-string {body}"
    return said if retry_after_s is None else f"{said} hdr retry-after {retry_after_s}"


def shaped(status: int, message: str, types: Mapping[str, str], *, param: str | None = None) -> str:
    """An error's body as one word of HAProxy's, in the shape of the request's API."""
    head = either('"type":"error",', "")
    tail = either("", f',"param":{json.dumps(param)},"code":{status}')
    kind = either(types[ANTHROPIC], types[OPENAI])
    said = json.dumps(message).replace("%", "%%")
    return quoted(f'{{{head}"error":{{"message":{said},"type":"{kind}"{tail}}}}}')


def either(anthropics: str, openais: str) -> str:
    """One of two texts inside an answer, by the request's API."""
    return f"%[var(txn.anthropic),iif({_argument(anthropics)},{_argument(openais)})]"


def _argument(text: str) -> str:
    return quoted(text) if text else ""


def quoted(text: object) -> str:
    """One word of HAProxy's, whatever is in it. Source: its manual, 2.2, Quoting and escaping."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def over_tls(guard: Guard) -> str:
    """What a `bind` of HAProxy's says besides, where clients come by TLS."""
    if not guard["cert_file"]:
        return ""
    ask = f" ca-file {quoted(guard['client_ca_file'])} verify optional"
    return (
        f" ssl crt {quoted(guard['cert_file'])} alpn http/1.1 ssl-min-ver TLSv1.2"
        f"{ask if guard['client_ca_file'] else ''}"
    )


def who_may_come(guard: Guard) -> Iterator[str]:
    """What HAProxy does first with a request that came to the public port."""
    if guard["cert_file"]:
        yield "http-request set-header x-forwarded-proto https"
        if guard["client_ca_file"]:
            yield f"acl baton_health path {_HEALTH}"
            said = _answer(403, "a client certificate is wanted")
            yield f"http-request return {said} if !{{ ssl_c_used }} !baton_health"
    elif guard["required"]:
        yield "acl baton_key req.hdr(authorization) -m found"
        yield "acl baton_key req.hdr(x-api-key) -m found"
        yield f"acl baton_here src {_HERE}"
        said = _answer(403, "keys are not taken in clear: use https, and replace this key")
        yield f"http-request return {said} if baton_key !baton_here"


_CHANGES: Final[Mapping[str, Callable[[str, Guard], list[str] | None]]] = {
    "global": _admin_socket,
    "defaults": _slow_requests,
    "frontend prometheus": _on_this_machine,
    "frontend http_frontend": _public,
    "backend default_backend": _no_application,
    "listen stats": _on_this_machine,
}
"""What is changed in a section: exactly one line of each."""


def main(arguments: list[str]) -> None:
    """Guard the file behind `-f`, then become HAProxy; the first argument names what to go by."""
    guard: Guard = json.loads(Path(arguments[0]).read_text())
    haproxy, passed_on = str(guard["haproxy"]), arguments[1:]
    if "-f" in passed_on:
        path = Path(passed_on[passed_on.index("-f") + 1])
        try:
            closed = guarded(path.read_text(), guard)
        except UnknownConfiguration as error:
            sys.exit(f"baton does not start an HAProxy that it cannot guard: {error}")
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(closed)
        draft.replace(path)
    os.execv(haproxy, [haproxy, *passed_on])  # noqa: S606 - this program stands in for it


if __name__ == "__main__":
    main(sys.argv[1:])
