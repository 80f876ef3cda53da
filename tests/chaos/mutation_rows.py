"""The protections, where each is, how it is taken away, and the tests that must notice.

`old` is a text that is in its file once. Tests are what pytest is given.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One protection."""

    what: str
    """What is taken away."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_CONTROL = "platform/baton/control"
_LINK = "platform/baton/runtime/link"
_FRONT = "platform/baton/engine/vllm"
_COORDINATOR = ("tests/control/test_coordinator.py", "tests/control/test_coordinator_placement.py")
_CONVERSATION = ("tests/runtime/test_link_conversation.py",)
_LINK_FAULTS = ("tests/runtime/test_link_faults.py",)
_GATE = ("tests/engine/test_frontend_gate.py",)
_ACCESS = ("tests/engine/test_frontend_access.py",)
_KEYS = ("tests/runtime/test_keys.py",)

DEADLINES = (
    Mutation(
        "the deadline of a stream that stalls",
        f"{_CONTROL}/journey.py",
        "self.wait_until(entry, now_s + self.limits.stall_s)",
        "pass",
        _COORDINATOR,
    ),
    Mutation(
        "the deadline of a transfer",
        f"{_CONTROL}/journey.py",
        "min(now_s + self.limits.transfer_s, entry.first_token_due_at_s)",
        "entry.first_token_due_at_s",
        _COORDINATOR,
    ),
    Mutation(
        "the deadline of a whole request",
        f"{_CONTROL}/journey.py",
        "min(at_s, entry.total_deadline_at_s))",
        "at_s)",
        _COORDINATOR,
    ),
    Mutation(
        "the deadline of those who wait for a replica",
        f"{_CONTROL}/turns.py",
        "self._journeys.wait_until(entry, now_s + wait_s)",
        "self._journeys.wait_until(entry, now_s + 1e6)",
        _COORDINATOR,
    ),
    Mutation(
        "the deadline of an abort that nobody confirms",
        f"{_CONTROL}/coordinator.py",
        "for closing in self._legs.take_overdue(now_s):",
        "for closing in ():",
        _COORDINATOR,
    ),
    Mutation(
        "the deadline of a probe's step",
        f"{_CONTROL}/pairs.py",
        "self._overdue(self._probes[probe_id], now_s)",
        "self._deadlines.arm(probe_id, now_s + 1e6)",
        ("tests/control/test_pairs.py",),
    ),
)

RECOVERY = (
    Mutation(
        "the tokens that a resumed stream has already",
        f"{_CONTROL}/ledger.py",
        "return (*prompt, *self.generated) if self.generated else prompt",
        "return prompt",
        _COORDINATOR,
    ),
    Mutation(
        "the tokens that a resumed stream has still to get",
        f"{_CONTROL}/ledger.py",
        "max_tokens=request.max_tokens - done",
        "max_tokens=request.max_tokens",
        _COORDINATOR,
    ),
)

BOOKS = (
    Mutation(
        "the release of blocks that nobody will fetch",
        f"{_CONTROL}/journey.py",
        "if entry.lease is not None:\n            self.release_lease",
        "if False:\n            self.release_lease",
        _COORDINATOR,
    ),
    Mutation(
        "the release of blocks whose ticket comes late",
        f"{_CONTROL}/leg_events.py",
        "self._journeys.release_lease(lease, now_s)",
        "pass",
        _COORDINATOR,
    ),
    Mutation(
        "aborting what nobody waits for when a coordinator is gone",
        f"{_LINK}/server.py",
        "self._handler.orphan(tuple(session.legs))",
        "pass",
        _CONVERSATION + _LINK_FAULTS,
    ),
    Mutation(
        "no new work for a replica that drains",
        f"{_CONTROL}/coordinator.py",
        "self._fleet.drain(event.replica_id)",
        "pass",
        _COORDINATOR,
    ),
    Mutation(
        "the bound on streams that are moved at a time",
        f"{_CONTROL}/draining.py",
        "chosen = chosen[: max(0, self._limits.drain_moves - len(self._moving))]",
        "pass",
        ("tests/control/test_draining.py",),
    ),
    Mutation(
        "refusing legs while draining",
        "platform/baton/runtime/replica_host.py",
        "if self._draining:\n            self._server.leg_failed",
        "if False:\n            self._server.leg_failed",
        ("tests/runtime/test_replica_host.py", "tests/runtime/test_draining.py"),
    ),
)

BOUNDS = (
    Mutation(
        "the bound on requests in flight",
        f"{_CONTROL}/coordinator.py",
        "if len(self._journeys.entries) > limits.max_requests:",
        "if False:",
        _COORDINATOR,
    ),
    Mutation(
        "the bound on requests that wait",
        f"{_CONTROL}/turns.py",
        "if len(self.waiters) < self._journeys.limits.max_queued or",
        "if True or",
        _COORDINATOR,
    ),
    Mutation(
        "the bound on legs in a replica",
        "platform/baton/runtime/replica_host.py",
        "elif self.live_legs > self._options.max_live_legs:",
        "elif False:",
        ("tests/runtime/test_replica_host.py",),
    ),
    Mutation(
        "the bound on pulls at a time",
        "platform/baton/runtime/desk.py",
        "if self._max_pulls is None or len(self._pulling) < self._max_pulls:",
        "if True:",
        ("tests/runtime/test_pull_limit.py",),
    ),
    Mutation(
        "the bound on what the prefix index keeps",
        "platform/baton/policy/prefix_index.py",
        "if room <= 0:",
        "room = len(blocks)\n            if room <= 0:",
        ("tests/policy/test_prefix_index.py",),
    ),
    Mutation(
        "the bound on values of a label",
        "platform/baton/telemetry/families.py",
        "if len(values) >= self._most_values:",
        "if False:",
        ("tests/telemetry/test_families.py",),
    ),
    Mutation(
        "refusing who would be late",
        "platform/baton/policy/admission.py",
        "return Shed(Reason.TOO_LATE, ttft_s, latest_s, ttft_s - latest_s)",
        "pass",
        ("tests/policy/test_admission.py",),
    ),
)

FAIRNESS = (
    Mutation(
        "the weights of tenants",
        "platform/baton/policy/fair_queue.py",
        "flow.tag += one.work / one.weight",
        "flow.tag += one.work",
        ("tests/policy/test_fair_queue.py",),
    ),
    Mutation(
        "turns between tenants",
        "platform/baton/policy/fair_queue.py",
        "flow = min(self._backlogged.values(), key=_turn)",
        "flow = next(iter(self._backlogged.values()))",
        ("tests/policy/test_fair_queue.py",),
    ),
    Mutation(
        "a tenant's requests at a time",
        f"{_CONTROL}/tenancy.py",
        "if places is not None and account.in_flight >= places:",
        "if False:",
        ("tests/control/test_tenancy.py",),
    ),
    Mutation(
        "a tenant's rates",
        f"{_CONTROL}/tenancy.py",
        "if wait_s > 0:",
        "if False:",
        ("tests/control/test_tenancy.py",),
    ),
)

PAIRS = (
    Mutation(
        "the quarantine of a pair whose probe fails",
        f"{_CONTROL}/pairs.py",
        "self._links.probe_failed(*ends, now_s, why)",
        "pass",
        ("tests/control/test_pairs.py",),
    ),
    Mutation(
        "no transfer over a pair in quarantine",
        "platform/baton/policy/links.py",
        "if link.state is LinkState.QUARANTINED:\n            return None",
        "if False:\n            return None",
        ("tests/policy/test_links.py",),
    ),
    Mutation(
        "the blocks that a probe must have moved to end a quarantine",
        f"{_CONTROL}/pairs.py",
        "self._links.probe_ok(*ends, now_s, took_s=moved_s, moved_bytes=moved_bytes)",
        "self._links.probe_ok(*ends, now_s, took_s=took_s, moved_bytes=moved_bytes)",
        ("tests/control/test_pairs.py",),
    ),
    Mutation(
        "no handoff between engines whose blocks differ",
        "platform/baton/policy/choosing.py",
        "if source.facts.layout != target.facts.layout:",
        "if False:",
        ("tests/policy/test_choosing.py", "tests/policy/test_placement.py"),
    ),
    Mutation(
        "the stand-in for a policy that fails",
        "platform/baton/policy/choosing.py",
        "if type(index) is not int or not 0 <= index < len(views):",
        "if False:",
        ("tests/policy/test_choosing.py",),
    ),
)

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
        "blaming nobody for one's own stall",
        f"{_LINK}/connection.py",
        "self._heard_at_s = min(now_s, self._heard_at_s + stalled_s)",
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

SCALING = (
    Mutation(
        "holding when an observation is no number",
        f"{_CONTROL}/scaling_doubts.py",
        "if not math.isfinite(value) or abs(value) > _MOST:",
        "if False:",
        ("tests/control/test_autoscaler.py",),
    ),
    Mutation(
        "holding when reports are missing",
        f"{_CONTROL}/scaling_doubts.py",
        "yield from seen.missing",
        "yield from ()",
        ("tests/control/test_autoscaler.py",),
    ),
    Mutation(
        "not believing a report that cannot be",
        f"{_CONTROL}/report_checks.py",
        "if not math.isfinite(value):",
        "if False:",
        ("tests/control/test_observing.py",),
    ),
)

ROWS: tuple[Mutation, ...] = (
    *DEADLINES,
    *RECOVERY,
    *BOOKS,
    *BOUNDS,
    *FAIRNESS,
    *PAIRS,
    *LINK,
    *ACCESS,
    *SCALING,
)
