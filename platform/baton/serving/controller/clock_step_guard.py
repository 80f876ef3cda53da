"""Has Ray Serve begin its timers anew when the wall clock was set back.

Theory of operation. Ray Serve (2.60) times its health checks by the wall clock: it asks a replica
again when that shows a period more than at the last check. Set back by an hour, it asks nobody for
an hour, and does not replace who dies in that time. A Serve controller that is started again has no
last check; and to start it again costs no request, for nothing that serves waits for it. So with
each turn the wall clock is compared with the monotonic one. A clock that is slewed, or set forward,
needs nothing: forward, each health check is late once.

What cannot be seen from here: the clock of another node, where Serve's controller is on that one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from baton.runtime.ports import Clock
from baton.serving.scaling.ports import TickInputs
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_MIN_STEP_S = 10.0
"""By which it must have been set back: Serve's checks are seconds apart, and late by no more."""


class ClockStepGuard:
    """See the module. A `TickListener`, for it has its turn with the scaling loop."""

    def __init__(
        self,
        clock: Clock,
        wall_now_s: Callable[[], float],
        restart_serve_controller: Callable[[], Awaitable[None]],
    ) -> None:
        """`wall_now_s` is seconds since 1970.

        `restart_serve_controller` starts Serve's controller again.
        """
        self._clock = clock
        self._wall_now_s = wall_now_s
        self._restart_serve_controller = restart_serve_controller
        self._offset_s = self._offset()

    async def on_tick(self, _inputs: TickInputs) -> None:
        """See whether the clock was set back since the last turn, and act on it."""
        offset_s = self._offset()
        step_back_s = self._offset_s - offset_s
        if step_back_s > _MIN_STEP_S:
            fields = {
                "back_s": round(step_back_s, 1),
                "then": "Ray Serve's controller starts again",
            }
            log_event(_LOGGER, logging.WARNING, "clock_set_back", fields)
            await self._restart_serve_controller()
        self._offset_s = offset_s  # only now: what failed is tried again with the next turn

    def _offset(self) -> float:
        return self._wall_now_s() - self._clock.now_s()
