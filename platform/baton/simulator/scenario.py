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
from baton.policy.scaling.actions import Tick
from baton.simulator.clients.clients import Audience
from baton.simulator.faults import (
    Freeze,
    Happening,
    Kill,
    SetBandwidth,
    SetRole,
    Start,
    Stop,
    StopReplica,
)
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.simulator.fleet.membership import Membership
from baton.simulator.fleet.plans import (
    GENEROUS,
    PoolPlan,
    Scenario,
    economical,
    limits_under,
    priors_of,
)
from baton.simulator.fleet.samples import PoolSample, Sample, Sampler
from baton.simulator.fleet.scaling import ScalingBody
from baton.simulator.fleet.scaling_log import NO_STORY, Scaler, Story, StoryTeller
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.trace import Trace

__all__ = [
    "GENEROUS",
    "Happening",
    "Kill",
    "PoolPlan",
    "PoolSample",
    "Run",
    "Sample",
    "Scenario",
    "SetBandwidth",
    "SetRole",
    "Stage",
    "Start",
    "Stop",
    "StopReplica",
    "economical",
    "simulate",
]

_SETTLE_S = 1.0
"""Replicas join so long before the trace begins."""
_PROGRESS_PARTS = 200
_SILENCE_S = 4.0
"""Less than half of what an observer takes for stale (`ObserverOptions.stale_s`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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
    reasons: Mapping[str, int]
    """How many requests were last routed for which reason."""
    ended_at_s: float
    events: int
    """Things that happened in virtual time: what the simulation's own time goes by."""
    story: Story = NO_STORY
    """What an autoscaler did, and what the fleet cost."""
    ticks: tuple[Tick, ...] = ()
    """Those of an autoscaler that changed something, or held."""


