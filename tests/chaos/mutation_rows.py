"""The protections of the brain: deadlines, recovery, books, bounds, fairness, pairs, scaling."""

from __future__ import annotations

from tests.chaos.mutation import Mutation
from tests.chaos.mutation_rows_deployed import DEPLOYED
from tests.chaos.mutation_rows_edges import EDGES

_CONTROL = "platform/baton/control"
_LINK = "platform/baton/runtime/link"
_STEPS = "platform/baton/engine/vllm/step_budget.py"
_COORDINATOR = ("tests/control/test_coordinator.py", "tests/control/test_coordinator_placement.py")
_REFUSALS = ("tests/control/test_refusals.py",)
_FROM_ZERO = ("tests/control/test_from_zero.py",)
_EARLY = ("tests/control/test_early_first_token.py",)
_CONVERSATION = ("tests/runtime/test_link_conversation.py",)
_LINK_FAULTS = ("tests/runtime/test_link_faults.py",)

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
        "self.wait_until(entry, now_s + self._transfer_limit_s(entry))",
        "pass",
        _COORDINATOR,
    ),
    Mutation(
        "the time of a transfer of many bytes",
        f"{_CONTROL}/journey.py",
        "return max(self.limits.transfer_s, longest_s)",
        "return self.limits.transfer_s",
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
        "self._journeys.wait_until(entry, now_s + self._queue_wait_s(now_s))",
        "self._journeys.wait_until(entry, now_s + 1e6)",
        _COORDINATOR,
    ),
    Mutation(
        "the bound on a wait for a cold start",
        f"{_CONTROL}/cold_wait.py",
        "return 0.0 if is_known and self.left_s(now_s) > self.most_s else self.most_s",
        "return 1e6",
        _FROM_ZERO,
    ),
    Mutation(
        "the wait of a request that has a replica started",
        f"{_CONTROL}/turns.py",
        "return wait_s if self.has_replica else max(wait_s, self.cold.waits_s(now_s))",
        "return wait_s",
        _FROM_ZERO,
    ),
    Mutation(
        "that a wait for a replica is not judged as one for a turn",
        f"{_CONTROL}/knowledge.py",
        "now_s - request.arrived_at_s - entry.no_replica_s(now_s))",
        "now_s - request.arrived_at_s)",
        _FROM_ZERO,
    ),
    Mutation(
        "that clients come back when a cold start is over",
        f"{_CONTROL}/turns.py",
        "return max(wait_s, self.cold.left_s(now_s))",
        "return wait_s",
        _FROM_ZERO,
    ),
    Mutation(
        "that the load of an adapter is no queue",
        "platform/baton/policy/replica_cost.py",
        "return self.backlog_s + self.room_wait_s",
        "return self.backlog_s + self.room_wait_s + self.adapter_s",
        ("tests/control/test_service.py", "tests/policy/test_adapter_locality.py"),
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
        "going on elsewhere when a replica is lost",
        f"{_CONTROL}/coordinator.py",
        "recovery.broken(entry, event.replica_id, why, now_s, trouble=Trouble.LOST)",
        "recovery._journeys.running.drop(entry, now_s)",
        _COORDINATOR,
    ),
    Mutation(
        "staying away from a replica that has just failed a request",
        f"{_CONTROL}/recovery.py",
        "entry.avoid |= {replica_id}",
        "pass",
        _COORDINATOR,
    ),
    Mutation(
        "giving a request up that fails everywhere",
        f"{_CONTROL}/recovery.py",
        "if entry.failures > self._journeys.limits.max_failures:",
        "if entry.failures > 10_000:",
        _COORDINATOR,
    ),
    Mutation(
        "answering once what an engine finds wrong with a request",
        f"{_CONTROL}/leg_events.py",
        "elif output.finish in REFUSALS:",
        "elif False:",
        _REFUSALS,
    ),
    Mutation(
        "the bound on replicas that die with one request",
        f"{_CONTROL}/recovery.py",
        "if trouble is Trouble.LOST and entry.crashes >= _MOST_CRASHES:",
        "if False:",
        _REFUSALS,
    ),
    Mutation(
        "telling a request that is wrong from an engine that failed",
        "platform/baton/engine/vllm/wire.py",
        "if finish is FinishReason.ERROR and (told := refusal(stop_reason)) is not None:",
        "if False and (told := refusal(stop_reason)) is not None:",
        ("tests/engine/test_refusals.py",),
    ),
    Mutation(
        "one replica for a prompt whose handoff has failed",
        f"{_CONTROL}/recovery.py",
        "entry.local_only, trouble = LocalOnly.HANDOFF_FAILED, Trouble.HANDOFF",
        "trouble = Trouble.HANDOFF",
        _COORDINATOR,
    ),
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
        "the abort of what a client has left",
        f"{_CONTROL}/journey.py",
        "self.recovery.abort(entry, LegEnd.CANCELLED, now_s)",
        "self.running.drop(entry, now_s)",
        _COORDINATOR,
    ),
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
    Mutation(
        "the blocks of a first token that is the last",
        f"{_CONTROL}/journey.py",
        "if (ticket := output.ticket) is not None:\n            lease",
        "if (ticket := output.ticket) is not None and False:\n            lease",
        _EARLY,
    ),
    Mutation(
        "no early first token of what cannot go on elsewhere",
        f"{_CONTROL}/coordinator.py",
        "self._limits.early_first_token and request.resumable",
        "self._limits.early_first_token",
        _EARLY,
    ),
    Mutation(
        "no token of a prefix that is fetched",
        f"{_CONTROL}/journey.py",
        "if route.prefill_tokens is not None or decoder is None or not decoder.facts.goes_on:",
        "if decoder is None or not decoder.facts.goes_on:",
        _COORDINATOR,
    ),
)

