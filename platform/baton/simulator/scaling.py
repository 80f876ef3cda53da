"""The autoscaler's body in virtual time: it sees, decides, and has it carried out.

Theory of operation: every `interval_s` the reports of all coordinators go to an `Observer`, as the
live controller does it; the autoscaler ticks, and what it wants is done at once. Nothing is lost on
the way: reports cannot be late here, and starts never fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from baton.domain.demand import CoordinatorReport
from baton.policy.scaling.actions import Action, FlipReplicas, StartReplicas, StopReplicas, Tick
from baton.policy.scaling.observation import Observation
from baton.simulator.membership import Membership
from baton.simulator.scaling_story import StoryTeller
from baton.simulator.timeline import Timeline


class Scaler(Protocol):
    """What decides: `control.autoscaler.Autoscaler`."""

    def tick(self, seen: Observation) -> Tick:
        """What is to be done now."""
        ...


Observe = Callable[[Iterable[CoordinatorReport], float], Observation]
"""What is to be seen now, after these reports."""


class ScalingBody:
    """Ticks an autoscaler for as long as time goes on."""

    def __init__(
        self,
        scaler: Scaler,
        membership: Membership,
        timeline: Timeline,
        *,
        reports: Callable[[float], Iterable[CoordinatorReport]],
        observe: Observe,
        interval_s: float,
    ) -> None:
        self._scaler = scaler
        self._membership = membership
        self._timeline = timeline
        self._reports = reports
        self._observe = observe
        self._interval_s = interval_s
        self.story = StoryTeller()
        self.ticks: list[Tick] = []
        """Those that changed something, and those that held."""

    def begin(self) -> None:
        """Tick after one interval, and from then on."""
        self._timeline.after(self._interval_s, self._tick)

    def _tick(self) -> None:
        now_s = self._timeline.now_s
        tick = self._scaler.tick(self._observe(self._reports(now_s), now_s))
        self.story.ticked(tick)
        if tick.actions or tick.held:
            self.ticks.append(tick)
        for action in tick.actions:
            self._carry_out(action)
        self._timeline.after(self._interval_s, self._tick)

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
