"""The pair prober: can every prefill replica really hand blocks to every decode replica?

Theory of operation. A probe of a pair walks CHECK (the target asks the source's side channel), and
when it is a *whole* one PREFILL (the source computes a prompt of one block and a token) and PULL
(the target fetches the block and decodes one token). Whole probes are made of pairs that are
unknown, quarantined, doubted or slow, and otherwise rarely: not at all while requests' own pulls
prove the pair. Each prompt is random, so no prefix cache hides the transfer; a target that computed
the prompt itself after all did not get the block, and the probe has failed.

A probe ends once, with one of three verdicts. FAILED quarantines the link; it is probed again after
1 s, 2 s, 4 s, ... 30 s until a whole probe goes well; where the pull itself failed, `agent_watch`
sees whether the target is at fault. OK ends a quarantine if it was whole. UNCLEAR
changes nothing: what fails before the pull is due, or for want of a free place, says something of
one replica's load but nothing of the pair, and an overload must not take links away.

Its legs are in the same `LegBook` as those of requests. This machine is asked about legs that run
(`owns`); a leg that it gave up is *closing* there, and the coordinator treats it, its late ticket
and its lease like any other. What may fail: any step, either replica, and time; every step has a
deadline, and a lease is released when its pull did not happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegBook
from baton.control.probing.failed_agent_detector import AgentWatch
from baton.control.probing.notices import PairNotice, PairNotices
from baton.control.probing.probe_legs import Probe, ProbeLegs, ProbeStep
from baton.control.probing.schedule import Pair, PairSchedule
from baton.control.state.deadlines import Deadlines
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import CheckSideChannel, Command
from baton.domain.events import LegFailed, SideChannelChecked
from baton.domain.fleet import ReplicaFacts
from baton.domain.handoff import LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.policy.links.estimates import LinkBook, LinkState
from baton.policy.resilience.failed_agents import AgentRules

PROBE_PREFIX = "probe-"
"""Request ids of probes start so; those of clients have the frontend's own prefixes."""

_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 3, 66
"""Beyond the special tokens of common vocabularies, and within the smallest."""
_BROKEN = frozenset(
    {FinishReason.ERROR, FinishReason.ABORT, FinishReason.INVALID, FinishReason.REFUSED}
)
_PAIR_FAILURES = frozenset(
    {
        *(LegFailure.ENGINE_ERROR, LegFailure.KV_LOAD_FAILED),
        *(LegFailure.REFUSED, LegFailure.INVALID),
    }
)
"""Of a pull: the others are about the target alone."""


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
    """Probes begun per second, besides a burst of `max_running`: a fleet of more than a hundred
    pairs is swept less often than every five seconds."""
    partners: int = 32
    """With how many others a replica is paired each way when it joins; in fleets of no more
    sources and targets than that every pair is checked."""


class _Verdict(StrEnum):
    OK = "ok"
    FAILED = "failed"
    UNCLEAR = "unclear"


