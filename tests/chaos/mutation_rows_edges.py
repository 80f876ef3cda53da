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
        "path not in self._paths",
        "False",
        _GATE,
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
