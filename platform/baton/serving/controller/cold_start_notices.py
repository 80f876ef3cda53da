"""Tells ingresses how long the first replica of a model takes that has none.

Theory of operation. After each turn of the scaling loop its last observation is made into one
`ColdStart` for each model (`control.queue.cold_start_forecast`). Ingresses are told when that has
changed, or when one of them is new: while pools have replicas, and while they rest at zero,
nothing changes and nothing is sent. Whoever does not answer is told again in the next turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from baton.control.autoscaling.autoscaler import Override
from baton.control.queue.cold_start_forecast import forecast_cold_starts, startable_pools
from baton.domain.demand import ColdStart
from baton.policy.scaling.observation import Observation
from baton.serving.scaling.plan import ScalingPlan
from baton.serving.scaling.ports import TickInputs

ColdStartsByModel = Mapping[str, ColdStart]
"""By model; under an empty name where there is only one."""
SendColdStarts = Callable[[ColdStartsByModel], Awaitable[int]]
"""Tells all ingresses; returns how many of them have taken it."""


class ColdStartNotifier:
    """See the module's theory of operation. A `TickListener`."""

    def __init__(
        self,
        send: SendColdStarts,
        *,
        observation: Callable[[], Observation | None],
        plan: Callable[[], ScalingPlan],
        overrides: Callable[[], Mapping[str, Override]],
    ) -> None:
        self._send = send
        self._observation = observation
        self._plan = plan
        self._overrides = overrides
        self._last_sent: ColdStartsByModel = {}
        self._recipients: frozenset[str] = frozenset()

    async def on_tick(self, inputs: TickInputs) -> None:
        """Tell what is new."""
        observation = self._observation()
        ingresses = frozenset(report.coordinator_id for report in inputs.reports)
        if observation is None or not ingresses:
            return
        plan = self._plan()
        override_sizes = {pool: override.replicas for pool, override in self._overrides().items()}
        startable = (
            startable_pools(plan.options, override_sizes) if plan.is_automatic else frozenset()
        )
        starts = {
            model: _rounded(start)
            for model, start in forecast_cold_starts(observation, startable=startable).items()
        }
        if starts == self._last_sent and ingresses <= self._recipients:
            return
        accepted = await self._send(starts)
        self._last_sent = starts
        self._recipients = ingresses if accepted and not inputs.missing else frozenset()


def _rounded(start: ColdStart) -> ColdStart:
    """To tenths of a second: more is not known, and is not sent again and again."""
    left_s = None if start.remaining_s is None else round(start.remaining_s, 1)
    return start._replace(duration_s=round(start.duration_s, 1), remaining_s=left_s)
