"""A pretend fleet for tests of the pair prober: it answers probes by hand and counts blocks."""

from __future__ import annotations

from random import Random

from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import LegTable
from baton.control.probing.prober import PairProber, ProbeOptions
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
from baton.domain.fleet import Load, Role
from baton.domain.handoff import KvHandle, Lease, Leg, LegFailure, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.policy.links.estimates import LinkTable
from tests.fakes.facts import replica_facts

ReplicaPair = tuple[str, str]
"""Source and target."""

NO_RATE_LIMIT = ProbeOptions(max_per_s=1000.0)


class PairWorld:
    """Drives a `PairProber`, and does with closing legs what the coordinator does.

    `leased` are the blocks that sources keep, by the prefill leg that got them.
    """

    def __init__(self, options: ProbeOptions = NO_RATE_LIMIT) -> None:
        self.now_s = 0.0
        self.fleet = FleetTable()
        self.legs = LegTable(self.fleet)
        self.links = LinkTable()
        self.prober = PairProber(
            limits=CoordinatorLimits(),
            fleet=self.fleet,
            legs=self.legs,
            links=self.links,
            rng=Random(1),
            options=options,
        )
        self.checks: list[ReplicaPair] = []
        """Asked and not answered yet."""
        self.running: dict[str, SubmitLeg] = {}
        self.aborts: dict[str, str] = {}
        """Legs whose abort is not confirmed yet, and where they ran."""
        self.leased: dict[str, str] = {}
        self.reported_agents: list[str] = []
        """Targets that were told that their agents are broken."""
        self.prompts: list[tuple[int, ...]] = []
        self.started_checks: list[tuple[float, ReplicaPair]] = []

    # ------------------------------------------------------------ membership

    def join(
        self, replica_id: str, role: Role, *, layout: str = "same", has_side_channel: bool = True
    ) -> None:
        address = f"{replica_id}:5600" if has_side_channel else ""
        facts = replica_facts(replica_id, role, layout=layout, side_channel=address)
        self.fleet.add(facts, self.now_s)
        self.links.add_replica(replica_id)
        self.execute(self.prober.on_replica_joined(facts, self.now_s))

    def join_prefill_decode(self, prefill: int = 1, decode: int = 1) -> None:
        for number in range(decode):
            self.join(f"d{number}", Role.DECODE)
        for number in range(prefill):
            self.join(f"p{number}", Role.PREFILL)

    def disconnect(self, replica_id: str) -> None:
        self.fleet.remove(replica_id)
        self.links.remove_replica(replica_id)
        commands = self.prober.on_replica_removed(replica_id, self.now_s)
        running, closing = self.legs.legs_on(replica_id)
        assert not running, "legs of probes are left on a lost replica"
        for closing_leg in closing:
            self.legs.confirm_closed(closing_leg.dispatched.leg.leg_id)
            self.release_orphan(closing_leg.lease)
        self.running = {i: s for i, s in self.running.items() if s.replica_id != replica_id}
        self.aborts = {i: r for i, r in self.aborts.items() if r != replica_id}
        self.leased = {i: r for i, r in self.leased.items() if r != replica_id}
        self.checks = [pair for pair in self.checks if pair[1] != replica_id]
        self.execute(commands)
        if len(self.fleet) == 1:
            # Nobody is left who could tell the source: its leases run out by themselves.
            self.leased.clear()

    def drain(self, replica_id: str) -> None:
        self.fleet.mark_draining(replica_id)
        self.execute(self.prober.on_replica_removed(replica_id, self.now_s))

    # ------------------------------------------------------------ what is ordered

    def execute(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case CheckSideChannel():
                    assert command.address == f"{command.source_id}:5600"
                    pair = (command.source_id, command.replica_id)
                    self.checks.append(pair)
                    self.started_checks.append((self.now_s, pair))
                case SubmitLeg():
                    self.on_submit(command)
                case AbortLegs():
                    assert command.replica_id in self.fleet
                    for leg_id in command.leg_ids:
                        self.aborts[leg_id] = command.replica_id
                case ReleaseLease():
                    assert command.via_replica_id != command.lease.replica_id
                    assert command.via_replica_id in self.fleet
                    self.leased.pop(command.lease.leg_id, None)
                case ReportFailedAgent():
                    assert command.replica_id in self.fleet
                    self.reported_agents.append(command.replica_id)
                case _:
                    raise AssertionError(f"a prober does not order {command}")
        self.prober.check_integrity()
        self.legs.check_integrity()
        self.links.check_integrity()

    def on_submit(self, command: SubmitLeg) -> None:
        leg = command.leg
        assert command.replica_id in self.fleet
        assert leg.leg_id not in self.running
        assert (leg.payload, leg.max_tokens) == (b"", 1)
        self.running[leg.leg_id] = command
        if leg.kind is LegKind.PREFILL:
            self.prompts.append(tuple(leg.prompt_token_ids))

    # ------------------------------------------------------------ answers

    def answer_check(
        self, *, ok: bool = True, reason: str = "no listener", pair: ReplicaPair | None = None
    ) -> None:
        source_id, target_id = pair or self.checks[0]
        self.checks.remove((source_id, target_id))
        event = SideChannelChecked(
            replica_id=target_id,
            source_id=source_id,
            is_reachable=ok,
            elapsed_s=0.01,
            reason="" if ok else reason,
        )
        self.execute(self.prober.on_side_channel_checked(event, self.now_s))

    def finish(
        self,
        leg_id: str | None = None,
        *,
        finish: FinishReason = FinishReason.LENGTH,
        ticket: bool = True,
        cached_tokens: int | None = 16,
    ) -> None:
        """The engine finishes a leg: a prefill leg gives a KV handle, a decode leg has pulled."""
        leg_id = leg_id or next(iter(self.running))
        command = self.running.pop(leg_id)
        leg = command.leg
        output = LegOutput(leg_id, (7,), finish)
        if leg.kind is LegKind.PREFILL:
            if ticket:
                self.leased[leg_id] = command.replica_id
                params = leg_id.encode()
                ticket_out = KvHandle(tokens=17, blocks=2, params=params)
                output = output._replace(kv_handle=ticket_out, cached_tokens=0)
        else:
            output = output._replace(cached_tokens=cached_tokens)
            if finish is FinishReason.LENGTH and cached_tokens != 0:
                self.on_pulled(leg)
        self.deliver(command.replica_id, output)

    def deliver(self, replica_id: str, output: LegOutput) -> None:
        if self.prober.owns(output.leg_id):
            self.execute(self.prober.on_output(output, self.now_s))
        elif output.kv_handle is not None:
            # As the coordinator does with any late KV handle.
            self.release_orphan(self.lease(output.leg_id, replica_id, output.kv_handle))

    def fail(self, failure: LegFailure, leg_id: str | None = None) -> None:
        leg_id = leg_id or next(iter(self.running))
        command = self.running.pop(leg_id)
        if self.prober.owns(leg_id):
            event = LegFailed(replica_id=command.replica_id, leg_id=leg_id, failure=failure)
            self.execute(self.prober.on_leg_failed(event, self.now_s))
        elif (closing := self.legs.confirm_closed(leg_id)) is not None:
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
            self.on_pulled(command.leg)
        self.legs.confirm_closed(leg_id)

    def on_pulled(self, leg: Leg) -> None:
        assert leg.kv_handle is not None
        self.leased.pop(leg.kv_handle.params.decode(), None)

    def lease(self, leg_id: str, replica_id: str, ticket: KvHandle) -> Lease:
        return Lease(
            leg_id=leg_id,
            request_id="-",
            replica_id=replica_id,
            kv_handle=ticket,
            granted_at_s=self.now_s,
            expires_at_s=self.now_s + 30.0,
        )

    def release_orphan(self, lease: Lease | None) -> None:
        if lease is not None:
            self.leased.pop(lease.leg_id, None)

    # ------------------------------------------------------------ time

    def advance(self, seconds: float) -> None:
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
        for closing in self.legs.pop_overdue(self.now_s):
            self.release_orphan(closing.lease)
            self.aborts.pop(closing.dispatched.leg.leg_id, None)
            self.running.pop(closing.dispatched.leg.leg_id, None)
        self.execute(self.prober.on_time(self.now_s))

    def report_load(self, replica_id: str, load: Load) -> None:
        self.fleet.on_load_report(replica_id, load, self.now_s)

    # ------------------------------------------------------------ whole probes

    def complete_probe(self, pair: ReplicaPair | None = None) -> None:
        """Answer one probe through all of its steps."""
        before = set(self.running)
        self.answer_check(pair=pair)
        while started_legs := [leg_id for leg_id in self.running if leg_id not in before]:
            self.finish(started_legs[0])

    def complete_all_probes(self) -> None:
        while self.checks:
            self.complete_probe()
