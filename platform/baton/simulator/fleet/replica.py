"""A replica in virtual time: an engine, and its messages to coordinators.

Theory of operation: the engine computes while there is work, a step or a stretch of steps at a
time. Its outputs and cache changes go to every coordinator with a *session*, in order, after that
session's latency. A message to the engine may end a stretch earlier: the superseded end event has
an old number and is ignored. As with a live replica host, aborts are confirmed after the last
output of their legs, rejected legs are reported as failed, and a draining replica accepts none.
After `die` it sends nothing more; messages under way still arrive.

A *frozen* replica (a stopped process) neither computes nor sends, and messages to it wait until it
thaws. Its memory stays readable, so pulls from it continue. If its coordinator has closed a session
meanwhile, the session ends with all its legs at the thaw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, assert_never

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
    StepCompleted,
)
from baton.domain.fleet import Load, LossReason, ReplicaFacts, Role
from baton.domain.handoff import RENEWALS_PER_LEASE, KvHandle, Leg, LegFailure, LegOutput
from baton.simulator.engine.commands import (
    CancelFetch,
    EngineCommand,
    FreeSource,
    LoadBlocks,
    StartPull,
    decode_kv_handle,
)
from baton.simulator.engine.port import Occupancy, VirtualEngine
from baton.simulator.fleet.engines import LinkSettings
from baton.simulator.network.timeline import Callback, Timeline
from baton.simulator.network.transfers import Pull, Transfers

_MAX_STEP_S = 0.25
"""No decode step takes longer: an engine may exceed its horizon by one step."""
MAX_STEP_RUN_S = 1.0
"""Longest stretch of steps of a fleet that reports as often as on the live link."""
_TIME_TOLERANCE_S = 1e-9
"""End times that differ by less are equal except for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingOptions:
    """Times and contents of a replica's reports."""

    report_interval_s: float = 0.25
    """Between two load reports; the fleet link's value."""
    load_delay_s: float = 0.0
    """Extra delay of load reports."""
    cache_flush_interval_s: float = 0.02
    """How long cache changes are collected before they are sent."""
    report_unchanged: bool = True
    """Whether to report without a change, as the fleet link does."""
    max_report_gap_s: float = float("inf")
    """Longest gap between reports without `report_unchanged`."""
    report_cache: bool = True
    """Whether to send cache updates."""
    max_step_run_s: float = MAX_STEP_RUN_S
    """Longest stretch of steps, and so the largest delay of computed tokens."""


@dataclass(slots=True, kw_only=True)
class FleetContext:
    """Shared objects and state of the replicas."""

    timeline: Timeline
    transfers: Transfers
    reporting: ReportingOptions
    replace_replica: Callable[[str], None]
    replicas_by_address: dict[str, VirtualReplica] = field(default_factory=dict)
    """Live replicas, by their side channels."""
    next_event_at_s: float = float("inf")
    """No stretch of steps passes it: a replica that dies then has sent its computed tokens."""


class _Freezer:
    """Defers actions while it is frozen."""

    def __init__(self) -> None:
        self.is_frozen = False
        self._deferred: list[Callback] = []

    def defer_if_frozen(self, action: Callback) -> bool:
        """Defer `action` and return True if frozen."""
        if self.is_frozen:
            self._deferred.append(action)
        return self.is_frozen

    def thaw(self) -> list[Callback]:
        """Stop deferring; returns the deferred actions in order."""
        self.is_frozen = False
        deferred, self._deferred = self._deferred, []
        return deferred


class Listener(Protocol):
    """A coordinator's end of a session."""

    def on_replica_event(self, replica: VirtualReplica, event: Event) -> None:
        """An event of the replica has arrived."""
        ...


@dataclass(slots=True, eq=False)
class Session:
    """A coordinator's session with a replica."""

    listener: Listener
    latency_s: float
    received_legs: int = 0
    unreported_sources: set[str] = field(default_factory=set)
    """Sources of pulls that are not yet reported to it."""


