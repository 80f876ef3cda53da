"""Binds an engine to the fleet link: the body of a replica.

Theory of operation: legs go to the engine in the order of arrival, one call at a time, so that an
abort can never overtake its leg. Aborts gather during an abort call and go as one call. Releases,
which may wait for another replica, have a queue of their own. Each engine step is split by
coordinator and sent before the next is taken, so an `Aborted` frame follows every output of its
leg. All queues are bounded: legs by `max_live_legs`, aborts by the legs that live, releases by
`max_releases`. Legs that wait here are reported as queued. When the engine dies, every coordinator
is notified and `failed` is set; the host never restarts an engine. States: STARTED ─drain()─▶
DRAINING ─nothing lives─▶ DRAINED, and CLOSED from any.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import partial

from baton.control.fleet.cache_feed import FeedCounters
from baton.domain.errors import AdapterFailed, BatonError, EngineDied, LegInvalid, RoleUnsupported
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegOutput
from baton.runtime.cache_reporter import CacheReporter
from baton.runtime.link.frames import CloseReason
from baton.runtime.link.options import LinkCounters, LinkOptions
from baton.runtime.link.server import LinkServer
from baton.runtime.ports import Engine
from baton.runtime.process.log_events import log_event
from baton.runtime.roles import check_role
from baton.runtime.side_channel_checks import WORKERS, SideChannelCheckQueue

_LOG = logging.getLogger(__name__)
_LOAD_LAG_BEATS = 2
_Job = Callable[[], Coroutine[None, None, None]]


@dataclass(slots=True, kw_only=True)
class _HostCounters:
    submitted: int = 0
    failed: int = 0
    aborted: int = 0
    released: int = 0
    dropped_releases: int = 0
    steps: int = 0
    outputs: int = 0
    role_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Bounds and deadlines of a replica host."""

    max_live_legs: int = 8192
    max_releases: int = 1024
    """Releases in the queue; more are dropped, for their leases expire."""
    lease_s: float = 30.0
    """How long the engine keeps the blocks of a KV handle without a pull."""
    submit_timeout_s: float = 30.0
    abort_timeout_s: float = 30.0
    """An engine that takes longer is dead."""
    release_timeout_s: float = 10.0
    close_timeout_s: float = 30.0
    check_timeout_s: float = 2.0
    """Limit of a side channel's answer."""
    devices: float = 1.0
    """GPUs of the replica; a replica on CPUs counts as one."""


