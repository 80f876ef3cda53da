"""Who may have which route: the whole table, and whether a server keeps to it.

A route that nobody has put here is closed to everybody; a new one that answers fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import httpx


class Access(StrEnum):
    """To whom a path is open."""

    ANYBODY = "anybody"
    KEY = "those with a good key"
    ADMINISTER = "those with a good key that may administer"
    NOBODY = "nobody"


RAY_SERVE_PATHS = ("/-/healthz", "/-/routes")
"""What Ray Serve's front answers by itself: that it is there, and the application's name."""
CONSOLE = (
    "/", "/events", "/api/request?id=x", "/api/config", "/api/playground", "/api/chat",
    "/static/x/y", "/metrics", "/sd", "/healthz",
)  # fmt: skip
"""What the controller serves on a port of its own, to whoever has its token."""
RULES: Mapping[str, Access] = {
    **dict.fromkeys(RAY_SERVE_PATHS, Access.ANYBODY),
    "/health": Access.ANYBODY,
    "/metrics": Access.KEY,
    "/v1/models": Access.KEY,
    "/v1/chat/completions": Access.KEY,
    "/v1/completions": Access.KEY,
    "/v1/responses": Access.KEY,
    "/v1/messages": Access.KEY,
    "/v1/messages/count_tokens": Access.KEY,
    "/tokenize": Access.KEY,
    "/detokenize": Access.KEY,
    "/v1/load_lora_adapter": Access.ADMINISTER,
    "/v1/unload_lora_adapter": Access.ADMINISTER,
}


class Credential(StrEnum):
    """Which key is shown."""

    NONE = "no key"
    WRONG = "a wrong key"
    REVOKED = "a revoked key"
    OTHERS = "another tenant's key"
    GOOD = "a good key"
    CONSOLES = "the console's token"


BAD_CREDENTIALS = frozenset(
    {Credential.NONE, Credential.WRONG, Credential.REVOKED, Credential.CONSOLES}
)


def check_route(
    client: httpx.Client, route: tuple[str, str], credential: tuple[Credential, str | None]
) -> str | None:
    """In which way a route is not as its rule says; None where it is. `client` has no key."""
    (method, path), (kind, token) = route, credential
    status = _status(client, re.sub(r"{[^}]*}", "x", path), method, token)
    if method == "HEAD" and status == httpx.codes.METHOD_NOT_ALLOWED:
        return None
    match RULES.get(path, Access.NOBODY):
        case Access.NOBODY:
            expected, is_as_expected = "404", status == httpx.codes.NOT_FOUND
        case Access.ANYBODY:
            expected, is_as_expected = "200", status == httpx.codes.OK
        case Access.ADMINISTER if kind not in BAD_CREDENTIALS:
            expected = "not to be let in"
            is_as_expected = status in {httpx.codes.FORBIDDEN, httpx.codes.METHOD_NOT_ALLOWED}
        case Access.KEY | Access.ADMINISTER if kind in BAD_CREDENTIALS:
            expected, is_as_expected = "401", status == httpx.codes.UNAUTHORIZED
        case Access.KEY:
            # The body is empty, so that most say 400; none says that it lets nobody in, or breaks.
            expected = "to be let in"
            is_as_expected = (
                status not in {401, 403, 404} and status < httpx.codes.INTERNAL_SERVER_ERROR
            )
    return None if is_as_expected else f"{method} {path} with {kind}: {status}, expected {expected}"


def check_console(
    client: httpx.Client, path: str, credential: tuple[Credential, str | None]
) -> list[str]:
    """In which way the console is open to others than those with its token."""
    kind, token = credential
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with client.stream("GET", path, headers=headers) as answer:
        status = answer.status_code
    is_admitted = status < httpx.codes.INTERNAL_SERVER_ERROR and status != httpx.codes.UNAUTHORIZED
    if is_admitted == (kind is Credential.CONSOLES or path == "/healthz"):
        return []
    return [f"console {path} with {kind}: {status}"]


def _status(client: httpx.Client, path: str, method: str, token: str | None) -> int:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    if method not in {"POST", "PUT", "PATCH"}:
        return client.request(method, path, headers=headers).status_code
    return client.request(method, path, json={}, headers=headers).status_code
