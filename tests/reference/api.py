"""The HTTP routes as a page: from the gate's table, the errors, and who may have what."""

from __future__ import annotations

import json
from collections.abc import Iterator

from baton.config.schema import Route
from baton.domain import errors
from baton.domain.errors import BatonError, Cause
from baton.engine.vllm.frontend_access import (
    MAX_CLASS_CHARS,
    MAX_REQUEST_ID_CHARS,
    SLO_CLASS_HEADER,
)
from baton.engine.vllm.frontend_errors import Dialect, Problem
from baton.engine.vllm.frontend_gate import ROUTES
from tests.abuse.routes import CONSOLE, RULES, Rule
from tests.reference.docstrings import attribute_docs, class_doc

HEAD = """\
# The API

Written by `scripts/render-reference` from the gate's table of routes and the tree of errors.

The front is vLLM's own API server: fields of requests and answers are those of vLLM, and so of
OpenAI and Anthropic. What baton adds is who may ask ([tenants](../operations/tenants.md)), what
is promised ([objectives](../operations/usage.md)), what is refused
([security](../operations/security.md#hostile-requests)) and how errors look.
"""
GETS = frozenset({"/v1/models", "/health", "/metrics"})
"""What is asked for with GET; everything else with POST."""
_HEADERS = {
    "`Authorization: Bearer KEY`, `x-api-key: KEY`": "who asks; either will do on every route",
    f"`{SLO_CLASS_HEADER.decode()}: NAME`": "the class that it is to be served as, at most"
    f" {MAX_CLASS_CHARS} characters; 403 where its tenant may not ask for it",
    "`X-Session-ID: NAME`": "requests of one session stay where their prefix is cached, when that"
    " costs hardly more; the field `session_id` does the same",
    "`x-request-id: NAME`": "what it is called in logs, traces and `baton explain route`; one word"
    f" of at most {MAX_REQUEST_ID_CHARS} letters, digits and `._:/=@+-`",
    "`traceparent`, `tracestate`": "the trace that it is part of (W3C Trace Context)",
}
_OPERATORS = {
    "/": "the console",
    "/events": "its events, as a stream",
    "/api/request": "all that is known of one request (`?id=NAME`)",
    "/api/config": "the configuration that holds, without secrets",
    "/static/x/y": "the console's own files",
    "/metrics": "the controller's metrics",
    "/sd": "every other process that has some (Prometheus' HTTP service discovery)",
    "/healthz": "that it is there; asks for no token",
}
_ROUTES_HEAD = """\
## Routes

`server.routes` says which groups are open; all are unless it is set. Any other path, and any
other spelling of one of these, is 404. While no tenant has keys, nobody needs one.

| group | route | what it is | to whom |
|---|---|---|---|"""
_HEADERS_HEAD = """\
## What a request may say of itself

| header | what it says |
|---|---|"""
_ERRORS_HEAD = """\
## Errors

One that happens before the first token has a status of its own, also where a stream was asked
for. A later one is the last event of its stream, and no `[DONE]` follows. 429 and 503 say when to
come back (`Retry-After`, in seconds). *Cause* is the label of the metrics.

| status | cause | what happened | `type`, OpenAI | `type`, Anthropic |
|---|---|---|---|---|"""
_SHAPES_HEAD = """
Besides, whatever is wrong with a request itself: 400, 401, 403, 404, 408, 413 and 431
([which is what](../operations/security.md#hostile-requests)). The shapes:
"""
_OPERATORS_HEAD = """\
## For operators

The controller answers at `observability.metrics.host` and `.port`
([seeing what baton does](../operations/observability.md)). All of it only reads, and asks for the
token of `observability.token_file` where there is one.

| route | what it is |
|---|---|"""


def page() -> str:
    """The page in Markdown."""
    return "\n".join((HEAD, *_routes(), *_headers(), *_errors(), *_shapes(), *_operators()))


def _routes() -> Iterator[str]:
    yield _ROUTES_HEAD
    said = attribute_docs(Route)
    for group in Route:
        for path in ROUTES[group]:
            method = "GET" if path in GETS else "POST"
            whom = "anybody" if RULES[path] is Rule.ANYBODY else "who has a key"
            yield f"| `{group}` | `{method} {path}` | {said[group.name]} | {whom} |"
    yield ""


def _headers() -> Iterator[str]:
    yield _HEADERS_HEAD
    yield from (f"| {header} | {text} |" for header, text in _HEADERS.items())
    yield ""


def _errors() -> Iterator[str]:
    yield _ERRORS_HEAD
    for error in sorted(_told_to_clients(), key=lambda one: (one.http_status, one.cause)):
        openai = _type(error.http_status, Dialect.OPENAI)
        anthropic = _type(error.http_status, Dialect.ANTHROPIC)
        what = f"`{error.cause}` | {class_doc(error)}"
        yield f"| {error.http_status} | {what} | `{openai}` | `{anthropic}` |"


def _shapes() -> Iterator[str]:
    yield _SHAPES_HEAD
    problem = Problem(status=429, message="request r-1 refused: the queue is full; retry in 3 s")
    for dialect, whose in ((Dialect.OPENAI, "OpenAI's"), (Dialect.ANTHROPIC, "Anthropic's")):
        body = json.dumps(json.loads(problem.body(dialect)), indent=2)
        yield f"{whose} routes:\n\n```json\n{body}\n```\n"


def _told_to_clients() -> Iterator[type[BatonError]]:
    for one in vars(errors).values():
        if isinstance(one, type) and issubclass(one, BatonError) and one.cause is not Cause.OTHER:
            yield one


def _type(status: int, dialect: Dialect) -> str:
    told: dict[str, dict[str, str]] = json.loads(Problem(status=status, message="").body(dialect))
    return told["error"]["type"]


def _operators() -> Iterator[str]:
    yield _OPERATORS_HEAD
    for path in CONSOLE:
        bare = path.partition("?")[0]
        shown = bare.replace("/static/x/y", "/static/…")
        yield f"| `GET {shown}` | {_OPERATORS[bare]} |"
    yield ""
