"""A replica in virtual time: an engine, and the word between it and coordinators.

Theory of operation: the engine computes whenever there is something to compute, a step at a time
or many steps in one *jump*; what it produces, and what happens to its cache, goes to every
coordinator with a *session*, after that session's latency, in order. Whatever reaches the engine
amid a jump may end it earlier: an end that was put off the calendar so is told by its number, and
ignored. A replica behaves as a replica host of the live body does: an abort is confirmed after each
output of its leg, a leg that the engine does not take is said to have failed, a draining replica
takes none. Once it has `died` it does and says nothing more; what was on its way still arrives.

A *frozen* replica (a stopped process) neither computes nor says anything, and what it is told waits
until it thaws. Its memory can be read all the while, so pulls from it go on. A session that its
coordinator has broken off meanwhile is over when it thaws, with all its legs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

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
    RoleChanged,
    SideChannelChecked,
    StepProduced,
)
from baton.domain.fleet import Load, LossReason, ReplicaFacts, Role
from baton.domain.handoff import Leg, LegFailure, LegOutput, Ticket
from baton.simulator.engine.kv_handles import read_ticket
from baton.simulator.engine.port import VirtualEngine
from baton.simulator.fleet.context import World
from baton.simulator.fleet.engines import Wiring
from baton.simulator.fleet.fetches import Fetches
from baton.simulator.fleet.frozen_replica import Freezer
from baton.simulator.network.timeline import Action

_STEP_S = 0.25
"""No decode step takes longer; by so much may an engine overstep its patience."""
_SAME_MOMENT_S = 1e-9
"""An end that moves by less than this has not moved: it was computed in another way."""


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
    pulled_from: set[str] = field(default_factory=set)
    """Sources of pulls that it has not been told of."""


class VirtualReplica:
    """One life of one replica."""

    def __init__(
        self, facts: ReplicaFacts, engine: VirtualEngine, wires: Wiring, world: World
    ) -> None:
        self.facts = facts
        self.started_as = facts.role
        self.alive = True
        self.draining = False
        self.engine = engine
        self._on_empty: Callable[[], None] | None = None
        self._wires = wires
        self._world = world
        self._timeline = world.timeline
        self._sessions: list[Session] = []
        self._broken_off = False
        self.freezer = Freezer()
        self._owners: dict[str, Session] = {}
        self._ends_at_s: float | None = None
        self._end_number = 0
        self._expiry_watched_s = float("inf")
        self._flush_due = False
        self._changed = True
        self._said_at_s = world.timeline.now_s
        self._fetches = Fetches(self, wires, world)
        world.by_address[facts.side_channel] = self
        world.transfers.network.connect(facts.side_channel, wires.bytes_per_s)

    # ------------------------------------------------------------------ sessions
    def open(self, listener: Listener, latency_s: float) -> Session:
        """Begin to talk to a coordinator: who this is, what is cached here, how loaded it is."""
        links = self.engine.links()
        session = Session(listener, latency_s, pulled_from={link.source_id for link in links})
        self._sessions.append(session)
        self._say(session, ReplicaJoined(facts=self.facts))
        if self.draining:
            self._say(session, ReplicaDraining(replica_id=self.facts.replica_id))
        self._send_snapshot(session)
        self._report(session, self.load())
        return session

    def beat(self) -> None:
        """Report to everybody, if there is anything to report."""
        if self.freezer.frozen:
            return
        reporting, now_s = self._world.reporting, self._timeline.now_s
        silent = now_s - self._said_at_s < reporting.silence_s
        if silent and not (self._changed or self._ends_at_s is not None or reporting.always):
            return
        self._changed = False
        self._said_at_s = now_s
        load = self.load()
        for session in self._sessions:
            self._report(session, load)

    def load(self) -> Load:
        """How loaded it is at this moment."""
        return self.engine.load(self._timeline.now_s)

    def is_empty(self) -> bool:
        """Whether nothing is left here of any request: no leg, no block that is in use."""
        load = self.load()
        return not load.requests and not load.kv_used_fraction

    def _report(self, session: Session, load: Load) -> None:
        report = LoadReported(
            replica_id=self.facts.replica_id, load=load, received_legs=session.received_legs
        )
        self._say(session, report, late_s=self._world.reporting.stale_s)
        if session.pulled_from:
            links = self.engine.links()
            news = tuple(link for link in links if link.source_id in session.pulled_from)
            session.pulled_from.clear()
            self._say(session, LinksReported(replica_id=self.facts.replica_id, links=news))

    def _say(self, session: Session, event: Event, *, late_s: float = 0.0) -> None:
        delay_s = session.latency_s + late_s
        self._timeline.after(delay_s, partial(session.listener.hear, self, event))

    def _say_to_all(self, event: Event) -> None:
        for session in self._sessions:
            self._say(session, event)

    # ------------------------------------------------------------------ what coordinators ask
    def submit(self, session: Session, leg: Leg) -> None:
        """Run a leg, or say why not."""
        if not self._hears(session, partial(self.submit, session, leg)):
            return
        session.received_legs += 1
        failure = self._take_in(leg)
        if failure is not None:
            failed = LegFailed(replica_id=self.facts.replica_id, leg_id=leg.leg_id, failure=failure)
            self._say(session, failed)
            return
        self._owners[leg.leg_id] = session
        self.go_on()

    def _take_in(self, leg: Leg) -> LegFailure | None:
        if self.draining:
            return LegFailure.DRAINING
        failure = self.engine.add(leg, now_s=self._timeline.now_s)
        if failure is None and leg.ticket is not None:
            self._fetches.watch_lease()
        return failure

    def abort(self, session: Session, leg_ids: Sequence[str]) -> None:
        """Stop legs and confirm it."""
        if not self._hears(session, partial(self.abort, session, leg_ids)):
            return
        self.engine.abort(leg_ids)
        for leg_id in leg_ids:
            self._owners.pop(leg_id, None)
        self.after_change()
        self._say(session, LegsAborted(replica_id=self.facts.replica_id, leg_ids=tuple(leg_ids)))
        self.go_on()

    def release(self, ticket: Ticket) -> None:
        """Tell whoever issued a ticket that nobody will pull it."""
        if self.alive and not self.freezer.holds(partial(self.release, ticket)):
            read = read_ticket(ticket)
            self._fetches.free_source(read.address, read.leg_id)

    def sync_cache(self, session: Session) -> None:
        """Say all that is cached."""
        if self._hears(session, partial(self.sync_cache, session)):
            self._send_snapshot(session)

    def check_side_channel(self, session: Session, source_id: str, address: str) -> None:
        """Say whether another engine answers, and has blocks of the same layout."""
        if not self._hears(session, partial(self.check_side_channel, session, source_id, address)):
            return
        source = self._world.by_address.get(address)
        ok = source is not None and source.facts.layout == self.facts.layout
        checked = SideChannelChecked(
            replica_id=self.facts.replica_id,
            source_id=source_id,
            ok=ok,
            took_s=self._wires.setup_s,
            why="" if ok else "it does not answer, or has other blocks",
        )
        self._say(session, checked, late_s=self._wires.setup_s)

    def agent_broken(self) -> None:
        """A coordinator says that this replica is to be replaced: tell who does that, once."""
        if self.alive and not self.draining and not self.freezer.holds(self.agent_broken):
            self._world.replace(self.facts.replica_id)

    def _hears(self, session: Session, again: Action) -> bool:
        """Whether what a coordinator says is heard now; a frozen replica hears it `again` later."""
        if not self.alive or self.freezer.holds(again):
            return False
        return session in self._sessions

    # ------------------------------------------------------------------ life
    def freeze(self) -> None:
        """Do and say nothing until it thaws."""
        self.freezer.frozen = True

    def break_agent(self) -> None:
        """Fail every pull from now on, and answer those who ask as before."""
        self._fetches.agent_broken = True

    def break_off(self) -> None:
        """Coordinators have waited for a frozen replica for long enough: it is lost to them."""
        if self.alive and self.freezer.frozen:
            self._broken_off = True
            lost = ReplicaLost(replica_id=self.facts.replica_id, reason=LossReason.SILENT)
            for session in self._sessions:
                session.listener.hear(self, lost)

    def thaw(self) -> bool:
        """Go on; whether coordinators have broken off, so that sessions must be opened anew."""
        broken_off, self._broken_off = self._broken_off, False
        if not self.alive:
            return False
        over: tuple[str, ...] = ()
        if broken_off:
            over = tuple(self._owners)
            self._sessions.clear()
            self._owners.clear()
        for action in self.freezer.thaw():
            action()
        self.engine.abort(over)
        self.after_change()
        self.go_on()
        return broken_off

    def drain(self, on_empty: Callable[[], None] | None = None) -> None:
        """Take no new legs; call `on_empty` when nothing is left here of any request."""
        self.draining, self._on_empty = True, on_empty
        self._say_to_all(ReplicaDraining(replica_id=self.facts.replica_id))
        if self._ends_at_s is None:
            self._begin()

    def change_role(self, role: Role) -> None:
        """Be meant for something else; what runs here runs on."""
        self.facts = replace(self.facts, role=role)
        self._say_to_all(RoleChanged(replica_id=self.facts.replica_id, role=role))

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
    def go_on(self) -> None:
        """Something has changed: compute, or end what is under way earlier."""
        self._changed = True
        if not self.alive or self.freezer.frozen:
            return
        if self._ends_at_s is None:
            self._begin()
            return
        now_s = self._timeline.now_s
        left_s = self.engine.interrupt(now_s)
        if left_s is not None and now_s + left_s < self._ends_at_s - _SAME_MOMENT_S:
            self._end_in(left_s)
        self.after_change()

    def _begin(self) -> None:
        now_s = self._timeline.now_s
        world = self._world
        patience_s = world.reporting.patience_s
        left_s = world.next_happening_at_s - _STEP_S - now_s
        if left_s < patience_s:
            patience_s = max(0.0, left_s)
        took_s = self.engine.begin(now_s, patience_s=patience_s)
        self.after_change()
        if took_s is not None:
            self._end_in(took_s)
            return
        self._watch_expiry()
        if self._on_empty is not None and self.is_empty():
            self._on_empty()

    def _end_in(self, delay_s: float) -> None:
        self._ends_at_s = self._timeline.now_s + delay_s
        self._end_number += 1
        self._timeline.after(delay_s, partial(self._on_end, self._end_number))

    def _on_end(self, number: int) -> None:
        if not self.alive or number != self._end_number:
            return
        if self.freezer.frozen and self.freezer.holds(partial(self._on_end, number)):
            return
        self._ends_at_s = None
        outputs = self.engine.finish(self._timeline.now_s)
        self.after_change()
        self.send_outputs(outputs)
        self.go_on()

    def _watch_expiry(self) -> None:
        """Look again when a lease ends: legs may wait for its blocks."""
        at_s = self.engine.next_expiry_s()
        if at_s is not None and at_s < self._expiry_watched_s:
            self._expiry_watched_s = at_s
            self._timeline.at(at_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_watched_s = float("inf")
        self.go_on()

    def send_outputs(self, outputs: Iterable[LegOutput]) -> None:
        """Tell coordinators what their legs have produced."""
        shares: dict[Session, list[LegOutput]] = {}
        owners = self._owners
        for output in outputs:
            session = owners.get(output.leg_id)
            if session is None:
                continue
            if session in shares:
                shares[session].append(output)
            else:
                shares[session] = [output]
            if output.finish is not None:
                del owners[output.leg_id]
        for session, share in shares.items():
            produced = StepProduced(replica_id=self.facts.replica_id, outputs=tuple(share))
            self._say(session, produced)

    # ------------------------------------------------------------------ orders of the engine
    def after_change(self) -> None:
        """Something has changed in the engine: do what it orders, say what it caches."""
        engine = self.engine
        if not self._flush_due and engine.has_cache_news():
            self._flush_due = True
            self._timeline.after(self._world.reporting.cache_every_s, self._flush)
        for order in engine.take_orders():
            self._fetches.carry_out(order)

    def pulled(self, source_id: str) -> None:
        """A pull from a source is over, one way or the other."""
        for session in self._sessions:
            session.pulled_from.add(source_id)
        self.after_change()
        self.go_on()

    # ------------------------------------------------------------------ cache
    def _flush(self) -> None:
        if self.freezer.holds(self._flush):
            return
        self._flush_due = False
        update = self.engine.take_cache_update() if self.alive else None
        if update is not None and self._world.reporting.cached:
            self._say_to_all(CacheChanged(replica_id=self.facts.replica_id, update=update))

    def _send_snapshot(self, session: Session) -> None:
        update = self.engine.take_cache_update()
        if not self._world.reporting.cached:
            return
        if update is not None:
            self._say_to_all(CacheChanged(replica_id=self.facts.replica_id, update=update))
        snapshot = self.engine.cache_snapshot()
        self._say(session, CacheChanged(replica_id=self.facts.replica_id, update=snapshot))
