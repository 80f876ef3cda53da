"""A fleet serves a trace: the whole brain in virtual time.

Theory of operation: times are those of the trace; replicas join a second before it begins. Requests
are made when they arrive, one at a time, and what became of them is kept as one outcome each, so a
million of them need little memory. Everything is deterministic by the scenario's seed. What is done
to replicas from outside is known beforehand, and no engine's jump goes beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from baton.control.autoscaling.observer import Observer, ObserverOptions
from baton.control.coordinator import Coordinator
from baton.domain.commands import RequestRecord
from baton.domain.request import Request
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from baton.policy.scaling.actions import AutoscalerTick
from baton.simulator.clients.clients import Clients
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
from baton.simulator.fleet.membership import Membership
from baton.simulator.fleet.plans import (
    UNBOUNDED_LIMITS,
    PoolPlan,
    Scenario,
    limits_for,
    throttled_reporting,
    timing_priors,
)
from baton.simulator.fleet.samples import PoolSample, Sample, Sampler
from baton.simulator.fleet.scaling import ScalingLoop
from baton.simulator.fleet.scaling_log import (
    EMPTY_SCALING_REPORT,
    Scaler,
    ScalingRecorder,
    ScalingReport,
)
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.trace import Trace

__all__ = [
    "UNBOUNDED_LIMITS",
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
"""Replicas join so long before the trace begins."""
_PROGRESS_PARTS = 200
_MAX_REPORT_GAP_S = 4.0
"""Less than half of what an observer takes for stale (`ObserverOptions.stale_s`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What became of a trace."""

    outcomes: tuple[Outcome, ...]
    """In order of arrival."""
    timeline: tuple[Sample, ...]
    replica_seconds: Mapping[str, float]
    """By pool: from being asked for to being gone, or to the end."""
    handoffs: int
    """Requests whose last route took their blocks from one replica to another."""
    resumes: int
    """Times that a request was placed again because a leg of it had failed."""
    route_reasons: Mapping[str, int]
    """How many requests were last routed for which reason."""
    ended_at_s: float
    event_count: int
    """Things that happened in virtual time: what the simulation's own time goes by."""
    scaling: ScalingReport = EMPTY_SCALING_REPORT
    """What an autoscaler did, and what the fleet cost."""
    ticks: tuple[AutoscalerTick, ...] = ()
    """Those of an autoscaler that changed something, or held."""


def simulate(
    scenario: Scenario,
    trace: Trace,
    *,
    declared_tokens: int = 1024,
    until_s: float | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """Let a fleet serve a trace until every request has ended, or until a time of the trace.

    Requests that have not ended by then are among the outcomes, as not served; those that have not
    arrived are not. `on_progress` hears the fraction of the requests that have ended.
    """
    simulation = Simulation(scenario, trace)
    simulation.run(
        trace.to_requests(declared_tokens=declared_tokens, classes=scenario.rules.slos.classes),
        until_s=float("inf") if until_s is None else until_s,
        on_progress=on_progress,
    )
    return simulation.result()


class Simulation:
    """One run; `simulate` is the short way to it."""

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
        if scenario.autoscaler is not None:  # which holds still where it has not heard for long
            reporting = replace(
                reporting, max_report_gap_s=min(reporting.max_report_gap_s, _MAX_REPORT_GAP_S)
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
        self._clients = Clients(self.fleet.timeline)
        self._scaling: ScalingLoop | None = None
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
        requests: Iterator[Request],
        *,
        until_s: float = float("inf"),
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Let it happen."""
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
        self._schedule_next_arrival(requests)
        if self._total:
            fleet.run(until_s=until_s, until_ended=self._total)
        self._sampler.take_sample()

    def result(self) -> SimulationResult:
        """What became of it."""
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

    def _build_scaling_loop(self, scaler: Scaler) -> ScalingLoop:
        return ScalingLoop(
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
        """Wait for the next arrival."""
        request = next(requests, None)
        if request is not None:
            self.fleet.timeline.call_at(
                request.arrived_at_s, lambda: self._on_arrival(request, requests)
            )

    def _on_arrival(self, request: Request, later: Iterator[Request]) -> None:
        ingress = self._clients.arrived % self._scenario.coordinators
        self._clients.on_request_sent(request)
        self._schedule_next_arrival(later)
        self.fleet.send(request, ingress)

    def _on_end(self, record: RequestRecord) -> None:
        self._clients.on_record(record)
        ended = self._clients.ended
        if self._on_progress is not None and ended >= self._next_progress:
            self._next_progress = ended + max(1, self._total // _PROGRESS_PARTS)
            self._on_progress(ended / self._total)

    # ------------------------------------------------------------------ what happens to replicas
    def _schedule_events(self, events: list[ScheduledEvent]) -> None:
        """Wait for the first of what is yet to happen."""
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
