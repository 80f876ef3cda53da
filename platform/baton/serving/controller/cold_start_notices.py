"""Tells ingresses how long the first replica of a model takes that has none.

Theory of operation. After each turn of the scaling loop its last observation is made into one
`ColdStart` for each model (`control.starts`). Ingresses are told when that has changed, or when one
of them is new: while pools have replicas, and while they rest at zero, nothing changes and nothing
is sent. Whoever does not answer is told again in the next turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from baton.control.autoscaling.autoscaler import Override
from baton.control.queue.cold_start_forecast import cold_starts, startable
from baton.domain.demand import ColdStart
from baton.policy.scaling.observation import Observation
from baton.serving.scaling.plan import ScalingPlan
from baton.serving.scaling.ports import Looks

Starts = Mapping[str, ColdStart]
"""By model; under an empty name where there is only one."""
Send = Callable[[Starts], Awaitable[int]]
"""Tells all ingresses; returns how many of them have taken it."""


class StartDesk:
    """See the module's theory of operation. A `ReportReader`."""

    def __init__(
        self,
        send: Send,
        *,
        seen: Callable[[], Observation | None],
        plan: Callable[[], ScalingPlan],
        overrides: Callable[[], Mapping[str, Override]],
    ) -> None:
        self._send = send
        self._seen = seen
        self._plan = plan
        self._overrides = overrides
        self._told: Starts = {}
        self._to: frozenset[str] = frozenset()

    async def take(self, looks: Looks) -> None:
        """Tell what is new."""
        seen = self._seen()
        listeners = frozenset(report.coordinator_id for report in looks.reports)
        if seen is None or not listeners:
            return
        plan = self._plan()
        numbers = {pool: one.replicas for pool, one in self._overrides().items()}
        able = startable(plan.options, numbers) if plan.automatic else frozenset()
        starts = {model: _rounded(one) for model, one in cold_starts(seen, startable=able).items()}
        if starts == self._told and listeners <= self._to:
            return
        taken = await self._send(starts)
        self._told = starts
        self._to = listeners if taken and not looks.missing else frozenset()


def _rounded(start: ColdStart) -> ColdStart:
    """To tenths of a second: more is not known, and is not sent again and again."""
    left_s = None if start.left_s is None else round(start.left_s, 1)
    return start._replace(takes_s=round(start.takes_s, 1), left_s=left_s)
