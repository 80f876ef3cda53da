"""The HAProxy configuration of the gate before vLLM's Rust frontend.

Theory of operation: in Rust mode no byte of HTTP passes through Python. So an HAProxy of the
ingress does the checks of the Python gate (`gate`) in the same order: paths, keys, class, body
size, shedding. Texts and statuses are the same. The ingress changes the maps at run time through
HAProxy's admin socket (`gate_process`). Forwarded requests carry no credential, but one id with the
caller (`rust_requests`).

On the public port the gate also has the deadline for bodies and the guard of the port. Ray Serve's
health check of the replica then uses another port.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.domain.errors import NotAllowed
from baton.engine.vllm.gate.access import (
    BATON_HEADER_PREFIX,
    INVALID_CLASS,
    MAX_CLASS_CHARS,
    MAX_REQUEST_ID_CHARS,
    MISSING_KEY,
    REQUEST_ID_CHARS,
    SEVERAL_CLASSES,
    SEVERAL_KEYS,
    STRIPPED_HEADERS,
    UNKNOWN_KEY,
    unauthorized,
)
from baton.engine.vllm.gate.errors import Dialect, Problem, error_type
from baton.engine.vllm.gate.gate import (
    GENERATION_PATHS,
    HEALTH_PATH,
    ROUTES,
    allowed_methods,
    method_not_allowed,
)
from baton.engine.vllm.gate.http import BAD_HOST, HOST, NO_HOST
from baton.engine.vllm.gate.model_list import LIST_PATH, MODEL_PREFIX, ModelRow
from baton.engine.vllm.wire.identity import SESSION_FIELD, SESSION_HEADERS
from baton.runtime.keys.api_keys import KEY_PREFIX, KeyState
from baton.serving.front.gate_maps import REJECTED_PREFIX, SEPARATOR, SESSION_MARK
from baton.serving.front.haproxy_wrapper import (
    ANTHROPIC,
    MAX_HEADERS_DIRECTIVE,
    OPENAI,
    GuardFields,
    access_rules,
    dialect_rules,
    error_body,
    error_rules,
    header_limit_rules,
    quote,
    tls_bind_options,
)

SERVE_HEALTH_PATH = "/-/healthz"
_SESSION_DIGEST_CHARS = 16
_RETRY_AFTER_PLACEHOLDER = "SECONDS"
_BUFFER_BYTES = 64 * 1024
"""As in Ray Serve's HAProxy: the largest head that can be rejected with a reason."""
_MAX_CONNECTIONS = 4096
_CONNECT_TIMEOUT_S = 2
_HEADER_TIMEOUT_S = 10
_KEEP_ALIVE_TIMEOUT_S = 65
_RETRY_AFTER_S = 1
_OWN_ERROR_MESSAGES: Mapping[int, str] = {
    500: "the gate could not go on; the same request may succeed",
    501: "this is not understood here, expected HTTP/1.1 and a body in chunks or of a known length",
    502: "the frontend broke off; the same request may succeed",
    503: "this frontend is going away; try again",
    504: "the frontend did not answer in time",
}
"""HAProxy's own errors for requests with a complete head."""


