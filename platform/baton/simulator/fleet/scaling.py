"""The autoscaler's body in virtual time: it sees, decides, and has it carried out.

Theory of operation: every `interval_s` the reports of all coordinators go to an `Observer`, as in
the live controller; the autoscaler ticks, and what it wants is done at once. Reports are never lost
here, and starts do not fail; they take their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from baton.control.autoscaling.observer import Observer
from baton.control.queue.cold_start_forecast import forecast_cold_starts
from baton.domain.demand import ColdStart
from baton.domain.events import ColdStartReported
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingAction,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.observation import Observation
from baton.simulator.fleet.ingress import VirtualIngress
from baton.simulator.fleet.membership import Membership
from baton.simulator.fleet.scaling_log import Scaler, ScalingRecorder
from baton.simulator.network.timeline import Timeline


class ScalingLoop:
    """Ticks an autoscaler for as long as time goes on."""

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
        """Those that changed something, and those that held."""

    def begin(self) -> None:
        """Tick after one interval, and from then on."""
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
        """Tell coordinators how long a first replica takes, where that has changed."""
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