class ReplicaHost:
    """Runs an engine for coordinators; lives on one running event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        bind: str,
        options: HostOptions | None = None,
        link: LinkOptions | None = None,
    ) -> None:
        self.counters = _HostCounters()
        self.drained = asyncio.Event()
        """Set when a drain ends: nothing lives here any more, or its deadline passed."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BatonError] = self._loop.create_future()
        """Done, with the reason as its result, when the engine has died."""
        self.agent_failure = ""
        """Why a coordinator calls the engine's transfer agent broken; empty while it works."""
        self._engine = engine
        self._bind = bind
        self._options = options or HostOptions()
        self._link_options = link or LinkOptions()
        self._server: LinkServer | None = None
        self._facts: ReplicaFacts | None = None
        self._address = ""
        self._runner: asyncio.Task[None] | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._inbox = _EngineInbox(max_releases=self._options.max_releases)
        self._cache: CacheReporter | None = None
        self._checks: SideChannelCheckQueue | None = None
        self._leases = _OutstandingLeases(
            lease_s=self._options.lease_s,
            load_lag_s=_LOAD_LAG_BEATS * self._link_options.heartbeat_interval_s,
        )

    # ------------------------------------------------------------------ life

    async def start(self) -> ReplicaFacts:
        """Start the engine, then serve.

        Raises:
            EngineStartFailed: from the engine.
            OSError: the link's address cannot be bound; the engine has been closed again.
        """
        facts = replace(await self._engine.start(), devices=self._options.devices)
        kv_batches = self._engine.kv_events()  # before there is any
        server = LinkServer(facts, self, options=self._link_options)
        try:
            self._address = server.bind(self._bind)
        except OSError:
            await server.close()
            await self._close_engine()
            raise
        self._server, self._facts = server, facts
        max_bytes = self._link_options.max_part_bytes
        cache = CacheReporter(facts, server.reports, max_frame_bytes=max_bytes)
        on_check_result = server.reports.send_check_result
        checks = SideChannelCheckQueue(
            self._engine, on_check_result, deadline_s=self._options.check_timeout_s
        )
        self._cache, self._checks = cache, checks
        jobs: list[_Job] = [
            partial(cache.follow, kv_batches),
            *(checks.run_worker for _ in range(WORKERS)),
        ]
        self._runner = asyncio.create_task(
            self._run(server, jobs), name=f"replica {facts.replica_id}"
        )
        return facts

    @property
    def _replica_id(self) -> str:
        return "?" if self._facts is None else self._facts.replica_id

    @property
    def address(self) -> str:
        """The bound address of the link; empty before `start`."""
        return self._address

    @property
    def link_counters(self) -> LinkCounters:
        """The link's counters; zeros before `start`."""
        return LinkCounters() if self._server is None else self._server.counters

    @property
    def cache_counters(self) -> FeedCounters:
        """The prefix cache's counters; zeros before `start`."""
        return FeedCounters() if self._cache is None else self._cache.counters

    @property
    def coordinators(self) -> int:
        """Coordinators with a session."""
        return 0 if self._server is None else self._server.coordinators

    @property
    def live_legs(self) -> int:
        """Legs that run, wait for the engine, or are being aborted."""
        owned = 0 if self._server is None else self._server.live_legs
        return owned + len(self._inbox.orphans)

    @property
    def leases(self) -> int:
        """KV handles whose blocks may still be kept, as far as this side knows."""
        return len(self._leases)

    @property
    def facts(self) -> ReplicaFacts | None:
        """The replica's facts with its present role; None before `start`."""
        return self._facts if self._server is None else self._server.facts

    def set_role(self, role: Role) -> bool:
        """Change the role and tell every coordinator; False without a change. Work here goes on.

        Raises:
            RoleUnsupported: the engine cannot play it, or has not started.
        """
        if self._server is None:
            raise RoleUnsupported(f"this replica cannot become {role} yet", "wait until it runs")
        check_role(self._server.facts, role)
        changed = self._server.change_role(role)
        self.counters.role_changes += changed
        return changed

    def drain(self, deadline_s: float | None = None) -> None:
        """Refuse new legs and report that in heartbeats; `drained` is set when nothing lives here.

        At once where the engine has died.
        """
        if self._draining:
            return
        self._draining = True
        log_event(_LOG, logging.INFO, "replica_drains", {"replica_id": self._replica_id})
        if self.failed.done():
            self.drained.set()
            return
        if deadline_s is not None:
            self._drain_timer = self._loop.call_later(deadline_s, self.drained.set)
        if self._server is not None:
            self._server.beat_now()
        self._check_drained()

    async def close(self) -> None:
        """Say goodbye, stop the engine, and leave no task, port or memory behind. Idempotent."""
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        if self._cache is not None:
            self._cache.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.wait((runner,), timeout=self._options.close_timeout_s)
        if self._server is not None:
            await self._server.close()
        await self._close_engine()

    async def _close_engine(self) -> None:
        async with asyncio.timeout(self._options.close_timeout_s):
            await self._engine.close()

    async def _run(self, server: LinkServer, side_jobs: list[_Job]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump_steps(server))
                group.create_task(self._pump_legs(server))
                group.create_task(self._pump_aborts(server))
                group.create_task(self._pump_releases())
                for job in side_jobs:
                    group.create_task(job())
        except* Exception as failures:  # noqa: BLE001 - the supervised boundary of the engine
            self._fail(server, failures.exceptions[0])

    def _fail(self, server: LinkServer, error: BaseException) -> None:
        log_event(_LOG, logging.ERROR, "engine_failed", {"replica": self._replica_id}, error=error)
        if isinstance(error, BatonError):
            reason = error
        else:
            reason = EngineDied(self._replica_id, f"{type(error).__name__}: {error}")
        self.failed.set_result(reason)
        server.close_sessions(CloseReason.ENGINE_DEAD, str(reason))
        if self._draining:
            self.drained.set()

    # ------------------------------------------------------------------ link.server.LinkHandler

    def submit(self, leg: Leg) -> None:
        """Queue a leg for the engine, or refuse it."""
        if self._server is None:
            return
        if self._draining:
            self._server.send_leg_failed(leg.leg_id, LegFailure.DRAINING)
        elif self.live_legs > self._options.max_live_legs:
            reason = f"{self._options.max_live_legs} legs live here already"
            self._server.send_leg_failed(leg.leg_id, LegFailure.OVERLOADED, reason)
        else:
            self._inbox.put(leg)

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Queue an abort behind its legs."""
        self._inbox.abort(leg_ids)

    def orphan(self, leg_ids: tuple[str, ...]) -> None:
        """Queue an abort without a requester."""
        self._inbox.orphans.update(leg_ids)
        self._inbox.abort(leg_ids)

    def release(self, kv_handle: KvHandle) -> None:
        """Queue a release, or drop it when too many wait."""
        try:
            self._inbox.releases.put_nowait(kv_handle)
        except asyncio.QueueFull:
            self.counters.dropped_releases += 1

    def load_status(self) -> tuple[Load, bool]:
        """Return the engine's load and whether this replica drains."""
        load = self._engine.load()
        self._leases.expire(self._loop.time(), engine_is_empty=load.kv_used_fraction == 0)
        self._check_drained()
        legs, tokens = self._inbox.count_queued()
        reported = load._replace(
            queued_requests=load.queued_requests + legs,
            queued_tokens=load.queued_tokens + tokens,
            cache_sequence=0 if self._cache is None else self._cache.sequence,
        )
        return reported, self._draining

    def links(self) -> tuple[LinkTotals, ...]:
        """The engine's pulls so far."""
        return self._engine.links()

    def sync_cache(self, *, immediately: bool) -> None:
        """Send a snapshot of the prefix cache to those who wait for one."""
        if self._cache is not None:
            self._cache.sync(immediately=immediately)

    def check_side_channel(self, source_id: str, address: str) -> bool:
        """Have the engine check another replica; False when too many checks wait."""
        return self._checks is not None and self._checks.request(source_id, address)

    def report_broken_agent(self, reason: str) -> None:
        """Keep why this replica is to be replaced; logged once."""
        if not self.agent_failure:
            self.agent_failure = reason
            fields = {"replica_id": self._replica_id, "reason": reason}
            log_event(_LOG, logging.ERROR, "agent_broken", fields)

    # ------------------------------------------------------------------ pumps

    async def _pump_steps(self, server: LinkServer) -> None:
        async for outputs in self._engine.steps():
            self.counters.steps += 1
            self.counters.outputs += len(outputs)
            server.send_step(outputs)
            self._leases.record(outputs, self._loop.time())
            if self._draining:
                self._check_drained()
        raise EngineDied(self._replica_id, "it ended its output")

    async def _pump_legs(self, server: LinkServer) -> None:
        while True:
            item = await self._inbox.get()
            if not isinstance(item, Leg):
                self._inbox.schedule_abort(item)
            elif server.owns(item.leg_id):
                await self._submit(server, item)
            elif item.kv_handle is not None:
                self.release(item.kv_handle)  # as the engine does with a leg that it aborts

    async def _submit(self, server: LinkServer, leg: Leg) -> None:
        reason = ""
        try:
            async with asyncio.timeout(self._options.submit_timeout_s):
                failure = await self._engine.submit(leg)
        except AdapterFailed as error:
            failure, reason = LegFailure.REJECTED, str(error)
        except LegInvalid as error:
            failure, reason = LegFailure.INVALID, error.reason
        except Exception as error:  # noqa: BLE001 - one leg's failure is not the replica's
            log_event(
                _LOG, logging.WARNING, "leg_not_accepted", {"leg_id": leg.leg_id}, error=error
            )
            failure, reason = LegFailure.ENGINE_ERROR, f"{type(error).__name__}: {error}"
            self.orphan((leg.leg_id,))  # it may have started all the same
        if failure is None:
            self.counters.submitted += 1
            return
        self.counters.failed += 1
        server.send_leg_failed(leg.leg_id, failure, reason)
        self._check_drained()

    async def _pump_aborts(self, server: LinkServer) -> None:
        while True:
            leg_ids = await self._inbox.get_due_aborts()
            async with asyncio.timeout(self._options.abort_timeout_s):
                await self._engine.abort(leg_ids)
            self.counters.aborted += len(leg_ids)
            self._inbox.on_aborted(leg_ids)
            server.send_legs_aborted(leg_ids)
            self._check_drained()

    async def _pump_releases(self) -> None:
        while True:
            kv_handle = await self._inbox.releases.get()
            try:
                async with asyncio.timeout(self._options.release_timeout_s):
                    await self._engine.release(kv_handle)
            except Exception as error:  # noqa: BLE001 - best effort: the lease expires anyway
                reason = {"reason": f"{type(error).__name__}: {error}"}
                log_event(_LOG, logging.WARNING, "ticket_not_released", reason)
                continue
            self.counters.released += 1
            self._leases.remove(kv_handle)

    # ------------------------------------------------------------------ drain

    def _check_drained(self) -> None:
        if not self._draining or self.live_legs or self._leases:
            return
        # Leases are renewed by those who wait for their blocks, and this side gets no notice.
        if self._engine.load().kv_used_fraction == 0:
            self.drained.set()


