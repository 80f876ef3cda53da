"""Who may have which route: the whole table, and whether a server keeps to it.

A route that nobody has put here is closed to everybody; a new one that answers fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import httpx


class Rule(StrEnum):
    """To whom a path is open."""

    ANYBODY = "anybody"
    KEY = "those with a good key"
    ADMINISTER = "those with a good key that may administer"
    NOBODY = "nobody"


SERVES_OWN = ("/-/healthz", "/-/routes")
"""What Ray Serve's front answers by itself: that it is there, and the application's name."""
CONSOLE = (
    "/", "/events", "/api/request?id=x", "/api/config", "/static/x/y", "/metrics", "/sd",
    "/healthz",
)  # fmt: skip
"""What the controller serves on a port of its own, to whoever has its token."""
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(SERVES_OWN, Rule.ANYBODY),
    "/health": Rule.ANYBODY,
    "/metrics": Rule.KEY,
    "/v1/models": Rule.KEY,
    "/v1/chat/completions": Rule.KEY,
    "/v1/completions": Rule.KEY,
    "/v1/responses": Rule.KEY,
    "/v1/messages": Rule.KEY,
    "/v1/messages/count_tokens": Rule.KEY,
    "/tokenize": Rule.KEY,
    "/detokenize": Rule.KEY,
    "/v1/load_lora_adapter": Rule.ADMINISTER,
    "/v1/unload_lora_adapter": Rule.ADMINISTER,
}


class Shown(StrEnum):
    """Which key is shown."""

    NONE = "no key"
    WRONG = "a wrong key"
    REVOKED = "a revoked key"
    OTHERS = "another tenant's key"
    GOOD = "a good key"
    CONSOLES = "the console's token"


BAD = frozenset({Shown.NONE, Shown.WRONG, Shown.REVOKED, Shown.CONSOLES})


def what_is_wrong(
    client: httpx.Client, route: tuple[str, str], shown: tuple[Shown, str | None]
) -> str | None:
    """In which way a route is not as its rule says; None where it is. `client` has no key."""
    (method, path), (which, token) = route, shown
    status = _status(client, re.sub(r"{[^}]*}", "x", path), method, token)
    if method == "HEAD" and status == httpx.codes.METHOD_NOT_ALLOWED:
        return None
    match RULES.get(path, Rule.NOBODY):
        case Rule.NOBODY:
            wanted, right = "404", status == httpx.codes.NOT_FOUND
        case Rule.ANYBODY:
            wanted, right = "200", status == httpx.codes.OK
        case Rule.ADMINISTER if which not in BAD:
            wanted = "not to be let in"
            right = status in {httpx.codes.FORBIDDEN, httpx.codes.METHOD_NOT_ALLOWED}
        case Rule.KEY | Rule.ADMINISTER if which in BAD:
            wanted, right = "401", status == httpx.codes.UNAUTHORIZED
        case Rule.KEY:
            # The body is empty, so that most say 400; none says that it lets nobody in, or breaks.
            wanted = "to be let in"
            right = status not in {401, 403, 404} and status < httpx.codes.INTERNAL_SERVER_ERROR
    return None if right else f"{method} {path} with {which}: {status}, wanted {wanted}"


def what_is_wrong_at_console(
    client: httpx.Client, path: str, shown: tuple[Shown, str | None]
) -> list[str]:
    """In which way the console is open to others than those with its token."""
    which, token = shown
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with client.stream("GET", path, headers=headers) as answer:
        status = answer.status_code
    let_in = status < httpx.codes.INTERNAL_SERVER_ERROR and status != httpx.codes.UNAUTHORIZED
    if let_in == (which is Shown.CONSOLES or path == "/healthz"):
        return []
    return [f"console {path} with {which}: {status}"]


def _status(client: httpx.Client, path: str, method: str, token: str | None) -> int:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    if method not in {"POST", "PUT", "PATCH"}:
        return client.request(method, path, headers=headers).status_code
    return client.request(method, path, json={}, headers=headers).status_code
