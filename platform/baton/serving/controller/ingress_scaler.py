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
from baton.serving.scaling.ports import Looks
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)


class Used(NamedTuple):
    """What one ingress has used since it began."""

    ingress: str
    needed_s: float
    """Processor time that it has used, and that it has waited for."""
    at_s: float
    """On its own clock."""
    cores: float
    """How many it can keep busy."""


class IngressDesk:
    """See the module's theory of operation. A `ReportReader`."""

    def __init__(
        self,
        bounds: IngressBounds,
        *,
        used: Callable[[], Awaitable[tuple[tuple[Used, ...], int]]],
        target: Callable[[], Awaitable[int | None]],
        scale: Callable[[int], Awaitable[None]],
        clock: Clock,
    ) -> None:
        """Take what it asks and tells.

        Args:
            bounds: How many there may be.
            used: What each ingress has used, and how many did not say.
            target: How many there are to be at present; None where Serve does not say.
            scale: Has there be so many.
            clock: For how long things are calm.
        """
        self._bounds = bounds
        self._sizer = IngressSizer(bounds)
        self._used, self._target, self._scale = used, target, scale
        self._clock = clock
        self._before: Mapping[str, Used] = {}

    async def take(self, looks: Looks) -> None:
        """Have more of them, or fewer, where that is due."""
        if not self._bounds.open:
            return
        told, silent = await self._used()
        now = {one.ingress: one for one in told}
        before, self._before = self._before, now
        have = await self._target()
        known = now.keys() & before.keys()
        if have is None or silent or len(known) < max(have, len(now)):
            return
        busy = [_busy(before[name], now[name]) for name in sorted(known)]
        want = self._sizer.want(have, busy, self._clock.now_s())
        if want != have:
            fields = {"had": have, "want": want, "busy": [round(one, 2) for one in busy]}
            log_event(_LOGGER, logging.INFO, "ingresses_scaled", fields)
            await self._scale(want)


def _busy(before: Used, now: Used) -> float:
    passed_s = now.at_s - before.at_s
    return 0.0 if passed_s <= 0 else (now.needed_s - before.needed_s) / (passed_s * now.cores)