class _OutstandingLeases:
    """KV handles whose blocks may still be kept.

    Only the pulling side learns when blocks have moved. But an engine without a used block keeps
    none, once its load has caught up with the last KV handle (`load_lag_s`).
    """

    def __init__(self, *, lease_s: float, load_lag_s: float) -> None:
        self._lease_s = lease_s
        self._load_lag_s = load_lag_s
        self._expires_at_s: dict[bytes, float] = {}
        self._last_lease_at_s = 0.0

    def __len__(self) -> int:
        return len(self._expires_at_s)

    def record(self, outputs: Iterable[LegOutput], now_s: float) -> None:
        """Add the KV handles of one engine step."""
        for output in outputs:
            if output.kv_handle is not None:
                self._last_lease_at_s = now_s
                self.remove(output.kv_handle)  # so that the oldest stay in front
                self._expires_at_s[output.kv_handle.params] = now_s + self._lease_s

    def remove(self, kv_handle: KvHandle) -> None:
        """Remove a released KV handle."""
        self._expires_at_s.pop(kv_handle.params, None)

    def expire(self, now_s: float, *, engine_is_empty: bool) -> None:
        """Forget expired KV handles, or all when the engine can hold no blocks for them."""
        for params, expires_at_s in tuple(self._expires_at_s.items()):
            if expires_at_s > now_s:
                break
            del self._expires_at_s[params]
        if engine_is_empty and now_s - self._last_lease_at_s > self._load_lag_s:
            self._expires_at_s.clear()


