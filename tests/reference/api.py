"""The HTTP routes as a page: from the gate's table, the errors, and who may have what."""

from __future__ import annotations

import json
from collections.abc import Iterator

from baton.config.derive.api_arguments import ALLOWED_ARGUMENTS, CONFIG_KEYS, REJECTED_ARGUMENTS
from baton.config.schema.deployment import Route
from baton.console.playground import CHAT_PATH
from baton.domain import errors
from baton.domain.errors import BatonError, Cause
from baton.engine.vllm.frontend.rust_arguments import SUPPORTED_ARGUMENTS
from baton.engine.vllm.gate.access import (
    MAX_CLASS_CHARS,
    MAX_REQUEST_ID_CHARS,
    SLO_CLASS_HEADER,
)
from baton.engine.vllm.gate.errors import Dialect, Problem
from baton.engine.vllm.gate.gate import METHODS, ROUTES
from baton.engine.vllm.gate.model_list import LIST_PATH
from tests.abuse.routes import CONSOLE, RULES, Access
from tests.reference.docstrings import attribute_docs, class_doc

HEAD = """\
# The API

Written by `scripts/render-reference` from the gate's table of routes and the tree of errors.

The front is vLLM's own API server: fields of requests and answers are those of vLLM, and so of
OpenAI and Anthropic. What baton adds is who may ask ([tenants](../operations/tenants.md)), what
is promised ([objectives](../operations/usage.md)), what is refused
([security](../operations/security.md#hostile-requests)) and how errors look.
"""
GETS = frozenset(path for path, methods in METHODS.items() if "GET" in methods)
"""What is asked for with GET; everything else with POST."""
_HEADERS = {
    "`Authorization: Bearer KEY`, `x-api-key: KEY`": "who asks; either will do on every route",
    f"`{SLO_CLASS_HEADER.decode()}: NAME`": "the class that it is to be served as, at most"
    f" {MAX_CLASS_CHARS} characters; 403 where its tenant may not ask for it",
    "`X-Session-ID: NAME`": "requests of one session stay where their prefix is cached, when that"
    " costs hardly more; so do other names of it"
    " ([which](../operations/routing.md#sessions))",
    "`x-request-id: NAME`": "what it is called in logs, traces and `baton explain route`; one word"
    f" of at most {MAX_REQUEST_ID_CHARS} letters, digits and `._:/=@+-`",
    "`anthropic-version: DATE`": "its client is Anthropic's: errors on every route, and lists of"
    " models, have Anthropic's shape",
    "`traceparent`, `tracestate`": "the trace that it is part of (W3C Trace Context)",
}
_ACCESS_TEXTS = {
    Access.ANYBODY: "anybody",
    Access.KEY: "who has a key",
    Access.ADMINISTER: "who has a key that may administer",
}
_OPERATORS = {
    "/": "the console",
    "/events": "its events, as a stream",
    "/api/request": "all that is known of one request (`?id=NAME`)",
    "/api/config": "the configuration that holds, without secrets",
    "/api/playground": "whether its playground can chat, with which models, and whether with a key",
    "/api/chat": "a chat with the deployment's own API, streamed; an API key is `x-api-key`",
    "/static/x/y": "the console's own files",
    "/metrics": "the controller's metrics",
    "/sd": "every other process that has some (Prometheus' HTTP service discovery)",
    "/healthz": "that it is there; asks for no token",
}
_ROUTES_HEAD = """\
## Routes

`server.routes` says which groups are open; all are unless it is set. Any other path, and any
other spelling of one of these, is 404. Another method than a path has is 405, and `Allow` names
those that it has. While no tenant has keys, nobody needs one.

| group | route | what it is | to whom |
|---|---|---|---|"""
_HEADERS_HEAD = """\
## What a request may say of itself

| header | what it says |
|---|---|"""
_ERRORS_HEAD = """\
## Errors

An error before the first token has a status of its own, also where a stream was asked for. A later
error is the last event of its stream, and no `[DONE]` follows. 429 and 503 say when to come back
(`Retry-After`, in whole seconds, rounded up; a text that says it has the same number). *Cause* is
the label of the metrics.

With `sse_keep_alive_interval` the status of a chat or completion stream is sent with the first
keep-alive comment, after that many seconds without a token. Errors after it are in the stream.

| status | cause | what happened | `type`, OpenAI | `type`, Anthropic |
|---|---|---|---|---|"""
_SHAPES_HEAD = """
Besides, whatever is wrong with a request itself: 400, 401, 403, 404, 405, 408, 413 and 431
([which is what](../operations/security.md#hostile-requests)). Errors are JSON. Anthropic's shape
is that of `/v1/messages` and all below it, and of every request with the header
`anthropic-version`. All others have OpenAI's shape:
"""
_UNREADABLE_TEXT = """
Errors that HAProxy finds before it knows whose request it has can be read by clients of both:

```json
{
  "type": "error",
  "error": {
    "type": "invalid_request_error",
    "message": "the request cannot be read",
    "param": null,
    "code": 400
  }
}
```

One kind of error is HTML: HAProxy 2.8 answers with a page of its own where it cannot read a head at
all. The status is 400 for no HTTP and for a head over 64 KiB or 4,096 fields, 408 for one that
does not come in 10 s. The connection is closed.
"""
_ARGUMENTS_HEAD = """\
## Arguments of vLLM's API server

What stands in `models.*.api` is passed on to vLLM's API server, with underscores for dashes. These
arguments do there what they do without baton. *Rust* says whether `server.api_server: rust` takes
them.

| argument | value | Rust |
|---|---|---|"""
_REFUSED_HEAD = """
Each other argument is refused with its name, since it would do nothing behind baton's front. Those
of engines belong in `engine.extra`. Of the rest:

| argument | instead |
|---|---|"""
_OPERATORS_HEAD = """\
## For operators

The controller answers at `observability.metrics.host` and `.port`
([seeing what baton does](../operations/observability.md)). All but `/api/chat` only
reads. All asks for the token of `observability.token_file` where there is one.

| route | what it is |
|---|---|"""


