"""A fleet serves a trace in virtual time, with all of the control plane.

Theory of operation: times are those of the trace; replicas join a second before it begins. Requests
are made when they arrive and kept as one outcome each, so a million of them need little memory. All
is deterministic by the scenario's seed. Scheduled events are known beforehand, and no engine's
stretch of steps passes one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from baton.control.autoscaling.observer import Observer, ObserverOptions
from baton.control.coordinator import Coordinator
from baton.control.queue.cold_start_forecast import forecast_cold_starts
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.demand import ColdStart
from baton.domain.events import ColdStartReported
from baton.domain.handoff import HandoffMode
from baton.domain.request import Phase, Request
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.observation import Observation
from baton.simulator.faults import (
    Freeze,
    Kill,
    ScheduledEvent,
    SetBandwidth,
    SetRole,
    Start,
    Stop,
    StopReplica,
)
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.simulator.fleet.ingress import VirtualIngress
from baton.simulator.fleet.membership import Membership
from baton.simulator.fleet.plans import (
    UNBOUNDED_LIMITS,
    PoolPlan,
    Scenario,
    limits_for,
    throttled_reporting,
    timing_priors,
)
from baton.simulator.fleet.replica import MAX_STEP_RUN_S
from baton.simulator.fleet.samples import PoolSample, Sample, Sampler
from baton.simulator.fleet.scaling_log import (
    EMPTY_SCALING_REPORT,
    Scaler,
    ScalingRecorder,
    ScalingReport,
)
from baton.simulator.network.timeline import Timeline
from baton.simulator.outcome import Outcome
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.arrivals import UserLoad
from baton.simulator.workloads.trace import Trace, TraceRequest, to_request

__all__ = [
    "UNBOUNDED_LIMITS",
    "ClosedLoop",
    "Kill",
    "PoolPlan",
    "PoolSample",
    "Sample",
    "Scenario",
    "ScheduledEvent",
    "SetBandwidth",
    "SetRole",
    "Simulation",
    "SimulationResult",
    "Start",
    "Stop",
    "StopReplica",
    "simulate",
    "throttled_reporting",
]
_JOIN_LEAD_S = 1.0
"""Replicas join this long before the trace begins."""
_PROGRESS_PARTS = 200
_MAX_REPORT_GAP_S = 4.0
"""Less than half of `ObserverOptions.stale_s`, after which an observer ignores a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Users that send a trace's requests, instead of its arrival times."""

    load: UserLoad
    duration_s: float | None = None
    """Requests are sent for this time; None until all are sent."""
    max_requests: int | None = None
    """Requests are sent up to this number; None until all are sent."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Results of a trace."""

    outcomes: tuple[Outcome, ...]
    """In order of arrival."""
    timeline: tuple[Sample, ...]
    replica_seconds: Mapping[str, float]
    """By pool: from the request for a replica until it leaves, or to the end."""
    handoffs: int
    """Requests with a handoff in their last route."""
    resumes: int
    """Times that a request was placed again after a leg had failed."""
    route_reasons: Mapping[str, int]
    """Number of requests by the reason of their last route."""
    ended_at_s: float
    event_count: int
    """Events in virtual time; the simulation's run time is proportional to it."""
    scaling: ScalingReport = EMPTY_SCALING_REPORT
    ticks: tuple[AutoscalerTick, ...] = ()
    """The autoscaler's ticks with actions, and paused ticks."""


