"""Ray Serve runs this program as its HAProxy: it guards the configuration, then becomes HAProxy.

Theory of operation: in Serve's template, metrics and statistics listen on every address, and every
user may open the admin socket. Clients may take an hour for a request, and there is no TLS. Serve
writes the file anew and restarts HAProxy for each change. This program rewrites the file: the
public port moves from loopback to the configured address, and the rest is closed. Then it replaces
itself by the real HAProxy, with the same arguments and process id. With an unexpected file it
starts no HAProxy at all.

HAProxy's own errors become JSON in the shape of the client's API. A 500 in plain text, Serve's
answer without an ingress, becomes a 503 with `Retry-After`, as do plain texts of Serve's proxy.

The program is run by path and without packages: it may import nothing of baton.
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
"""Settings of the public port:

- `haproxy`: the real program;
- `bind_host`, `bind_options`: the address of clients in HAProxy's form (`*` for all), and options;
- `cert_file`: the certificate, with its key beside it under the same name and `.key`;
- `client_ca_file`: the authorities of client certificates;
- `require_tls`: whether to reject keys that come from other machines in clear.
"""
HARDENED_MARKER: Final = "# guarded by baton"
_SECTION_LINE = re.compile(r"(global|defaults|frontend|backend|listen)\b *(\S*)")
_BIND_LINE = re.compile(r"( *bind )(\S*:)(\d+)( .*)?")
_ADMIN_SOCKET_LINE = re.compile(r"( *stats socket .*\bmode )666\b(.*)")
_LOOPBACK_NETWORKS: Final = "127.0.0.0/8 ::1"
_HEALTH_PATH: Final = "/health"
_REQUEST_TIMEOUT_S: Final = 10
"""For the head and the buffered part of the body."""


OPENAI, ANTHROPIC = "openai", "anthropic"
_NO_INGRESS_MESSAGE = "no ingress is there to take the request; retry in a few seconds"
_NO_INGRESS_RETRY_AFTER_S: Final = 5
"""Another ingress starts in seconds, on a busy machine in a minute."""
_NO_PATH_MESSAGE = "nothing is served by this name, expected a path that begins with /"
MAX_HEADERS_DIRECTIVE: Final = "tune.http.maxhdr 4096"
"""By default HAProxy rejects over 100 header fields before any rule, in HTML."""
_MAX_HEADERS, _MAX_HEADER_BYTES = 100, 32 * 1024
"""As in the Python gate."""
UNREADABLE_REQUEST_MESSAGES: Final[Mapping[int, str]] = {
    400: "the request cannot be read",
    408: "the first part of the request's body was not complete in time",
}
"""Errors that HAProxy finds before rules have set the dialect."""
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
"""The error types of both APIs, as in `errors.error_type`."""
_OWN_ERROR_MESSAGES: Final[Mapping[int, str]] = {
    500: "the front could not go on; the same request may succeed",
    501: "this is not understood here, expected HTTP/1.1 and a body in chunks or of a known length",
    502: "the ingress broke off before its answer began; the same request may succeed",
    503: _NO_INGRESS_MESSAGE,
    504: "no answer came in time",
}
_RETRYABLE_STATUSES: Final = frozenset({502, 503})
"""Statuses while the only ingress ends, and after it: another one will start."""
_ERROR_FILE_LINE = re.compile(r" *errorfile \d+ .*")


class UnexpectedConfiguration(Exception):
    """The configuration is not as Serve's template of the known version has it."""


def harden(text: str, guard: GuardFields) -> str:
    """A guarded configuration of Serve's; unchanged if it is guarded already.

    Raises:
        UnexpectedConfiguration: a line to change is missing, or occurs twice.
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
    """By default a client may hold a connection for an hour without a complete request.

    Buffered requests can be retried on another ingress.
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
    # IPv6 addresses have their brackets already, from `haproxy_hardening`.
    line = f"{match[1]}{guard['bind_host']}:{match[3]}{match[4] or ''}{guard['bind_options']}"
    rules = [
        *dialect_rules(),
        *header_limit_rules(),
        *access_rules(guard),
        *_replace_serve_errors(),
    ]
    return [line + tls_bind_options(guard), *(f"    {rule}" for rule in rules)]


def _answer_without_application(line: str, _guard: GuardFields) -> list[str] | None:
    """The answer while Serve has no application, and to paths such as `OPTIONS *` or CONNECT."""
    if not line.strip().startswith("http-request return status 404 "):
        return None
    return [
        f"    http-request return {_no_ingress_response()} if {{ path_beg / }}",
        f"    http-request return {_error_response(404, _NO_PATH_MESSAGE)}",
    ]


def _replace_serve_errors() -> Iterator[str]:
    """Replace plain-text errors of Serve's proxy, which answers while there is no ingress."""
    plain = "{ res.hdr(content-type) -m beg text/ }"
    for status in ("{ status ge 500 }", "{ status 404 }"):
        yield f"http-response return {_no_ingress_response()} if {status} {plain}"


def _no_ingress_response() -> str:
    return _error_response(503, _NO_INGRESS_MESSAGE, retry_after_s=_NO_INGRESS_RETRY_AFTER_S)


def dialect_rules() -> Iterator[str]:
    """Rules that set the dialect of errors, for `error_body`; they come first."""
    yield "acl baton_anthropic req.hdr(anthropic-version) -m found"
    yield "acl baton_anthropic path /v1/messages"
    yield "acl baton_anthropic path_beg /v1/messages/"
    yield "http-request set-var(txn.anthropic) bool(true) if baton_anthropic"
    yield "http-request set-var(txn.anthropic) bool(false) if !baton_anthropic"


def header_limit_rules() -> Iterator[str]:
    """Rules that reject heads as the Python gate does; HAProxy itself reads larger heads."""
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
    """HAProxy's own errors by status, as JSON in place of HTML."""
    for status, message in UNREADABLE_REQUEST_MESSAGES.items():
        # Clients of both APIs can read this shape.
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
    """A text as one word of HAProxy's. Source: its manual, 2.2, Quoting and escaping."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def tls_bind_options(guard: GuardFields) -> str:
    """The TLS options of the public `bind`; empty without a certificate."""
    if not guard["cert_file"]:
        return ""
    client_verification = f" ca-file {quote(guard['client_ca_file'])} verify optional"
    return (
        f" ssl crt {quote(guard['cert_file'])} alpn http/1.1 ssl-min-ver TLSv1.2"
        f"{client_verification if guard['client_ca_file'] else ''}"
    )


def access_rules(guard: GuardFields) -> Iterator[str]:
    """The first rules for requests at the public port."""
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
"""The edit of each section; each changes exactly one line."""


def main(arguments: list[str]) -> None:
    """Guard the file behind `-f`, then become HAProxy; the first argument names the settings."""
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
