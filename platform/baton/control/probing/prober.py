"""The pair prober: whether each prefill replica can hand blocks to each decode replica.

Theory of operation. A probe of a pair begins with CHECK: the target asks the source's side channel.
A *whole* probe continues with PREFILL (the source computes a prompt of one block and a token) and
PULL (the target fetches the block and decodes one token). Pairs that are unknown, quarantined,
suspect or slow get whole probes; others rarely, and none while requests' own pulls prove the pair.
Prompts are random, so no prefix cache hides the transfer. A target that computed the prompt itself
did not get the block: that probe has failed.

A probe has one of three results. FAILED quarantines the link, and the next probe comes after 1 s,
2 s, 4 s, ... 30 s. OK ends a quarantine if the probe was whole. UNCLEAR changes nothing: a failure
before the pull, or for want of room, shows nothing about the pair. An overload must not quarantine
links.

Its legs are in the same `LegTable` as those of requests; `owns` tells them apart. A leg that it
gave up is *closing* there, and the coordinator handles its late KV handle and its lease. Every step
has a deadline. A lease is released when its pull did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegTable
from baton.control.probing.notices import PairNotice, PairNotices
from baton.control.probing.schedule import Pair, PairSchedule
from baton.control.state.deadlines import Deadlines
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import (
    AbortLegs,
    CheckSideChannel,
    Command,
    ReleaseLease,
    ReportFailedAgent,
    SubmitLeg,
)
from baton.domain.events import LegFailed, SideChannelChecked
from baton.domain.fleet import ReplicaFacts
from baton.domain.handoff import KvHandle, Lease, Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.policy.links.estimates import LinkState, LinkTable
from baton.policy.placement.port import choose_releaser
from baton.policy.resilience.failed_agents import (
    AgentRules,
    PullHistory,
    agent_failure_reason,
    choose_replacement,
)

PROBE_PREFIX = "probe-"
"""Request ids of probes start so; those of clients have the frontend's own prefixes."""
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 3, 66
"""Beyond the special tokens of common vocabularies, and within the smallest."""
_FAILED_FINISHES = frozenset(
    {FinishReason.ERROR, FinishReason.ABORT, FinishReason.INVALID, FinishReason.REJECTED}
)
_LINK_FAILURES = frozenset(
    {
        *(LegFailure.ENGINE_ERROR, LegFailure.KV_LOAD_FAILED),
        *(LegFailure.REJECTED, LegFailure.INVALID),
    }
)
"""Of a pull: the others are about the target alone."""


class _ProbeStep(StrEnum):
    """Where a probe is."""

    CHECK = "side channel"
    PREFILL = "prefill"
    PULL = "pull"


@dataclass(slots=True)
class _Probe:
    """One probe under way. PREFILL and PULL have a leg, PULL a lease too."""

    probe_id: str
    pair: Pair
    with_transfer: bool
    prompt: tuple[int, ...] = ()
    step: _ProbeStep = _ProbeStep.CHECK
    leg_id: str | None = None
    lease: Lease | None = None
    step_started_at_s: float = 0.0
    """When its present step began."""
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """How often pairs are checked and how long each step may take."""

    interval_s: float = 5.0
    """Between two checks of a pair, give or take a tenth, so that coordinators do not march in
    step."""
    deadline_s: float = 2.0
    """For each step."""
    answer_s: float = 1.5
    """How much longer than that a replica may take to say that a check got no answer."""
    first_transfer_s: float = 10.0
    """For a pair's first transfer, which includes the engines' handshake: seconds on some."""
    transfer_every_s: float = 60.0
    """A check moves blocks when none are known to have come over the pair for so long."""
    retry_s: float = 1.0
    """The pause after a first failure; it doubles with each further one, ..."""
    max_retry_s: float = 30.0
    """... up to this."""
    max_running: int = 8
    """Probes under way at once."""
    max_per_s: float = 20.0
    """Probes begun per second, beyond a burst of `max_running`: a fleet of more than a hundred
    pairs is swept less often than every five seconds."""
    max_partners: int = 32
    """With how many others a replica is paired each way when it joins; in fleets of no more
    sources and targets than that every pair is checked."""


