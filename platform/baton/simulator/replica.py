"""A replica in virtual time: a simulated engine, and the word between it and coordinators.

Theory of operation: the engine steps whenever there is something to compute; what it produces, and
what happens to its cache, goes to every coordinator with a *session*, after that session's latency,
in order. It behaves as a replica host of the live body does: an abort is confirmed after every
output of its leg, a leg that the engine does not take is said to have failed, a draining replica
takes none. Once it has `died` it does and says nothing more; what was on its way still arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from baton.control.cache_feed import CacheFeed
from baton.domain.events import (
    CacheChanged,
    Event,
    LegFailed,
    LegsAborted,
    LinksReported,
    LoadReported,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    SideChannelChecked,
    StepProduced,
)
from baton.domain.fleet import LinkTotals, LossReason, ReplicaFacts
from baton.domain.handoff import Leg, LegFailure, LegOutput, Ticket
from baton.domain.kv_events import KvEventBatch
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.orders import CancelFetch, FreeSource, LoadBlocks, StartPull
from baton.simulator.engine.settings import SimSettings
from baton.simulator.tickets import read_ticket, write_ticket
from baton.simulator.timeline import Timeline
from baton.simulator.transfers import Pull, Transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """When a replica says how it is."""

    beat_s: float = 0.25
    """Between two load reports; as the fleet link does it."""
    stale_s: float = 0.0
    """How much later than anything else load reports arrive."""
    cache_every_s: float = 0.02
    """How long cache changes are gathered before they are sent."""


class Listener(Protocol):
    """A coordinator's end of a session."""

    def hear(self, replica: VirtualReplica, event: Event) -> None:
        """Something that the replica said has arrived."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """A coordinator that a replica talks to."""

    listener: Listener
    latency_s: float
    received_legs: int = 0
    links: dict[str, LinkTotals] = field(default_factory=dict)
    """As last reported."""


@dataclass(slots=True, kw_only=True)
class World:
    """What the replicas of a fleet have in common."""

    timeline: Timeline
    transfers: Transfers
    reporting: Reporting
    by_address: dict[str, VirtualReplica] = field(default_factory=dict)
    """Those that live, by their side channels."""


class VirtualReplica:
    """One life of one replica."""

    def __init__(self, facts: ReplicaFacts, settings: SimSettings, world: World) -> None:
        self.facts = facts
        self.alive = True
        self.core = SimCore(
            settings,
            engine_id=facts.replica_id,
            model=facts.model,
            address=facts.side_channel,
            write_ticket=write_ticket,
        )
        self._settings = settings
        self._world = world
        self._timeline = world.timeline
        self._feed = CacheFeed(
            model=facts.model,
            block_size_tokens=facts.block_size_tokens,
            capacity_blocks=facts.kv_blocks,
            host_blocks=facts.host_blocks,
        )
        self._sessions: list[Session] = []
        self._owners: dict[str, Session] = {}
        self._draining = False
        self._stepping = False
        self._expiry_watched_s = float("inf")
        self._kv_batches = 0
        self._flush_due = False
        world.by_address[facts.side_channel] = self
        world.transfers.network.connect(facts.side_channel, settings.wire_bytes_per_s)

    # ------------------------------------------------------------------ sessions
    def open(self, listener: Listener, latency_s: float) -> Session:
        """Begin to talk to a coordinator: who this is, what is cached here, how loaded it is."""
        session = Session(listener, latency_s)
        self._sessions.append(session)
        self._say(session, ReplicaJoined(facts=self.facts))
        self._send_snapshot(session)
        self._report(session)
        return session

    def beat(self) -> None:
        """Report to everybody."""
        for session in self._sessions:
            self._report(session)

    def _report(self, session: Session) -> None:
        load = self.core.load()._replace(cache_sequence=self._feed.sequence)
        report = LoadReported(
            replica_id=self.facts.replica_id, load=load, received_legs=session.received_legs
        )
        self._say(session, report, late_s=self._world.reporting.stale_s)
        news = tuple(
            link for link in self.core.links() if session.links.get(link.source_id) != link
        )
        if news:
            session.links |= {link.source_id: link for link in news}
            self._say(session, LinksReported(replica_id=self.facts.replica_id, links=news))

    def _say(self, session: Session, event: Event, *, late_s: float = 0.0) -> None:
        delay_s = session.latency_s + late_s
        self._timeline.after(delay_s, lambda: session.listener.hear(self, event))

    def _say_to_all(self, event: Event) -> None:
        for session in self._sessions:
            self._say(session, event)

    # ------------------------------------------------------------------ what coordinators ask
    def submit(self, session: Session, leg: Leg) -> None:
        """Run a leg, or say why not."""
        if not self.alive:
            return
        session.received_legs += 1
        failure = LegFailure.DRAINING if self._draining else self._add(leg)
        if failure is not None:
            failed = LegFailed(replica_id=self.facts.replica_id, leg_id=leg.leg_id, failure=failure)
            self._say(session, failed)
            return
        self._owners[leg.leg_id] = session
        self._wake()

    def _add(self, leg: Leg) -> LegFailure | None:
        return self.core.add(leg, None if leg.ticket is None else read_ticket(leg.ticket))

    def abort(self, session: Session, leg_ids: Sequence[str]) -> None:
        """Stop legs and confirm it."""
        if not self.alive:
            return
        self.core.abort(leg_ids)
        for leg_id in leg_ids:
            self._owners.pop(leg_id, None)
        self._after_change()
        self._say(session, LegsAborted(replica_id=self.facts.replica_id, leg_ids=tuple(leg_ids)))
        self._wake()

    def release(self, ticket: Ticket) -> None:
        """Tell whoever issued a ticket that nobody will pull it."""
        if self.alive:
            self._free_source(read_ticket(ticket).address, read_ticket(ticket).leg_id)

    def sync_cache(self, session: Session) -> None:
        """Say all that is cached."""
        if self.alive:
            self._send_snapshot(session)

    def check_side_channel(self, session: Session, source_id: str, address: str) -> None:
        """Say whether another engine answers, and has blocks of the same layout."""
        if not self.alive:
            return
        source = self._world.by_address.get(address)
        ok = source is not None and source.facts.layout == self.facts.layout
        checked = SideChannelChecked(
            replica_id=self.facts.replica_id,
            source_id=source_id,
            ok=ok,
            took_s=self._settings.transfer_setup_s,
            why="" if ok else "it does not answer, or has other blocks",
        )
        self._say(session, checked, late_s=self._settings.transfer_setup_s)

    # ------------------------------------------------------------------ life
    def drain(self) -> None:
        """Take no new legs."""
        self._draining = True
        self._say_to_all(ReplicaDraining(replica_id=self.facts.replica_id))

    def die(self, reason: LossReason) -> None:
        """Stop at once, with everything that runs here; coordinators notice."""
        if not self.alive:
            return
        self.alive = False
        del self._world.by_address[self.facts.side_channel]
        self._world.transfers.engine_died(self.facts.side_channel)
        self._say_to_all(ReplicaLost(replica_id=self.facts.replica_id, reason=reason))
        self._sessions.clear()

    # ------------------------------------------------------------------ steps
    def _wake(self) -> None:
        """Begin a step if none is under way and there is something to do."""
        if self._stepping or not self.alive:
            return
        step = self.core.begin_step(self._timeline.now_s)
        self._after_change()
        if step is None:
            self._watch_expiry()
            return
        self._stepping = True
        self._timeline.after(step.duration_s, self._on_step_end)

    def _on_step_end(self) -> None:
        if not self.alive:
            return
        self._stepping = False
        outputs = self.core.finish_step(self._timeline.now_s)
        self._after_change()
        self._send_outputs(outputs)
        self._wake()

    def _watch_expiry(self) -> None:
        """Look again when a lease ends: legs may wait for its blocks."""
        at_s = self.core.next_expiry_s
        if at_s is not None and at_s < self._expiry_watched_s:
            self._expiry_watched_s = at_s
            self._timeline.at(at_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_watched_s = float("inf")
        self._wake()

    def _send_outputs(self, outputs: Iterable[LegOutput]) -> None:
        shares: dict[Session, list[LegOutput]] = {}
        for output in outputs:
            session = self._owners.get(output.leg_id)
            if session is None:
                continue
            shares.setdefault(session, []).append(output)
            if output.finish is not None:
                del self._owners[output.leg_id]
        for session, share in shares.items():
            produced = StepProduced(replica_id=self.facts.replica_id, outputs=tuple(share))
            self._say(session, produced)

    # ------------------------------------------------------------------ orders of the engine
    def _after_change(self) -> None:
        self._publish()
        for order in self.core.take_orders():
            match order:
                case StartPull():
                    self._pull(order)
                case LoadBlocks():
                    self._load(order)
                case CancelFetch():
                    self._world.transfers.cancel(self._key(order.leg_id))
                case FreeSource():
                    self._free_source(order.ticket.address, order.ticket.leg_id)
                case _:
                    assert_never(order)

    def _key(self, leg_id: str) -> str:
        return f"{self.facts.side_channel}/{leg_id}"

    def _pull(self, order: StartPull) -> None:
        ticket, begun_at_s = order.ticket, self._timeline.now_s

        def done() -> None:
            if not self.alive:
                return
            # The source may have given the blocks up meanwhile: then they are worth nothing.
            if not self._free_source(ticket.address, ticket.leg_id):
                failed()
                return
            took_s = self._timeline.now_s - begun_at_s
            self.core.pull_done(order.leg_id, blocks=order.blocks, took_s=took_s)
            self._after_change()
            self._wake()

        def failed() -> None:
            if not self.alive:
                return
            output = self.core.pull_failed(order.leg_id)
            self._after_change()
            self._send_outputs(() if output is None else (output,))
            self._wake()

        source = self._world.by_address.get(ticket.address)
        if source is None or not source.core.holds(ticket.leg_id, self._timeline.now_s):
            self._timeline.after(0.0, failed)
            return
        self._world.transfers.begin(
            Pull(
                key=self._key(order.leg_id),
                source_id=ticket.address,
                target_id=self.facts.side_channel,
                moved_bytes=order.blocks * self._settings.kv_block_bytes,
                setup_s=self._settings.transfer_setup_s / self._settings.speed,
                done=done,
                failed=failed,
            )
        )

    def _load(self, order: LoadBlocks) -> None:
        def done() -> None:
            if self.alive:
                self.core.load_done(order.leg_id)
                self._after_change()
                self._wake()

        self._timeline.after(self._settings.host_load_s(order.blocks), done)

    def _free_source(self, address: str, leg_id: str) -> bool:
        """Have a source free blocks; False when it does not keep them (any more)."""
        source = self._world.by_address.get(address)
        if source is None or not source.core.release(leg_id, self._timeline.now_s):
            return False
        source._wake()  # noqa: SLF001 - another replica: legs may wait for these blocks there
        return True

    # ------------------------------------------------------------------ cache
    def _publish(self) -> None:
        events = self.core.take_events()
        if not events:
            return
        self._feed.apply(
            KvEventBatch(replica_id=self.facts.replica_id, sequence=self._kv_batches, events=events)
        )
        self._kv_batches += 1
        if not self._flush_due:
            self._flush_due = True
            self._timeline.after(self._world.reporting.cache_every_s, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        update = self._feed.take() if self.alive else None
        if update is not None:
            self._say_to_all(CacheChanged(replica_id=self.facts.replica_id, update=update))

    def _send_snapshot(self, session: Session) -> None:
        update = self._feed.take()
        if update is not None:
            self._say_to_all(CacheChanged(replica_id=self.facts.replica_id, update=update))
        snapshot = self._feed.snapshot()
        self._say(session, CacheChanged(replica_id=self.facts.replica_id, update=snapshot))
