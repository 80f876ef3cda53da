"""Scales ingresses within the configured bounds.

Theory of operation. Each tick asks every ingress for its processor time. The difference to the last
tick, divided by its cores, is how busy it was. Time that an ingress waited for a core counts as
used. If an ingress is new or does not answer, the scaler decides nothing. Serve drains an ingress
that it removes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from baton.policy.scaling.ingresses import IngressBounds, IngressSizer
from baton.runtime.ports import Clock
from baton.serving.scaling.ports import TickInputs
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)


class IngressUsage(NamedTuple):
    """The processor time of one ingress since its start."""

    ingress: str
    needed_s: float
    """Used, and waited for."""
    at_s: float
    """By the ingress' own clock."""
    cores: float


class IngressScaler:
    """See the module. A `TickListener`."""

    def __init__(
        self,
        bounds: IngressBounds,
        *,
        usage: Callable[[], Awaitable[tuple[tuple[IngressUsage, ...], int]]],
        target: Callable[[], Awaitable[int | None]],
        scale: Callable[[int], Awaitable[None]],
        clock: Clock,
    ) -> None:
        """Nothing is asked before the first tick.

        Args:
        bounds: minimum and maximum of ingresses.
        usage: returns the usage of each ingress, and how many did not answer.
        target: returns the desired ingresses; None if Serve does not answer.
        scale: sets the desired ingresses.
        clock: times stabilization windows.
        """
        self._bounds = bounds
        self._sizer = IngressSizer(bounds)
        self._usage, self._target, self._scale = usage, target, scale
        self._clock = clock
        self._last_usage: Mapping[str, IngressUsage] = {}

    async def on_tick(self, inputs: TickInputs) -> None:
        """Scale ingresses if that is due."""
        if not self._bounds.is_scalable:
            return
        usages, unresponsive = await self._usage()
        current = {usage.ingress: usage for usage in usages}
        previous, self._last_usage = self._last_usage, current
        target = await self._target()
        comparable = current.keys() & previous.keys()
        if target is None or unresponsive or len(comparable) < max(target, len(current)):
            return
        busy_fractions = [
            _busy_fraction(previous[name], current[name]) for name in sorted(comparable)
        ]
        desired = self._sizer.desired(target, busy_fractions, self._clock.now_s())
        if desired != target:
            fields = {
                "had": target,
                "desired": desired,
                "busy": [round(busy_fraction, 2) for busy_fraction in busy_fractions],
            }
            log_event(_LOGGER, logging.INFO, "ingresses_scaled", fields)
            await self._scale(desired)


def _busy_fraction(previous: IngressUsage, current: IngressUsage) -> float:
    elapsed_s = current.at_s - previous.at_s
    return (
        0.0
        if elapsed_s <= 0
        else (current.needed_s - previous.needed_s) / (elapsed_s * current.cores)
    )