class _ProbeOutcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


class PairProber:
    """Probes pairs; each method returns what is to be done, in order."""

    def __init__(
        self,
        *,
        limits: CoordinatorLimits,
        fleet: FleetTable,
        legs: LegTable,
        links: LinkTable,
        rng: Random,
        options: ProbeOptions | None = None,
    ) -> None:
        self._fleet = fleet
        self._legs = _ProbeLegs(limits=limits, fleet=fleet, legs=legs)
        self._links = links
        self._options = options or ProbeOptions()
        self._rng = rng
        self._schedule = PairSchedule(
            per_s=self._options.max_per_s,
            burst=self._options.max_running,
            partners=self._options.max_partners,
            rng=rng,
        )
        self._probes: dict[str, _Probe] = {}
        self._by_pair: dict[Pair, _Probe] = {}
        self._deadlines = Deadlines()
        self._notices = PairNotices(self._schedule)
        self._agent_detector = _FailedAgentDetector(
            self._schedule, links, self._notices, AgentRules()
        )
        self._started_count = 0
        self.ignored_events = 0
        """Answers that no probe waits for; late answers mostly."""

    def reconfigure(self, limits: CoordinatorLimits) -> None:
        """Go on by other limits."""
        self._legs.limits = limits

    # -------------------------------------------------------------- membership

    def on_replica_joined(self, facts: ReplicaFacts, now_s: float) -> list[Command]:
        """A replica is new in the fleet table: its pairs are probed at once."""
        if self._schedule.has_replica(facts.replica_id):
            self._remove_replica(facts.replica_id, now_s)
        self._schedule.add_replica(facts)
        return self._start_due_probes(now_s)

    def on_replica_removed(self, replica_id: str, now_s: float) -> list[Command]:
        """A replica drains or was lost (then the fleet table has forgotten it): end its probes.

        To be called before the coordinator looks through the legs that ran on it.
        """
        self._remove_replica(replica_id, now_s)
        return self._start_due_probes(now_s)

    def suspect(self, source_id: str, target_id: str, now_s: float) -> list[Command]:
        """A handoff failed on this pair: see soon whether it still works, by moving blocks."""
        pair = self._schedule.get_or_add(source_id, target_id)
        if pair is None:
            return []
        self._note_state(pair, now_s)
        if pair.suspect:
            return []
        pair.suspect = True
        recently_probed = now_s - pair.last_probe_at_s < self._options.retry_s
        if pair.queue_number and not pair.failures_in_row and not recently_probed:
            self._schedule.enqueue_urgent(pair)
        return self._start_due_probes(now_s)

    # -------------------------------------------------------------- answers

    def owns(self, leg_id: str) -> bool:
        """Whether this is the running leg of a probe."""
        return leg_id in self._legs

    def on_side_channel_checked(self, event: SideChannelChecked, now_s: float) -> list[Command]:
        """A target has tried a source's side channel."""
        pair = self._schedule.get(event.source_id, event.replica_id)
        probe = None if pair is None else self._by_pair.get(pair)
        if probe is None or probe.step is not _ProbeStep.CHECK:
            self.ignored_events += 1
            return []
        reason = "" if event.is_reachable else f"side channel: {event.reason or 'no reason given'}"
        self._note_answer(probe.pair, reason, now_s)
        if not event.is_reachable:
            self._end_probe(probe, _ProbeOutcome.FAILED, now_s, reason=reason)
        elif probe.with_transfer:
            self._start_prefill(probe, now_s)
        else:
            self._end_probe(probe, _ProbeOutcome.OK, now_s)
        return self._start_due_probes(now_s)

    def on_output(self, output: LegOutput, now_s: float) -> list[Command]:
        """A step's output for a leg that `owns` says is ours."""
        probe = self._legs.probe_of(output.leg_id)
        if output.cached_tokens is not None:
            probe.cached_tokens = output.cached_tokens
        if output.finish is not None:
            self._legs.end_leg(probe)
            if probe.step is _ProbeStep.PREFILL:
                self._on_prefill_done(probe, output, now_s)
            else:
                self._on_pull_done(probe, output.finish, now_s)
        return self._start_due_probes(now_s)

    def on_leg_failed(self, event: LegFailed, now_s: float) -> list[Command]:
        """A leg that `owns` says is ours ended without its engine finishing it."""
        probe = self._legs.probe_of(event.leg_id)
        self._legs.end_leg(probe)
        self._legs.release_lease(probe, now_s)
        blames_link = probe.step is _ProbeStep.PULL and event.failure in _LINK_FAILURES
        outcome = _ProbeOutcome.FAILED if blames_link else _ProbeOutcome.INCONCLUSIVE
        reason = f"{probe.step}: {event.failure} {event.reason}".strip()
        self._end_probe(probe, outcome, now_s, reason=reason)
        return self._start_due_probes(now_s)

    # -------------------------------------------------------------- time

    def on_time(self, now_s: float) -> list[Command]:
        """Give up what is overdue and begin what is due."""
        for probe_id in self._deadlines.pop_due(now_s):
            self._on_timeout(self._probes[probe_id], now_s)
        return self._start_due_probes(now_s)

    def next_deadline_at_s(self) -> float | None:
        """When `on_time` should come at the latest; None while nothing waits for time."""
        due_at_s = self._deadlines.next_at_s()
        if len(self._probes) < self._options.max_running:
            next_probe_at_s = self._schedule.next_at_s()
            if due_at_s is None or (next_probe_at_s is not None and next_probe_at_s < due_at_s):
                return next_probe_at_s
        return due_at_s

    # -------------------------------------------------------------- operators

    def pop_notices(self) -> tuple[PairNotice, ...]:
        """The changes since this was last called, at most the last 256."""
        return self._notices.pop_all()

    def failed_agents(self) -> Mapping[str, str]:
        """Targets whose transfer agents are taken for broken, and why."""
        return self._agent_detector.suspects

    def running_count(self) -> int:
        """Probes under way."""
        return len(self._probes)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        self._schedule.check_integrity(self._by_pair)
        assert len(self._probes) <= self._options.max_running, "too many probes at once"
        assert len(self._by_pair) == len(self._probes), "a pair is probed twice"
        assert len(self._deadlines) == len(self._probes), "deadlines of ended probes"
        self._legs.check_integrity(list(self._probes.values()))
        for probe_id in self._probes:
            assert probe_id in self._deadlines, f"{probe_id} waits without a deadline"

    # -------------------------------------------------------------- a probe's way

    def _remove_replica(self, replica_id: str, now_s: float) -> None:
        for pair in self._schedule.remove_replica(replica_id):
            probe = self._by_pair.get(pair)
            if probe is not None:
                self._legs.abort(probe, now_s)
                self._remove_probe(probe)
        self._notices.remove_replica(replica_id)
        self._agent_detector.remove_replica(replica_id, now_s)

    def _start_due_probes(self, now_s: float) -> list[Command]:
        while len(self._probes) < self._options.max_running:
            pair = self._schedule.pop_due(now_s)
            if pair is None:
                break
            self._start_probe(pair, now_s)
        commands, self._legs.commands = self._legs.commands, []
        return commands

    def _start_probe(self, pair: Pair, now_s: float) -> None:
        self._started_count += 1
        nonce = f"{self._rng.getrandbits(64):016x}"
        probe = _Probe(
            probe_id=f"{PROBE_PREFIX}{nonce}-{self._started_count}",
            pair=pair,
            with_transfer=self._needs_transfer(pair, now_s),
        )
        self._probes[probe.probe_id] = self._by_pair[pair] = probe
        self._enter_step(
            probe, _ProbeStep.CHECK, now_s, self._options.deadline_s + self._options.answer_s
        )
        self._legs.commands.append(
            CheckSideChannel(
                replica_id=pair.target.replica_id,
                source_id=pair.source.replica_id,
                address=pair.source.side_channel,
            )
        )

    def _needs_transfer(self, pair: Pair, now_s: float) -> bool:
        pair_ids = (pair.source.replica_id, pair.target.replica_id)
        if pair.suspect or self._links.state(*pair_ids) is not LinkState.OK:
            return True
        if self._links.is_slow(*pair_ids):
            return True  # placement avoids it, so only a probe can see that it is well again
        proven_at_s = self._links.last_success_at_s(*pair_ids)
        return proven_at_s is None or now_s - proven_at_s >= self._options.transfer_every_s

    def _start_prefill(self, probe: _Probe, now_s: float) -> None:
        source = probe.pair.source
        probe.prompt = tuple(
            self._rng.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID)
            for _ in range(source.block_size_tokens + 1)
        )
        self._enter_step(probe, _ProbeStep.PREFILL, now_s, self._options.deadline_s)
        self._legs.submit(probe, source.replica_id, LegKind.PREFILL, tokens=len(probe.prompt))

    def _on_prefill_done(self, probe: _Probe, output: LegOutput, now_s: float) -> None:
        kv_handle, failed = output.kv_handle, output.finish in _FAILED_FINISHES
        if kv_handle is not None:
            self._legs.record_lease(probe, output.leg_id, kv_handle, now_s)
        if kv_handle is None or failed:
            self._legs.release_lease(probe, now_s)
            # A broken engine says nothing of the pair; an engine that hands nothing out says all.
            outcome = _ProbeOutcome.INCONCLUSIVE if failed else _ProbeOutcome.FAILED
            handle_note = "without a KV handle" if kv_handle is None else "with a KV handle"
            reason = f"prefill: the source ended it in {output.finish}, {handle_note}"
            self._end_probe(probe, outcome, now_s, reason=reason)
            return
        options = self._options
        wait_s = options.deadline_s if probe.pair.has_transferred else options.first_transfer_s
        probe.cached_tokens = None
        self._enter_step(probe, _ProbeStep.PULL, now_s, wait_s)
        self._legs.submit(probe, probe.pair.target.replica_id, LegKind.DECODE, tokens=1)

    def _on_pull_done(self, probe: _Probe, finish: FinishReason, now_s: float) -> None:
        cached_tokens, expected_tokens = probe.cached_tokens, probe.pair.source.block_size_tokens
        if finish in _FAILED_FINISHES:
            self._legs.release_lease(probe, now_s)
            reason = f"pull: the target ended it in {finish}"
        elif cached_tokens is not None and cached_tokens < expected_tokens:
            self._legs.release_lease(probe, now_s)
            reason = (
                "pull: the block did not come, the target computed it itself"
                f" ({cached_tokens} cached)"
            )
        else:
            self._end_probe(probe, _ProbeOutcome.OK, now_s)
            return
        self._end_probe(probe, _ProbeOutcome.FAILED, now_s, reason=reason)

    def _on_timeout(self, probe: _Probe, now_s: float) -> None:
        elapsed_s = now_s - probe.step_started_at_s
        reason = f"{probe.step}: no answer within {elapsed_s:.3g} s"
        blames_link = probe.step is _ProbeStep.PULL and not self._is_busy(
            probe.pair.target.replica_id
        )
        self._legs.abort(probe, now_s)
        self._end_probe(
            probe,
            _ProbeOutcome.FAILED if blames_link else _ProbeOutcome.INCONCLUSIVE,
            now_s,
            reason=reason,
        )

    def _is_busy(self, replica_id: str) -> bool:
        """Whether a leg may be late there because it waits for its turn."""
        view = self._fleet.get(replica_id)
        if view is None:
            return True
        return view.load.queued_requests > 0 or view.load.step_s > self._options.deadline_s / 4

    def _end_probe(
        self, probe: _Probe, outcome: _ProbeOutcome, now_s: float, *, reason: str = ""
    ) -> None:
        """The probe is over; its leg and lease are taken care of already."""
        pair, elapsed_s = probe.pair, now_s - probe.step_started_at_s
        blocks = 0 if probe.lease is None else probe.lease.kv_handle.blocks
        self._remove_probe(probe)
        pair.last_probe_at_s = now_s
        pair_ids = (pair.source.replica_id, pair.target.replica_id)
        retry_s = self._options.interval_s * self._rng.uniform(0.9, 1.1)
        match outcome:
            case _ProbeOutcome.OK:
                moved_bytes = blocks * pair.source.kv_block_bytes
                transfer_s = elapsed_s if probe.with_transfer else None
                self._links.record_probe_success(
                    *pair_ids, now_s, elapsed_s=transfer_s, moved_bytes=moved_bytes
                )
                pair.failures_in_row = 0
                if probe.with_transfer:
                    pair.has_transferred, pair.suspect = True, False
                    self._agent_detector.on_pull_done(pair, now_s)
                elif pair.suspect:
                    retry_s = self._options.retry_s
            case _ProbeOutcome.FAILED:
                self._links.record_probe_failure(*pair_ids, now_s, reason)
                pair.failures_in_row += 1
                retry_s = self._backoff_s(pair)
                if probe.step is _ProbeStep.PULL:
                    self._legs.commands += self._agent_detector.on_pull_failed(pair, now_s)
                else:
                    pair.failed_pulls_in_row = 0  # a source that does not answer is no witness
            case _ProbeOutcome.INCONCLUSIVE:
                self._links.record_probe_inconclusive(*pair_ids, now_s, reason)
        self._note_state(pair, now_s)
        if pair.sampled or pair.suspect or pair.failures_in_row or outcome is not _ProbeOutcome.OK:
            self._schedule.schedule(pair, now_s + retry_s)
        else:
            self._schedule.remove_pair(pair)

    def _note_state(self, pair: Pair, now_s: float) -> None:
        pair_ids = (pair.source.replica_id, pair.target.replica_id)
        quarantined = self._links.state(*pair_ids) is LinkState.QUARANTINED
        self._notices.note_state(
            pair, self._links.reason(*pair_ids), now_s, quarantined=quarantined
        )

    def _backoff_s(self, pair: Pair) -> float:
        options, source_id = self._options, pair.source.replica_id
        backoff_s = min(
            options.max_retry_s, options.retry_s * 2.0 ** min(pair.failures_in_row - 1, 30)
        )
        if self._notices.is_unreachable(source_id):
            # An unresponsive source costs a place among the running probes each time, for seconds.
            # All pairs together try it once per `retry_s`, and all come up when one of them reaches
            # it.
            round_robin_s = options.retry_s * len(self._schedule.pairs_from(source_id))
            if round_robin_s > backoff_s:
                backoff_s = round_robin_s * self._rng.uniform(0.5, 1.5)
        return backoff_s

    def _note_answer(self, pair: Pair, reason: str, now_s: float) -> None:
        source_id = pair.source.replica_id
        was_unreachable = self._notices.is_unreachable(source_id)
        self._notices.note_answer(pair, reason, now_s, has_answered=not reason)
        if was_unreachable and not reason:
            for other in self._schedule.pairs_from(source_id):
                if other.queue_number:
                    self._schedule.enqueue_urgent(other)

    # -------------------------------------------------------------- legs and leases

    def _enter_step(self, probe: _Probe, step: _ProbeStep, now_s: float, timeout_s: float) -> None:
        probe.step, probe.step_started_at_s = step, now_s
        self._deadlines.arm(probe.probe_id, now_s + timeout_s)

    def _remove_probe(self, probe: _Probe) -> None:
        del self._probes[probe.probe_id]
        del self._by_pair[probe.pair]
        self._deadlines.disarm(probe.probe_id)