_DATE_PLACEHOLDER = "now"
_NOT_FOUND = Problem(status=404, message="not found")
_CLASS_NOT_ALLOWED = Problem(
    status=NotAllowed.http_status, message="this SLO class is none that this tenant may ask for"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicListener:
    """Further settings of a gate at the public port."""

    probe_bind: str
    """Ray Serve's health check, as an address of HAProxy's `bind`."""
    guard: GuardFields


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Settings of a gate; keys, limits and state are in maps."""

    bind: str
    """Address of clients for HAProxy's `bind`: `fd@5`, `127.0.0.1:8000`."""
    frontend_socket: Path
    folder: Path
    """Of the maps and the admin socket; readable by this user only."""
    routes: Sequence[str]
    max_body_bytes: int
    models: Sequence[ModelRow] = ()
    max_stream_s: float = 600.0
    client_idle_timeout_s: float = 60.0
    """How long a client may pause in the middle of a body, or not read."""
    public_listener: PublicListener | None = None
    """None: clients come by Ray Serve's HAProxy."""

    @property
    def admin_socket(self) -> Path:
        """HAProxy's admin socket."""
        return self.folder / "gate.sock"

    @property
    def key_map(self) -> Path:
        """From a key's SHA-256 to the word of its tenant, or to why it is rejected."""
        return self.folder / "keys.map"

    @property
    def shed_map(self) -> Path:
        """From a caller that is rejected for now to the seconds until its next attempt."""
        return self.folder / "shed.map"

    @property
    def class_map(self) -> Path:
        """The classes that each tenant may request."""
        return self.folder / "classes.map"

    @property
    def state_map(self) -> Path:
        """Whether the fleet can serve, whether there are keys, and the tenant without a key."""
        return self.folder / "state.map"


def render_gate_config(settings: GateSettings) -> str:
    """The configuration of the gate's HAProxy."""
    sections = [
        _global_section(settings),
        _defaults_section(settings),
        _frontend_section(settings),
        _backend_section(settings),
    ]
    if settings.public_listener is not None:
        sections.append(_probe_section(settings.public_listener))
    return "\n\n".join("\n    ".join(lines) for lines in sections) + "\n"


def _global_section(settings: GateSettings) -> list[str]:
    return [
        "global",
        f"stats socket {quote(settings.admin_socket)} mode 600 level admin",
        f"maxconn {_MAX_CONNECTIONS}",
        "nbthread 1",
        MAX_HEADERS_DIRECTIVE,
        f"tune.bufsize {_BUFFER_BYTES}",
    ]


def _defaults_section(settings: GateSettings) -> list[str]:
    stream_s = math.ceil(settings.max_stream_s)
    return [
        "defaults",
        "mode http",
        "option http-no-delay",
        f"timeout connect {_CONNECT_TIMEOUT_S}s",
        f"timeout http-request {_HEADER_TIMEOUT_S}s",
        f"timeout http-keep-alive {_KEEP_ALIVE_TIMEOUT_S}s",
        f"timeout client {math.ceil(settings.client_idle_timeout_s)}s",
        f"timeout server {stream_s}s",
        *error_rules(_OWN_ERROR_MESSAGES, retry_after_s=_RETRY_AFTER_S),
    ]


def _frontend_section(settings: GateSettings) -> list[str]:
    public_listener = settings.public_listener
    return [
        "frontend gate",
        f"bind {settings.bind}{tls_bind_options(public_listener.guard) if public_listener else ''}",
        *dialect_rules(),
        *header_limit_rules(),
        *(access_rules(public_listener.guard) if public_listener else ()),
        *_host_rules(),
        *_path_rules(settings),
        *_tenant_rules(settings),
        *_class_rules(settings),
        *_method_rules(settings),
        *_model_rules(settings),
        *_body_size_rules(settings),
        *_shedding_rules(settings),
        *_session_rules(settings),
        *_forwarding_rules(),
        "default_backend rust",
    ]


def _backend_section(settings: GateSettings) -> list[str]:
    lines = ["backend rust", f"server rust unix@{settings.frontend_socket}"]
    if settings.public_listener is not None:
        # The deadline for heads then includes the buffered part of the body. It is in the backend,
        # so that rejected requests get their answer before.
        lines.append("option http-buffer-request")
    return lines


def _probe_section(public_listener: PublicListener) -> list[str]:
    return [
        "frontend replica",
        f"bind {public_listener.probe_bind}",
        _probe_response(),
        f"http-request {_problem_response(_NOT_FOUND)}",
    ]


def _probe_response() -> str:
    response = "status 200 content-type text/plain string success"
    return f"http-request return {response} if {{ path {SERVE_HEALTH_PATH} }}"


def _host_rules() -> Iterator[str]:
    # Ray Serve's health check of its replica names no host.
    yield _probe_response()
    missing_host = Problem(status=400, message=NO_HOST, close=True)
    yield (
        f"http-request {_problem_response(missing_host)} if HTTP_1.1 !{{ req.fhdr(host) -m found }}"
    )
    invalid_host = Problem(status=400, message=BAD_HOST, close=True)
    is_valid_host = f"{{ req.fhdr(host) -m reg {quote(f'^{HOST}$')} }}"
    yield (
        f"http-request {_problem_response(invalid_host)} if {{ req.fhdr(host) -m found }}"
        f" !{is_valid_host}"
    )


def _path_rules(settings: GateSettings) -> Iterator[str]:
    # The path is compared as sent: `/v1/%63hat` is unknown. A model's name may be escaped, or have
    # slashes.
    paths = _open_paths(settings)
    yield f"acl listed path {' '.join(map(quote, paths))}"
    if LIST_PATH in paths:
        yield f"acl one_model path_beg {MODEL_PREFIX}"
        yield f"acl one_model_named path_len gt {len(MODEL_PREFIX)}"
    unlisted = "!listed !one_model" if LIST_PATH in paths else "!listed"
    yield f"http-request {_problem_response(_NOT_FOUND)} if {unlisted}"
    if LIST_PATH in paths:
        yield f"http-request {_problem_response(_NOT_FOUND)} if one_model !one_model_named"
    if HEALTH_PATH in paths:
        is_healthy = (
            f"{{ str(healthy),map_str({settings.state_map}) -m found }} {{ nbsrv(rust) gt 0 }}"
        )
        yield f"acl health path {HEALTH_PATH}"
        yield (
            f"http-request {_wrong_method_response(HEALTH_PATH)} if health"
            f" {_is_other_method(HEALTH_PATH)}"
        )
        yield f"http-request return status 200 if health {is_healthy}"
        yield "http-request return status 503 if health"


def _open_paths(settings: GateSettings) -> list[str]:
    return [path for name in settings.routes for path in ROUTES[name]]


def _method_rules(settings: GateSettings) -> Iterator[str]:
    for path in _open_paths(settings):
        if path != HEALTH_PATH:
            condition = f"{{ path {path} }} {_is_other_method(path)}"
            yield f"http-request {_wrong_method_response(path)} if {condition}"
    if LIST_PATH in _open_paths(settings):
        condition = f"one_model {_is_other_method(LIST_PATH)}"
        yield f"http-request {_wrong_method_response(LIST_PATH)} if {condition}"


def _is_other_method(path: str) -> str:
    return f"!{{ method -m str {' '.join(allowed_methods(path))} }}"


def _wrong_method_response(path: str) -> str:
    methods = allowed_methods(path)
    message = f"got another method, expected {' or '.join(methods)}"
    return _problem_response(replace(method_not_allowed("", methods), message=message))


def _model_rules(settings: GateSettings) -> Iterator[str]:
    if LIST_PATH not in _open_paths(settings) or not settings.models:
        return
    response = "http-request return status 200 content-type application/json lf-string"
    for row in settings.models:
        is_model_path = f"{{ path,url_dec -m str {quote(MODEL_PREFIX + row.name)} }}"
        yield f"{response} {quote(_anthropic_model(row))} if {is_model_path} baton_anthropic"
        yield f"{response} {quote(_openai_model(row))} if {is_model_path}"
    missing = Problem(
        status=404,
        message=f"this model does not exist; GET {LIST_PATH} lists those that do",
        param="model",
    )
    yield f"http-request {_problem_response(missing)} if one_model"
    first_and_last = (settings.models[0], settings.models[-1])
    first, last = (json.dumps(row.name).replace("%", "%%") for row in first_and_last)
    rows = ",".join(map(_anthropic_model, settings.models))
    page = f'{{"data":[{rows}],"has_more":false,"first_id":{first},"last_id":{last}}}'
    yield f"{response} {quote(page)} if {{ path {LIST_PATH} }} baton_anthropic"


def _openai_model(row: ModelRow) -> str:
    fields: dict[str, object] = {
        "id": row.name,
        "object": "model",
        "created": _DATE_PLACEHOLDER,
        "owned_by": "vllm",
    }
    fields |= {"root": row.root, "parent": row.parent, "max_model_len": row.max_len_tokens}
    return _with_date(fields, "%[date]")


def _anthropic_model(row: ModelRow) -> str:
    fields: dict[str, object] = {
        "type": "model",
        "id": row.name,
        "display_name": row.name,
        "created_at": _DATE_PLACEHOLDER,
    }
    fields |= {"max_input_tokens": row.max_len_tokens}
    return _with_date(fields, '"%[date,utime(%Y-%m-%dT%H:%M:%SZ)]"')


def _with_date(fields: Mapping[str, object], date: str) -> str:
    text = json.dumps(fields, separators=(",", ":")).replace("%", "%%")
    return text.replace(f'"{_DATE_PLACEHOLDER}"', date)


def _tenant_rules(settings: GateSettings) -> Iterator[str]:
    yield f"http-request set-var(txn.anonymous) str(anonymous),map_str({settings.state_map})"
    yield "acl anonymous var(txn.anonymous) -m found"
    yield f"acl keyed str(keys),map_str({settings.state_map}) -m found"
    yield f"http-request {_problem_response(MISSING_KEY)} if !keyed !anonymous"
    yield from _key_rules()
    yield (
        f"http-request {_problem_response(MISSING_KEY)} if keyed !{{ var(txn.key) -m found }}"
        " !anonymous"
    )
    lookup = f"var(txn.key),sha2(256),hex,lower,map_str({settings.key_map},{REJECTED_PREFIX})"
    yield f"http-request set-var(txn.who) {lookup} if {{ var(txn.key) -m found }}"
    for state in (KeyState.EXPIRED, KeyState.REVOKED):
        refused = _problem_response(unauthorized(f"this API key is {state}"))
        yield f"http-request {refused} if {{ var(txn.who) -m str {REJECTED_PREFIX}{state} }}"
    yield (
        f"http-request {_problem_response(UNKNOWN_KEY)} if {{ var(txn.who) -m beg"
        f" {REJECTED_PREFIX} }}"
    )
    yield "http-request set-var(txn.who) var(txn.anonymous) if !{ var(txn.who) -m found }"


def _key_rules() -> Iterator[str]:
    """Put the key of the request, if any counts, into `txn.key`."""
    for header in ("authorization", "x-api-key"):
        is_repeated = f"{{ req.fhdr_cnt({header}) gt 1 }}"
        yield f"http-request {_problem_response(SEVERAL_KEYS)} if keyed {is_repeated}"
    yield "http-request set-var(txn.bearer) http_auth_bearer if keyed"
    yield "http-request set-var(txn.key) req.fhdr(x-api-key) if keyed"
    for name in ("bearer", "key"):
        is_present = f"{{ var(txn.{name}) -m found }}"
        yield f"http-request unset-var(txn.{name}) if {is_present} {{ var(txn.{name}) -m len 0 }}"
        # Clients that must send some key send any word: without keys, it means no key.
        is_own_format = f"{{ var(txn.{name}) -m beg {KEY_PREFIX} }}"
        yield f"http-request unset-var(txn.{name}) if {is_present} anonymous !{is_own_format}"
    both = "{ var(txn.bearer) -m found } { var(txn.key) -m found }"
    differ = "!{ var(txn.bearer),strcmp(txn.key) eq 0 }"
    yield f"http-request {_problem_response(SEVERAL_KEYS)} if {both} {differ}"
    yield "http-request set-var(txn.key) var(txn.bearer) if { var(txn.bearer) -m found }"


def _class_rules(settings: GateSettings) -> Iterator[str]:
    yield (
        f"http-request {_problem_response(SEVERAL_CLASSES)} if {{ req.fhdr_cnt(x-slo-class) gt 1 }}"
    )
    yield (
        "http-request set-var(txn.class) req.fhdr(x-slo-class)"
        " if { req.fhdr(x-slo-class) -m len gt 0 }"
    )
    pattern = f"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_CLASS_CHARS - 1}}}$"
    is_invalid = f"!{{ var(txn.class) -m reg {quote(pattern)} }}"
    yield (
        f"http-request {_problem_response(INVALID_CLASS)} if {{ var(txn.class) -m found }}"
        f" {is_invalid}"
    )
    is_allowed = (
        f"{{ var(txn.who),concat({SEPARATOR},txn.class),map_str({settings.class_map}) -m found }}"
    )
    yield (
        f"http-request {_problem_response(_CLASS_NOT_ALLOWED)} if {{ var(txn.class) -m found"
        f" }} !{is_allowed}"
    )
    yield "http-request set-var(txn.class) str() if !{ var(txn.class) -m found }"


def _body_size_rules(settings: GateSettings) -> Iterator[str]:
    max_bytes = settings.max_body_bytes
    too_large = Problem(status=413, message=f"the request body is larger than {max_bytes} bytes")
    yield (
        f"http-request {_problem_response(too_large)} if {{ req.hdr_val(content-length) gt"
        f" {max_bytes} }}"
    )


def _shedding_rules(settings: GateSettings) -> Iterator[str]:
    paths = " ".join(path for path in GENERATION_PATHS)
    yield f"acl generates path {paths}"
    shed_map = settings.shed_map
    map_keys = (
        "var(txn.who)",
        f"var(txn.who),concat({SEPARATOR},txn.class)",
    )
    for key in map_keys:
        yield f"http-request set-var(txn.shed) {key},map_str({shed_map}) if generates METH_POST"
    # HAProxy inserts the number of the map into text and header of its answer.
    seconds = "%[var(txn.shed)]"
    refused = Problem(
        status=429,
        message="more of these requests are not taken for now; retry in"
        f" {_RETRY_AFTER_PLACEHOLDER} s",
    )
    answer = _problem_response(refused, with_retry_after=False).replace(
        _RETRY_AFTER_PLACEHOLDER, seconds
    )
    yield f"http-request {answer} hdr retry-after {seconds} if {{ var(txn.shed) -m found }}"


def _forwarding_rules() -> Iterator[str]:
    pattern = f"^{REQUEST_ID_CHARS}{{1,{MAX_REQUEST_ID_CHARS}}}$"
    is_single = "{ req.fhdr_cnt(x-request-id) eq 1 }"
    yield (
        "http-request set-var(txn.name) req.fhdr(x-request-id)"
        f" if {is_single} {{ req.fhdr(x-request-id) -m reg {quote(pattern)} }}"
    )
    yield "http-request set-var(txn.name) uuid() if !{ var(txn.name) -m found }"
    for header in sorted(pattern.decode() for pattern in STRIPPED_HEADERS):
        yield f"http-request del-header {header}"
    yield f"http-request del-header {BATON_HEADER_PREFIX.decode()} -m beg"
    request_id = SEPARATOR.join(f"%[var(txn.{word})]" for word in ("name", "who", "class"))
    yield f"http-request set-header x-request-id {request_id}%[var(txn.session)]"


def _session_rules(settings: GateSettings) -> Iterator[str]:
    """Put `+` and a digest of the session's name into `txn.session`, if the client names one.

    Only the part of the body in HAProxy's buffer (`_BUFFER_BYTES`) is read; `at-least` would not
    wait for more.
    """
    yield "http-request set-var(txn.session) str()"
    is_unset = "{ var(txn.session) -m len 0 }"
    digest = f"sha2(256),hex,lower,bytes(0,{_SESSION_DIGEST_CHARS})"
    session_value = f"str({SESSION_MARK}),concat(,txn.digest)"
    for header in (name.decode() for name in SESSION_HEADERS):
        has_name = f"{{ req.fhdr({header}) -m len gt 0 }}"
        yield (
            f"http-request set-var(txn.digest) req.fhdr({header}),{digest} if {is_unset} {has_name}"
        )
        yield f"http-request set-var(txn.session) {session_value} if {is_unset} {has_name}"
    wait_s = _HEADER_TIMEOUT_S  # no longer than for a head
    yield f"http-request wait-for-body time {wait_s}s if generates METH_POST {is_unset}"
    # Searching for a word costs far less than parsing JSON.
    has_name = f"{{ req.body -m sub {SESSION_FIELD} }}"
    key = f"req.body,json_query('$.{SESSION_FIELD}')"
    needs_body = f"generates METH_POST {is_unset} {has_name}"
    yield f"http-request set-var(txn.key_name) {key} if {needs_body}"
    has_body_name = f"{is_unset} {{ var(txn.key_name) -m len gt 0 }}"
    yield f"http-request set-var(txn.digest) var(txn.key_name),{digest} if {has_body_name}"
    yield f"http-request set-var(txn.session) {session_value} if {has_body_name}"


def _problem_response(problem: Problem, *, with_retry_after: bool = True) -> str:
    types = {
        ANTHROPIC: error_type(problem.status, Dialect.ANTHROPIC),
        OPENAI: error_type(problem.status, Dialect.OPENAI),
    }
    body = error_body(problem.status, problem.message, types, param=problem.param)
    headers = problem.headers() if with_retry_after else []
    header_options = " ".join(_header_option(name, value) for name, value in headers)
    response = f"return status {problem.status} content-type application/json lf-string {body}"
    return f"{response} {header_options}".rstrip()


def _header_option(name: bytes, value: bytes) -> str:
    return f"hdr {name.decode()} {quote(value.decode().replace('%', '%%'))}"
