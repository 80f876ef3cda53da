"""What can happen to one request: placed, handed off, streamed, ended.

Each method takes an `Entry` along one edge of the transition table, or several, and appends the
commands that follow. Which request an event is about is the coordinator's business, and what is
done when a leg fails that of `recovery`.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.health import Health
from baton.control.fleet.leg_table import LegBook, PlacedLeg
from baton.control.queue.admission_controller import Admittance
from baton.control.queue.pending import Waiters
from baton.control.queue.tenant_limits import Tenancy
from baton.control.request.dispatch import Turns
from baton.control.request.leases import granted, release
from baton.control.request.leg_recorder import LegRunning
from baton.control.request.retries import Recovery
from baton.control.request.transfers import Flows
from baton.control.state.deadlines import Deadlines
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.prompt_use import SharedPrompts
from baton.control.state.request_state import RUNS, Entry
from baton.domain.commands import Command, Delivery, FailRequest, RecordRequest
from baton.domain.errors import BatonError, DeadlineExceeded, EngineFailed, RequestInvalid
from baton.domain.handoff import (
    CacheUse,
    Decision,
    HandoffMode,
    Lease,
    LegKind,
    LegOutput,
    RouteReason,
    Ticket,
)
from baton.domain.leg_record import LegEnd
from baton.domain.request import FinishReason, LocalOnly, Phase
from baton.domain.retry_reasons import Trouble
from baton.domain.value import evolve
from baton.policy.admission.decision import Admit, Hold, Reason, Shed, Verdict
from baton.policy.placement.port import NoRoute, PlacementQuery, Placer
from baton.policy.placement.replica_cost import usable_tokens

BROKEN = frozenset({FinishReason.ERROR, FinishReason.ABORT})
REFUSALS = frozenset({FinishReason.INVALID, FinishReason.REFUSED})
"""Ends of legs that no engine has failed at: another one would end them the same."""

_TRANSFER_PATIENCE = 2.0
"""So many times what a transfer is predicted to take."""


class Journeys:
    """The requests in flight, their queue and deadlines, and the commands they give rise to."""

    def __init__(
        self,
        *,
        limits: CoordinatorLimits,
        placer: Placer,
        fleet: FleetTable,
        legs: LegBook,
        knowledge: Knowledge,
        tenancy: Tenancy,
    ) -> None:
        self.limits = limits
        self.entries: dict[str, Entry] = {}
        self.deadlines = Deadlines()
        self.commands: list[Command] = []
        self.placer = placer
        self._fleet = fleet
        self._legs = legs
        self.flows = Flows(fleet, knowledge.links)
        self._knowledge = knowledge
        self.accounts = Accounts(fleet, knowledge)
        self.health = Health(limits.recovery, fleet)
        self.running = LegRunning(
            legs=legs, knowledge=knowledge, accounts=self.accounts, health=self.health
        )
        self.recovery = Recovery(self, health=self.health, legs=legs, knowledge=knowledge)
        self.waiters = Waiters(
            Admittance(fleet=fleet, knowledge=knowledge, patience_s=limits.first_token_s)
        )
        self.turns = Turns(self, fleet=fleet, waiters=self.waiters)
        self.tenancy = tenancy
        self.shared = SharedPrompts()

    # -------------------------------------------------------------- placement

    def place(self, entry: Entry, now_s: float, *, hold_if_tried: bool = False) -> None:
        """Begin the first leg of a route, or wait when nobody can take the request.

        With `hold_if_tried`, a route over a replica that has just failed this request waits a
        moment first: a replica that refuses at once would otherwise use up every attempt at once.
        """
        query = self._knowledge.query(entry, now_s)
        decision = self.placer.place(query, self._knowledge.around(now_s))
        if isinstance(decision, NoRoute):
            self.turns.enqueue(entry, now_s, why=decision.reason)
        elif hold_if_tried and decision.route.decode_replica_id in entry.avoid:
            self.turns.enqueue(entry, now_s, why="every replica has just failed it")
            self.waiters.retry_at_s = self.waiters.retry_at_s or now_s + self.limits.retry_s
        else:
            verdict = self.waiters.admittance.ask(entry, query, decision, now_s)
            if isinstance(verdict, Hold) and verdict.reason is Reason.PACE:
                decision, verdict = self._ask_to_stay(entry, query, (decision, verdict), now_s)
            match verdict:
                case Admit():
                    self._follow(entry, query, decision, now_s)
                case Hold():
                    self.turns.hold(entry, verdict, now_s)
                case Shed():
                    self.turns.turn_away(entry, verdict, now_s)
                case _:
                    assert_never(verdict)

    def _ask_to_stay(
        self, entry: Entry, query: PlacementQuery, held: tuple[Decision, Hold], now_s: float
    ) -> tuple[Decision, Verdict]:
        """Where decode will be too full for it, see whether it can stay where it is prefilled.

        Placement goes by the streams of now, and does not see those that are on their way.
        """
        around = self._knowledge.around(now_s)
        decision = self.placer.place(evolve(query, decode_full=True), around)
        if isinstance(decision, NoRoute) or decision.route.reason is not RouteReason.DEFLECTED:
            return held
        verdict = self.waiters.admittance.ask(entry, query, decision, now_s)
        return (decision, verdict) if isinstance(verdict, Admit) else held

    def _follow(
        self, entry: Entry, query: PlacementQuery, decision: Decision, now_s: float
    ) -> None:
        route = decision.route
        self._knowledge.placed(entry, decision, now_s)
        self.waiters.let_in(entry, now_s)
        entry.decisions.append(decision)
        entry.routes.append(route)
        entry.move(Phase.PREFILL)
        if entry.placed_at_s is None:
            entry.placed_at_s = now_s
        entry.first_token_due_at_s = now_s + self.limits.first_token_s
        hedge_at_s = self.recovery.hedge_at_s(entry, decision)
        self.wait_until(entry, min(entry.first_token_due_at_s, hedge_at_s))
        if route.mode is HandoffMode.LOCAL:
            replica_id, leg = route.decode_replica_id, entry.next_leg(LegKind.LOCAL)
        else:
            assert route.prefill_replica_id is not None, "a PULL route names a prefill replica"
            replica_id = route.prefill_replica_id
            leg = entry.next_leg(
                LegKind.PREFILL,
                prefill_tokens=route.prefill_tokens,
                gives_token=self._gives_token(entry, decision),
            )
        tokens = len(leg.prompt_token_ids)
        uncached = tokens - self._held(query, replica_id, tokens)
        self.commands.append(
            self.running.begin(entry, leg, replica_id=replica_id, tokens=uncached, now_s=now_s)
        )
        self._knowledge.sent(entry, replica_id, tokens, now_s)

    def _gives_token(self, entry: Entry, decision: Decision) -> bool:
        """Whether the prefill leg of a route gives a client its token.

        Where a policy predicts, it says so; and what is expected to go on after it must be able to.
        """
        route, option = decision.route, decision.chosen
        decoder = self._fleet.get(route.decode_replica_id)
        if route.prefill_tokens is not None or decoder is None or not decoder.facts.goes_on:
            return False
        return entry.early and (option is None or option.early)

    def _held(self, query: PlacementQuery, replica_id: str, tokens: int) -> int:
        """How many of so many leading tokens a replica need not compute."""
        view = self._fleet.get(replica_id)
        if view is None:
            return 0
        return usable_tokens(query.hits.of(replica_id), tokens, view.facts.block_size_tokens)

    # -------------------------------------------------------------- tokens and handoff

    def take_tokens(
        self, entry: Entry, output: LegOutput, leg: PlacedLeg, now_s: float
    ) -> Delivery:
        """Journal the tokens of a local or decode leg and pass them on."""
        _, token_ids, finish, stop_reason, _, cached_tokens, detail, _, cache = output
        if cached_tokens is not None:
            self.running.cached(entry, leg, cached_tokens, now_s)
            entry.learn_use(leg.leg, cached_tokens, cache)
            cached_tokens = cache = None
        if not entry.generated:
            cached_tokens, cache = self._first_use(entry, leg)
        if token_ids:
            self._journal(entry, token_ids, leg, now_s)
            if entry.phase is not Phase.DECODE:
                self._begin_stream(entry, output, leg, now_s)
        if finish is not None:
            self.running.finish(entry, leg, output, now_s)
            self._knowledge.finished(entry, leg.replica_id, now_s)
            self.end(entry, Phase.FINISHED, now_s, reason=finish)
        request_id = entry.request.request_id
        return Delivery(request_id, token_ids, finish, stop_reason, cached_tokens, detail, cache)

    def _first_use(self, entry: Entry, placed: PlacedLeg) -> tuple[int | None, CacheUse | None]:
        """What to tell a client of its prompt with its first tokens."""
        if (use := entry.prompt_use) is None:
            return None, None
        if entry.request.parent_id is not None:
            view = self._fleet.get(placed.replica_id)
            size = 1 if view is None else view.facts.block_size_tokens
            use = self.shared.told(entry.request, use, block_size_tokens=size)
        return use.cached_tokens, use.cache

    def _journal(
        self, entry: Entry, token_ids: tuple[int, ...], leg: PlacedLeg, now_s: float
    ) -> None:
        """Keep tokens that go on to the client."""
        if entry.last_token_at_s is None:
            entry.first_token_at_s = now_s
            self._knowledge.first_token(entry, leg.replica_id, now_s)
        elif (gap_s := now_s - entry.last_token_at_s) > entry.gap_of_note_s:
            entry.note_gap(gap_s)
        entry.last_token_at_s = now_s
        entry.generated.extend(token_ids)

    def _begin_stream(self, entry: Entry, output: LegOutput, leg: PlacedLeg, now_s: float) -> None:
        """A leg gave its first tokens."""
        entry.move(Phase.DECODE)
        self.running.spoke(entry, leg, output, now_s)
        self._knowledge.prompts.computed(output.leg_id, now_s)
        # The pull is over: the engines have ended the lease between themselves.
        entry.lease = None
        self.flows.end(entry, now_s, landed=True)
        # Tokens to come do not move it; whether any have come is looked at when it has passed.
        self.wait_until(entry, now_s + self.limits.stall_s)

    def take_prefill(
        self, entry: Entry, output: LegOutput, placed: PlacedLeg, now_s: float
    ) -> Delivery | None:
        """Go from a finished prefill leg to the decode leg.

        A leg that gives its token gives it to the client now, and decode goes on after it, as after
        a resume. The token of another is not used: the decode replica computes the last prompt
        position again and samples the first one, so that sampling state lives in one engine only.
        """
        if output.cached_tokens is not None:
            self.running.cached(entry, placed, output.cached_tokens, now_s)
            if output.finish not in BROKEN:
                entry.learn_use(placed.leg, output.cached_tokens, output.cache)
        if output.finish is None:
            return None
        given = output.token_ids if placed.leg.gives_token else ()
        if output.finish in BROKEN or not given:
            self._take_blocks(entry, output, placed, now_s)
            return None
        request_id = entry.request.request_id
        cached_tokens, cache = (None, None) if entry.generated else self._first_use(entry, placed)
        last = output.finish is FinishReason.STOP or self._has_all(placed, len(given))
        self._journal(entry, given, placed, now_s)
        if last:
            self._end_with_prefill(entry, output, placed, now_s)
        else:
            self._take_blocks(entry, output, placed, now_s)
        finish = output.finish if last else None
        stop_reason = output.stop_reason if last else None
        detail = output.detail
        return Delivery(request_id, given, finish, stop_reason, cached_tokens, detail, cache)

    def _has_all(self, placed: PlacedLeg, tokens: int) -> bool:
        """Whether so many tokens are all that a leg's request, or its engine's context, allows."""
        leg, view = placed.leg, self._fleet.get(placed.replica_id)
        context = float("inf") if view is None else view.facts.max_len_tokens
        return leg.max_tokens <= tokens or len(leg.prompt_token_ids) + tokens >= context

    def _end_with_prefill(
        self, entry: Entry, output: LegOutput, placed: PlacedLeg, now_s: float
    ) -> None:
        """The first token was also the last: nobody will pull its blocks."""
        if (ticket := output.ticket) is not None:
            lease = self.lease(entry.request_id, output.leg_id, placed.replica_id, ticket, now_s)
            self.release_lease(lease, now_s)
        assert output.finish is not None, "only a finished leg ends a request"
        self.running.spoke(entry, placed, output, now_s)
        self.running.finish(entry, placed, output, now_s)
        self._knowledge.finished(entry, placed.replica_id, now_s, decoded=False)
        self.end(entry, Phase.FINISHED, now_s, reason=output.finish)

    def _take_blocks(
        self, entry: Entry, output: LegOutput, placed: PlacedLeg, now_s: float
    ) -> None:
        """Have the blocks of a finished prefill leg pulled by whoever will decode."""
        replica_id = placed.replica_id
        if output.ticket is None or output.finish in BROKEN:
            if (ticket := output.ticket) is not None:  # it keeps blocks all the same
                lease = self.lease(entry.request_id, output.leg_id, replica_id, ticket, now_s)
                self.release_lease(lease, now_s)
            # Such an engine can not hand this prompt off: one replica shall run both phases.
            entry.local_only = LocalOnly.HANDOFF_FAILED
            why = f"prefill ended in {output.finish}"
            trouble = Trouble.FAILED if output.finish in BROKEN else Trouble.HANDOFF
            if placed.leg.gives_token and output.token_ids:
                self.running.spoke(entry, placed, output, now_s)
            self.recovery.broken(entry, replica_id, why, now_s, trouble=trouble)
            return
        self.running.spoke(entry, placed, output, now_s)
        self.running.finish(entry, placed, output, now_s)
        entry.prefill_done_at_s = now_s
        entry.handed_off_blocks = output.ticket.blocks
        entry.lease = self.lease(entry.request_id, output.leg_id, replica_id, output.ticket, now_s)
        self._hand_off(entry, replica_id, output.ticket, now_s)

    def _hand_off(self, entry: Entry, source_id: str, ticket: Ticket, now_s: float) -> None:
        """Choose the decode replica now, not when prefill began: loads have changed since."""
        query = self._knowledge.query(entry, now_s)
        source = self._fleet.get(source_id)
        around = self._knowledge.around(now_s)
        target = None if source is None else self.placer.place_decode(query, source, around)
        if target is None:
            entry.local_only = LocalOnly.HANDOFF_FAILED
            self.release(entry, now_s)
            why = "no replica could take the handoff"
            self.recovery.resume(entry, why, now_s, trouble=Trouble.HANDOFF)
            return
        entry.routes[-1] = evolve(entry.routes[-1], decode_replica_id=target)
        entry.move(Phase.TRANSFER)
        leg = entry.next_leg(LegKind.DECODE, ticket=ticket, source_id=source_id)
        tokens = len(leg.prompt_token_ids)
        here = max(ticket.tokens, self._held(query, target, tokens))
        self.flows.begin(entry, leg.leg_id, target_id=target, ticket=ticket, now_s=now_s)
        self.wait_until(entry, now_s + self._transfer_limit_s(entry))
        left = max(0, tokens - here)
        fetches = entry.routes[-1].prefill_tokens is not None
        entry.rest_s = self._knowledge.prefill_s(target, left, now_s) if fetches else 0.0
        self.commands.append(
            self.running.begin(entry, leg, replica_id=target, tokens=left, now_s=now_s)
        )
        self._knowledge.sent(entry, target, tokens, now_s)

    # -------------------------------------------------------------- gone clients

    def cancel(self, entry: Entry, now_s: float) -> None:
        """End a request whose client went away, or has all that it wants (see `Knowledge.left`)."""
        if entry.phase is Phase.DECODE or (entry.phase is Phase.TRANSFER and entry.generated):
            self._knowledge.left(entry, entry.running.replica_id, now_s)
        if entry.leg_id is not None:
            self.recovery.abort(entry, LegEnd.CANCELLED, now_s)
        self.end(entry, Phase.CANCELLED, now_s, reason="cancelled")

    # -------------------------------------------------------------- leases

    def lease(
        self, request_id: str, leg_id: str, replica_id: str, ticket: Ticket, now_s: float
    ) -> Lease:
        """The lease that comes with a ticket."""
        lasts_s = self.limits.lease_s
        return granted(
            request_id, leg_id, replica_id=replica_id, ticket=ticket, now_s=now_s, lasts_s=lasts_s
        )

    def release(self, entry: Entry, now_s: float) -> None:
        """End the entry's lease, if it has one, before its blocks were pulled."""
        if entry.lease is not None:
            self.release_lease(entry.lease, now_s)
            entry.lease = None

    def release_lease(self, lease: Lease, now_s: float) -> None:
        """Have the blocks freed now; where nobody can, the lease runs out by itself."""
        if (order := release(lease, self._fleet.view(now_s))) is not None:
            self.commands.append(order)

    def leases(self) -> dict[str, int]:
        """Leases that are held, by the replica that keeps the blocks."""
        return dict(Counter(e.lease.replica_id for e in self.entries.values() if e.lease))

    def transfers(self) -> int:
        """Transfers that are under way; one outlives its source until its leg ends."""
        return sum(entry.flow is not None for entry in self.entries.values())

    # -------------------------------------------------------------- time and endings

    def on_deadline(self, entry: Entry, now_s: float) -> None:
        """Act on the deadline that has just passed."""
        if now_s >= entry.total_deadline_at_s:
            if entry.leg_id is not None:
                self.recovery.abort(entry, LegEnd.GIVEN_UP, now_s)
            why = f"not finished {self.limits.total_s:g} s after it arrived"
            self.fail(entry, DeadlineExceeded(entry.request_id, why), now_s)
        elif entry.phase is Phase.QUEUED:
            self.turns.leave_queue(entry, now_s)
        elif entry.phase is Phase.PREFILL and now_s < entry.first_token_due_at_s:
            self.recovery.hedge(entry, now_s)
        elif now_s < (due_at_s := self._due_at_s(entry, now_s)):
            self.wait_until(entry, due_at_s)
        else:
            assert entry.phase in RUNS, f"no deadline is armed in phase {entry.phase}"
            self.recovery.give_up(entry, now_s)

    def _due_at_s(self, entry: Entry, now_s: float) -> float:
        """When a phase must be over whose deadline has passed; `now_s` when it must be already.

        A stream has until `stall_s` after its last token. A decode leg that waits for a place or
        for its turn to pull does not move blocks yet: its time counts from when its replica last
        had a queue. With `transfer_s` of 2 s and a turn that comes 1.9 s after the handoff, it has
        until 3.9 s; and `rest_s` more where only a prefix is fetched. Its blocks are kept all the
        while, and to compute them again elsewhere would cost more than to wait; only an engine that
        does no steps is not waited for.
        """
        if entry.phase is Phase.DECODE and entry.last_token_at_s is not None:
            return entry.last_token_at_s + self.limits.stall_s
        placed = None if entry.leg_id is None else self._legs.running(entry.leg_id)
        if entry.phase is not Phase.TRANSFER or placed is None:
            return now_s
        if self.health.is_still(placed.replica_id, now_s, for_s=self.limits.stall_s):
            return now_s
        queued_at_s = self._fleet.queue_seen_at_s(placed.replica_id, now_s)
        if queued_at_s is None and not entry.rest_s:
            return now_s
        return entry.transfer_due_at_s(queued_at_s, self._transfer_limit_s(entry))

    def _transfer_limit_s(self, entry: Entry) -> float:
        """How long its blocks may be on their way: many bytes over a slow link are not given up.

        Of 32,000 tokens of a 405B model 16.9 GB are moved, for 1.7 s at 10 GB/s; what is predicted
        for them may be half of what it takes, and is no reason to wait longer than for a prefill.
        """
        moves_s = 0.0 if entry.flow is None else entry.flow.moves_s
        longest_s = min(_TRANSFER_PATIENCE * moves_s, self.limits.first_token_s)
        return max(self.limits.transfer_s, longest_s)

    def wait_until(self, entry: Entry, at_s: float) -> None:
        """Set the deadline of the phase that the entry is in; its own comes first, if sooner."""
        self.deadlines.arm(entry.request.request_id, min(at_s, entry.total_deadline_at_s))

    def refuse(self, entry: Entry, replica_id: str, why: str, now_s: float, *, own: bool) -> None:
        """End a request whose leg an engine has refused: once, and to nobody's blame.

        With `own` it is the request that is wrong, which its client is told; unless an engine has
        given tokens of it, which finds nothing wrong with it.
        """
        self.running.drop(entry, now_s, LegEnd.REFUSED if own else LegEnd.BROKEN)
        why = why or "no reason given"
        if own and not entry.generated:
            error: BatonError = RequestInvalid(entry.request_id, f"the engine refuses it: {why}")
        else:
            error = EngineFailed(entry.request_id, f"replica {replica_id} refused it: {why}")
        self.fail(entry, error, now_s)

    def fail(self, entry: Entry, error: BatonError, now_s: float) -> None:
        """End a request in FAILED."""
        self.end(entry, Phase.FAILED, now_s, reason=str(error), error=error)

    def end(
        self,
        entry: Entry,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> None:
        """Take the last edge, tell the client if it went wrong, and keep the story."""
        self.release(entry, now_s)
        self.flows.end(entry, now_s)
        entry.move(outcome)
        del self.entries[entry.request_id]
        self.shared.ended(entry.request)
        self.waiters.leave(entry, now_s)
        self._settle(entry, now_s)
        self.deadlines.disarm(entry.request_id)
        if error is not None:
            self.commands.append(FailRequest(request_id=entry.request_id, error=error))
        record = self.accounts.ended(entry, outcome, now_s, reason=reason, error=error)
        self.commands.append(RecordRequest(record=record))

    def _settle(self, entry: Entry, now_s: float) -> None:
        """Charge its tenant for what it used, rather than for what was expected."""
        if entry.charge is not None:
            used = 0
            if entry.placed_at_s is not None:
                used = len(entry.request.prompt_token_ids) + len(entry.generated)
            self.tenancy.ended(entry.charge, used=used, took_s=now_s - entry.taken_in_at_s)

    def reconfigure(self, *, limits: CoordinatorLimits | None, placer: Placer | None) -> None:
        """Go on by others; deadlines that are armed stay as they are."""
        self.limits = limits or self.limits
        self.placer = placer or self.placer
        self.waiters.admittance.patience_s = self.limits.first_token_s
        self.turns.cold.most_s = self.limits.cold_start_wait_s
        self.recovery.budget.reconfigure(self.limits.recovery.retries)
        self.health.reconfigure(self.limits.recovery)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        running = frozenset(one.leg_id for one in self.entries.values() if one.leg_id is not None)
        self.accounts.check_integrity(self.entries, running)
        self._knowledge.prompts.check_integrity(running)
        self.waiters.check_integrity()
        self.recovery.budget.check_integrity()
        self.shared.check_integrity(entry.request for entry in self.entries.values())
        self.tenancy.check_integrity(
            Counter(e.tenant.name for e in self.entries.values() if e.charge is not None)
        )
        for request_id, entry in self.entries.items():
            queued = entry.phase is Phase.QUEUED
            assert queued == (request_id in self.waiters), f"{request_id}: queue and phase differ"
            assert request_id in self.deadlines, f"{request_id} waits without a deadline"
            entry.check_integrity()
            if entry.leg_id is not None:
                placed = self._legs.running(entry.leg_id)
                assert placed is not None, f"{request_id}: leg {entry.leg_id} does not run"
                assert placed.replica_id in self._fleet, f"{request_id} runs on a lost replica"
        assert self.entries.keys() >= set(self.waiters.ids()), "the queue holds ended requests"
        assert len(self.deadlines) == len(self.entries), "there are deadlines of ended requests"
