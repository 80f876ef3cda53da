"""The protections at the edges: links, who is let in, and what holds the deployment together."""

from __future__ import annotations

from tests.chaos.mutation import Mutation

_LINK = "platform/baton/runtime/link"
_FRONT = "platform/baton/engine/vllm"
_SERVING = "platform/baton/serving"
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
        "noticing a step that is missing",
        f"{_LINK}/connection.py",
        "if seq != self._next_seq:",
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
        f"{_FRONT}/frontend_gate.py",
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
        'return _unauthorized("this API key is not known")',
        "return DEFAULT_TENANT",
        _ACCESS,
    ),
    Mutation(
        "the refusal of a caller without a key",
        f"{_FRONT}/frontend_access.py",
        "return DEFAULT_TENANT if self.anonymous else _MISSING",
        "return DEFAULT_TENANT",
        _ACCESS,
    ),
    Mutation(
        "keeping credentials from vLLM's handlers",
        f"{_FRONT}/frontend_access.py",
        "not in _CREDENTIALS",
        "is not None",
        _ACCESS,
    ),
    Mutation(
        "taking off headers that are ours to set",
        f"{_FRONT}/frontend_access.py",
        "and lower not in _OURS",
        "and lower is not None",
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


DEPLOYMENT = (
    Mutation(
        "a controller that takes over holds still for a window",
        f"{_SERVING}/takeover.py",
        "self._pending = self._pending or another_acted",
        "self._pending = False",
        ("tests/serving/test_takeover.py",),
    ),
    Mutation(
        "time in which nobody was heard was not watched",
        f"{_SERVING}/takeover.py",
        "if self._since_s is None and heard:",
        "if self._since_s is None:",
        ("tests/serving/test_takeover.py",),
    ),
    Mutation(
        "what was used outlives its controller",
        f"{_SERVING}/usage_memory.py",
        "return own if self._before is None else self._before + own",
        "return own",
        ("tests/serving/test_usage_memory.py",),
    ),
    Mutation(
        "a deployment's holder is known after the wall clock was set",
        f"{_SERVING}/cluster_state.py",
        "return process_ticks(self.pid) == self.pid_started_ticks",
        "pass",
        ("tests/serving/test_cluster_state.py",),
    ),
    Mutation(
        "a dead side channel has its replica replaced",
        f"{_SERVING}/own_side_channel.py",
        'return self._why if self._failures >= self._timing.failures else ""',
        'return ""',
        ("tests/serving/test_broken_parts.py",),
    ),
    Mutation(
        "what runs on a replica that is to be replaced ends first",
        f"{_SERVING}/replica.py",
        "if host.drained.is_set():",
        "if host is not None:",
        ("tests/serving/test_broken_parts.py",),
    ),
    Mutation(
        "a new quota desk gives out nothing that is still had",
        f"{_SERVING}/quota_desk.py",
        " or not shares.keys() <= self._told.keys()",
        "",
        ("tests/serving/test_quota_desk.py",),
    ),
    Mutation(
        "Serve's timers begin anew when the clock was set back",
        f"{_SERVING}/clock_watch.py",
        "if back_s > _STEP_S:",
        "if back_s > 1e9:",
        ("tests/serving/test_clock_watch.py",),
    ),
    Mutation(
        "lookups that hang take one thread",
        f"{_SERVING}/membership.py",
        "await loop.run_in_executor(self._looking, self._find_controller)",
        "await asyncio.to_thread(self._find_controller)",
        ("tests/serving/test_membership.py",),
    ),
    Mutation(
        "a full disk stops nobody who logs",
        "platform/baton/telemetry/logs.py",
        "if not isinstance(sys.exc_info()[1], OSError):",
        "if record:",
        ("tests/telemetry/test_logs.py",),
    ),
)

EDGES: tuple[Mutation, ...] = (*LINK, *ACCESS, *DEPLOYMENT)