def simulate(
    scenario: Scenario,
    trace: Trace,
    *,
    declared_tokens: int = 1024,
    until_s: float | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Run:
    """Let a fleet serve a trace until every request has ended, or until a time of the trace.

    Requests that have not ended by then are among the outcomes, as not served; those that have not
    arrived are not. `on_progress` hears the fraction of the requests that have ended.
    """
    stage = Stage(scenario, trace)
    stage.run(
        trace.asked(declared_tokens=declared_tokens, classes=scenario.rules.slos.classes),
        until_s=float("inf") if until_s is None else until_s,
        on_progress=on_progress,
    )
    return stage.result()


class Stage:
    """One run; `simulate` is the short way to it."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self._scenario = scenario
        shared = scenario.index is not None or any(one.block_ids for one in trace.requests)
        self._index = scenario.index if shared else IndexOptions(mode=IndexMode.EVENTS)
        replicas = len(scenario.replica_ids())
        reporting = scenario.reporting or economical(replicas, scenario.coordinators, shared=shared)
        self._limits = limits_under(reporting, scenario.limits)
        if scenario.autoscaler is not None:  # which holds still where it has not heard for long
            reporting = replace(reporting, silence_s=min(reporting.silence_s, _SILENCE_S))
        options = FleetOptions(
            seed=scenario.seed, latency_s=scenario.latency_s, reporting=reporting
        )
        first_s = trace.requests[0].at_s if trace.requests else 0.0
        self._begun_at_s = min(0.0, first_s)
        self.fleet = VirtualFleet(options, start_s=self._begun_at_s - _SETTLE_S, keep_records=False)
        self._members = Membership(self.fleet, scenario.pools, model=scenario.model)
        self._audience = Audience(self.fleet.timeline)
        self._scaling: ScalingBody | None = None
        self._total = len(trace)
        self._on_progress: Callable[[float], None] | None = None
        self._next_progress = 0
        self._sampler = Sampler(
            self.fleet,
            span_s=trace.span_s,
            replicas=replicas,
            starting=self._members.starting,
            counts=lambda: (self._audience.arrived, self._audience.ended),
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
        priors = priors_of(scenario)
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
            fleet.add_coordinator(coordinator, self._audience.hears)
        self._members.found(self._begun_at_s)
        fleet.watch(self._on_end)
        if scenario.autoscaler is not None:
            self._scaling = self._scaled_by(scenario.autoscaler())
            fleet.timeline.at(self._begun_at_s, self._scaling.begin)
        self._wait_for(sorted(scenario.happenings, key=lambda one: one.at_s))
        fleet.timeline.at(self._begun_at_s, self._sampler.watch)
        self._expect(requests)
        if self._total:
            fleet.run(until_s=until_s, ended=self._total)
        self._sampler.look()

    def result(self) -> Run:
        """What became of it."""
        now_s, members = self.fleet.timeline.now_s, self._members
        scaling, held_s = self._scaling, members.replica_seconds()
        story = (StoryTeller() if scaling is None else scaling.story).told(
            now_s - self._begun_at_s,
            replica_seconds=held_s,
            gpus_per_replica={name: one.gpus_per_replica for name, one in members.plans.items()},
        )
        return Run(
            outcomes=self._audience.outcomes(),
            timeline=self._sampler.taken(),
            replica_seconds=held_s,
            handoffs=self._audience.handoffs,
            resumes=self._audience.resumes,
            reasons=dict(self._audience.reasons),
            ended_at_s=now_s,
            story=story,
            ticks=() if scaling is None else tuple(scaling.ticks),
            events=self.fleet.timeline.happened,
        )

    def _scaled_by(self, scaler: Scaler) -> ScalingBody:
        return ScalingBody(
            scaler,
            self._members,
            self.fleet.timeline,
            ingresses=self.fleet.ingresses,
            observer=Observer(
                ObserverOptions.of_ticks(self._scenario.scaling_interval_s),
                slos=self._scenario.rules.slos.classes,
            ),
            interval_s=self._scenario.scaling_interval_s,
        )

    # ------------------------------------------------------------------ requests
    def _expect(self, requests: Iterator[Request]) -> None:
        """Wait for the next arrival."""
        request = next(requests, None)
        if request is not None:
            self.fleet.timeline.at(request.arrived_at_s, lambda: self._arrive(request, requests))

    def _arrive(self, request: Request, later: Iterator[Request]) -> None:
        ingress = self._audience.arrived % self._scenario.coordinators
        self._audience.sends(request)
        self._expect(later)
        self.fleet.send(request, ingress)

    def _on_end(self, record: RequestRecord) -> None:
        self._audience.is_told(record)
        ended = self._audience.ended
        if self._on_progress is not None and ended >= self._next_progress:
            self._next_progress = ended + max(1, self._total // _PROGRESS_PARTS)
            self._on_progress(ended / self._total)

    # ------------------------------------------------------------------ what happens to replicas
    def _wait_for(self, happenings: list[Happening]) -> None:
        """Wait for the first of what is yet to happen."""
        if not happenings:
            self.fleet.expect_happening(float("inf"))
            return
        first, *later = happenings
        self.fleet.expect_happening(first.at_s)

        def happen() -> None:
            self._wait_for(later)
            self._take_place(first)

        self.fleet.timeline.at(first.at_s, happen)

    def _take_place(self, happening: Happening) -> None:
        fleet = self.fleet
        match happening:
            case Start():
                self._members.start(happening.pool, happening.replicas)
            case Stop():
                self._members.stop(happening.pool, happening.replicas)
            case _ if happening.replica_id not in fleet.replicas:
                pass
            case StopReplica():
                self._members.stop_one(happening.replica_id)
            case Kill():
                self._members.kill(happening.replica_id)
            case Freeze():
                fleet.freeze(happening.replica_id, happening.for_s)
            case SetRole():
                fleet.replicas[happening.replica_id].change_role(happening.role)
            case SetBandwidth():
                fleet.change_bandwidth(happening.replica_id, happening.bytes_per_s)
            case _:
                assert_never(happening)