class PairProber:
    """Probes pairs; each method returns what is to be done, in order."""

    def __init__(
        self,
        *,
        limits: CoordinatorLimits,
        fleet: FleetTable,
        legs: LegBook,
        links: LinkBook,
        rng: Random,
        options: ProbeOptions | None = None,
    ) -> None:
        self._fleet = fleet
        self._legs = ProbeLegs(limits=limits, fleet=fleet, legs=legs)
        self._links = links
        self._options = options or ProbeOptions()
        self._rng = rng
        self._schedule = PairSchedule(
            per_s=self._options.max_per_s,
            burst=self._options.max_running,
            partners=self._options.partners,
            rng=rng,
        )
        self._probes: dict[str, Probe] = {}
        self._by_pair: dict[Pair, Probe] = {}
        self._deadlines = Deadlines()
        self._notices = PairNotices(self._schedule)
        self._agents = AgentWatch(self._schedule, links, self._notices, AgentRules())
        self._probes_begun = 0
        self.ignored_events = 0
        """Answers that no probe waits for; late ones mostly."""

    def reconfigure(self, limits: CoordinatorLimits) -> None:
        """Go on by other limits."""
        self._legs.limits = limits

    # -------------------------------------------------------------- membership

    def joined(self, facts: ReplicaFacts, now_s: float) -> list[Command]:
        """A replica is new in the fleet table: its pairs are probed at once."""
        if self._schedule.knows(facts.replica_id):
            self._drop(facts.replica_id, now_s)
        self._schedule.join(facts)
        return self._go_on(now_s)

    def gone(self, replica_id: str, now_s: float) -> list[Command]:
        """A replica drains or was lost (then the fleet table has forgotten it): end its probes.

        To be told before the coordinator looks through the legs that ran on it.
        """
        self._drop(replica_id, now_s)
        return self._go_on(now_s)

    def doubt(self, source_id: str, target_id: str, now_s: float) -> list[Command]:
        """A handoff failed on this pair: see soon whether it still works, by moving blocks."""
        pair = self._schedule.watch(source_id, target_id)
        if pair is None:
            return []
        self._say_state(pair, now_s)
        if pair.doubted:
            return []
        pair.doubted = True
        lately = now_s - pair.ended_at_s < self._options.retry_s
        if pair.due_number and not pair.failures and not lately:
            self._schedule.put_first(pair)
        return self._go_on(now_s)

    # -------------------------------------------------------------- answers

    def owns(self, leg_id: str) -> bool:
        """Whether this is the running leg of a probe."""
        return leg_id in self._legs

    def checked(self, event: SideChannelChecked, now_s: float) -> list[Command]:
        """A target has tried a source's side channel."""
        pair = self._schedule.get(event.source_id, event.replica_id)
        probe = None if pair is None else self._by_pair.get(pair)
        if probe is None or probe.step is not ProbeStep.CHECK:
            self.ignored_events += 1
            return []
        why = "" if event.ok else f"side channel: {event.why or 'no reason given'}"
        self._note_answer(probe.pair, why, now_s)
        if not event.ok:
            self._end(probe, _Verdict.FAILED, now_s, why=why)
        elif probe.whole:
            self._prefill(probe, now_s)
        else:
            self._end(probe, _Verdict.OK, now_s)
        return self._go_on(now_s)

    def output(self, output: LegOutput, now_s: float) -> list[Command]:
        """A step's output for a leg that `owns` says is ours."""
        probe = self._legs.of(output.leg_id)
        if output.cached_tokens is not None:
            probe.cached_tokens = output.cached_tokens
        if output.finish is not None:
            self._legs.end(probe)
            if probe.step is ProbeStep.PREFILL:
                self._prefilled(probe, output, now_s)
            else:
                self._pulled(probe, output.finish, now_s)
        return self._go_on(now_s)

    def leg_failed(self, event: LegFailed, now_s: float) -> list[Command]:
        """A leg that `owns` says is ours ended without its engine finishing it."""
        probe = self._legs.of(event.leg_id)
        self._legs.end(probe)
        self._legs.release(probe, now_s)
        telling = probe.step is ProbeStep.PULL and event.failure in _PAIR_FAILURES
        verdict = _Verdict.FAILED if telling else _Verdict.UNCLEAR
        why = f"{probe.step}: {event.failure} {event.why}".strip()
        self._end(probe, verdict, now_s, why=why)
        return self._go_on(now_s)

    # -------------------------------------------------------------- time

    def time_passed(self, now_s: float) -> list[Command]:
        """Give up what is overdue and begin what is due."""
        for probe_id in self._deadlines.take_due(now_s):
            self._overdue(self._probes[probe_id], now_s)
        return self._go_on(now_s)

    def next_deadline_at_s(self) -> float | None:
        """When `time_passed` should come at the latest; None while nothing waits for time."""
        due_at_s = self._deadlines.next_at_s()
        if len(self._probes) < self._options.max_running:
            begin_at_s = self._schedule.next_at_s()
            if due_at_s is None or (begin_at_s is not None and begin_at_s < due_at_s):
                return begin_at_s
        return due_at_s

    # -------------------------------------------------------------- operators

    def take_notices(self) -> tuple[PairNotice, ...]:
        """What has changed since this was last called, at most the last 256."""
        return self._notices.take()

    def broken_agents(self) -> Mapping[str, str]:
        """Targets whose transfer agents are taken for broken, and why."""
        return self._agents.suspects

    def running(self) -> int:
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

    def _drop(self, replica_id: str, now_s: float) -> None:
        for pair in self._schedule.leave(replica_id):
            probe = self._by_pair.get(pair)
            if probe is not None:
                self._legs.give_up(probe, now_s)
                self._forget(probe)
        self._notices.leave(replica_id)
        self._agents.leave(replica_id, now_s)

    def _go_on(self, now_s: float) -> list[Command]:
        while len(self._probes) < self._options.max_running:
            pair = self._schedule.take(now_s)
            if pair is None:
                break
            self._begin(pair, now_s)
        commands, self._legs.commands = self._legs.commands, []
        return commands

    def _begin(self, pair: Pair, now_s: float) -> None:
        self._probes_begun += 1
        nonce = f"{self._rng.getrandbits(64):016x}"
        probe = Probe(
            probe_id=f"{PROBE_PREFIX}{nonce}-{self._probes_begun}",
            pair=pair,
            whole=self._wants_transfer(pair, now_s),
        )
        self._probes[probe.probe_id] = self._by_pair[pair] = probe
        self._enter(
            probe, ProbeStep.CHECK, now_s, self._options.deadline_s + self._options.answer_s
        )
        self._legs.commands.append(
            CheckSideChannel(
                replica_id=pair.target.replica_id,
                source_id=pair.source.replica_id,
                address=pair.source.side_channel,
            )
        )

    def _wants_transfer(self, pair: Pair, now_s: float) -> bool:
        ends = (pair.source.replica_id, pair.target.replica_id)
        if pair.doubted or self._links.state(*ends) is not LinkState.OK:
            return True
        if self._links.is_slow(*ends):
            return True  # placement avoids it, so nobody else would see that it is well again
        proven_at_s = self._links.proven_at_s(*ends)
        return proven_at_s is None or now_s - proven_at_s >= self._options.transfer_every_s

    def _prefill(self, probe: Probe, now_s: float) -> None:
        source = probe.pair.source
        probe.prompt = tuple(
            self._rng.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID)
            for _ in range(source.block_size_tokens + 1)
        )
        self._enter(probe, ProbeStep.PREFILL, now_s, self._options.deadline_s)
        self._legs.submit(probe, source.replica_id, LegKind.PREFILL, tokens=len(probe.prompt))

    def _prefilled(self, probe: Probe, output: LegOutput, now_s: float) -> None:
        ticket, broken = output.ticket, output.finish in _BROKEN
        if ticket is not None:
            self._legs.grant(probe, output.leg_id, ticket, now_s)
        if ticket is None or broken:
            self._legs.release(probe, now_s)
            # A broken engine says nothing of the pair; one that hands nothing out says all.
            verdict = _Verdict.UNCLEAR if broken else _Verdict.FAILED
            handed = "without a ticket" if ticket is None else "with a ticket"
            why = f"prefill: the source ended it in {output.finish}, {handed}"
            self._end(probe, verdict, now_s, why=why)
            return
        options = self._options
        wait_s = options.deadline_s if probe.pair.moved else options.first_transfer_s
        probe.cached_tokens = None
        self._enter(probe, ProbeStep.PULL, now_s, wait_s)
        self._legs.submit(probe, probe.pair.target.replica_id, LegKind.DECODE, tokens=1)

    def _pulled(self, probe: Probe, finish: FinishReason, now_s: float) -> None:
        cached, wanted = probe.cached_tokens, probe.pair.source.block_size_tokens
        if finish in _BROKEN:
            self._legs.release(probe, now_s)
            why = f"pull: the target ended it in {finish}"
        elif cached is not None and cached < wanted:
            self._legs.release(probe, now_s)
            why = f"pull: the block did not come, the target computed it itself ({cached} cached)"
        else:
            self._end(probe, _Verdict.OK, now_s)
            return
        self._end(probe, _Verdict.FAILED, now_s, why=why)

    def _overdue(self, probe: Probe, now_s: float) -> None:
        after_s = now_s - probe.began_s
        why = f"{probe.step}: no answer within {after_s:.3g} s"
        telling = probe.step is ProbeStep.PULL and not self._is_busy(probe.pair.target.replica_id)
        self._legs.give_up(probe, now_s)
        self._end(probe, _Verdict.FAILED if telling else _Verdict.UNCLEAR, now_s, why=why)

    def _is_busy(self, replica_id: str) -> bool:
        """Whether a leg may be late there because it waits for its turn."""
        view = self._fleet.get(replica_id)
        if view is None:
            return True
        return view.load.queued_requests > 0 or view.load.step_s > self._options.deadline_s / 4

    def _end(self, probe: Probe, verdict: _Verdict, now_s: float, *, why: str = "") -> None:
        """The probe is over; its leg and lease are taken care of already."""
        pair, took_s = probe.pair, now_s - probe.began_s
        blocks = 0 if probe.lease is None else probe.lease.ticket.blocks
        self._forget(probe)
        pair.ended_at_s = now_s
        ends = (pair.source.replica_id, pair.target.replica_id)
        retry_s = self._options.interval_s * self._rng.uniform(0.9, 1.1)
        match verdict:
            case _Verdict.OK:
                moved_bytes = blocks * pair.source.kv_block_bytes
                moved_s = took_s if probe.whole else None
                self._links.probe_ok(*ends, now_s, took_s=moved_s, moved_bytes=moved_bytes)
                pair.failures = 0
                if probe.whole:
                    pair.moved, pair.doubted = True, False
                    self._agents.pulled(pair, now_s)
                elif pair.doubted:
                    retry_s = self._options.retry_s
            case _Verdict.FAILED:
                self._links.probe_failed(*ends, now_s, why)
                pair.failures += 1
                retry_s = self._pause_s(pair)
                if probe.step is ProbeStep.PULL:
                    self._legs.commands += self._agents.not_pulled(pair, now_s)
                else:
                    pair.void_pulls = 0  # a source that does not answer is no witness
            case _Verdict.UNCLEAR:
                self._links.probe_unclear(*ends, now_s, why)
        self._say_state(pair, now_s)
        if pair.drawn or pair.doubted or pair.failures or verdict is not _Verdict.OK:
            self._schedule.put(pair, now_s + retry_s)
        else:
            self._schedule.forget(pair)

    def _say_state(self, pair: Pair, now_s: float) -> None:
        ends = (pair.source.replica_id, pair.target.replica_id)
        quarantined = self._links.state(*ends) is LinkState.QUARANTINED
        self._notices.note_state(pair, self._links.why(*ends), now_s, quarantined=quarantined)

    def _pause_s(self, pair: Pair) -> float:
        options, source_id = self._options, pair.source.replica_id
        pause_s = min(options.max_retry_s, options.retry_s * 2.0 ** min(pair.failures - 1, 30))
        if self._notices.is_unreachable(source_id):
            # Its silence costs a place among the running probes each time, for seconds: all pairs
            # together try it once per `retry_s`, and all come up when one of them reaches it.
            turn_s = options.retry_s * len(self._schedule.from_source(source_id))
            if turn_s > pause_s:
                pause_s = turn_s * self._rng.uniform(0.5, 1.5)
        return pause_s

    def _note_answer(self, pair: Pair, why: str, now_s: float) -> None:
        source_id = pair.source.replica_id
        was_unreachable = self._notices.is_unreachable(source_id)
        self._notices.note_answer(pair, why, now_s, reached=not why)
        if was_unreachable and not why:
            for other in self._schedule.from_source(source_id):
                if other.due_number:
                    self._schedule.put_first(other)

    # -------------------------------------------------------------- legs and leases

    def _enter(self, probe: Probe, step: ProbeStep, now_s: float, wait_s: float) -> None:
        probe.step, probe.began_s = step, now_s
        self._deadlines.arm(probe.probe_id, now_s + wait_s)

    def _forget(self, probe: Probe) -> None:
        del self._probes[probe.probe_id]
        del self._by_pair[probe.pair]
        self._deadlines.disarm(probe.probe_id)
