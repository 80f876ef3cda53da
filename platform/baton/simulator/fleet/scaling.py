"""The autoscaler's body in virtual time: it sees, decides, and has it carried out.

Theory of operation: every `interval_s` the reports of all coordinators go to an `Observer`, as in
the live controller; the autoscaler ticks, and what it wants is done at once. Reports are never lost
here, and starts do not fail; they take their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from baton.control.autoscaling.observer import Observer
from baton.control.queue.cold_start_forecast import cold_starts
from baton.domain.demand import ColdStart
from baton.domain.events import ColdStartReported
from baton.policy.scaling.actions import Action, FlipReplicas, StartReplicas, StopReplicas, Tick
from baton.policy.scaling.observation import Observation
from baton.simulator.fleet.ingress import VirtualIngress
from baton.simulator.fleet.membership import Membership
from baton.simulator.fleet.scaling_log import Scaler, StoryTeller
from baton.simulator.network.timeline import Timeline


class ScalingBody:
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
        self._starts = ColdStart()
        self._observer = observer
        self._interval_s = interval_s
        self.story = StoryTeller()
        self.ticks: list[Tick] = []
        """Those that changed something, and those that held."""

    def begin(self) -> None:
        """Tick after one interval, and from then on."""
        self._timeline.after(self._interval_s, self._tick)

    def _tick(self) -> None:
        seen = self._seen(self._timeline.now_s)
        tick = self._scaler.tick(seen)
        self.story.ticked(tick)
        if tick.actions or tick.held:
            self.ticks.append(tick)
        for action in tick.actions:
            self._carry_out(action)
        self._tell(seen)
        self._timeline.after(self._interval_s, self._tick)

    def _seen(self, now_s: float) -> Observation:
        reports = [
            one.coordinator.report(f"coordinator-{number}", now_s)
            for number, one in enumerate(self._ingresses)
        ]
        return self._observer.observe(reports, self._membership.states(), now_s)

    def _tell(self, seen: Observation) -> None:
        """Tell coordinators how long a first replica takes, where that has changed."""
        (start,) = cold_starts(seen, startable=seen.pools).values()
        if start != self._starts:
            self._starts = start
            for ingress in self._ingresses:
                ingress.on_event(ColdStartReported(start=start))

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartReplicas():
                self._membership.start(action.pool, action.replicas)
            case StopReplicas():
                self._membership.stop(action.pool, action.replicas)
            case FlipReplicas():
                self._membership.flip(action.pool, action.replicas, action.to)
            case _:
                assert_never(action)
