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

GuardFields = Mapping[str, str | bool | None]
"""As `haproxy_hardening.GuardFields` writes it."""
HARDENED_MARKER: Final = "# guarded by baton"
_SECTION_LINE = re.compile(r"(global|defaults|frontend|backend|listen)\b *(\S*)")
_BIND_LINE = re.compile(r"( *bind )(\S*:)(\d+)( .*)?")
_ADMIN_SOCKET_LINE = re.compile(r"( *stats socket .*\bmode )666\b(.*)")
_LOOPBACK_NETWORKS: Final = "127.0.0.0/8 ::1"
_HEALTH_PATH: Final = "/health"
_REQUEST_TIMEOUT_S: Final = 10
"""Until its head and as much of its body as a buffer holds have come."""


OPENAI, ANTHROPIC = "openai", "anthropic"
_NO_INGRESS_MESSAGE = "no ingress is there to take the request; retry in a few seconds"
_NO_INGRESS_RETRY_AFTER_S: Final = 5
"""As clients are told to wait; another one is there in seconds, on a busy machine in a minute."""
_NO_PATH_MESSAGE = "nothing is served by this name, expected a path that begins with /"
MAX_HEADERS_DIRECTIVE: Final = "tune.http.maxhdr 4096"
"""Or HAProxy would refuse a request with over 100 header fields before a rule sees it, in HTML."""
_MAX_HEADERS, _MAX_HEADER_BYTES = 100, 32 * 1024
"""As the gate in Python takes them."""
UNREADABLE_REQUEST_MESSAGES: Final[Mapping[int, str]] = {
    400: "the request cannot be read",
    408: "the first part of the request's body was not complete in time",
}
"""Errors that HAProxy finds before rules have said whose shape to use."""
ERROR_TYPES: Final[Mapping[int, Mapping[str, str]]] = {
    403: {OPENAI: "PermissionDeniedError", ANTHROPIC: "permission_error"},
    404: {OPENAI: "NotFoundError", ANTHROPIC: "not_found_error"},
    431: {OPENAI: "BadRequestError", ANTHROPIC: "invalid_request_error"},
    500: {OPENAI: "InternalServerError", ANTHROPIC: "api_error"},
    501: {OPENAI: "NotImplementedError", ANTHROPIC: "api_error"},
    502: {OPENAI: "InternalServerError", ANTHROPIC: "api_error"},
    503: {OPENAI: "ServiceUnavailableError", ANTHROPIC: "overloaded_error"},
    504: {OPENAI: "GatewayTimeoutError", ANTHROPIC: "timeout_error"},
}
"""What either API calls these; as `errors.error_type` has it."""
_OWN_ERROR_MESSAGES: Final[Mapping[int, str]] = {
    500: "the front could not go on; the same request may succeed",
    501: "this is not understood here, expected HTTP/1.1 and a body in chunks or of a known length",
    502: "the ingress broke off before its answer began; the same request may succeed",
    503: _NO_INGRESS_MESSAGE,
    504: "no answer came in time",
}
_RETRYABLE_STATUSES: Final = frozenset({502, 503})
"""What is said while the only ingress ends, and when it is gone: another one comes."""
_ERROR_FILE_LINE = re.compile(r" *errorfile \d+ .*")


class UnexpectedConfiguration(Exception):
    """The configuration is not as Serve's template of the known version has it."""


def harden(text: str, guard: GuardFields) -> str:
    """A configuration of Serve's, closed; one that is closed already stays as it is.

    Raises:
        UnexpectedConfiguration: a line that must be changed is not there, or is there twice.
    """
    if text.startswith(HARDENED_MARKER):
        return text
    lines = [HARDENED_MARKER]
    changed_sections: list[str] = []
    for section, line in _by_section(text.splitlines()):
        if _ERROR_FILE_LINE.fullmatch(line):
            continue  # Serve's, in plain text
        edit = _EDITS.get(section)
        replacement = None if edit is None else edit(line, guard)
        if replacement is None:
            lines.append(line)
        else:
            lines += replacement
            changed_sections.append(section)
    if sorted(changed_sections) != sorted(_EDITS):
        raise UnexpectedConfiguration(
            f"changed {', '.join(sorted(changed_sections)) or 'nothing'}, expected each of"
            f" {', '.join(sorted(_EDITS))} once: another version of Ray Serve?"
        )
    return "\n".join(lines) + "\n"


