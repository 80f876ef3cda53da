"""A pretend fleet for tests of the pair prober: it answers probes by hand and counts blocks."""

from __future__ import annotations

from random import Random

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegBook
from baton.control.probing.prober import PairProber, ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import (
    AbortLegs,
    CheckSideChannel,
    Command,
    ReleaseLease,
    ReportBrokenAgent,
    SubmitLeg,
)
from baton.domain.events import LegFailed, SideChannelChecked
from baton.domain.fleet import Load, Role
from baton.domain.handoff import Lease, Leg, LegFailure, LegKind, LegOutput, Ticket
from baton.domain.request import FinishReason
from baton.policy.links.estimates import LinkBook
from tests.fakes.facts import replica_facts

Ends = tuple[str, str]
"""Source and target."""

STEADY = ProbeOptions(max_per_s=1000.0)


class PairWorld:
    """Drives a `PairProber`, and does with closing legs what the coordinator does.

    `held` are the blocks that sources keep, by the prefill leg that got them.
    """

    def __init__(self, options: ProbeOptions = STEADY) -> None:
        self.now_s = 0.0
        self.fleet = FleetTable()
        self.legs = LegBook(self.fleet)
        self.links = LinkBook()
        self.prober = PairProber(
            limits=CoordinatorLimits(),
            fleet=self.fleet,
            legs=self.legs,
            links=self.links,
            rng=Random(1),
            options=options,
        )
        self.checks: list[Ends] = []
        """Asked and not answered yet."""
        self.running: dict[str, SubmitLeg] = {}
        self.aborts: dict[str, str] = {}
        """Legs whose abort is not confirmed yet, and where they ran."""
        self.held: dict[str, str] = {}
        self.reported: list[str] = []
        """Targets that were told that their agents are broken."""
        self.prompts: list[tuple[int, ...]] = []
        self.begun: list[tuple[float, Ends]] = []

    # ------------------------------------------------------------ membership

    def join(
        self, replica_id: str, role: Role, *, layout: str = "same", listens: bool = True
    ) -> None:
        address = f"{replica_id}:5600" if listens else ""
        facts = replica_facts(replica_id, role, layout=layout, side_channel=address)
        self.fleet.join(facts, self.now_s)
        self.links.join(replica_id)
        self.do(self.prober.joined(facts, self.now_s))

    def pd(self, prefill: int = 1, decode: int = 1) -> None:
        for number in range(decode):
            self.join(f"d{number}", Role.DECODE)
        for number in range(prefill):
            self.join(f"p{number}", Role.PREFILL)

    def lose(self, replica_id: str) -> None:
        self.fleet.lose(replica_id)
        self.links.leave(replica_id)
        commands = self.prober.gone(replica_id, self.now_s)
        running, closing = self.legs.on_replica(replica_id)
        assert not running, "legs of probes are left on a lost replica"
        for gone in closing:
            self.legs.confirm(gone.placed.leg.leg_id)
            self.release_orphan(gone.lease)
        self.running = {i: s for i, s in self.running.items() if s.replica_id != replica_id}
        self.aborts = {i: r for i, r in self.aborts.items() if r != replica_id}
        self.held = {i: r for i, r in self.held.items() if r != replica_id}
        self.checks = [ends for ends in self.checks if ends[1] != replica_id]
        self.do(commands)
        if len(self.fleet) == 1:
            # Nobody is left who could tell the source: its leases run out by themselves.
            self.held.clear()

    def drain(self, replica_id: str) -> None:
        self.fleet.drain(replica_id)
        self.do(self.prober.gone(replica_id, self.now_s))

    # ------------------------------------------------------------ what is ordered

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case CheckSideChannel():
                    assert command.address == f"{command.source_id}:5600"
                    ends = (command.source_id, command.replica_id)
                    self.checks.append(ends)
                    self.begun.append((self.now_s, ends))
                case SubmitLeg():
                    self.submitted(command)
                case AbortLegs():
                    assert command.replica_id in self.fleet
                    for leg_id in command.leg_ids:
                        self.aborts[leg_id] = command.replica_id
                case ReleaseLease():
                    assert command.via_replica_id != command.lease.replica_id
                    assert command.via_replica_id in self.fleet
                    self.held.pop(command.lease.leg_id, None)
                case ReportBrokenAgent():
                    assert command.replica_id in self.fleet
                    self.reported.append(command.replica_id)
                case _:
                    raise AssertionError(f"a prober does not order {command}")
        self.prober.check_integrity()
        self.legs.check_integrity()
        self.links.check_integrity()

    def submitted(self, command: SubmitLeg) -> None:
        leg = command.leg
        assert command.replica_id in self.fleet
        assert leg.leg_id not in self.running
        assert (leg.payload, leg.max_tokens) == (b"", 1)
        self.running[leg.leg_id] = command
        if leg.kind is LegKind.PREFILL:
            self.prompts.append(tuple(leg.prompt_token_ids))

    # ------------------------------------------------------------ answers

    def answer(
        self, *, ok: bool = True, why: str = "no listener", ends: Ends | None = None
    ) -> None:
        source_id, target_id = ends or self.checks[0]
        self.checks.remove((source_id, target_id))
        event = SideChannelChecked(
            replica_id=target_id,
            source_id=source_id,
            ok=ok,
            took_s=0.01,
            why="" if ok else why,
        )
        self.do(self.prober.checked(event, self.now_s))

    def finish(
        self,
        leg_id: str | None = None,
        *,
        finish: FinishReason = FinishReason.LENGTH,
        ticket: bool = True,
        cached_tokens: int | None = 16,
    ) -> None:
        """The engine finishes a leg: a prefill leg hands out a ticket, a decode leg has pulled."""
        leg_id = leg_id or next(iter(self.running))
        command = self.running.pop(leg_id)
        leg = command.leg
        out = LegOutput(leg_id, (7,), finish)
        if leg.kind is LegKind.PREFILL:
            if ticket:
                self.held[leg_id] = command.replica_id
                params = leg_id.encode()
                ticket_out = Ticket(tokens=17, blocks=2, params=params)
                out = out._replace(ticket=ticket_out, cached_tokens=0)
        else:
            out = out._replace(cached_tokens=cached_tokens)
            if finish is FinishReason.LENGTH and cached_tokens != 0:
                self.pulled(leg)
        self.report(command.replica_id, out)

    def report(self, replica_id: str, out: LegOutput) -> None:
        if self.prober.owns(out.leg_id):
            self.do(self.prober.output(out, self.now_s))
        elif out.ticket is not None:
            # As the coordinator does with any late ticket.
            self.release_orphan(self.lease(out.leg_id, replica_id, out.ticket))

    def fail(self, failure: LegFailure, leg_id: str | None = None) -> None:
        leg_id = leg_id or next(iter(self.running))
        command = self.running.pop(leg_id)
        if self.prober.owns(leg_id):
            event = LegFailed(replica_id=command.replica_id, leg_id=leg_id, failure=failure)
            self.do(self.prober.leg_failed(event, self.now_s))
        elif (closing := self.legs.confirm(leg_id)) is not None:
            self.aborts.pop(leg_id, None)
            self.release_orphan(closing.lease)

    def confirm_aborts(self) -> None:
        for leg_id in tuple(self.aborts):
            self.confirm(leg_id)

    def confirm(self, leg_id: str) -> None:
        """The engine ends the leg, and with a decode leg the lease of what it would have pulled."""
        del self.aborts[leg_id]
        command = self.running.pop(leg_id, None)
        if command is not None and command.leg.kind is LegKind.DECODE:
            self.pulled(command.leg)
        self.legs.confirm(leg_id)

    def pulled(self, leg: Leg) -> None:
        assert leg.ticket is not None
        self.held.pop(leg.ticket.params.decode(), None)

    def lease(self, leg_id: str, replica_id: str, ticket: Ticket) -> Lease:
        return Lease(
            leg_id=leg_id,
            request_id="-",
            replica_id=replica_id,
            ticket=ticket,
            granted_at_s=self.now_s,
            expires_at_s=self.now_s + 30.0,
        )

    def release_orphan(self, lease: Lease | None) -> None:
        if lease is not None:
            self.held.pop(lease.leg_id, None)

    # ------------------------------------------------------------ time

    def wait(self, seconds: float) -> None:
        """Let time pass, stopping at every deadline on the way."""
        until_s = self.now_s + seconds
        for _ in range(10_000):
            at_s = self.prober.next_deadline_at_s()
            if at_s is None or at_s > until_s:
                break
            self.now_s = max(self.now_s, at_s)
            self.tick()
        else:
            raise AssertionError("the prober asks for the same deadline again and again")
        self.now_s = until_s
        self.tick()

    def tick(self) -> None:
        for closing in self.legs.take_overdue(self.now_s):
            self.release_orphan(closing.lease)
            self.aborts.pop(closing.placed.leg.leg_id, None)
            self.running.pop(closing.placed.leg.leg_id, None)
        self.do(self.prober.time_passed(self.now_s))

    def report_load(self, replica_id: str, load: Load) -> None:
        self.fleet.report(replica_id, load, self.now_s)

    # ------------------------------------------------------------ whole probes

    def probe_well(self, ends: Ends | None = None) -> None:
        """Answer one probe through all of its steps."""
        before = set(self.running)
        self.answer(ends=ends)
        while new := [leg_id for leg_id in self.running if leg_id not in before]:
            self.finish(new[0])

    def probe_all_well(self) -> None:
        while self.checks:
            self.probe_well()