BOUNDS = (
    Mutation(
        "the bound on a part of a frame",
        f"{_LINK}/channel.py",
        "socket.setsockopt(zmq.MAXMSGSIZE, wire_bytes)",
        "pass",
        _CONVERSATION + _LINK_FAULTS,
    ),
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
        f"{_CONTROL}/pull_permits.py",
        "return len(self._counts_until_s) < self._limit",
        "return True",
        ("tests/control/test_pull_permits.py",),
    ),
    Mutation(
        "the deadline of a pull that holds up others",
        f"{_CONTROL}/pull_permits.py",
        "if until_s > now_s:",
        "if True:",
        ("tests/control/test_pull_permits.py",),
    ),
    Mutation(
        "throwing away blocks that a source has lost",
        "platform/baton/engine/vllm/connector.py",
        "if not kept:\n                self.xfer_stats",
        "if False:\n                self.xfer_stats",
        ("tests/engine/test_vllm_links.py",),
    ),
    Mutation(
        "asking a source before its blocks are used",
        "platform/baton/engine/vllm/connector.py",
        "if newly_done and handles and not newly_failed and self._ask_source(request_id):",
        "if False:",
        ("tests/engine/test_vllm_links.py",),
    ),
    Mutation(
        "asking a source before it may free its blocks",
        "platform/baton/engine/vllm/connector.py",
        'notif_msg = b""\n        return self._agent',
        "pass\n        return self._agent",
        ("tests/engine/test_vllm_links.py",),
    ),
    Mutation(
        "not believing a source that says nothing",
        "platform/baton/engine/vllm/lease_checks.py",
        "found.update((read.request_id, False) for read in asked.reads)\n\n\ndef _prepare",
        "found.update((read.request_id, True) for read in asked.reads)\n\n\ndef _prepare",
        ("tests/engine/test_lease_checks.py",),
    ),
    Mutation(
        "the simulated engine's own look whether blocks were kept",
        "platform/baton/simulator/engine/core.py",
        "if not kept:\n            self._meters.void()",
        "if False:\n            self._meters.void()",
        ("tests/simulator/test_sim_core_pulls.py",),
    ),
    Mutation(
        "renewing the leases of legs that wait",
        "platform/baton/engine/sim/engine.py",
        "core.renew(leg_id, now_s)",
        "pass",
        ("tests/engine/test_sim_contract.py",),
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
        "the bound on rows of a histogram",
        "platform/baton/telemetry/histograms.py",
        "if len(self._rows) >= self._most_rows:",
        "if False:",
        ("tests/telemetry/test_histograms.py",),
    ),
    Mutation(
        "the bound on sets of edges whose series are told",
        "platform/baton/telemetry/histograms.py",
        "while len(self._former) >= MOST_EDGE_SETS:",
        "while False:",
        ("tests/telemetry/test_histograms.py",),
    ),
    Mutation(
        "the edges of histograms at timeouts",
        "platform/baton/telemetry/edges.py",
        "for edge_s in (*objectives, *deadlines)",
        "for edge_s in (*objectives,)",
        ("tests/telemetry/test_ingress_metrics.py", "tests/telemetry/test_edges.py"),
    ),
    Mutation(
        "quantiles by set of edges",
        "dashboards/goodput.json",
        "0.99, sum by (le, job, slo_class, model, pool, edges) (rate(baton_time_to_first_token_",
        "0.99, sum by (le, job, slo_class, model, pool) (rate(baton_time_to_first_token_",
        ("tests/dashboards/test_quantiles.py",),
    ),
    Mutation(
        "refusing who would be late",
        "platform/baton/policy/admission.py",
        "return Shed(Reason.TOO_LATE, ttft_s, latest_s, ttft_s - latest_s)",
        "pass",
        ("tests/policy/test_admission.py",),
    ),
    Mutation(
        "refusing whom a queue would keep until it is given up",
        "platform/baton/policy/admission.py",
        "return Shed(Reason.TOO_LATE, ttft_s, latest_s, late_s)",
        "pass",
        ("tests/policy/test_admission.py",),
    ),
    Mutation(
        "the smaller budget of a step that streams wait for",
        _STEPS,
        "scheduler.max_num_scheduled_tokens = decode_step_tokens",
        "pass",
        ("tests/engine/test_step_budget.py",),
    ),
    Mutation(
        "giving vLLM its whole budget back after a step",
        _STEPS,
        "scheduler.max_num_scheduled_tokens = whole",
        "pass",
        ("tests/engine/test_step_budget.py",),
    ),
    Mutation(
        "refusing a vLLM that has its budget from elsewhere",
        _STEPS,
        "if missing:",
        "if False:",
        ("tests/engine/test_step_budget.py",),
    ),
)

