"""What no report can say: whoever scales by reports does not believe one that says it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from baton.domain.demand import MIN_LATENCY_BUCKETS, CoordinatorReport


def report_problems(report: CoordinatorReport) -> Iterator[str]:
    """Everything that is wrong with a report, in words."""
    signed = {"at_s": report.at_s, "slack_s": report.slack_s or 0.0}
    non_negative: dict[str, float] = {"in_flight": report.in_flight, "held": report.queued}
    non_negative |= {f"demand.{key}": value for key, value in report.demand._asdict().items()}
    non_negative |= {"ttft.sum_s": report.ttft.sum_s, "tpot.sum_s": report.tpot.sum_s}
    for pool in report.pools:
        non_negative |= {
            f"pool {pool.pool}: {key}": value
            for key, value in pool._asdict().items()
            if isinstance(value, int | float)
        }
    for name, value in signed.items():
        if not math.isfinite(value):
            yield f"{name} is {value}"
    for name, value in non_negative.items():
        if not 0 <= value < math.inf:
            yield f"{name} is {value}, wanted a number from 0"
    for latencies in (report.ttft, report.tpot):
        if latencies.buckets and (
            len(latencies.buckets) < MIN_LATENCY_BUCKETS or min(latencies.buckets) < 0
        ):
            histogram = (
                f"{len(latencies.buckets)} buckets, the least of which holds"
                f" {min(latencies.buckets)}"
            )
            yield (
                f"a histogram has {histogram}; wanted at least {MIN_LATENCY_BUCKETS}, each"
                " from 0 up"
            )
    for row in report.tallies:
        if not all(0 <= value < math.inf for value in row[4:]):
            yield f"a tally of class {row.slo_class!r} has a figure that is no number from 0"
