"""Decides the unit of a trace's arrival times by its data.

A rule for each case, the first that holds:

- The user names the unit.
- Times are dates.
- Times lie between 2010 and 2040 in one unit since 1970: epoch times of that unit.
- In the format's usual unit, the mean rate is usual.
- In the usual unit the rate is implausible, and in exactly one other unit it is usual: the unit
  is the other.

All else is refused: the rate could be wrong by a factor of 1,000.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence
from decimal import Decimal

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads.arrivals import TimeUnit
from baton.simulator.workloads.lines import (
    NS_PER_S,
    build_trace,
    parse_number,
    seconds_since_first,
)
from baton.simulator.workloads.trace import Trace, TraceRequest

_EPOCH_S = (1_262_304_000, 2_208_988_800)
"""From 2010 until 2040, in seconds since 1970."""
_USUAL_RATES_PER_S = (0.03, 30.0)
"""Published traces lie between BurstGPT's 0.13 requests/s and ShareGPT's 10."""
_PLAUSIBLE_RATES_PER_S = (0.01, 1000.0)
_MIN_EPOCH_RATE_PER_S = 1e-5
"""One request a day. Fewer are short times of a clock that began long ago."""

_LEAP_SECOND = 60

_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9})\d*)?"
    r"(?:Z|([+-])(\d\d):?(\d\d))?"
)


def date_ns(text: str) -> int:
    """Nanoseconds since 1970 of a date such as `2023-11-16 18:17:03.9799600`, in UTC by default.

    Raises:
        ValueError: no such date.
    """
    match = _DATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"time is {text!r}, expected a date such as 2023-11-16 18:17:03.9799600")
    year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
    # `calendar` raises ValueError for a wrong month or year, but takes a wrong day.
    last_day = calendar.monthrange(year, month)[1]
    limits = ((day, last_day), (hour, 23), (minute, 59), (second, _LEAP_SECOND))
    if not day or any(got > most for got, most in limits):
        raise ValueError(f"time is {text!r}: there is no such day, hour, minute or second")
    seconds = calendar.timegm((year, month, day, hour, minute, second))
    if match[8]:
        utc_offset_s = int(match[9]) * 3600 + int(match[10]) * 60
        seconds -= utc_offset_s if match[8] == "+" else -utc_offset_s
    return seconds * NS_PER_S + int((match[7] or "").ljust(9, "0"))


class TimeColumn:
    """The arrival times of one file: parses them, then decides their unit.

    Args:
        name: the file, for errors.
        field: the column or field, for errors.
        usual: the format's unit; None where its times are dates.
        given: the user's unit; None to decide.
        is_fixed: the field's name has the usual unit.
    """

    def __init__(
        self,
        name: str,
        field: str,
        *,
        usual: TimeUnit | None,
        given: TimeUnit | None,
        is_fixed: bool = False,
    ) -> None:
        self._name = name
        self.field = field
        self._usual = usual
        self._given = given
        self._is_fixed = is_fixed
        self._has_dates: bool | None = None
        self.note = ""
        """How times were read, for reports; set by `seconds`."""

    def parse(self, value: object) -> Decimal:
        """A time: nanoseconds since 1970 of a date, else the number.

        Raises:
            ValueError: it is neither, or negative, or not what the first was.
        """
        has_dates = _is_date_like(value) if self._has_dates is None else self._has_dates
        time = Decimal(date_ns(str(value))) if has_dates else self._parse_number(value)
        self._has_dates = has_dates
        return time

    def _parse_number(self, value: object) -> Decimal:
        if parse_number(value, self.field) < 0:
            raise ValueError(f"{self.field} is {value!r}, expected at least 0")
        return Decimal(str(value).strip())

    def seconds(self, times: Sequence[Decimal]) -> list[float]:
        """Seconds since the earliest of the times that `parse` returned.

        Raises:
            TraceInvalid: the unit is not clear, or the given one contradicts dates.
        """
        if not times:
            return []
        if self._given is not None and (self._has_dates or self._is_fixed):
            what = "has dates" if self._has_dates else "names its unit"
            raise TraceInvalid(self._name, 0, f"{self.field} {what}, and --time-unit is given")
        if self._has_dates:
            return seconds_since_first([int(time) for time in times])
        if self._is_fixed and self._usual is not None:
            return seconds_since_first([round(time * self._usual.ns) for time in times])
        unit, reason = self._decide(times)
        self.note = f"{unit.words}: {reason}"
        return seconds_since_first([round(time * unit.ns) for time in times])

    def _decide(self, times: Sequence[Decimal]) -> tuple[TimeUnit, str]:
        """The unit, and why."""
        if self._given is not None:
            return self._given, "as --time-unit says"
        rates = {unit: _rate_per_s(times, unit) for unit in TimeUnit}
        usual = self._usual or TimeUnit.SECONDS
        epoch = self._epoch_unit(times)
        if epoch is not None and not 0 < rates[epoch] < _MIN_EPOCH_RATE_PER_S:
            return epoch, "they are times since 1970"
        if not rates[usual]:
            return usual, "all are the same"
        if self._usual is not None and _is_within(rates[usual], _USUAL_RATES_PER_S):
            return usual, "as this format has them"
        fitting = [unit for unit in TimeUnit if _is_within(rates[unit], _USUAL_RATES_PER_S)]
        is_implausible = not _is_within(rates[usual], _PLAUSIBLE_RATES_PER_S)
        if len(fitting) == 1 and (self._usual is None or is_implausible):
            if self._usual is None:
                return fitting[0], f"{rates[fitting[0]]:.3g} requests/s, usual in no other unit"
            return fitting[0], (
                f"in {usual.words}, as this format has them, they would be"
                f" {rates[usual]:.3g} requests/s"
            )
        rates_text = ", ".join(f"{rate:.3g}/s in {unit.words}" for unit, rate in rates.items())
        raise TraceInvalid(
            self._name,
            0,
            f"the unit of {self.field} is not clear: requests would arrive at {rates_text}",
        )

    def _epoch_unit(self, times: Sequence[Decimal]) -> TimeUnit | None:
        """The unit in which all times are of our years; None if they are not.

        Raises:
            TraceInvalid: they are, but not in one unit.
        """
        units = {_epoch_unit(time): number for number, time in enumerate(times, start=1)}
        if len(units) == 1:
            return next(iter(units))
        epochs = [unit for unit in units if unit is not None]
        if len(epochs) > 1:
            text = ", ".join(f"{unit.words} as request {units[unit]}" for unit in epochs)
            raise TraceInvalid(
                self._name, 0, f"{self.field} has times since 1970 of several units: {text}"
            )
        return None


def _is_date_like(value: object) -> bool:
    return isinstance(value, str) and ":" in value


def _epoch_unit(time: Decimal) -> TimeUnit | None:
    for unit in TimeUnit:
        per_s = NS_PER_S // unit.ns
        if _EPOCH_S[0] * per_s <= time < _EPOCH_S[1] * per_s:
            return unit
    return None


def _rate_per_s(times: Sequence[Decimal], unit: TimeUnit) -> float:
    """Requests per second over the span; 0 without a span."""
    span_ns = (max(times) - min(times)) * unit.ns if times else Decimal(0)
    return float((len(times) - 1) * NS_PER_S / span_ns) if span_ns else 0.0


def _is_within(rate_per_s: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= rate_per_s <= bounds[1]


def build_timed_trace(
    name: str, rows: Sequence[tuple[Decimal, int, int]], column: TimeColumn, *, skipped_lines: int
) -> Trace:
    """A trace of rows with a time of `column`, prompt tokens and output tokens.

    Raises:
        TraceInvalid: there are no rows, or the unit of times is not clear.
    """
    times_s = column.seconds([at for at, _, _ in rows])
    requests = [
        TraceRequest(at_s, prompt_tokens, output_tokens)
        for at_s, (_, prompt_tokens, output_tokens) in zip(times_s, rows, strict=True)
    ]
    return build_trace(name, requests, skipped_lines=skipped_lines, times=column.note)
