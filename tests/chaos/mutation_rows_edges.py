"""The protections at the edges: links, who is let in."""

from __future__ import annotations

from tests.chaos.mutation import Mutation

_LINK = "platform/baton/runtime/link"
_FRONT = "platform/baton/engine/vllm"
_CONVERSATION = ("tests/runtime/test_link_conversation.py",)
_LINK_FAULTS = ("tests/runtime/test_link_faults.py",)
_GATE = ("tests/engine/test_frontend_gate.py",)
_ACCESS = ("tests/engine/test_frontend_access.py",)
_KEYS = ("tests/runtime/test_keys.py",)

LINK = (
    Mutation(
        "noticing a replica that says nothing",
        f"{_LINK}/connection.py",
        "self._lose(LossReason.SILENT)",
        "pass",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "noticing a coordinator that says nothing",
        f"{_LINK}/server.py",
        "self._drop(session, frames.Goodbye(Parting.SILENT))",
        "pass",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "a coordinator's beats to a replica that has something to do",
        f"{_LINK}/connection.py",
        "(self._idle_beats if self._idle else 1)",
        "self._idle_beats",
        ("tests/runtime/test_link_idle.py",),
    ),
    Mutation(
        "a replica's beats to whoever waits for something",
        f"{_LINK}/server.py",
        "due or session.legs or beat.load.requests or beat != session.said",
        "due or beat != session.said",
        ("tests/runtime/test_link_idle.py",),
    ),
    Mutation(
        "noticing a step that is missing",
        f"{_LINK}/connection.py",
        "if step.seq != self._next_seq:",
        "if False:",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "ending a session that sends what is no frame",
        f"{_LINK}/server.py",
        "self._drop(session, frames.Goodbye(Parting.BAD_FRAME, str(error)))",
        "pass",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "the bound on coordinators of a replica",
        f"{_LINK}/server.py",
        "if len(self._sessions) >= self._options.max_coordinators:",
        "if False:",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "knowing the replica that was meant",
        f"{_LINK}/connection.py",
        "if facts.replica_id != self.replica_id:",
        "if False:",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "senseless figures of a replica",
        f"{_LINK}/connection.py",
        "if is_sane(figures):",
        "if True:",
        _CONVERSATION + _LINK_FAULTS,
    ),
)

