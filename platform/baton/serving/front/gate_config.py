"""What HAProxy is told as the gate before vLLM's Rust frontend; a pure function of its settings.

Theory of operation: in Rust mode no byte of HTTP passes through Python, so what the Python gate
(`frontend_gate`) does is said to an HAProxy of the ingress' own, in the same order: which paths
exist, who asks, for which class, how large a body is said to be, and whether the fleet takes more.
What changes while it runs is in maps that the ingress writes through HAProxy's own socket
(`rust_gate_process`). What goes on to the frontend carries no credential, and one id that says who
asks (`rust_callers`).

Where it is the front itself, no HAProxy of Ray Serve's has looked at a request before: it then has
the deadline for bodies and the guard of the public port, too, and Ray Serve's question whether its
replica is there comes to another port.

Texts and statuses are the Python gate's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.domain.errors import NotAllowed
from baton.engine.vllm.gate.access import (
    MAX_CLASS_CHARS,
    MAX_REQUEST_ID_CHARS,
    MISSING_KEY,
    NO_CLASS,
    OUR_PREFIX,
    REQUEST_ID_CHARS,
    SEVERAL_CLASSES,
    SEVERAL_KEYS,
    TAKEN_OFF,
    UNKNOWN_KEY,
    unauthorized,
)
from baton.engine.vllm.gate.errors import Dialect, Problem, error_type
from baton.engine.vllm.gate.gate import (
    GENERATION_PATHS,
    HEALTH_PATH,
    ROUTES,
    methods_of,
    wrong_method,
)
from baton.engine.vllm.gate.http import BAD_HOST, HOST, NO_HOST
from baton.engine.vllm.gate.model_list import LIST_PATH, ONE_PREFIX, ModelRow
from baton.engine.vllm.wire.sessions import SESSION_FIELD, SESSION_HEADERS
from baton.runtime.keys.api_keys import PREFIX, KeyState
from baton.serving.front.gate_maps import BAD, SEPARATOR, SESSION_MARK
from baton.serving.front.haproxy_wrapper import (
    ANTHROPIC,
    MOST_FIELDS_READ,
    OPENAI,
    Guard,
    over_tls,
    own_errors,
    quoted,
    readable_head,
    shaped,
    who_may_come,
    whose_shape,
)

REPLICA_PATH = "/-/healthz"
_SESSION_CHARS = 16
_SECONDS = "SECONDS"
"""Stands for a number that HAProxy puts in."""
_BUFFER_BYTES = 64 * 1024
"""As Ray Serve's HAProxy has: the largest head that can be read, and refused with a reason."""
_CONNECT_S = 2
_HEAD_S = 10
_IDLE_S = 65
_COME_BACK_S = 1
_STATUS_BY_ITSELF: Mapping[int, str] = {
    500: "the gate could not go on; the same request may succeed",
    501: "this is not understood here, wanted HTTP/1.1 and a body in chunks or of a known length",
    502: "the frontend broke off; the same request may succeed",
    503: "this frontend is going away; try again",
    504: "the frontend did not answer in time",
}
"""What it says of its own accord of requests whose head it has read."""