class _ProbeLegs:
    """The legs and leases of probes; `commands` collects the commands to issue."""

    def __init__(self, *, limits: CoordinatorLimits, fleet: FleetTable, legs: LegTable) -> None:
        self.commands: list[Command] = []
        self.limits = limits
        self._fleet = fleet
        self._legs = legs
        self._by_leg: dict[str, _Probe] = {}

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._by_leg

    def probe_of(self, leg_id: str) -> _Probe:
        """The probe whose leg this is.

        Raises:
            KeyError: it is no running leg of a probe.
        """
        return self._by_leg[leg_id]

    def submit(self, probe: _Probe, replica_id: str, kind: LegKind, *, tokens: int) -> None:
        """Begin a leg with the probe's prompt and, once there is one, its KV handle."""
        leg = Leg(
            leg_id=f"{probe.probe_id}~{kind}",
            request_id=probe.probe_id,
            kind=kind,
            prompt_token_ids=probe.prompt,
            max_tokens=1,
            kv_handle=None if probe.lease is None else probe.lease.kv_handle,
            source_id=None if probe.lease is None else probe.lease.replica_id,
        )
        probe.leg_id = leg.leg_id
        self._by_leg[leg.leg_id] = probe
        self._legs.begin(leg, replica_id, tokens)
        self.commands.append(SubmitLeg(replica_id=replica_id, leg=leg))

    def record_lease(self, probe: _Probe, leg_id: str, kv_handle: KvHandle, now_s: float) -> None:
        """The source keeps blocks for the probe from now on."""
        probe.lease = Lease(
            leg_id=leg_id,
            request_id=probe.probe_id,
            replica_id=probe.pair.source.replica_id,
            kv_handle=kv_handle,
            granted_at_s=now_s,
            expires_at_s=now_s + self.limits.lease_s,
        )

    def end_leg(self, probe: _Probe) -> None:
        """Take a leg that is over out of the books."""
        if probe.leg_id is not None:
            self._legs.end(probe.leg_id)
            del self._by_leg[probe.leg_id]
            probe.leg_id = None

    def abort(self, probe: _Probe, now_s: float) -> None:
        """Abort the leg, if there is one; its lease goes with it. A lost replica has none left."""
        if probe.leg_id is None:
            return
        leg_id = probe.leg_id
        dispatched = self._legs.get_running(leg_id)
        assert dispatched is not None, f"leg {leg_id} is not in the book"
        if dispatched.replica_id not in self._fleet:
            self.end_leg(probe)
            self.release_lease(probe, now_s)
            return
        confirm_by_s = now_s + self.limits.abort_s
        self._legs.begin_close(leg_id, lease=probe.lease, confirm_by_s=confirm_by_s)
        del self._by_leg[leg_id]
        probe.leg_id = None
        self.commands.append(AbortLegs(replica_id=dispatched.replica_id, leg_ids=(leg_id,)))

    def release_lease(self, probe: _Probe, now_s: float) -> None:
        """Have the blocks freed that no replica pulls any more."""
        if probe.lease is None:
            return
        fleet = self._fleet.view(now_s)
        source = fleet.replicas.get(probe.lease.replica_id)
        via = None if source is None else choose_releaser(source, fleet)
        if via is not None:
            self.commands.append(ReleaseLease(lease=probe.lease, via_replica_id=via))

    def check_integrity(self, probes: list[_Probe]) -> None:
        """Raise AssertionError when the legs are not those of the probes, or do not run."""
        with_leg = {probe.leg_id for probe in probes if probe.leg_id is not None}
        assert with_leg == self._by_leg.keys(), "legs of ended probes"
        for probe in probes:
            assert (probe.leg_id is None) == (probe.step is _ProbeStep.CHECK), f"{probe}: leg"
            assert (probe.lease is None) == (probe.step is not _ProbeStep.PULL), f"{probe}: lease"
            if probe.leg_id is not None:
                assert self._legs.get_running(probe.leg_id) is not None, (
                    f"{probe.leg_id} does not run"
                )