ACCESS = (
    Mutation(
        "the list of routes",
        f"{_FRONT}/frontend_gate.py",
        "path in self._paths and scope",
        "True and scope",
        _GATE,
    ),
    Mutation(
        "the status that goes out with a keep-alive comment",
        f"{_FRONT}/frontend_gate.py",
        "waits = self._is_stream and body.startswith(_COMMENT)",
        "waits = False",
        (*_GATE, "-k", "keeps_a_connection"),
    ),
    Mutation(
        "errors of a handler's own are told without its text",
        f"{_FRONT}/frontend_gate.py",
        "return self._is_stream and self._dialect is Dialect.ANTHROPIC",
        "return False",
        (*_GATE, "-k", "handlers_own"),
    ),
    Mutation(
        "a stream that a handler breaks off before its first token has a status",
        f"{_FRONT}/frontend_llm.py",
        "exchange.problem = told_by_vllm(",
        "_ = (",
        ("tests/compat/test_compat_errors.py", "-k", "bad_request_has_a_status"),
    ),
    Mutation(
        "arguments of an API server that would do nothing are refused",
        "platform/baton/config/api_arguments.py",
        "if name in REFUSED:",
        "if not name:",
        ("tests/config/test_api_keys.py",),
    ),
    Mutation(
        "the bound on a body that comes in pieces",
        f"{_FRONT}/frontend_body.py",
        "if self._bytes > self._max_bytes:",
        "if False:",
        _GATE,
    ),
    Mutation(
        "the refusal at the door before a body is read",
        f"{_FRONT}/frontend_gate.py",
        "if generates and (refusal := self._admit(1, caller)) is not None:",
        "if False and (refusal := self._admit(1, caller)) is not None:",
        _GATE,
    ),
    Mutation(
        "the comparison of a key's secret",
        "platform/baton/runtime/keys.py",
        "if key is None or not same:",
        "if key is None:",
        _KEYS,
    ),
    Mutation(
        "revocation and expiry of a key",
        "platform/baton/runtime/keys.py",
        "if state is not KeyState.ACTIVE:",
        "if False:",
        _KEYS,
    ),
    Mutation(
        "the refusal of a key that is not known",
        f"{_FRONT}/frontend_access.py",
        "return UNKNOWN_KEY",
        "return DEFAULT_TENANT",
        _ACCESS,
    ),
    Mutation(
        "the refusal of a caller without a key",
        f"{_FRONT}/frontend_access.py",
        "return DEFAULT_TENANT if self.anonymous else MISSING_KEY",
        "return DEFAULT_TENANT",
        _ACCESS,
    ),
    Mutation(
        "keeping credentials from vLLM's handlers",
        f"{_FRONT}/frontend_access.py",
        "TAKEN_OFF = _CREDENTIALS | _OURS | TRACE_HEADERS",
        "TAKEN_OFF = _OURS | TRACE_HEADERS",
        _ACCESS,
    ),
    Mutation(
        "taking off headers that are ours to set",
        f"{_FRONT}/frontend_access.py",
        "TAKEN_OFF = _CREDENTIALS | _OURS | TRACE_HEADERS",
        "TAKEN_OFF = _CREDENTIALS | TRACE_HEADERS",
        _ACCESS,
    ),
    Mutation(
        "who asks, which a client cannot say for itself",
        f"{_FRONT}/callers.py",
        "if name not in OUR_ARGS}",
        "if name is not None}",
        ("tests/engine/test_frontend_seam.py", "tests/engine/test_frontend_access.py"),
    ),
    Mutation(
        "a tenant's own cache",
        f"{_FRONT}/salts.py",
        'return f"{_OURS}tenant:{cache_scope}"',
        "return None",
        ("tests/engine/test_frontend_access.py", "tests/engine/test_frontend_seam.py"),
    ),
    Mutation(
        "salts that look like a tenant's",
        f"{_FRONT}/salts.py",
        'return f"{_OURS}shared:{cache_salt}"',
        "return cache_salt",
        ("tests/engine/test_frontend_access.py", "tests/engine/test_frontend_seam.py"),
    ),
    Mutation(
        "a key that may not administer",
        f"{_FRONT}/frontend_access.py",
        "return found if found.administers else NO_ADMINISTRATOR",
        "return found",
        _ACCESS,
    ),
    Mutation(
        "the places in which added adapters must lie",
        "platform/baton/control/adapter_registry.py",
        "if not any(lies_in(plain, place) for place in rules.places):",
        "if False:",
        ("tests/control/test_adapter_registry.py",),
    ),
    Mutation(
        "the bound on added adapters of a model",
        "platform/baton/control/adapter_registry.py",
        "if len(of_model) >= rules.limit:",
        "if False:",
        ("tests/control/test_adapter_registry.py",),
    ),
    Mutation(
        "a key of its own for each load of an adapter",
        "platform/baton/control/adapter_registry.py",
        'return f"{name}{_MARK}{number}"',
        "return name",
        ("tests/control/test_adapter_registry.py", "tests/compat/test_compat_adapters.py"),
    ),
    Mutation(
        "keeping an unloaded adapter while a request needs it",
        "platform/baton/serving/adapter_desk.py",
        "quiet = needed is not None and not needed.get(key)",
        "quiet = True",
        ("tests/serving/test_adapter_desk.py",),
    ),
    Mutation(
        "one writer of each version of the registry of adapters",
        "platform/baton/serving/adapter_store.py",
        "self._store.put(_key(registry.version), data, overwrite=False)",
        "self._store.put(_key(registry.version), data, overwrite=True)",
        ("tests/serving/test_adapter_desk.py",),
    ),
    Mutation(
        "links out of the places in which added adapters must lie",
        "platform/baton/engine/adapter_files.py",
        "real.is_relative_to(Path(one).resolve())",
        "path.is_relative_to(Path(one))",
        ("tests/engine/test_adapter_files.py",),
    ),
    Mutation(
        "sessions of one tenant that steer no other's",
        f"{_FRONT}/callers.py",
        'return f"{caller.tenant}/{session_id}"',
        "return session_id",
        ("tests/engine/test_frontend_sessions.py", "tests/engine/test_rust_callers.py"),
    ),
    Mutation(
        "a tenant's sessions, which another with many cannot push out",
        "platform/baton/control/sessions.py",
        "max(self._by_tenant.items(), key=lambda item: len(item[1]))",
        "next(iter(self._by_tenant.items()))",
        ("tests/control/test_sessions.py",),
    ),
    Mutation(
        "the length of a session's name",
        f"{_FRONT}/callers.py",
        "if len(session_id) > MAX_SESSION_CHARS:",
        "if False:",
        ("tests/engine/test_frontend_sessions.py",),
    ),
    Mutation(
        "a time to come back that is never too early",
        "platform/baton/domain/retry_after.py",
        "return math.ceil(",
        "return round(",
        ("tests/domain/test_retry_after.py",),
    ),
    Mutation(
        "the longest time to come back, for a limit of nothing per second",
        "platform/baton/domain/retry_after.py",
        "min(max(wait_s, LEAST_S), MOST_S)",
        "max(wait_s, LEAST_S)",
        ("tests/domain/test_retry_after.py",),
    ),
    Mutation(
        "where an adapter is kept, which a request cannot say",
        f"{_FRONT}/wire.py",
        "adapter, engine_request.lora_request = engine_request.lora_request, None",
        "adapter = engine_request.lora_request",
        ("tests/engine/test_vllm_wire.py",),
    ),
    Mutation(
        "the token of metrics and console",
        "platform/baton/serving/access_token.py",
        'if _has(scope["headers"], wanted.encode()):',
        "if True:",
        ("tests/serving/test_metrics_endpoint.py",),
    ),
    Mutation(
        "the console reads only",
        "platform/baton/console/guard.py",
        'if scope["method"] != "GET":',
        "if False:",
        ("tests/console/test_app.py",),
    ),
)


EDGES: tuple[Mutation, ...] = (*LINK, *ACCESS)