def render_page() -> str:
    """The page in Markdown."""
    parts = (_routes(), _headers(), _errors(), _shapes(), _arguments(), _operators())
    return "\n".join((HEAD, *(line for part in parts for line in part)))


def _routes() -> Iterator[str]:
    yield _ROUTES_HEAD
    docs = attribute_docs(Route)
    for group in Route:
        for path in ROUTES[group]:
            method = "GET" if path in GETS else "POST"
            access = _ACCESS_TEXTS[RULES[path]]
            yield f"| `{group}` | `{method} {path}` | {docs[group.name]} | {access} |"
            if path == LIST_PATH:
                one = f"GET {path}/NAME"
                yield (
                    f"| `{group}` | `{one}` | One of them; its name may have slashes. | {access} |"
                )
    yield ""


def _headers() -> Iterator[str]:
    yield _HEADERS_HEAD
    yield from (f"| {header} | {text} |" for header, text in _HEADERS.items())
    yield ""


def _errors() -> Iterator[str]:
    yield _ERRORS_HEAD
    for error in sorted(_client_errors(), key=lambda error: (error.http_status, error.cause)):
        openai = _type(error.http_status, Dialect.OPENAI)
        anthropic = _type(error.http_status, Dialect.ANTHROPIC)
        cause_and_doc = f"`{error.cause}` | {class_doc(error)}"
        yield f"| {error.http_status} | {cause_and_doc} | `{openai}` | `{anthropic}` |"


def _shapes() -> Iterator[str]:
    yield _SHAPES_HEAD
    problem = Problem(status=429, message="request r-1 refused: the queue is full; retry in 3 s")
    for dialect, owner in ((Dialect.OPENAI, "OpenAI's"), (Dialect.ANTHROPIC, "Anthropic's")):
        body = json.dumps(json.loads(problem.body(dialect)), indent=2)
        yield f"{owner} shape:\n\n```json\n{body}\n```\n"
    yield _UNREADABLE_TEXT


def _arguments() -> Iterator[str]:
    yield _ARGUMENTS_HEAD
    for name, argument in sorted(ALLOWED_ARGUMENTS.items()):
        yield (
            f"| `{name}` | {argument.expected} | {'yes' if name in SUPPORTED_ARGUMENTS else 'no'} |"
        )
    yield _REFUSED_HEAD
    instead = {name: f"`{key}`" if "." in key else key for name, key in CONFIG_KEYS.items()}
    for name, what in sorted((instead | dict(REJECTED_ARGUMENTS)).items()):
        yield f"| `{name}` | {what} |"
    yield ""


def _client_errors() -> Iterator[type[BatonError]]:
    for value in vars(errors).values():
        if (
            isinstance(value, type)
            and issubclass(value, BatonError)
            and value.cause is not Cause.OTHER
        ):
            yield value


def _type(status: int, dialect: Dialect) -> str:
    body: dict[str, dict[str, str]] = json.loads(Problem(status=status, message="").body(dialect))
    return body["error"]["type"]


def _operators() -> Iterator[str]:
    yield _OPERATORS_HEAD
    for path in CONSOLE:
        path_only = path.partition("?")[0]
        shown = path_only.replace("/static/x/y", "/static/…")
        method = "POST" if path_only == CHAT_PATH else "GET"
        yield f"| `{method} {shown}` | {_OPERATORS[path_only]} |"
    yield ""