def simulate(
    scenario: Scenario,
    trace: Trace,
    *,
    declared_tokens: int = 1024,
    until_s: float | None = None,
    closed_loop: ClosedLoop | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """Serve a trace until every request has ended, or until a time of the trace.

    Outcomes include requests that have not ended by then, as not served, but not requests that have
    not arrived. In a closed loop, users send the trace's requests; its arrival times are not used.
    `on_progress` gets the fraction of requests that have ended.
    """
    classes = scenario.rules.slos.classes
    simulation = Simulation(scenario, trace)
    source: Iterator[Request] | _Users
    if closed_loop is None:
        source = trace.to_requests(declared_tokens=declared_tokens, classes=classes)
    else:

        def make(trace_request: TraceRequest, number: int, at_s: float) -> Request:
            return to_request(
                trace_request._replace(at_s=at_s),
                number,
                block_tokens=trace.block_tokens,
                declared_tokens=declared_tokens,
                classes=classes,
            )

        source = _Users(closed_loop, trace, make)
    simulation.run(
        source,
        until_s=float("inf") if until_s is None else until_s,
        on_progress=on_progress,
    )
    return simulation.result()


class Simulation:
    """One run; `simulate` runs it."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self._scenario = scenario
        prompts_shared = scenario.index is not None or any(
            request.block_ids for request in trace.requests
        )
        self._index = scenario.index if prompts_shared else IndexOptions(mode=IndexMode.EVENTS)
        replicas = len(scenario.replica_ids())
        reporting = scenario.reporting or throttled_reporting(
            replicas, scenario.coordinators, prompts_shared=prompts_shared
        )
        self._limits = limits_for(reporting, scenario.limits)
        if scenario.autoscaler is not None:  # stale data would pause it
            reporting = replace(
                reporting,
                report_interval_s=min(reporting.report_interval_s, _MAX_REPORT_GAP_S),
                max_report_gap_s=min(reporting.max_report_gap_s, _MAX_REPORT_GAP_S),
                max_step_run_s=min(reporting.max_step_run_s, MAX_STEP_RUN_S),
            )
        options = FleetOptions(
            seed=scenario.seed, latency_s=scenario.latency_s, reporting=reporting
        )
        first_arrival_at_s = trace.requests[0].at_s if trace.requests else 0.0
        self._start_at_s = min(0.0, first_arrival_at_s)
        self.fleet = VirtualFleet(
            options, start_s=self._start_at_s - _JOIN_LEAD_S, keep_records=False
        )
        self._membership = Membership(self.fleet, scenario.pools, model=scenario.model)
        self._clients = _Clients(
            self.fleet.timeline,
            max(
                pool.settings.first_token_s if isinstance(pool.settings, V1Settings) else 0.0
                for pool in scenario.pools
            ),
        )
        self._scaling: _ScalingLoop | None = None
        self._total = len(trace)
        self._on_progress: Callable[[float], None] | None = None
        self._next_progress = 0
        self._sampler = Sampler(
            self.fleet,
            span_s=trace.span_s,
            replicas=replicas,
            starting=self._membership.starting,
            counts=lambda: (self._clients.arrived, self._clients.ended),
        )

    def run(
        self,
        source: Iterator[Request] | _Users,
        *,
        until_s: float = float("inf"),
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Serve the requests: at their arrival times, or as users send them."""
        fleet, scenario = self.fleet, self._scenario
        self._on_progress = on_progress
        priors = timing_priors(scenario)
        for number in range(scenario.coordinators):
            coordinator = Coordinator(
                limits=self._limits,
                rules=scenario.rules,
                placer=scenario.placer(),
                coordinators=scenario.coordinators,
                index=self._index,
                priors=priors,
                seed=scenario.seed + number,
            )
            fleet.add_coordinator(coordinator, self._clients.on_delivery)
        self._membership.join_initial(self._start_at_s)
        fleet.add_end_listener(self._on_end)
        if scenario.autoscaler is not None:
            self._scaling = self._build_scaling_loop(scenario.autoscaler())
            fleet.timeline.call_at(self._start_at_s, self._scaling.begin)
        self._schedule_events(sorted(scenario.scheduled_events, key=lambda event: event.at_s))
        fleet.timeline.call_at(self._start_at_s, self._sampler.sample_periodically)
        if isinstance(source, _Users):
            source.begin(fleet, self._send)
        else:
            self._schedule_next_arrival(source)
        if self._total:
            fleet.run(until_s=until_s, until_ended=self._total)
        self._sampler.take_sample()

    def result(self) -> SimulationResult:
        """The results so far."""
        now_s, membership = self.fleet.timeline.now_s, self._membership
        scaling, replica_seconds = self._scaling, membership.replica_seconds()
        scaling_report = (ScalingRecorder() if scaling is None else scaling.recorder).report(
            now_s - self._start_at_s,
            replica_seconds=replica_seconds,
            gpus_per_replica={
                name: plan.gpus_per_replica for name, plan in membership.plans.items()
            },
        )
        return SimulationResult(
            outcomes=self._clients.outcomes(),
            timeline=self._sampler.samples(),
            replica_seconds=replica_seconds,
            handoffs=self._clients.handoffs,
            resumes=self._clients.resumes,
            route_reasons=dict(self._clients.route_reasons),
            ended_at_s=now_s,
            scaling=scaling_report,
            ticks=() if scaling is None else tuple(scaling.ticks),
            event_count=self.fleet.timeline.event_count,
        )

    def _build_scaling_loop(self, scaler: Scaler) -> _ScalingLoop:
        return _ScalingLoop(
            scaler,
            self._membership,
            self.fleet.timeline,
            ingresses=self.fleet.ingresses,
            observer=Observer(
                ObserverOptions.for_interval(self._scenario.scaling_interval_s),
                slos=self._scenario.rules.slos.classes,
            ),
            interval_s=self._scenario.scaling_interval_s,
        )

    # ------------------------------------------------------------------ requests
    def _schedule_next_arrival(self, requests: Iterator[Request]) -> None:
        request = next(requests, None)
        if request is not None:
            self.fleet.timeline.call_at(
                request.arrived_at_s, lambda: self._on_arrival(request, requests)
            )

    def _on_arrival(self, request: Request, later: Iterator[Request]) -> None:
        self._schedule_next_arrival(later)
        self._send(request)

    def _send(self, request: Request) -> None:
        ingress = self._clients.arrived % self._scenario.coordinators
        self._clients.on_request_sent(request)
        self.fleet.send(request, ingress)

    def _on_end(self, record: RequestRecord) -> None:
        self._clients.on_record(record)
        ended = self._clients.ended
        if self._on_progress is not None and ended >= self._next_progress:
            self._next_progress = ended + max(1, self._total // _PROGRESS_PARTS)
            self._on_progress(ended / self._total)

    # ------------------------------------------------------------------ scheduled events
    def _schedule_events(self, events: list[ScheduledEvent]) -> None:
        """Schedule the first event, which schedules the rest."""
        if not events:
            self.fleet.expect_event(float("inf"))
            return
        first, *later = events
        self.fleet.expect_event(first.at_s)

        def fire() -> None:
            self._schedule_events(later)
            self._apply_event(first)

        self.fleet.timeline.call_at(first.at_s, fire)

    def _apply_event(self, event: ScheduledEvent) -> None:
        fleet = self.fleet
        match event:
            case Start():
                self._membership.start(event.pool, event.replicas)
            case Stop():
                self._membership.stop(event.pool, event.replicas)
            case _ if event.replica_id not in fleet.replicas:
                pass
            case StopReplica():
                self._membership.stop_replica(event.replica_id)
            case Kill():
                self._membership.kill(event.replica_id)
            case Freeze():
                fleet.freeze(event.replica_id, event.duration_s)
            case SetRole():
                fleet.replicas[event.replica_id].change_role(event.role)
            case SetBandwidth():
                fleet.change_bandwidth(event.replica_id, event.bytes_per_s)
            case _:
                assert_never(event)


class _Users:
    """The users of a closed loop.

    Theory of operation: a user thinks, sends a request, waits until it has ended, and thinks again.
    It sends the requests of one session after each other, then those of the next session that no
    user has begun; a request without a session is one. A user without a session leaves. When the
    duration is over, no user sends, and the run ends with the last answer.
    """

    def __init__(
        self,
        loop: ClosedLoop,
        trace: Trace,
        make: Callable[[TraceRequest, int, float], Request],
    ) -> None:
        self._loop = loop
        self._make = make
        self._sessions = iter(_sessions(trace))
        self._rng = random.Random(loop.seed)  # noqa: S311 - a simulation
        self._waiting: dict[str, Iterator[tuple[int, TraceRequest]]] = {}
        """By the request that a user waits for: the rest of the user's session."""
        self._sent = 0
        self._is_over = False

    def begin(self, fleet: VirtualFleet, send: Callable[[Request], None]) -> None:
        """Let all users think from time 0 on."""
        self._fleet, self._send = fleet, send
        fleet.add_end_listener(self._on_end)
        for _ in range(self._loop.load.users):
            session = next(self._sessions, None)
            if session is None:
                break
            self._think(iter(session), from_s=0.0)
        if self._loop.duration_s is not None:
            fleet.timeline.call_at(self._loop.duration_s, self._end)

    def _think(self, session: Iterator[tuple[int, TraceRequest]], *, from_s: float) -> None:
        at_s = from_s + self._loop.load.draw_think_s(self._rng)
        self._fleet.timeline.call_at(at_s, lambda: self._send_next(session))

    def _send_next(self, session: Iterator[tuple[int, TraceRequest]]) -> None:
        if self._is_over:
            return
        following = next(session, None)
        while following is None:
            others = next(self._sessions, None)
            if others is None:
                return
            session = iter(others)
            following = next(session, None)
        number, trace_request = following
        request = self._make(trace_request, number, self._fleet.timeline.now_s)
        self._waiting[request.request_id] = session
        self._sent += 1
        self._send(request)
        if self._sent == self._loop.max_requests:
            self._end()

    def _on_end(self, record: RequestRecord) -> None:
        self._think(self._waiting.pop(record.request_id), from_s=record.ended_at_s)

    def _end(self) -> None:
        self._is_over = True
        self._fleet.stop_after(self._sent)


def _sessions(trace: Trace) -> list[list[tuple[int, TraceRequest]]]:
    """The requests with their numbers, by session; a request without a session is one."""
    sessions: dict[str | int, list[tuple[int, TraceRequest]]] = {}
    for number, request in enumerate(trace.requests):
        key = number if request.session_id is None else request.session_id
        sessions.setdefault(key, []).append((number, request))
    return list(sessions.values())


class _ScalingLoop:
    """Ticks an autoscaler until the simulation ends.

    Theory of operation: every `interval_s` the reports of all coordinators go to an `Observer`, as
    in the live controller; the autoscaler ticks, and its actions are applied at once. No report is
    lost and no start fails; starts take their cold start.
    """

    def __init__(
        self,
        scaler: Scaler,
        membership: Membership,
        timeline: Timeline,
        *,
        ingresses: Sequence[VirtualIngress],
        observer: Observer,
        interval_s: float,
    ) -> None:
        self._scaler = scaler
        self._membership = membership
        self._timeline = timeline
        self._ingresses = ingresses
        self._cold_start = ColdStart()
        self._observer = observer
        self._interval_s = interval_s
        self.recorder = ScalingRecorder()
        self.ticks: list[AutoscalerTick] = []
        """Ticks with actions, and paused ticks."""

    def begin(self) -> None:
        """Tick after one interval, and then periodically."""
        self._timeline.call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        observation = self._observe(self._timeline.now_s)
        tick = self._scaler.tick(observation)
        self.recorder.record_tick(tick)
        if tick.actions or tick.paused_reason:
            self.ticks.append(tick)
        for action in tick.actions:
            self._apply(action)
        self._publish_cold_start(observation)
        self._timeline.call_later(self._interval_s, self._tick)

    def _observe(self, now_s: float) -> Observation:
        reports = [
            ingress.coordinator.report(f"coordinator-{number}", now_s)
            for number, ingress in enumerate(self._ingresses)
        ]
        return self._observer.observe(reports, self._membership.pool_states(), now_s)

    def _publish_cold_start(self, observation: Observation) -> None:
        """Report the expected cold start to coordinators when it changes."""
        (start,) = forecast_cold_starts(observation, startable=observation.pools).values()
        if start != self._cold_start:
            self._cold_start = start
            for ingress in self._ingresses:
                ingress.on_event(ColdStartReported(cold_start=start))

    def _apply(self, action: ScalingAction) -> None:
        match action:
            case StartReplicas():
                self._membership.start(action.pool, action.replicas)
            case StopReplicas():
                self._membership.stop(action.pool, action.replicas)
            case FlipReplicas():
                self._membership.flip(action.pool, action.replicas, action.role)
            case _:
                assert_never(action)


class _Client:
    __slots__ = (
        "_first_token_s",
        "arrived_at_s",
        "first_token_at_s",
        "index",
        "last_token_at_s",
        "max_itl_s",
        "output_tokens",
        "prompt_tokens",
        "slo_class",
        "tenant",
    )

    def __init__(self, number: int, request: Request, first_token_s: float) -> None:
        self.index = number
        self._first_token_s = first_token_s
        self.arrived_at_s = request.arrived_at_s
        self.prompt_tokens = len(request.prompt_token_ids)
        self.slo_class = request.slo_class or DEFAULT_CLASS
        self.tenant = request.tenant
        self.output_tokens = 0
        self.first_token_at_s = self.last_token_at_s = float("inf")
        self.max_itl_s = 0.0

    def on_tokens(self, tokens: int, now_s: float) -> None:
        """Count tokens; several at once are a stretch's, which came at even intervals."""
        if not self.output_tokens:
            self.first_token_at_s = now_s
        elif (gap_s := (now_s - self.last_token_at_s) / tokens) > self.max_itl_s:
            self.max_itl_s = gap_s
        self.last_token_at_s = now_s
        self.output_tokens += tokens

    def outcome(self, ended_at_s: float, record: RequestRecord | None) -> Outcome:
        later_tokens = self.output_tokens - 1
        return Outcome(
            arrived_at_s=self.arrived_at_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if record is None else record.cached_tokens or 0,
            output_tokens=self.output_tokens,
            ttft_s=self.first_token_at_s - self.arrived_at_s + self._first_token_s,
            tpot_s=(self.last_token_at_s - self.first_token_at_s) / later_tokens
            if later_tokens > 0
            else 0.0,
            e2e_s=ended_at_s - self.arrived_at_s + self._first_token_s,
            ok=record is not None and record.outcome is Phase.FINISHED,
            max_itl_s=self.max_itl_s,
            tenant=self.tenant,
            slo_class=self.slo_class if record is None else record.slo.name,
            slo_met=record is not None and record.slo_result.is_good,
        )


class _Clients:
    """All clients; for ended requests only the outcomes are kept."""

    def __init__(self, timeline: Timeline, first_token_s: float) -> None:
        self._timeline = timeline
        self._first_token_s = first_token_s
        self._active: dict[str, _Client] = {}
        self._outcomes: list[Outcome | None] = []
        self.ended = 0
        self.handoffs = 0
        self.resumes = 0
        self.route_reasons: Counter[str] = Counter()
        """Reason of each request's last route; its phase if it has no route."""

    @property
    def arrived(self) -> int:
        """Number of requests sent."""
        return len(self._outcomes)

    def on_request_sent(self, request: Request) -> None:
        """A client sends a request now."""
        client = _Client(len(self._outcomes), request, self._first_token_s)
        self._active[request.request_id] = client
        self._outcomes.append(None)

    def on_delivery(self, delivery: Delivery) -> None:
        """Tokens reach a client."""
        if tokens := len(delivery.token_ids):
            self._active[delivery.request_id].on_tokens(tokens, self._timeline.now_s)

    def on_record(self, record: RequestRecord) -> None:
        """A request has ended, with any outcome."""
        client = self._active.pop(record.request_id)
        self._outcomes[client.index] = client.outcome(record.ended_at_s, record)
        self.ended += 1
        self.resumes += record.resumes
        if record.routes:
            route = record.routes[-1]
            self.handoffs += route.mode is not HandoffMode.LOCAL
            self.route_reasons[str(route.reason)] += 1
        else:
            self.route_reasons[str(record.outcome)] += 1

    def outcomes(self) -> tuple[Outcome, ...]:
        """Of all sent requests, in that order; unfinished requests count as not served."""
        for client in self._active.values():
            self._outcomes[client.index] = client.outcome(self._timeline.now_s, None)
        return tuple(outcome for outcome in self._outcomes if outcome is not None)
