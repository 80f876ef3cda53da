"""What a virtual replica's engine orders from outside: pulls from others, loads from its host."""

from __future__ import annotations

from typing import assert_never

from baton.control.request.leases import RENEWALS
from baton.domain.handoff import LegOutput
from baton.simulator.engine.commands import CancelFetch, FreeSource, LoadBlocks, Order, StartPull
from baton.simulator.fleet.context import Member, World
from baton.simulator.fleet.engines import Wiring
from baton.simulator.network.transfers import Pull


class Fetches:
    """Carries out one replica's orders; what ends while it is frozen has ended when it thaws."""

    def __init__(self, replica: Member, wires: Wiring, world: World) -> None:
        self._replica = replica
        self._wires = wires
        self._world = world
        self._renews = False
        self.agent_broken = False
        """Whether every pull fails that begins from now on."""

    def carry_out(self, order: Order) -> None:
        """Do one thing that the engine has ordered."""
        match order:
            case StartPull():
                self._pull(order)
            case LoadBlocks():
                self._load_blocks(order)
            case CancelFetch():
                self._world.transfers.cancel(self._key(order.leg_id))
            case FreeSource():
                self.free_source(order.ticket.address, order.ticket.leg_id)
            case _:
                assert_never(order)

    def free_source(self, address: str, leg_id: str) -> bool:
        """Have a source free blocks; False when it does not keep them (any more)."""
        source = self._world.by_address.get(address)
        if source is None or not source.engine.release(leg_id, self._world.timeline.now_s):
            return False
        source.go_on()  # legs may wait for these blocks there
        return True

    def renew_leases(self) -> None:
        """Have the sources of what legs here wait for keep it for longer; again, while any waits.

        As vLLM does from the moment that its scheduler has a leg.
        """
        replica, world = self._replica, self._world
        if not replica.alive or replica.freezer.holds(self.renew_leases):
            return
        awaited = replica.engine.awaited()
        for ticket in awaited:
            source = world.by_address.get(ticket.address)
            if source is not None:
                source.engine.renew(ticket.leg_id, world.timeline.now_s)
        self._renews = bool(awaited)
        if awaited:
            world.timeline.after(self._wires.lease_s / RENEWALS, self.renew_leases)

    def watch_lease(self) -> None:
        """A leg has come that waits for blocks."""
        if not self._renews:
            self._renews = True
            self._world.timeline.after(0.0, self.renew_leases)

    def _key(self, leg_id: str) -> str:
        return f"{self._replica.facts.side_channel}/{leg_id}"

    def _pull(self, order: StartPull) -> None:
        ticket, world, replica = order.ticket, self._world, self._replica
        begun_at_s = world.timeline.now_s

        def done() -> None:
            if not replica.alive or replica.freezer.holds(done):
                return
            # The source may have given the blocks up meanwhile: then they are worth nothing. It is
            # asked, and one that is frozen answers when it thaws.
            source = world.by_address.get(ticket.address)
            if source is not None and source.freezer.holds(done):
                return
            kept = self.free_source(ticket.address, ticket.leg_id)
            took_s = world.timeline.now_s - begun_at_s
            output = replica.engine.pull_done(
                order.leg_id, blocks=order.blocks, took_s=took_s, kept=kept
            )
            over(output)

        def failed() -> None:
            if not replica.alive or replica.freezer.holds(failed):
                return
            over(replica.engine.pull_failed(order.leg_id))

        def over(output: LegOutput | None) -> None:
            replica.after_change()
            replica.send_outputs(() if output is None else (output,))
            replica.pulled(ticket.engine_id)

        # Memory is read, whoever's blocks are in it: a lease that is over does not show before.
        if self.agent_broken or ticket.address not in world.by_address:
            world.timeline.after(0.0, failed)
            return
        world.transfers.begin(
            Pull(
                key=self._key(order.leg_id),
                source_id=ticket.address,
                target_id=replica.facts.side_channel,
                moved_bytes=order.blocks * replica.facts.kv_block_bytes,
                setup_s=self._wires.setup_s,
                done=done,
                failed=failed,
            )
        )

    def _load_blocks(self, order: LoadBlocks) -> None:
        replica = self._replica

        def done() -> None:
            if replica.alive and not replica.freezer.holds(done):
                replica.engine.load_done(order.leg_id)
                replica.after_change()
                replica.go_on()

        self._world.timeline.after(order.blocks * self._wires.host_block_s, done)