def _by_section(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    section = ""
    for line in lines:
        match = _SECTION_LINE.match(line)
        if match is not None:
            section = f"{match[1]} {match[2]}".strip()
        yield section, line


def _restrict_admin_socket(line: str, _guard: GuardFields) -> list[str] | None:
    match = _ADMIN_SOCKET_LINE.fullmatch(line)
    return None if match is None else [f"{match[1]}600{match[2]}", f"    {MAX_HEADERS_DIRECTIVE}"]


def _limit_request_time(line: str, _guard: GuardFields) -> list[str] | None:
    """Without it a client may take an hour to say what it wants, and hold a connection so long.

    Waiting for as much of a request as HAProxy can hold lets it ask another ingress when one ends.
    """
    if line.strip() != "mode http":
        return None
    return [
        line,
        f"    timeout http-request {_REQUEST_TIMEOUT_S}s",
        "    option http-buffer-request",
        *(
            f"    {rule}"
            for rule in error_rules(_OWN_ERROR_MESSAGES, retry_after_s=_NO_INGRESS_RETRY_AFTER_S)
        ),
    ]


def _bind_to_loopback(line: str, _guard: GuardFields) -> list[str] | None:
    match = _BIND_LINE.fullmatch(line)
    return None if match is None else [f"{match[1]}127.0.0.1:{match[3]}{match[4] or ''}"]


def _harden_public_bind(line: str, guard: GuardFields) -> list[str] | None:
    match = _BIND_LINE.fullmatch(line)
    if match is None:
        return None
    # No address of IPv6 comes here without brackets: `haproxy_hardening` has written it.
    line = f"{match[1]}{guard['bind_host']}:{match[3]}{match[4] or ''}{guard['bind_options']}"
    rules = [
        *dialect_rules(),
        *header_limit_rules(),
        *access_rules(guard),
        *_replace_serve_errors(),
    ]
    return [line + tls_bind_options(guard), *(f"    {rule}" for rule in rules)]


def _answer_without_application(line: str, _guard: GuardFields) -> list[str] | None:
    """What is said while Serve knows no application, or none any more.

    And of what no application could serve: `OPTIONS *`, or the name that is behind a CONNECT.
    """
    if not line.strip().startswith("http-request return status 404 "):
        return None
    return [
        f"    http-request return {_no_ingress_response()} if {{ path_beg / }}",
        f"    http-request return {_error_response(404, _NO_PATH_MESSAGE)}",
    ]


def _replace_serve_errors() -> Iterator[str]:
    """In place of what Serve's proxy says while no ingress is there; ours answer in JSON."""
    plain = "{ res.hdr(content-type) -m beg text/ }"
    for status in ("{ status ge 500 }", "{ status 404 }"):
        yield f"http-response return {_no_ingress_response()} if {status} {plain}"


def _no_ingress_response() -> str:
    return _error_response(503, _NO_INGRESS_MESSAGE, retry_after_s=_NO_INGRESS_RETRY_AFTER_S)


def dialect_rules() -> Iterator[str]:
    """Note, before all else, which API's shape an error is to have; `error_body` goes by it."""
    yield "acl baton_anthropic req.hdr(anthropic-version) -m found"
    yield "acl baton_anthropic path /v1/messages"
    yield "acl baton_anthropic path_beg /v1/messages/"
    yield "http-request set-var(txn.anthropic) bool(true) if baton_anthropic"
    yield "http-request set-var(txn.anthropic) bool(false) if !baton_anthropic"


def header_limit_rules() -> Iterator[str]:
    """Refuse heads that the gate in Python would refuse; HAProxy itself can read larger ones."""
    too_many = f"more than {_MAX_HEADERS} header fields, at most {_MAX_HEADERS} are taken"
    yield (
        f"http-request return {_error_response(431, too_many)} if {{ req.fhdr_cnt gt"
        f" {_MAX_HEADERS} }}"
    )
    too_large = f"the header fields are larger than {_MAX_HEADER_BYTES} bytes"
    yield (
        f"http-request return {_error_response(431, too_large)} if {{ req.hdrs,length gt"
        f" {_MAX_HEADER_BYTES} }}"
    )


def error_rules(messages: Mapping[int, str], *, retry_after_s: int) -> Iterator[str]:
    """What HAProxy says of its own accord, by its status, where it would say it in HTML."""
    for status, message in UNREADABLE_REQUEST_MESSAGES.items():
        # What either API's clients can read.
        error = {"type": "invalid_request_error", "message": message, "param": None, "code": status}
        body = quote(json.dumps({"type": "error", "error": error}))
        yield f"http-error status {status} content-type application/json string {body}"
    for status, message in messages.items():
        wait_s = retry_after_s if status in _RETRYABLE_STATUSES else None
        yield f"http-error {_error_response(status, message, retry_after_s=wait_s)}"


def _error_response(status: int, message: str, *, retry_after_s: int | None = None) -> str:
    body = error_body(status, message, ERROR_TYPES[status])
    response = f"status {status} content-type application/json lf-string {body}"
    return response if retry_after_s is None else f"{response} hdr retry-after {retry_after_s}"


def error_body(
    status: int, message: str, types: Mapping[str, str], *, param: str | None = None
) -> str:
    """An error's body as one word of HAProxy's, in the shape of the request's API."""
    head = by_dialect('"type":"error",', "")
    tail = by_dialect("", f',"param":{json.dumps(param)},"code":{status}')
    error_type = by_dialect(types[ANTHROPIC], types[OPENAI])
    escaped_message = json.dumps(message).replace("%", "%%")
    return quote(f'{{{head}"error":{{"message":{escaped_message},"type":"{error_type}"{tail}}}}}')


def by_dialect(anthropic_text: str, openai_text: str) -> str:
    """One of two texts inside an answer, by the request's API."""
    texts = f"{_quote_argument(anthropic_text)},{_quote_argument(openai_text)}"
    return f"%[var(txn.anthropic),iif({texts})]"


def _quote_argument(text: str) -> str:
    return quote(text) if text else ""


def quote(text: object) -> str:
    """One word of HAProxy's, whatever is in it. Source: its manual, 2.2, Quoting and escaping."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def tls_bind_options(guard: GuardFields) -> str:
    """What a `bind` of HAProxy's says besides, where clients come by TLS."""
    if not guard["cert_file"]:
        return ""
    client_verification = f" ca-file {quote(guard['client_ca_file'])} verify optional"
    return (
        f" ssl crt {quote(guard['cert_file'])} alpn http/1.1 ssl-min-ver TLSv1.2"
        f"{client_verification if guard['client_ca_file'] else ''}"
    )


def access_rules(guard: GuardFields) -> Iterator[str]:
    """What HAProxy does first with a request that came to the public port."""
    if guard["cert_file"]:
        yield "http-request set-header x-forwarded-proto https"
        if guard["client_ca_file"]:
            yield f"acl baton_health path {_HEALTH_PATH}"
            response = _error_response(403, "a client certificate is wanted")
            yield f"http-request return {response} if !{{ ssl_c_used }} !baton_health"
    elif guard["require_tls"]:
        yield "acl baton_key req.hdr(authorization) -m found"
        yield "acl baton_key req.hdr(x-api-key) -m found"
        yield f"acl baton_here src {_LOOPBACK_NETWORKS}"
        response = _error_response(
            403, "keys are not taken in clear: use https, and replace this key"
        )
        yield f"http-request return {response} if baton_key !baton_here"


_EDITS: Final[Mapping[str, Callable[[str, GuardFields], list[str] | None]]] = {
    "global": _restrict_admin_socket,
    "defaults": _limit_request_time,
    "frontend prometheus": _bind_to_loopback,
    "frontend http_frontend": _harden_public_bind,
    "backend default_backend": _answer_without_application,
    "listen stats": _bind_to_loopback,
}
"""What is changed in a section: exactly one line of each."""


def main(arguments: list[str]) -> None:
    """Guard the file behind `-f`, then become HAProxy; the first argument names what to go by."""
    guard: GuardFields = json.loads(Path(arguments[0]).read_text())
    haproxy, haproxy_arguments = str(guard["haproxy"]), arguments[1:]
    if "-f" in haproxy_arguments:
        path = Path(haproxy_arguments[haproxy_arguments.index("-f") + 1])
        try:
            hardened = harden(path.read_text(), guard)
        except UnexpectedConfiguration as error:
            sys.exit(f"baton does not start an HAProxy that it cannot guard: {error}")
        temp_path = path.with_name(f"{path.name}.{os.getpid()}")
        with os.fdopen(
            os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
        ) as file:
            file.write(hardened)
        temp_path.replace(path)
    os.execv(haproxy, [haproxy, *haproxy_arguments])  # noqa: S606 - this program stands in for it


if __name__ == "__main__":
    main(sys.argv[1:])