class VirtualReplica:
    """One life of one replica."""

    def __init__(
        self, facts: ReplicaFacts, engine: VirtualEngine, link: LinkSettings, context: FleetContext
    ) -> None:
        self.facts = facts
        self.initial_role = facts.role
        self.is_alive = True
        self.is_draining = False
        self.engine = engine
        self._on_empty: Callable[[], None] | None = None
        self._link = link
        self._context = context
        self._timeline = context.timeline
        self._sessions: list[Session] = []
        self._is_lost = False
        self.freezer = _Freezer()
        self._sessions_by_leg: dict[str, Session] = {}
        self._ends_at_s: float | None = None
        self._end_sequence = 0
        self._expiry_timer_at_s = float("inf")
        self._flush_due = False
        self._has_changed = True
        self._is_beat_pending = True
        self._next_beat_at_s = self._last_report_at_s = context.timeline.now_s
        self._fetches = _Fetches(self, link, context)
        context.replicas_by_address[facts.side_channel] = self
        context.transfers.network.connect(facts.side_channel, link.bytes_per_s)

    # ------------------------------------------------------------------ sessions
    def open_session(self, listener: Listener, latency_s: float) -> Session:
        """Open a session: sends facts, a cache snapshot and the load."""
        links = self.engine.links()
        session = Session(
            listener, latency_s, unreported_sources={link.source_id for link in links}
        )
        self._sessions.append(session)
        self._send(session, ReplicaJoined(facts=self.facts))
        if self.is_draining:
            self._send(session, ReplicaDraining(replica_id=self.facts.replica_id))
        self._send_snapshot(session)
        self._send_load(session, self.load())
        return session

    def begin_heartbeats(self, delay_s: float) -> None:
        """Report at even intervals, after a first delay, while this replica lives."""
        self._timeline.call_later(delay_s, self._beat)

    def _beat(self) -> None:
        if not self.is_alive:
            return
        self.report_if_due()
        reporting = self._context.reporting
        self._next_beat_at_s = self._timeline.now_s + reporting.report_interval_s
        if (
            self._has_changed
            or self._ends_at_s is not None
            or reporting.report_unchanged
            or reporting.max_report_gap_s < float("inf")
        ):
            self._timeline.call_at(self._next_beat_at_s, self._beat)
        else:
            self._is_beat_pending = False

    def _resume_heartbeats(self) -> None:
        """Go on after a time without a change, in which no report was due, in the same rhythm."""
        interval_s, now_s = self._context.reporting.report_interval_s, self._timeline.now_s
        while self._next_beat_at_s < now_s:
            self._next_beat_at_s += interval_s
        self._is_beat_pending = True
        self._timeline.call_at(self._next_beat_at_s, self._beat)

    def report_if_due(self) -> None:
        """Report to every session, if a report is due."""
        if self.freezer.is_frozen:
            return
        reporting, now_s = self._context.reporting, self._timeline.now_s
        if not (
            self._has_changed
            or self._ends_at_s is not None
            or reporting.report_unchanged
            or now_s - self._last_report_at_s >= reporting.max_report_gap_s
        ):
            return
        self._has_changed = False
        self._last_report_at_s = now_s
        load = self.load()
        for session in self._sessions:
            self._send_load(session, load)

    def load(self) -> Load:
        """The load at this moment."""
        return self.engine.load(self._timeline.now_s)

    def occupancy(self) -> Occupancy:
        """Its requests and blocks at this moment."""
        return self.engine.occupancy(self._timeline.now_s)

    def is_empty(self) -> bool:
        """Whether it has no leg and no block in use."""
        return not any(self.occupancy())

    def _send_load(self, session: Session, load: Load) -> None:
        report = LoadReported(
            replica_id=self.facts.replica_id, load=load, received_legs=session.received_legs
        )
        self._send(session, report, extra_delay_s=self._context.reporting.load_delay_s)
        if session.unreported_sources:
            links = self.engine.links()
            unreported_links = tuple(
                link for link in links if link.source_id in session.unreported_sources
            )
            session.unreported_sources.clear()
            self._send(
                session, LinksReported(replica_id=self.facts.replica_id, links=unreported_links)
            )

    def _send(self, session: Session, event: Event, *, extra_delay_s: float = 0.0) -> None:
        delay_s = session.latency_s + extra_delay_s
        self._timeline.call_later(delay_s, partial(session.listener.on_replica_event, self, event))

    def _broadcast(self, event: Event) -> None:
        for session in self._sessions:
            self._send(session, event)

    # ------------------------------------------------------------------ messages of coordinators
    def submit(self, session: Session, leg: Leg) -> None:
        """Run a leg, or send its failure."""
        if not self._accepts(session, partial(self.submit, session, leg)):
            return
        session.received_legs += 1
        failure = self._add_leg(leg)
        if failure is not None:
            failed = LegFailed(replica_id=self.facts.replica_id, leg_id=leg.leg_id, failure=failure)
            self._send(session, failed)
            return
        self._sessions_by_leg[leg.leg_id] = session
        self.continue_steps()

    def _add_leg(self, leg: Leg) -> LegFailure | None:
        if self.is_draining:
            return LegFailure.DRAINING
        failure = self.engine.add(leg, now_s=self._timeline.now_s)
        if failure is None and leg.kv_handle is not None:
            self._fetches.start_renewals()
        return failure

    def abort(self, session: Session, leg_ids: Sequence[str]) -> None:
        """End legs and confirm it."""
        if not self._accepts(session, partial(self.abort, session, leg_ids)):
            return
        self.engine.abort(leg_ids)
        for leg_id in leg_ids:
            self._sessions_by_leg.pop(leg_id, None)
        self.apply_engine_commands()
        self._send(session, LegsAborted(replica_id=self.facts.replica_id, leg_ids=tuple(leg_ids)))
        self.continue_steps()

    def release(self, kv_handle: KvHandle) -> None:
        """Tell the source of a KV handle that no engine will pull it."""
        if self.is_alive and not self.freezer.defer_if_frozen(partial(self.release, kv_handle)):
            source_handle = decode_kv_handle(kv_handle)
            self._fetches.free_source(source_handle.address, source_handle.leg_id)

    def sync_cache(self, session: Session) -> None:
        """Send a cache snapshot."""
        if self._accepts(session, partial(self.sync_cache, session)):
            self._send_snapshot(session)

    def check_side_channel(self, session: Session, source_id: str, address: str) -> None:
        """Report whether another engine answers and has the same layout."""
        if not self._accepts(
            session, partial(self.check_side_channel, session, source_id, address)
        ):
            return
        source = self._context.replicas_by_address.get(address)
        ok = source is not None and source.facts.layout == self.facts.layout
        checked = SideChannelChecked(
            replica_id=self.facts.replica_id,
            source_id=source_id,
            is_reachable=ok,
            elapsed_s=self._link.setup_s,
            reason="" if ok else "it does not answer, or has other blocks",
        )
        self._send(session, checked, extra_delay_s=self._link.setup_s)

    def on_agent_broken(self) -> None:
        """Ask the fleet to replace this replica, unless it drains already."""
        if (
            self.is_alive
            and not self.is_draining
            and not self.freezer.defer_if_frozen(self.on_agent_broken)
        ):
            self._context.replace_replica(self.facts.replica_id)

    def _accepts(self, session: Session, retry: Callback) -> bool:
        """Whether to handle a coordinator's message now; a frozen replica calls `retry` later."""
        if not self.is_alive or self.freezer.defer_if_frozen(retry):
            return False
        return session in self._sessions

    # ------------------------------------------------------------------ life
    def freeze(self) -> None:
        """Compute and send nothing until `thaw`."""
        self.freezer.is_frozen = True

    def break_agent(self) -> None:
        """Fail every new pull, but answer side channel checks as before."""
        self._fetches.is_agent_broken = True

    def on_heartbeat_timeout(self) -> None:
        """Report a frozen replica as lost to its coordinators."""
        if self.is_alive and self.freezer.is_frozen:
            self._is_lost = True
            lost = ReplicaLost(replica_id=self.facts.replica_id, reason=LossReason.UNRESPONSIVE)
            for session in self._sessions:
                session.listener.on_replica_event(self, lost)

    def thaw(self) -> bool:
        """Continue; True if coordinators have closed their sessions and must open new sessions."""
        was_lost, self._is_lost = self._is_lost, False
        if not self.is_alive:
            return False
        lost_leg_ids: tuple[str, ...] = ()
        if was_lost:
            lost_leg_ids = tuple(self._sessions_by_leg)
            self._sessions.clear()
            self._sessions_by_leg.clear()
        for action in self.freezer.thaw():
            action()
        self.engine.abort(lost_leg_ids)
        self.apply_engine_commands()
        self.continue_steps()
        return was_lost

    def drain(self, on_empty: Callable[[], None] | None = None) -> None:
        """Reject new legs; call `on_empty` when no leg and no block in use is left."""
        self.is_draining, self._on_empty = True, on_empty
        self._broadcast(ReplicaDraining(replica_id=self.facts.replica_id))
        if self._ends_at_s is None:
            self._begin_steps()

    def change_role(self, role: Role) -> None:
        """Change the role; existing legs run on."""
        self.facts = replace(self.facts, role=role)
        self._broadcast(RoleChanged(replica_id=self.facts.replica_id, role=role))

    def die(self, reason: LossReason) -> None:
        """Stop at once with all legs; coordinators are notified."""
        if not self.is_alive:
            return
        self.is_alive = False
        del self._context.replicas_by_address[self.facts.side_channel]
        self._context.transfers.on_engine_died(self.facts.side_channel)
        self._broadcast(ReplicaLost(replica_id=self.facts.replica_id, reason=reason))
        self._sessions.clear()

    # ------------------------------------------------------------------ steps
    def continue_steps(self) -> None:
        """Handle a change: begin steps, or end the stretch under way earlier."""
        self._has_changed = True
        if not self._is_beat_pending:
            self._resume_heartbeats()
        if not self.is_alive or self.freezer.is_frozen:
            return
        if self._ends_at_s is None:
            self._begin_steps()
            return
        now_s = self._timeline.now_s
        remaining_s = self.engine.interrupt(now_s)
        if remaining_s is not None and now_s + remaining_s < self._ends_at_s - _TIME_TOLERANCE_S:
            self._schedule_end(remaining_s)
        self.apply_engine_commands()

    def _begin_steps(self) -> None:
        now_s = self._timeline.now_s
        horizon_s = self._context.reporting.max_step_run_s
        until_event_s = self._context.next_event_at_s - _MAX_STEP_S - now_s
        if until_event_s < horizon_s:
            horizon_s = max(0.0, until_event_s)
        duration_s = self.engine.begin(now_s, horizon_s=horizon_s)
        self.apply_engine_commands()
        if duration_s is not None:
            self._schedule_end(duration_s)
            return
        self._schedule_expiry()
        if self._on_empty is not None and self.is_empty():
            self._on_empty()

    def _schedule_end(self, delay_s: float) -> None:
        self._ends_at_s = self._timeline.now_s + delay_s
        self._end_sequence += 1
        self._timeline.call_later(delay_s, partial(self._on_steps_end, self._end_sequence))

    def _on_steps_end(self, number: int) -> None:
        if not self.is_alive or number != self._end_sequence:
            return
        if self.freezer.is_frozen and self.freezer.defer_if_frozen(
            partial(self._on_steps_end, number)
        ):
            return
        self._ends_at_s = None
        outputs = self.engine.finish(self._timeline.now_s)
        self.apply_engine_commands()
        self.send_outputs(outputs)
        self.continue_steps()

    def _schedule_expiry(self) -> None:
        """Wake when a lease ends: legs may wait for its blocks."""
        at_s = self.engine.next_expiry_s()
        if at_s is not None and at_s < self._expiry_timer_at_s:
            self._expiry_timer_at_s = at_s
            self._timeline.call_at(at_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry_timer_at_s = float("inf")
        self.continue_steps()

    def send_outputs(self, outputs: Iterable[LegOutput]) -> None:
        """Send outputs to the coordinators of their legs."""
        outputs_by_session: dict[Session, list[LegOutput]] = {}
        owners = self._sessions_by_leg
        last, share = None, []
        for output in outputs:
            leg_id = output.leg_id
            session = owners.get(leg_id)
            if session is None:
                continue
            if session is not last:
                last, share = session, outputs_by_session.setdefault(session, [])
            share.append(output)
            if output.finish is not None:
                del owners[leg_id]
        for session, share in outputs_by_session.items():
            produced = StepCompleted(
                replica_id=self.facts.replica_id,
                outputs=tuple(share),
                steps=len(share[0].token_ids) or 1,  # a virtual engine's steps give a token each
            )
            self._send(session, produced)

    # ------------------------------------------------------------------ commands of the engine
    def apply_engine_commands(self) -> None:
        """Execute the engine's commands and schedule its cache update."""
        engine = self.engine
        if not self._flush_due and engine.has_cache_update():
            self._flush_due = True
            self._timeline.call_later(
                self._context.reporting.cache_flush_interval_s, self._flush_cache_update
            )
        for command in engine.pop_commands():
            self._fetches.execute(command)

    def on_pull_ended(self, source_id: str) -> None:
        """Handle the end of a pull, successful or not."""
        for session in self._sessions:
            session.unreported_sources.add(source_id)
        self.apply_engine_commands()
        self.continue_steps()

    # ------------------------------------------------------------------ cache
    def _flush_cache_update(self) -> None:
        if self.freezer.defer_if_frozen(self._flush_cache_update):
            return
        self._flush_due = False
        update = self.engine.pop_cache_update() if self.is_alive else None
        if update is not None and self._context.reporting.report_cache:
            self._broadcast(CacheChanged(replica_id=self.facts.replica_id, update=update))

    def _send_snapshot(self, session: Session) -> None:
        update = self.engine.pop_cache_update()
        if not self._context.reporting.report_cache:
            return
        if update is not None:
            self._broadcast(CacheChanged(replica_id=self.facts.replica_id, update=update))
        snapshot = self.engine.cache_snapshot()
        self._send(session, CacheChanged(replica_id=self.facts.replica_id, update=snapshot))


class _Fetches:
    """Executes a replica's engine commands; a transfer that ends in a freeze counts at the thaw."""

    def __init__(self, replica: VirtualReplica, link: LinkSettings, context: FleetContext) -> None:
        self._replica = replica
        self._link = link
        self._context = context
        self._is_renewing = False
        self.is_agent_broken = False
        """Whether every new pull fails."""

    def execute(self, command: EngineCommand) -> None:
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
        """Free blocks at their source; False when it does not keep them any more."""
        source = self._context.replicas_by_address.get(address)
        if source is None or not source.engine.release(leg_id, self._context.timeline.now_s):
            return False
        source.continue_steps()  # legs may wait for these blocks there
        return True

    def renew_leases(self) -> None:
        """Renew the leases that legs here wait for, repeatedly while there are any.

        vLLM does so from the moment that its scheduler has the leg.
        """
        replica, context = self._replica, self._context
        if not replica.is_alive or replica.freezer.defer_if_frozen(self.renew_leases):
            return
        kv_handles = replica.engine.pending_kv_handles()
        for kv_handle in kv_handles:
            source = context.replicas_by_address.get(kv_handle.address)
            if source is not None:
                source.engine.renew(kv_handle.leg_id, context.timeline.now_s)
        self._is_renewing = bool(kv_handles)
        if kv_handles:
            context.timeline.call_later(self._link.lease_s / RENEWALS_PER_LEASE, self.renew_leases)

    def start_renewals(self) -> None:
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
            # The source may have freed the blocks meanwhile: it is asked, and a frozen source
            # answers when it thaws.
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

        # A pull reads memory even after the lease: only `on_done` finds out.
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
