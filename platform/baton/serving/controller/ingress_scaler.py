"""Keeps as many ingresses as are needed, where the configuration lets their number change.

Theory of operation. With each turn of the scaling loop every ingress is asked how much processor
time it has needed; what it needed since the turn before, of what it can use, is how busy it was.
The time for which others had its core counts: one that gets half a core is as full at half of the
use. Where one does not answer, or has only just come, nothing is decided: it may be the one that
was asked for in the turn before. An ingress that goes is told so by Serve, and drains.
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
    """What one ingress has used since it began."""

    ingress: str
    needed_s: float
    """Processor time that it has used, and that it has waited for."""
    at_s: float
    """On its own clock."""
    cores: float
    """How many it can keep busy."""


class IngressScaler:
    """See the module's theory of operation. A `TickListener`."""

    def __init__(
        self,
        bounds: IngressBounds,
        *,
        usage: Callable[[], Awaitable[tuple[tuple[IngressUsage, ...], int]]],
        target: Callable[[], Awaitable[int | None]],
        scale: Callable[[int], Awaitable[None]],
        clock: Clock,
    ) -> None:
        """Take what it asks and tells.

        Args:
            bounds: How many there may be.
            usage: What each ingress has used, and how many did not say.
            target: How many there are to be at present; None where Serve does not say.
            scale: Has there be so many.
            clock: For how long things are calm.
        """
        self._bounds = bounds
        self._sizer = IngressSizer(bounds)
        self._usage, self._target, self._scale = usage, target, scale
        self._clock = clock
        self._last_usage: Mapping[str, IngressUsage] = {}

    async def on_tick(self, inputs: TickInputs) -> None:
        """Have more of them, or fewer, where that is due."""
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
