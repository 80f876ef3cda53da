"""Tells ingresses how long a model without replicas takes to start its first one.

Theory of operation. Each tick turns the last observation into one `ColdStart` per model
(`control.queue.cold_start_forecast`). The notifier sends them when they change or an ingress is
new. It sends again in the next tick if an ingress did not answer.
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
"""By model; the empty name if there is only one."""
SendColdStarts = Callable[[ColdStartsByModel], Awaitable[int]]
"""Returns how many ingresses accepted."""


class ColdStartNotifier:
    """See the module. A `TickListener`."""

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
        """Send cold starts that changed."""
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
    """To tenths of a second, so that noise causes no messages."""
    left_s = None if start.remaining_s is None else round(start.remaining_s, 1)
    return start._replace(duration_s=round(start.duration_s, 1), remaining_s=left_s)
