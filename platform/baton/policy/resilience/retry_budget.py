"""The retry budget of a fleet: a share of arrivals, and a fixed minimum.

Theory of operation. Where everything fails, retries multiply the load on the remaining replicas (a
*retry storm*). So in a window of time retries may be at most

    min_retries + ratio x arrivals in that window

Retries of streams whose client has tokens may use all of it. Others get `_NO_OUTPUT_FRACTION` of
it, since their clients can come back. The window slides in slots. `control.request.retries` says
which retries are free. Source: Finagle's RetryBudget and gRPC's retry throttling (gRFC A6).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_SLOTS = 10
_NO_OUTPUT_FRACTION = 0.5
"""The part of the budget that requests may use whose client has got nothing yet."""
_MAX_FRACTION = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """How large the budget is."""

    ratio: float = 0.2
    """Retries for each request that arrives."""
    min_retries: int = 30
    """Retries in a window, however little arrives."""
    window_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= _MAX_FRACTION:
            raise ValueError(
                f"retry_budget: ratio is {self.ratio}, expected from 0 to {_MAX_FRACTION:g}"
            )
        if self.min_retries < 0:
            raise ValueError(
                f"retry_budget: min_retries is {self.min_retries}, expected at least 0"
            )
        if not self.window_s > 0:
            raise ValueError(f"retry_budget: window_s is {self.window_s}, expected more than 0")


@dataclass(slots=True)
class _Slot:
    number: int
    arrivals: int = 0
    retries: int = 0


class RetryBudget:
    """One coordinator's; every call passes the time, which never goes back."""

    def __init__(self, options: RetryOptions | None = None) -> None:
        self.denied = 0
        """Retries that were denied, so far."""
        self._options = options or RetryOptions()
        self._slots: deque[_Slot] = deque()
        self._arrivals = 0
        self._retries = 0
        """Both of the window."""

    def reconfigure(self, options: RetryOptions) -> None:
        """Go on with other options; the window keeps its counts."""
        if options.window_s != self._options.window_s:
            self._slots.clear()
            self._arrivals = self._retries = 0
        self._options = options

    def record_arrival(self, now_s: float) -> None:
        """A request has arrived."""
        self._slot(now_s).arrivals += 1
        self._arrivals += 1

    def spend(self, now_s: float, *, has_output: bool) -> bool:
        """Whether a retry may be made now; it is counted when it may.

        `has_output`: its client has tokens already, and would see its stream break.
        """
        slot = self._slot(now_s)
        if self._retries + 1 > self.max_retries() * (1.0 if has_output else _NO_OUTPUT_FRACTION):
            self.denied += 1
            return False
        slot.retries += 1
        self._retries += 1
        return True

    def max_retries(self) -> float:
        """Retries that the window allows in all."""
        return self._options.min_retries + self._options.ratio * self._arrivals

    def retry_after_s(self) -> float:
        """When a client may come back: half of the used budget is forgotten by then."""
        return max(1.0, self._options.window_s / 2)

    def check_integrity(self) -> None:
        """Raise AssertionError when the sums are not those of the slots."""
        assert self._arrivals == sum(slot.arrivals for slot in self._slots), "arrivals differ"
        assert self._retries == sum(slot.retries for slot in self._slots), "retries differ"
        assert len(self._slots) <= _SLOTS, "slots are kept that are over"

    def _slot(self, now_s: float) -> _Slot:
        """The present slot; slots out of the window are forgotten."""
        slots = self._slots
        number = int(now_s // (self._options.window_s / _SLOTS))
        if slots and slots[-1].number == number:
            return slots[-1]
        while slots and slots[0].number <= number - _SLOTS:
            old = slots.popleft()
            self._arrivals -= old.arrivals
            self._retries -= old.retries
        slots.append(_Slot(number))
        return slots[-1]
