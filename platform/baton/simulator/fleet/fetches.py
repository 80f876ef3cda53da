"""What a virtual replica's engine orders from outside: pulls from others, loads from its host."""

from __future__ import annotations

from typing import assert_never

from baton.control.request.leases import RENEWALS_PER_LEASE
from baton.domain.handoff import LegOutput
from baton.simulator.engine.commands import (
    CancelFetch,
    EngineCommand,
    FreeSource,
    LoadBlocks,
    StartPull,
)
from baton.simulator.fleet.context import FleetContext, PeerReplica
from baton.simulator.fleet.engines import LinkSettings
from baton.simulator.network.transfers import Pull


class Fetches:
    """Carries out one replica's orders; what ends while it is frozen has ended when it thaws."""

    def __init__(self, replica: PeerReplica, link: LinkSettings, context: FleetContext) -> None:
        self._replica = replica
        self._link = link
        self._context = context
        self._is_renewing = False
        self.is_agent_broken = False
        """Whether every pull fails that begins from now on."""

    def execute(self, command: EngineCommand) -> None:
        """Do one thing that the engine has ordered."""
        match command:
            case StartPull():
                self._pull(command)
            case LoadBlocks():
                self._load_blocks(command)
            case CancelFetch():
                self._context.transfers.cancel(self._key(command.leg_id))
            case FreeSource():
                self.free_source(command.kv_handle.address, command.kv_handle.leg_id)
            case _:
                assert_never(command)

    def free_source(self, address: str, leg_id: str) -> bool:
        """Have a source free blocks; False when it does not keep them (any more)."""
        source = self._context.replicas_by_address.get(address)
        if source is None or not source.engine.release(leg_id, self._context.timeline.now_s):
            return False
        source.continue_steps()  # legs may wait for these blocks there
        return True

    def renew_leases(self) -> None:
        """Have the sources of what legs here wait for keep it for longer; again, while any waits.

        As vLLM does from the moment that its scheduler has a leg.
        """
        replica, context = self._replica, self._context
        if not replica.is_alive or replica.freezer.defer_if_frozen(self.renew_leases):
            return
        kv_handles = replica.engine.pending_kv_handles()
        for ticket in kv_handles:
            source = context.replicas_by_address.get(ticket.address)
            if source is not None:
                source.engine.renew(ticket.leg_id, context.timeline.now_s)
        self._is_renewing = bool(kv_handles)
        if kv_handles:
            context.timeline.call_later(self._link.lease_s / RENEWALS_PER_LEASE, self.renew_leases)

    def start_renewals(self) -> None:
        """A leg has come that waits for blocks."""
        if not self._is_renewing:
            self._is_renewing = True
            self._context.timeline.call_later(0.0, self.renew_leases)

    def _key(self, leg_id: str) -> str:
        return f"{self._replica.facts.side_channel}/{leg_id}"

    def _pull(self, command: StartPull) -> None:
        kv_handle, context, replica = command.kv_handle, self._context, self._replica
        started_at_s = context.timeline.now_s

        def on_done() -> None:
            if not replica.is_alive or replica.freezer.defer_if_frozen(on_done):
                return
            # The source may have given the blocks up meanwhile: then they are worth nothing. It is
            # asked, and one that is frozen answers when it thaws.
            source = context.replicas_by_address.get(kv_handle.address)
            if source is not None and source.freezer.defer_if_frozen(on_done):
                return
            kept = self.free_source(kv_handle.address, kv_handle.leg_id)
            took_s = context.timeline.now_s - started_at_s
            output = replica.engine.pull_done(
                command.leg_id, blocks=command.blocks, duration_s=took_s, source_kept=kept
            )
            on_pull_ended(output)

        def on_failed() -> None:
            if not replica.is_alive or replica.freezer.defer_if_frozen(on_failed):
                return
            on_pull_ended(replica.engine.pull_failed(command.leg_id))

        def on_pull_ended(output: LegOutput | None) -> None:
            replica.apply_engine_commands()
            replica.send_outputs(() if output is None else (output,))
            replica.on_pull_ended(kv_handle.engine_id)

        # Memory is read, whoever's blocks are in it: a lease that is over does not show before.
        if self.is_agent_broken or kv_handle.address not in context.replicas_by_address:
            context.timeline.call_later(0.0, on_failed)
            return
        context.transfers.begin(
            Pull(
                key=self._key(command.leg_id),
                source_id=kv_handle.address,
                target_id=replica.facts.side_channel,
                moved_bytes=command.blocks * replica.facts.kv_block_bytes,
                setup_s=self._link.setup_s,
                on_done=on_done,
                on_failed=on_failed,
            )
        )

    def _load_blocks(self, command: LoadBlocks) -> None:
        replica = self._replica

        def on_done() -> None:
            if replica.is_alive and not replica.freezer.defer_if_frozen(on_done):
                replica.engine.load_done(command.leg_id)
                replica.apply_engine_commands()
                replica.continue_steps()

        self._context.timeline.call_later(command.blocks * self._link.host_block_s, on_done)