class _EngineInbox:
    """The queues between the fleet link and an engine; their bounds are the host's.

    Legs and aborts share one queue, so that an abort cannot overtake its leg. Nothing else may hold
    a leg back: only the engine that has a decode leg renews the lease of the blocks to fetch.
    """

    def __init__(self, *, max_releases: int) -> None:
        self.releases: asyncio.Queue[KvHandle] = asyncio.Queue(max_releases)
        self.orphans: set[str] = set()
        """Legs without an owner that may still run."""
        self._queue: deque[Leg | tuple[str, ...]] = deque()
        """Bounded by the host: legs by `max_live_legs`, aborts by the legs that live."""
        self._abort_requested: set[str] = set()
        self._due_aborts: dict[str, None] = {}
        self._not_empty = asyncio.Event()
        self._aborts_due = asyncio.Event()

    # ------------------------------------------------------------------ legs

    def put(self, leg: Leg) -> None:
        """Queue a leg for the engine."""
        self._queue.append(leg)
        self._not_empty.set()

    async def get(self) -> Leg | tuple[str, ...]:
        """Wait for the next leg that may go to the engine, or the next abort."""
        while not self._queue:
            self._not_empty.clear()
            await self._not_empty.wait()
        return self._queue.popleft()

    def count_queued(self) -> tuple[int, int]:
        """Legs that wait here, and their prompt tokens that have to be computed."""
        legs = [item for item in self._queue if isinstance(item, Leg)]
        return len(legs), sum(leg.uncached_prompt_tokens for leg in legs)

    # ------------------------------------------------------------------ aborts

    def abort(self, leg_ids: tuple[str, ...]) -> None:
        """Queue an abort of those legs that have none queued."""
        new_ids = tuple(leg_id for leg_id in leg_ids if leg_id not in self._abort_requested)
        if new_ids:
            self._abort_requested.update(new_ids)
            self._queue.append(new_ids)
            self._not_empty.set()

    def schedule_abort(self, leg_ids: tuple[str, ...]) -> None:
        """The engine has the legs that were queued before this abort: it may go."""
        self._due_aborts.update(dict.fromkeys(leg_ids))
        self._aborts_due.set()

    async def get_due_aborts(self) -> tuple[str, ...]:
        """Wait for aborts that may go; returns all of them."""
        await self._aborts_due.wait()
        self._aborts_due.clear()
        leg_ids = tuple(self._due_aborts)
        self._due_aborts.clear()
        return leg_ids

    def on_aborted(self, leg_ids: tuple[str, ...]) -> None:
        """These legs no longer run."""
        self._abort_requested.difference_update(leg_ids)
        self.orphans.difference_update(leg_ids)