_NOW = "now"
_NOT_FOUND = Problem(status=404, message="not found")
_NOT_ALLOWED = Problem(
    status=NotAllowed.http_status, message="this SLO class is none that this tenant may ask for"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtFront:
    """What a gate has to know besides where it is the front itself."""

    asked: str
    """Where Ray Serve asks whether its replica is there, as HAProxy's `bind` takes it."""
    guard: Guard
    """Of the public port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What a gate is to do; who is let in, and whom it refuses, it is told while it runs."""

    listen: str
    """Where clients come, as HAProxy's `bind` takes it: `fd@5`, `127.0.0.1:8000`."""
    frontend: Path
    """The Unix socket of the frontend behind it."""
    folder: Path
    """Of the maps and of the socket by which it is told things; nobody else may read it."""
    routes: Sequence[str]
    """Which groups are open."""
    max_body_bytes: int
    models: Sequence[ModelRow] = ()
    """What is served, under which names."""
    longest_stream_s: float = 600.0
    body_idle_s: float = 60.0
    """How long a client may be silent in the middle of a body, or not read."""
    max_connections: int = 4096
    threads: int = 1
    at_front: AtFront | None = None
    """None: clients come by Ray Serve's HAProxy."""

    @property
    def socket(self) -> Path:
        """By which it is told things."""
        return self.folder / "gate.sock"

    @property
    def key_map(self) -> Path:
        """From a key's SHA-256 to what it is good for."""
        return self.folder / "keys.map"

    @property
    def shed_map(self) -> Path:
        """From whose requests are refused for now to when they may come back."""
        return self.folder / "shed.map"

    @property
    def class_map(self) -> Path:
        """Who may ask for which class."""
        return self.folder / "classes.map"

    @property
    def state_map(self) -> Path:
        """Whether the fleet can serve, whether there are keys, and who is let in without one."""
        return self.folder / "state.map"


def gate_config(settings: GateSettings) -> str:
    """The configuration of the gate's HAProxy."""
    sections = [_global(settings), _defaults(settings), _front(settings), _back(settings)]
    if settings.at_front is not None:
        sections.append(_replica(settings.at_front))
    return "\n\n".join("\n    ".join(lines) for lines in sections) + "\n"


def _global(settings: GateSettings) -> list[str]:
    return [
        "global",
        f"stats socket {quoted(settings.socket)} mode 600 level admin",
        f"maxconn {settings.max_connections}",
        f"nbthread {settings.threads}",
        MOST_FIELDS_READ,
        f"tune.bufsize {_BUFFER_BYTES}",
    ]


def _defaults(settings: GateSettings) -> list[str]:
    stream_s = math.ceil(settings.longest_stream_s)
    return [
        "defaults",
        "mode http",
        "option http-no-delay",
        f"timeout connect {_CONNECT_S}s",
        f"timeout http-request {_HEAD_S}s",
        f"timeout http-keep-alive {_IDLE_S}s",
        f"timeout client {math.ceil(settings.body_idle_s)}s",
        f"timeout server {stream_s}s",
        *own_errors(_STATUS_BY_ITSELF, retry_after_s=_COME_BACK_S),
    ]


def _front(settings: GateSettings) -> list[str]:
    front = settings.at_front
    return [
        "frontend gate",
        f"bind {settings.listen}{over_tls(front.guard) if front else ''}",
        *whose_shape(),
        *readable_head(),
        *(who_may_come(front.guard) if front else ()),
        *_host(),
        *_paths(settings),
        *_who(settings),
        *_for_which_class(settings),
        *_methods(settings),
        *_models(settings),
        *_how_large(settings),
        *_whether_more_is_taken(settings),
        *_of_which_session(settings),
        *_what_goes_on(),
        "default_backend rust",
    ]


def _back(settings: GateSettings) -> list[str]:
    lines = ["backend rust", f"server rust unix@{settings.frontend}"]
    if settings.at_front is not None:
        # The deadline for heads then counts for what a buffer holds of the body as well, and only
        # here: whoever is refused is told before.
        lines.append("option http-buffer-request")
    return lines


def _replica(front: AtFront) -> list[str]:
    return [
        "frontend replica",
        f"bind {front.asked}",
        _there(),
        f"http-request {_return(_NOT_FOUND)}",
    ]


def _there() -> str:
    said = "status 200 content-type text/plain string success"
    return f"http-request return {said} if {{ path {REPLICA_PATH} }}"


def _host() -> Iterator[str]:
    # Ray Serve's own question, whether its replica is there; it names no host.
    yield _there()
    nowhere = Problem(status=400, message=NO_HOST, close=True)
    yield f"http-request {_return(nowhere)} if HTTP_1.1 !{{ req.fhdr(host) -m found }}"
    bad = Problem(status=400, message=BAD_HOST, close=True)
    named = f"{{ req.fhdr(host) -m reg {quoted(f'^{HOST}$')} }}"
    yield f"http-request {_return(bad)} if {{ req.fhdr(host) -m found }} !{named}"


def _paths(settings: GateSettings) -> Iterator[str]:
    # As it was sent: `/v1/%63hat` is no path here. A model's name may be escaped, or have slashes.
    paths = _listed(settings)
    yield f"acl listed path {' '.join(map(quoted, paths))}"
    if LIST_PATH in paths:
        yield f"acl one_model path_beg {ONE_PREFIX}"
        yield f"acl one_model_named path_len gt {len(ONE_PREFIX)}"
    unlisted = "!listed !one_model" if LIST_PATH in paths else "!listed"
    yield f"http-request {_return(_NOT_FOUND)} if {unlisted}"
    if LIST_PATH in paths:
        yield f"http-request {_return(_NOT_FOUND)} if one_model !one_model_named"
    if HEALTH_PATH in paths:
        serves = f"{{ str(healthy),map_str({settings.state_map}) -m found }} {{ nbsrv(rust) gt 0 }}"
        yield f"acl health path {HEALTH_PATH}"
        yield f"http-request {_wrong_method(HEALTH_PATH)} if health {_other_method(HEALTH_PATH)}"
        yield f"http-request return status 200 if health {serves}"
        yield "http-request return status 503 if health"


def _listed(settings: GateSettings) -> list[str]:
    return [path for name in settings.routes for path in ROUTES[name]]


def _methods(settings: GateSettings) -> Iterator[str]:
    """Which methods the paths have."""
    for path in _listed(settings):
        if path != HEALTH_PATH:
            there = f"{{ path {path} }} {_other_method(path)}"
            yield f"http-request {_wrong_method(path)} if {there}"
    if LIST_PATH in _listed(settings):
        there = f"one_model {_other_method(LIST_PATH)}"
        yield f"http-request {_wrong_method(LIST_PATH)} if {there}"


def _other_method(path: str) -> str:
    return f"!{{ method -m str {' '.join(methods_of(path))} }}"


def _wrong_method(path: str) -> str:
    methods = methods_of(path)
    message = f"got another method, expected {' or '.join(methods)}"
    return _return(replace(wrong_method("", methods), message=message))


def _models(settings: GateSettings) -> Iterator[str]:
    """One model by its name, and all of them as Anthropic lists them."""
    if LIST_PATH not in _listed(settings) or not settings.models:
        return
    said = "http-request return status 200 content-type application/json lf-string"
    for row in settings.models:
        named = f"{{ path,url_dec -m str {quoted(ONE_PREFIX + row.name)} }}"
        yield f"{said} {quoted(_anthropics(row))} if {named} baton_anthropic"
        yield f"{said} {quoted(_openais(row))} if {named}"
    missing = Problem(
        status=404,
        message=f"this model does not exist; GET {LIST_PATH} lists those that do",
        param="model",
    )
    yield f"http-request {_return(missing)} if one_model"
    ends = (settings.models[0], settings.models[-1])
    first, last = (json.dumps(row.name).replace("%", "%%") for row in ends)
    rows = ",".join(map(_anthropics, settings.models))
    page = f'{{"data":[{rows}],"has_more":false,"first_id":{first},"last_id":{last}}}'
    yield f"{said} {quoted(page)} if {{ path {LIST_PATH} }} baton_anthropic"


def _openais(row: ModelRow) -> str:
    made: dict[str, object] = {
        "id": row.name,
        "object": "model",
        "created": _NOW,
        "owned_by": "vllm",
    }
    made |= {"root": row.root, "parent": row.parent, "max_model_len": row.max_len_tokens}
    return _with_date(made, "%[date]")


def _anthropics(row: ModelRow) -> str:
    made: dict[str, object] = {
        "type": "model",
        "id": row.name,
        "display_name": row.name,
        "created_at": _NOW,
    }
    made |= {"max_input_tokens": row.max_len_tokens}
    return _with_date(made, '"%[date,utime(%Y-%m-%dT%H:%M:%SZ)]"')


def _with_date(made: Mapping[str, object], date: str) -> str:
    text = json.dumps(made, separators=(",", ":")).replace("%", "%%")
    return text.replace(f'"{_NOW}"', date)


def _who(settings: GateSettings) -> Iterator[str]:
    yield f"http-request set-var(txn.anonymous) str(anonymous),map_str({settings.state_map})"
    yield "acl anonymous var(txn.anonymous) -m found"
    yield f"acl keyed str(keys),map_str({settings.state_map}) -m found"
    yield f"http-request {_return(MISSING_KEY)} if !keyed !anonymous"
    yield from _keys()
    yield f"http-request {_return(MISSING_KEY)} if keyed !{{ var(txn.key) -m found }} !anonymous"
    found = f"var(txn.key),sha2(256),hex,lower,map_str({settings.key_map},{BAD})"
    yield f"http-request set-var(txn.who) {found} if {{ var(txn.key) -m found }}"
    for state in (KeyState.EXPIRED, KeyState.REVOKED):
        refused = _return(unauthorized(f"this API key is {state}"))
        yield f"http-request {refused} if {{ var(txn.who) -m str {BAD}{state} }}"
    yield f"http-request {_return(UNKNOWN_KEY)} if {{ var(txn.who) -m beg {BAD} }}"
    yield "http-request set-var(txn.who) var(txn.anonymous) if !{ var(txn.who) -m found }"


def _keys() -> Iterator[str]:
    """Put the one key that was sent, if any that counts, into `txn.key`."""
    for header in ("authorization", "x-api-key"):
        twice = f"{{ req.fhdr_cnt({header}) gt 1 }}"
        yield f"http-request {_return(SEVERAL_KEYS)} if keyed {twice}"
    yield "http-request set-var(txn.bearer) http_auth_bearer if keyed"
    yield "http-request set-var(txn.key) req.fhdr(x-api-key) if keyed"
    for name in ("bearer", "key"):
        said = f"{{ var(txn.{name}) -m found }}"
        yield f"http-request unset-var(txn.{name}) if {said} {{ var(txn.{name}) -m len 0 }}"
        # Clients that must send a key send any word: that is nobody, where nobody is let in.
        ours = f"{{ var(txn.{name}) -m beg {PREFIX} }}"
        yield f"http-request unset-var(txn.{name}) if {said} anonymous !{ours}"
    both = "{ var(txn.bearer) -m found } { var(txn.key) -m found }"
    differ = "!{ var(txn.bearer),strcmp(txn.key) eq 0 }"
    yield f"http-request {_return(SEVERAL_KEYS)} if {both} {differ}"
    yield "http-request set-var(txn.key) var(txn.bearer) if { var(txn.bearer) -m found }"


def _for_which_class(settings: GateSettings) -> Iterator[str]:
    yield f"http-request {_return(SEVERAL_CLASSES)} if {{ req.fhdr_cnt(x-slo-class) gt 1 }}"
    yield (
        "http-request set-var(txn.class) req.fhdr(x-slo-class)"
        " if { req.fhdr(x-slo-class) -m len gt 0 }"
    )
    name = f"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_CLASS_CHARS - 1}}}$"
    known = f"!{{ var(txn.class) -m reg {quoted(name)} }}"
    yield f"http-request {_return(NO_CLASS)} if {{ var(txn.class) -m found }} {known}"
    may = f"{{ var(txn.who),concat({SEPARATOR},txn.class),map_str({settings.class_map}) -m found }}"
    yield f"http-request {_return(_NOT_ALLOWED)} if {{ var(txn.class) -m found }} !{may}"
    yield "http-request set-var(txn.class) str() if !{ var(txn.class) -m found }"


def _how_large(settings: GateSettings) -> Iterator[str]:
    most = settings.max_body_bytes
    too_large = Problem(status=413, message=f"the request body is larger than {most} bytes")
    yield f"http-request {_return(too_large)} if {{ req.hdr_val(content-length) gt {most} }}"


def _whether_more_is_taken(settings: GateSettings) -> Iterator[str]:
    paths = " ".join(path for path in GENERATION_PATHS)
    yield f"acl generates path {paths}"
    table = settings.shed_map
    whom = (
        "var(txn.who)",
        f"var(txn.who),concat({SEPARATOR},txn.class)",
    )
    for key in whom:
        yield f"http-request set-var(txn.shed) {key},map_str({table}) if generates METH_POST"
    # The number in the map, in text and header: HAProxy puts it in when it answers.
    seconds = "%[var(txn.shed)]"
    refused = Problem(
        status=429, message=f"more of these requests are not taken for now; retry in {_SECONDS} s"
    )
    answer = _return(refused, waits=False).replace(_SECONDS, seconds)
    yield f"http-request {answer} hdr retry-after {seconds} if {{ var(txn.shed) -m found }}"


def _what_goes_on() -> Iterator[str]:
    name = f"^{REQUEST_ID_CHARS}{{1,{MAX_REQUEST_ID_CHARS}}}$"
    one = "{ req.fhdr_cnt(x-request-id) eq 1 }"
    yield (
        "http-request set-var(txn.name) req.fhdr(x-request-id)"
        f" if {one} {{ req.fhdr(x-request-id) -m reg {quoted(name)} }}"
    )
    yield "http-request set-var(txn.name) uuid() if !{ var(txn.name) -m found }"
    for header in sorted(name.decode() for name in TAKEN_OFF):
        yield f"http-request del-header {header}"
    yield f"http-request del-header {OUR_PREFIX.decode()} -m beg"
    words = SEPARATOR.join(f"%[var(txn.{word})]" for word in ("name", "who", "class"))
    yield f"http-request set-header x-request-id {words}%[var(txn.session)]"


def _of_which_session(settings: GateSettings) -> Iterator[str]:
    """Put `+` and a digest of the session's name into `txn.session`, where a client names one.

    A body is read as far as HAProxy's buffer holds it (16 KiB); `at-least` would not wait for the
    rest of it, either.
    """
    yield "http-request set-var(txn.session) str()"
    unknown = "{ var(txn.session) -m len 0 }"
    digest = f"sha2(256),hex,lower,bytes(0,{_SESSION_CHARS})"
    mark = f"str({SESSION_MARK}),concat(,txn.digest)"
    for header in (name.decode() for name in SESSION_HEADERS):
        named = f"{{ req.fhdr({header}) -m len gt 0 }}"
        yield f"http-request set-var(txn.digest) req.fhdr({header}),{digest} if {unknown} {named}"
        yield f"http-request set-var(txn.session) {mark} if {unknown} {named}"
    wait_s = _HEAD_S  # not any longer than a head
    yield f"http-request wait-for-body time {wait_s}s if generates METH_POST {unknown}"
    # A search for a word costs far less than to read JSON for it.
    named = f"{{ req.body -m sub {SESSION_FIELD} }}"
    key = f"req.body,json_query('$.{SESSION_FIELD}')"
    asks = f"generates METH_POST {unknown} {named}"
    yield f"http-request set-var(txn.key_name) {key} if {asks}"
    keyed = f"{unknown} {{ var(txn.key_name) -m len gt 0 }}"
    yield f"http-request set-var(txn.digest) var(txn.key_name),{digest} if {keyed}"
    yield f"http-request set-var(txn.session) {mark} if {keyed}"


def _return(problem: Problem, *, waits: bool = True) -> str:
    """An answer; without the time to wait where somebody else says it."""
    types = {
        ANTHROPIC: error_type(problem.status, Dialect.ANTHROPIC),
        OPENAI: error_type(problem.status, Dialect.OPENAI),
    }
    body = shaped(problem.status, problem.message, types, param=problem.param)
    headers = problem.headers() if waits else []
    told = " ".join(_header(name, value) for name, value in headers)
    said = f"return status {problem.status} content-type application/json lf-string {body}"
    return f"{said} {told}".rstrip()


def _header(name: bytes, value: bytes) -> str:
    return f"hdr {name.decode()} {quoted(value.decode().replace('%', '%%'))}"
