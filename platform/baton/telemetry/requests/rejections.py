"""Rejected requests by cause: a line of the log per period, and counts of the last hour."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.domain.errors import Cause, Rejected
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
LOG_PERIOD_S = 10.0
_MINUTE_S = 60.0
_MINUTES = 60
_MAX_REASON_CHARS = 200


class _Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], _Timer]
"""Calls a function after a delay in seconds, as an event loop's `call_later`."""


@dataclass(slots=True)
class _Cause:
    """The rejections of one cause."""

    last: Rejected
    last_at_s: float
    unlogged: int = 0
    by_minute: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MINUTES))
    """Minute and requests, oldest first; minutes without any have no entry."""

    def add(self, error: Rejected, requests: int, now_s: float) -> None:
        """Count requests that are rejected now."""
        self.last, self.last_at_s = error, now_s
        self.unlogged += requests
        minute = int(now_s // _MINUTE_S)
        counted = 0
        if self.by_minute and self.by_minute[-1][0] == minute:
            counted = self.by_minute.pop()[1]
        self.by_minute.append((minute, counted + requests))

    def recent(self, now_s: float) -> int:
        """Requests of the last hour, to the minute."""
        oldest = int(now_s // _MINUTE_S) - _MINUTES
        return sum(requests for minute, requests in self.by_minute if minute > oldest)


class RejectionLog:
    """See the module.

    Theory of operation. The first rejection is logged at once, and a timer starts. At the end of
    each period each cause with new rejections is one line; a period without any stops the timer.
    Causes come from an enumeration, so that lines and memory are bounded for any load.
    """

    def __init__(
        self, *, now_s: Callable[[], float], call_later: CallLater, period_s: float = LOG_PERIOD_S
    ) -> None:
        self._now_s = now_s
        self._call_later = call_later
        self._period_s = period_s
        self._causes: dict[Cause, _Cause] = {}
        self._timer: _Timer | None = None

    def record(self, error: Rejected, *, requests: int = 1) -> None:
        """Count requests that were answered with this error."""
        now_s = self._now_s()
        if (cause := self._causes.get(error.cause)) is None:
            cause = self._causes[error.cause] = _Cause(error, now_s)
        cause.add(error, requests, now_s)
        if self._timer is None:
            self._flush()
            self._start_timer()

    def rows(self) -> list[dict[str, object]]:
        """One per cause with rejections in the last hour: count, and age and reason of the last."""
        now_s = self._now_s()
        return [
            {
                "cause": str(name),
                "status": cause.last.http_status,
                "requests": recent,
                "last_age_s": round(now_s - cause.last_at_s, 1),
                "reason": cause.last.reason[:_MAX_REASON_CHARS],
            }
            for name, cause in sorted(self._causes.items())
            if (recent := cause.recent(now_s))
        ]

    def close(self) -> None:
        """Log what is not logged yet, and stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush()

    def _start_timer(self) -> None:
        self._timer = self._call_later(self._period_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._flush():
            self._start_timer()

    def _flush(self) -> bool:
        """Whether there was anything to log."""
        unlogged = {name: cause for name, cause in self._causes.items() if cause.unlogged}
        for name, cause in sorted(unlogged.items()):
            fields = {
                "cause": str(name),
                "status": cause.last.http_status,
                "requests": cause.unlogged,
                "last_request_id": cause.last.request_id,
                "reason": cause.last.reason[:_MAX_REASON_CHARS],
            }
            cause.unlogged = 0
            log_event(_LOGGER, logging.WARNING, "requests_rejected", fields)
        return bool(unlogged)
