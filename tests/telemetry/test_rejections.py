"""Rejected requests in the log and in `baton status`: one line per period and cause."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable

import pytest

from baton.domain.errors import Cause, NoCapacity, QueueFull, RateLimited, Rejected
from baton.domain.request import Phase
from baton.domain.value import evolve
from baton.runtime.process.log_events import FIELDS
from baton.telemetry.requests.request_log import LOG_PERIOD_S, RejectionLog, RequestLog
from tests.fakes.request_records import RECORD


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Time:
    """A clock that goes on only when it is told to, and its timers."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._timers: list[tuple[float, int, Timer, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer()
        heapq.heappush(self._timers, (self.now_s + delay_s, len(self._timers), timer, call))
        return timer

    def advance(self, by_s: float) -> None:
        end_s = self.now_s + by_s
        while self._timers and self._timers[0][0] <= end_s:
            self.now_s, _, timer, call = heapq.heappop(self._timers)
            if not timer.cancelled:
                call()
        self.now_s = end_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def log(time: Time) -> RejectionLog:
    return RejectionLog(now_s=lambda: time.now_s, call_later=time.call_later)


def queue_full(number: int = 0) -> Rejected:
    return QueueFull(f"r{number}", 1.0, "64 requests wait already")


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    rows = [getattr(line, FIELDS) for line in caplog.records if line.message == "requests_rejected"]
    return [(row["cause"], row["requests"]) for row in rows]


def test_an_overload_is_one_line_per_period_and_cause(
    time: Time, log: RejectionLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        log.record(queue_full(number))
        log.record(RateLimited(f"t{number}", 1.0, "its tenant's rate"))
        time.advance(0.03)
    time.advance(LOG_PERIOD_S)
    counts = logged(caplog)
    assert len(counts) <= 2 * 5
    for cause in (Cause.QUEUE_FULL, Cause.RATE_LIMITED):
        assert sum(requests for name, requests in counts if name == cause) == 1000


def test_the_first_rejection_is_logged_at_once(
    log: RejectionLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.record(queue_full(7), requests=3)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert getattr(line, FIELDS) == {
        "cause": "queue_full",
        "status": 429,
        "requests": 3,
        "last_request_id": "r7",
        "reason": "64 requests wait already",
    }


def test_a_period_without_any_is_no_line_and_the_next_one_is_logged_at_once(
    time: Time, log: RejectionLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.record(queue_full())
    time.advance(100 * LOG_PERIOD_S)
    log.record(queue_full())
    assert logged(caplog) == [("queue_full", 1), ("queue_full", 1)]


def test_rejections_that_are_not_logged_yet_are_logged_at_the_end(
    log: RejectionLog, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    log.record(queue_full())
    log.record(queue_full(), requests=4)
    log.close()
    log.close()
    time.advance(LOG_PERIOD_S)
    assert logged(caplog) == [("queue_full", 1), ("queue_full", 4)]


def test_a_cause_is_counted_for_an_hour_with_the_time_of_the_last(
    time: Time, log: RejectionLog
) -> None:
    log.record(queue_full(), requests=5)
    time.advance(1800.0)
    log.record(queue_full())
    log.record(NoCapacity("n", 1.0, "no replica"))
    time.advance(30.0)
    counts = {row["cause"]: (row["requests"], row["last_age_s"]) for row in log.rows()}
    assert counts == {"queue_full": (6, 30.0), "no_capacity": (1, 30.0)}
    time.advance(1860.0)
    assert {row["cause"]: row["requests"] for row in log.rows()} == {
        "queue_full": 1,
        "no_capacity": 1,
    }
    time.advance(1800.0)
    assert log.rows() == []


@pytest.mark.parametrize("outcome", [Phase.SHED, Phase.EVICTED])
def test_a_rejected_request_is_no_line_of_its_own(
    outcome: Phase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    requests = RequestLog()
    requests.record(evolve(RECORD, outcome=outcome))
    assert not caplog.records
    assert requests.latest(1), "it can still be traced"
    caplog.set_level(logging.DEBUG)
    requests.record(evolve(RECORD, outcome=outcome))
    assert caplog.records[0].message == "request_ended"