class _FailedAgentDetector:
    """Targets whose own transfer agents have failed, by the results of whole probes.

    Theory of operation. A target is evaluated after each failed pull. It is a suspect from when
    `agent_failure_reason` gives a reason until a pull of it succeeds or it leaves. A suspect that
    `choose_replacement` names gets a command, again with each failure, since the message may be
    lost. A suspect that leaves counts as replaced, whichever coordinator asked for it. One that
    ignores the command stays a suspect, and its pairs stay quarantined.
    """

    def __init__(
        self, schedule: PairSchedule, links: LinkTable, notices: PairNotices, rules: AgentRules
    ) -> None:
        self._schedule = schedule
        self._links = links
        self._notices = notices
        self._rules = rules
        self._suspects: dict[str, str] = {}
        self._replacing_id: str | None = None
        self._replaced_at_s: float | None = None

    @property
    def suspects(self) -> Mapping[str, str]:
        """Targets whose agents are taken for broken, and why."""
        return MappingProxyType(self._suspects)

    def on_pull_done(self, pair: Pair, now_s: float) -> None:
        """A probe's pull over this pair went well."""
        pair.failed_pulls_in_row = 0
        self._clear(pair.target.replica_id, now_s)

    def on_pull_failed(self, pair: Pair, now_s: float) -> list[Command]:
        """The commands after a failed pull whose source's side channel had answered."""
        if not pair.failed_pulls_in_row:
            pair.pulls_fail_since_s = now_s
        pair.failed_pulls_in_row += 1
        target_id = pair.target.replica_id
        reason = self._diagnose(target_id, now_s)
        if reason is None:
            self._clear(target_id, now_s)
            return []
        if target_id not in self._suspects:
            self._notices.note_agent(target_id, reason, now_s)
        self._suspects[target_id] = reason
        return self._request_replacement(now_s)

    def remove_replica(self, replica_id: str, now_s: float) -> None:
        """A replica is gone, or drains."""
        if self._suspects.pop(replica_id, None) is not None:
            self._replaced_at_s = now_s
        if replica_id == self._replacing_id:
            self._replacing_id = None

    def _diagnose(self, target_id: str, now_s: float) -> str | None:
        pairs = [
            PullHistory(
                source_id=pair.source.replica_id,
                consecutive_failures=pair.failed_pulls_in_row,
                failing_since_s=pair.pulls_fail_since_s,
                last_success_at_s=self._links.last_success_at_s(pair.source.replica_id, target_id),
            )
            for pair in self._schedule.pairs_to(target_id)
        ]
        failing = [
            pair.source_id for pair in pairs if pair.consecutive_failures >= self._rules.failures
        ]
        last_pull_at_s = {
            source_id: self._last_pull_at_s(source_id, target_id) for source_id in failing
        }
        return agent_failure_reason(pairs, last_pull_at_s, now_s, self._rules)

    def _last_pull_at_s(self, source_id: str, target_id: str) -> float:
        times = (
            self._links.last_success_at_s(source_id, pair.target.replica_id)
            for pair in self._schedule.pairs_from(source_id)
            if pair.target.replica_id != target_id and pair.target.replica_id not in self._suspects
        )
        return max((at_s for at_s in times if at_s is not None), default=float("-inf"))

    def _request_replacement(self, now_s: float) -> list[Command]:
        target_id = choose_replacement(
            self._suspects,
            self._schedule.target_count(),
            last_notified=self._replacing_id,
            since_last_s=None if self._replaced_at_s is None else now_s - self._replaced_at_s,
            rules=self._rules,
        )
        if target_id is None:
            return []
        if target_id != self._replacing_id:
            self._replacing_id, self._replaced_at_s = target_id, now_s
        return [ReportFailedAgent(replica_id=target_id, reason=self._suspects[target_id])]

    def _clear(self, target_id: str, now_s: float) -> None:
        if self._suspects.pop(target_id, None) is not None:
            self._notices.note_agent(target_id, "", now_s)