TRUST = (
    Mutation(
        "keeping requests from a replica that fails them",
        "platform/baton/policy/breakers.py",
        "return now_s >= state.open_until_s and not state.trials",
        "return True",
        ("tests/policy/test_breakers.py",),
    ),
    Mutation(
        "opening a circuit after failures in a row",
        "platform/baton/policy/breakers.py",
        "if state.failures < self._options.failures:",
        "if True:",
        ("tests/policy/test_breakers.py",),
    ),
    Mutation(
        "the budget of second tries",
        "platform/baton/policy/retry_budget.py",
        "if self._tries + 1 > self.allowed() * (1.0 if carries else _FRESH):",
        "if False:",
        ("tests/policy/test_retry_budget.py",),
    ),
    Mutation(
        "asking the budget before a request is tried again",
        f"{_CONTROL}/recovery.py",
        "return self.budget.take(now_s, carries=bool(entry.generated))",
        "return True",
        ("tests/control/test_recovery.py",),
    ),
    Mutation(
        "having whoever gets nowhere between two losses pay",
        f"{_CONTROL}/recovery.py",
        "(ails or trouble in _OUTSIDE) and len(entry.generated) > entry.excused_at_tokens",
        "ails or trouble in _OUTSIDE",
        ("tests/control/test_recovery.py",),
    ),
    Mutation(
        "carrying streams that got further over again for nothing",
        f"{_CONTROL}/recovery.py",
        "len(entry.generated) > entry.excused_at_tokens",
        "entry.excused_at_tokens < 0",
        ("tests/control/test_recovery.py",),
    ),
    Mutation(
        "leaving a replica that says nothing",
        f"{_CONTROL}/recovery.py",
        "self.leave(replica_id, Trouble.SILENT, why, now_s)",
        "pass",
        ("tests/control/test_recovery.py",),
    ),
    Mutation(
        "the patience with who has nothing to do, at its end once it has",
        f"{_CONTROL}/health.py",
        "self._silences.works(replica_id, now_s)",
        "pass",
        ("tests/control/test_recovery.py",),
    ),
    Mutation(
        "leaving a replica whose engine hangs",
        f"{_CONTROL}/recovery.py",
        "if not self._health.is_still(replica_id, now_s, for_s=_ALMOST * stall_s):",
        "if True:",
        ("tests/control/test_recovery.py",),
    ),
    Mutation(
        "an honest error for what cannot be carried over",
        f"{_CONTROL}/recovery.py",
        "return bool(entry.generated) and not entry.request.resumable",
        "return False",
        (*_COORDINATOR, "tests/control/test_recovery.py"),
    ),
    Mutation(
        "one hedge for a request",
        f"{_CONTROL}/recovery.py",
        "entry.hedged = True",
        "pass",
        ("tests/control/test_recovery.py",),
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
        "no replica is replaced for its agent where many look broken",
        "platform/baton/policy/broken_agents.py",
        "if not suspects or len(suspects) > max(1.0, targets * rules.most_fraction):",
        "if not suspects:",
        ("tests/policy/test_broken_agents.py", "tests/control/test_agent_watch.py"),
    ),
    Mutation(
        "no replica is replaced for its agent on the word of a source that serves nobody else",
        "platform/baton/policy/broken_agents.py",
        "if served_others_at_s.get(pair.source_id, never) > pair.failing_since_s",
        "if served_others_at_s is not None",
        ("tests/policy/test_broken_agents.py", "tests/control/test_agent_watch.py"),
    ),
    Mutation(
        "one replica at a time is replaced for its agent",
        "platform/baton/policy/broken_agents.py",
        "if since_last_s is not None and since_last_s < rules.pause_s:",
        "if False:",
        ("tests/policy/test_broken_agents.py", "tests/control/test_agent_watch.py"),
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
    *TRUST,
    *FAIRNESS,
    *PAIRS,
    *SCALING,
    *EDGES,
    *DEPLOYED,
)
