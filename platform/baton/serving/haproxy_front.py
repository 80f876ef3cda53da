"""Ray Serve runs this in HAProxy's place: it closes what Serve leaves open, then becomes HAProxy.

Theory of operation: Serve writes HAProxy's configuration from a template of its own, which has
metrics and statistics listen on every address, opens the socket for administrators to every user,
waits an hour for what a client wants, and knows no TLS. All of Serve listens where it is told to
have HAProxy listen, which is loopback; here that becomes the address where clients come. Serve
starts HAProxy anew, with that file, for each change. This program reads the file, writes it again
with what a deployment's guard says, and hands its process over to the real HAProxy with the same
arguments, so that Serve finds the process id that it started. A file that does not look as expected
starts no HAProxy at all, rather than an open one.

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
    return None if found is None else [f"{found[1]}600{found[2]}"]


def _slow_requests(line: str, _guard: Guard) -> list[str] | None:
    """Without it a client may take an hour to say what it wants, and hold a connection so long.

    Waiting for as much of a request as HAProxy can hold lets it ask another ingress when one ends.
    """
    if line.strip() != "mode http":
        return None
    return [line, f"    timeout http-request {_REQUEST_S}s", "    option http-buffer-request"]


def _on_this_machine(line: str, _guard: Guard) -> list[str] | None:
    found = _BIND.fullmatch(line)
    return None if found is None else [f"{found[1]}127.0.0.1:{found[3]}{found[4] or ''}"]


def _public(line: str, guard: Guard) -> list[str] | None:
    found = _BIND.fullmatch(line)
    if found is None:
        return None
    line = f"{found[1]}{guard['host']}:{found[3]}{found[4] or ''}"
    return [line + over_tls(guard), *(f"    {rule}" for rule in who_may_come(guard))]


def over_tls(guard: Guard) -> str:
    """What a `bind` of HAProxy's says besides, where clients come by TLS."""
    if not guard["cert_file"]:
        return ""
    ask = f" ca-file {_quoted(guard['client_ca_file'])} verify optional"
    return (
        f" ssl crt {_quoted(guard['cert_file'])} alpn http/1.1 ssl-min-ver TLSv1.2"
        f"{ask if guard['client_ca_file'] else ''}"
    )


def who_may_come(guard: Guard) -> Iterator[str]:
    """What HAProxy does first with a request that came to the public port."""
    if guard["cert_file"]:
        yield "http-request set-header x-forwarded-proto https"
        if guard["client_ca_file"]:
            yield f"acl baton_health path {_HEALTH}"
            said = _refusal("a client certificate is wanted")
            yield f"http-request return {said} if !{{ ssl_c_used }} !baton_health"
    elif guard["required"]:
        yield "acl baton_key req.hdr(authorization) -m found"
        yield "acl baton_key req.hdr(x-api-key) -m found"
        yield f"acl baton_here src {_HERE}"
        said = _refusal("keys are not taken in clear: use https, and replace this key")
        yield f"http-request return {said} if baton_key !baton_here"


def _refusal(why: str) -> str:
    body = json.dumps({"error": {"message": why, "type": "permission_error", "code": 403}})
    return f"status 403 content-type application/json string '{body}'"


def _quoted(path: object) -> str:
    """A path as one word of HAProxy's; configurations hold none with a quote in it."""
    return f'"{path}"'


_CHANGES: Final[Mapping[str, Callable[[str, Guard], list[str] | None]]] = {
    "global": _admin_socket,
    "defaults": _slow_requests,
    "frontend prometheus": _on_this_machine,
    "frontend http_frontend": _public,
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
