"""Reports of coordinators, put together over a window: the observation of a scaling tick.

*Theory of operation.* The autoscaler's caller gives each round of reports to `observe`, with other
facts of pools (how many replicas are starting, how long that takes). Rates come from two reports of
one coordinator and that coordinator's own clock: the newest, and that from the beginning of the
window. Then they are added up over coordinators. So a lost report costs nothing, and a new
coordinator counts from its second report on. A coordinator that has started again (its clock or its
counts go back) counts as new. Pools are seen by all coordinators alike: the report with most of a
pool's replicas, and among those the freshest, is believed.

Reports may be missing, stale, repeated or nonsense. Such a report is left out, and
`Observation.missing_inputs` says so in words; the autoscaler then changes nothing. Memory is
bounded by the number of coordinators times the reports of one window, in which tenants are added
up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add, sub
from statistics import median
from typing import NamedTuple, TypeAlias

from baton.control.accounting.class_counts import ClassCounts, by_class, sum_classes
from baton.control.accounting.cluster_totals import ClusterTotals
from baton.control.fleet.pool_views import (
    PoolState,
    active_by_role,
    active_replicas,
    best_capacities,
    best_pool_report,
)
from baton.domain.demand import (
    LATENCY_BUCKET_BOUNDS_S,
    MIN_LATENCY_BUCKETS,
    NO_LATENCIES,
    CoordinatorReport,
    DemandTotals,
    LatencyTotals,
    PoolReport,
)
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel

_EXPIRY_WINDOWS = 10
"""A coordinator that has not been heard for this many windows is gone."""

_WINDOW_TICKS = 15
"""Thirty seconds of ticks every two seconds."""
_NO_BUCKETS = (0,) * (len(LATENCY_BUCKET_BOUNDS_S) + 1)
_MAX_SAMPLES = 8
"""Of the durations of a pool's cold starts."""


class ColdStartTimer:
    """How long a pool's replicas take from a start to taking work, measured from counts alone.

    Each observation counts the pool's replicas that start, that have come up, and that take work. A
    growing count of starting replicas is a new start. A growing count of those that take work ends
    the oldest start; a start that is given up is the newest. A replica that was never seen to
    start, or that comes back, measures nothing. Counts come every few seconds, which is the error.
    The median of the last few is the estimate.
    """

    def __init__(self) -> None:
        self._requested_at_s: deque[float] = deque()
        self._durations_s: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._last_counts: tuple[int, int, int] | None = None

    def observe(self, *, starting: int, running: int, serving: int, now_s: float) -> None:
        """Take in the counts; `serving` replicas take work, among those that are `running`.

        The request times of starts at the first look are unknown.
        """
        if self._last_counts is not None:
            were_starting, were_running, were_serving = self._last_counts
            came_up = min(were_starting, max(0, running - were_running))
            self._adjust_requested(starting - were_starting + came_up, now_s)
            could_join = max(0, len(self._requested_at_s) - starting)
            for _ in range(min(max(0, serving - were_serving), could_join)):
                self._durations_s.append(max(0.0, now_s - self._requested_at_s.popleft()))
            while len(self._requested_at_s) > starting + max(0, running - serving):
                self._requested_at_s.pop()
        self._last_counts = (starting, running, serving)

    @property
    def measured_s(self) -> float | None:
        """The expected time of the next start; None before any was seen from its beginning."""
        return median(self._durations_s) if self._durations_s else None

    def starting_for_s(self, now_s: float) -> float | None:
        """How long ago the first of those that start was asked for; None: none was seen to be."""
        return now_s - self._requested_at_s[0] if self._requested_at_s else None

    def _adjust_requested(self, replicas: int, now_s: float) -> None:
        for _ in range(replicas):
            self._requested_at_s.append(now_s)
        for _ in range(min(-replicas, len(self._requested_at_s))):
            self._requested_at_s.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverOptions:
    """The window, and the age limit of reports."""

    window_s: float = 30.0
    """Long enough for a mean of bursty arrivals, short beside a cold start."""
    fast_window_s: float = 5.0
    """For slack: a request that was in danger so long ago still counts."""
    stale_s: float = 10.0
    """Loads, and coordinators that repeat themselves, are not believed any more after it; replicas
    report several times a second, and are given up by coordinators sooner."""

    @classmethod
    def for_interval(cls, interval_s: float) -> ObserverOptions:
        """For this interval of decisions: shorter intervals see changes sooner."""
        defaults = cls()
        return replace(defaults, window_s=max(defaults.fast_window_s, _WINDOW_TICKS * interval_s))

    def __post_init__(self) -> None:
        for name in ("window_s", "fast_window_s", "stale_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"observer: {name} is {value}, expected more than 0")


_DEFAULT_ATTAINMENT_TARGET = Slo().attainment_target


class _Sample(NamedTuple):
    """The totals of one report."""

    received_at_s: float
    """By the observer's clock."""
    reported_at_s: float
    """By the coordinator's."""
    demand: DemandTotals
    classes: Mapping[str, ClassCounts]
    ttft: LatencyTotals
    tpot: LatencyTotals
    busy_s: Mapping[str, float]
    """By pool."""


class _ReportHistory:
    """One coordinator."""

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque()
        self.last_new_at_s = -math.inf
        """When, by the observer's clock, its last new report came."""

    def add(self, report: CoordinatorReport, now_s: float, window_s: float) -> bool:
        """Take in a report; False when it has been heard before."""
        samples = self.samples
        if samples and report.at_s == samples[-1].reported_at_s:
            return False
        sample = _to_sample(report, now_s)
        if samples and _has_restarted(samples[-1], sample):
            samples.clear()
        samples.append(sample)
        self.last_new_at_s = now_s
        while len(samples) > 2 and samples[1].received_at_s <= now_s - window_s:  # noqa: PLR2004 - two
            samples.popleft()
        return True

    @property
    def span_s(self) -> float:
        """The time that rates are taken over; 0 for one report."""
        return self.samples[-1].reported_at_s - self.samples[0].reported_at_s


_ReportAndHistory: TypeAlias = tuple[CoordinatorReport, _ReportHistory]
"""A coordinator's last report, and its kept history."""


class Observer:
    """Derives observations from the reports of coordinators."""

    def __init__(
        self, options: ObserverOptions | None = None, *, slos: Mapping[str, Slo] | None = None
    ) -> None:
        """Begin with nothing; `slos` are the classes that there are, by name."""
        self._options = options or ObserverOptions()
        self._slos: dict[str, Slo] = {}
        self._histories: dict[str, _ReportHistory] = {}
        self._slacks: deque[tuple[float, str, float]] = deque()
        self._cold_starts: dict[str, ColdStartTimer] = {}
        self._known_pools: set[str] = set()
        self._active_classes: dict[str, tuple[str, ...]] = {}
        self.cluster_totals = ClusterTotals()
        """Totals since the beginning: classes over their own windows, usage."""
        self.reconfigure(slos=slos)

    def reconfigure(
        self, *, options: ObserverOptions | None = None, slos: Mapping[str, Slo] | None = None
    ) -> None:
        """Go on by other options and classes; None: as before."""
        self._options = options or self._options
        if slos is not None:
            self._slos = dict(slos)
            self.cluster_totals.set_max_window(
                max((slo.window_s for slo in slos.values()), default=0.0)
            )

    def observe(
        self,
        reports: Sequence[CoordinatorReport],
        pools: Mapping[str, PoolState],
        now_s: float,
        *,
        missing: Sequence[str] = (),
    ) -> Observation:
        """Take in a round of reports, and say what is seen.

        `missing` are answers that did not come, in words; they are passed on.
        """
        problems = list(missing)
        valid_reports = list(self._valid_reports(reports, problems))
        for report in valid_reports:
            self._ingest(report, now_s, problems)
        reports_and_histories = [
            (report, self._histories[report.coordinator_id]) for report in valid_reports
        ]
        self._forget_expired(now_s)
        if not valid_reports:
            problems.append("no coordinator reports")
        elif not any(history.span_s > 0 for _, history in reports_and_histories):
            problems.append("every coordinator has reported only once: there are no rates yet")
        pool_observations = {
            name: self._observe_pool(name, state, valid_reports, now_s, problems)
            for name, state in sorted(pools.items())
        }
        computed_s = {
            name: self._computed_s(name, pools[name], valid_reports, now_s) for name in pools
        }
        self.cluster_totals.record_capacity(pool_observations.values(), computed_s, now_s)
        self._note_slacks(valid_reports, now_s)
        observation = replace(
            self._observe_requests(reports_and_histories, now_s),
            pools=pool_observations,
            missing_inputs=tuple(problems),
        )
        return replace(
            observation, models=self._by_model(observation, reports_and_histories, pools)
        )

    def _observe_requests(
        self, reports_and_histories: Sequence[_ReportAndHistory], now_s: float, *, model: str = ""
    ) -> Observation:
        """Demand on some coordinators, and their results; without pools."""
        histories = [history for _, history in reports_and_histories if history.span_s > 0]
        slos = self._active_slos(histories, model)
        return Observation(
            at_s=now_s,
            window_s=max((history.span_s for history in histories), default=self._options.window_s),
            demand=_demand(histories),
            service=self._service(histories, [report for report, _ in reports_and_histories]),
            ttft_s=min((slo.ttft_s for slo in slos if slo.ttft_s is not None), default=None),
            tpot_s=min((slo.tpot_s for slo in slos if slo.tpot_s is not None), default=None),
            attainment_target=max(
                (slo.attainment_target for slo in slos), default=_DEFAULT_ATTAINMENT_TARGET
            ),
        )

    def _by_model(
        self,
        observation: Observation,
        reports_and_histories: Sequence[_ReportAndHistory],
        pools: Mapping[str, PoolState],
    ) -> dict[str, Observation]:
        """The same of each model's requests and pools; empty where there is only one."""
        models = sorted({state.model for state in pools.values()})
        if len(models) < 2:  # noqa: PLR2004 - several
            return {}
        return {
            model: replace(
                self._observe_requests(
                    [pair for pair in reports_and_histories if pair[0].model == model],
                    observation.at_s,
                    model=model,
                ),
                pools={
                    name: other
                    for name, other in observation.pools.items()
                    if pools[name].model == model
                },
                missing_inputs=observation.missing_inputs,
            )
            for model in models
        }

    def class_spans(
        self,
    ) -> Iterator[tuple[Mapping[str, ClassCounts], Mapping[str, ClassCounts], float]]:
        """Of each coordinator: classes when the window began and now, and how long that is."""
        for history in self._histories.values():
            yield history.samples[0].classes, history.samples[-1].classes, history.span_s

    # -------------------------------------------------------------- reports

    def _valid_reports(
        self, reports: Sequence[CoordinatorReport], problems: list[str]
    ) -> Iterator[CoordinatorReport]:
        """The reports that can be believed, one of each coordinator."""
        coordinator_ids: set[str] = set()
        for report in reports:
            problem = next(report_problems(report), None)
            if problem is not None:
                problems.append(f"coordinator {report.coordinator_id}: {problem}")
            elif report.coordinator_id not in coordinator_ids:
                coordinator_ids.add(report.coordinator_id)
                yield report

    def _ingest(self, report: CoordinatorReport, now_s: float, problems: list[str]) -> None:
        name = report.coordinator_id
        history = self._histories.setdefault(name, _ReportHistory())
        if history.add(report, now_s, self._options.window_s):
            self.cluster_totals.ingest(report, now_s)
        elif (age_s := now_s - history.last_new_at_s) > self._options.stale_s:
            problems.append(f"coordinator {name}: no new report for {age_s:.0f} s")

    def _forget_expired(self, now_s: float) -> None:
        oldest_s = now_s - _EXPIRY_WINDOWS * self._options.window_s
        for name in [
            pool_name
            for pool_name, known in self._histories.items()
            if known.last_new_at_s < oldest_s
        ]:
            del self._histories[name]

    def _active_slos(self, histories: Sequence[_ReportHistory], model: str) -> list[Slo]:
        """The objectives of the classes whose requests have ended in the window, or did last."""
        changed_classes = {
            name
            for history in histories
            for name, counts in history.samples[-1].classes.items()
            if counts != history.samples[0].classes.get(name)
        }
        if changed_classes:
            self._active_classes[model] = tuple(sorted(changed_classes))
        class_names = self._active_classes.get(model, (DEFAULT_CLASS,))
        return [self._slos[name] for name in class_names if name in self._slos]

    # -------------------------------------------------------------- what requests got

    def _service(
        self, histories: Sequence[_ReportHistory], reports: Sequence[CoordinatorReport]
    ) -> ServiceLevel:
        counts = ClassCounts()
        refused_per_s = 0.0
        for history in histories:
            delta = sum_classes(history.samples[-1].classes) - sum_classes(
                history.samples[0].classes
            )
            counts += delta
            refused_per_s += max(0, delta.refused) / history.span_s
        ttft = sum_deltas(
            [(history.samples[0].ttft, history.samples[-1].ttft) for history in histories]
        )
        tpot = sum_deltas(
            [(history.samples[0].tpot, history.samples[-1].tpot) for history in histories]
        )
        return ServiceLevel(
            attainment=counts.attainment,
            ttft_mean_s=mean_s(ttft),
            ttft_p90_s=quantile_s(ttft, 0.9),
            tpot_mean_s=mean_s(tpot),
            tpot_p90_s=quantile_s(tpot, 0.9),
            rejected_per_s=refused_per_s,
            in_flight=sum(report.in_flight for report in reports),
            queued_requests=sum(report.queued for report in reports),
            min_ttft_slack_s=self._min_slack_s({report.model for report in reports}),
        )

    def _note_slacks(self, reports: Sequence[CoordinatorReport], now_s: float) -> None:
        self._slacks.extend(
            (now_s, report.model, report.slack_s)
            for report in reports
            if report.slack_s is not None
        )
        while self._slacks and self._slacks[0][0] <= now_s - self._options.fast_window_s:
            self._slacks.popleft()

    def _min_slack_s(self, models: Collection[str]) -> float | None:
        return min((slack_s for _, model, slack_s in self._slacks if model in models), default=None)

    # -------------------------------------------------------------- pools

    def _observe_pool(
        self,
        name: str,
        state: PoolState,
        reports: Sequence[CoordinatorReport],
        now_s: float,
        problems: list[str],
    ) -> PoolObservation:
        best = best_pool_report(name, state, reports)
        pool_report = PoolReport(name) if best is None else best[1]
        reported_count = active_replicas(pool_report)
        if reported_count:
            self._known_pools.add(name)
            if pool_report.oldest_report_age_s > self._options.stale_s:
                problems.append(
                    f"pool {name}: its load reports are {pool_report.oldest_report_age_s:.0f} s old"
                )
        elif reports and state.running and name in self._known_pools:
            problems.append(f"pool {name}: no coordinator sees any of its {state.running} replicas")
        replicas_by_role = active_by_role(pool_report, state)
        ready = sum(replicas_by_role.values())
        capacity = best_capacities(name, reports, pool_report)
        # Those that run, and that no coordinator knows yet, are about to take work.
        starting = state.starting + max(0, (state.running or 0) - reported_count)
        cold_starts = self._cold_starts.setdefault(name, ColdStartTimer())
        running = ready if state.running is None else state.running
        cold_starts.observe(starting=state.starting, running=running, serving=ready, now_s=now_s)
        per_replica = 1 / ready if ready else 0.0
        measured_s = cold_starts.measured_s
        return PoolObservation(
            name=name,
            role=state.role,
            prefill=replicas_by_role[Role.PREFILL],
            decode=replicas_by_role[Role.DECODE],
            mixed=replicas_by_role[Role.MIXED],
            starting=starting,
            draining=max(state.draining, pool_report.draining),
            gpus_per_replica=state.gpus_per_replica,
            cold_start_s=state.cold_start_s if measured_s is None else measured_s,
            is_cold_start_measured=measured_s is not None,
            oldest_start_age_s=cold_starts.starting_for_s(now_s),
            prefill_tokens_per_s=capacity.prefill_tokens_per_s,
            decode_tokens_per_s=capacity.decode_tokens_per_s,
            decode_streams=capacity.decode_streams,
            utilization_fraction=None
            if best is None
            else self._busy_fraction(name, best[0], ready),
            running_requests=pool_report.running_requests * per_replica,
            queued_requests=pool_report.queued_requests * per_replica,
            queued_tokens=pool_report.queued_tokens * per_replica,
            kv_used_fraction=min(1.0, pool_report.kv_used_fraction),
        )

    def _computed_s(
        self, pool: str, state: PoolState, reports: Sequence[CoordinatorReport], now_s: float
    ) -> float:
        """How long its replicas computed, all together, since its last report."""
        best = best_pool_report(pool, state, reports)
        if best is None:
            return 0.0
        history = self._histories[best[0].coordinator_id]
        if history.last_new_at_s < now_s or history.span_s <= 0:
            return 0.0
        current, previous = history.samples[-1].busy_s, history.samples[-2].busy_s
        return max(0.0, current.get(pool, 0.0) - previous.get(pool, current.get(pool, 0.0)))

    def _busy_fraction(
        self, pool: str, report: CoordinatorReport, replica_count: int
    ) -> float | None:
        """The share of the window that its replicas computed, by the believed report."""
        history = self._histories[report.coordinator_id]
        first_s, last_s = history.samples[0].busy_s.get(pool), history.samples[-1].busy_s.get(pool)
        if first_s is None or last_s is None or not replica_count or history.span_s <= 0:
            return None
        return min(1.0, max(0.0, last_s - first_s) / (history.span_s * replica_count))


# ------------------------------------------------------------------------------------- totals


def _to_sample(report: CoordinatorReport, now_s: float) -> _Sample:
    return _Sample(
        received_at_s=now_s,
        reported_at_s=report.at_s,
        demand=report.demand,
        classes=by_class(report.tallies),
        ttft=report.ttft,
        tpot=report.tpot,
        busy_s={pool.pool: pool.busy_s for pool in report.pools},
    )


def _has_restarted(previous: _Sample, current: _Sample) -> bool:
    """Whether a coordinator's totals are those of another life: its clock or counts went back."""
    return (
        current.reported_at_s < previous.reported_at_s
        or sum_classes(current.classes).ended < sum_classes(previous.classes).ended
    )


def _demand(histories: Sequence[_ReportHistory]) -> Demand:
    per_s = [0.0] * 4
    for history in histories:
        deltas = map(sub, history.samples[-1].demand, history.samples[0].demand)
        # Expectations become facts, so a total may go back a little; nothing was given back.
        per_s = list(map(add, per_s, (max(0.0, more) / history.span_s for more in deltas)))
    requests, prompt, uncached, output = per_s
    per_request = 1 / requests if requests else 0.0
    return Demand(
        requests_per_s=requests,
        prompt_tokens_per_s=uncached,
        output_tokens_per_s=output,
        mean_prompt_tokens=prompt * per_request,
        mean_uncached_tokens=uncached * per_request,
        mean_output_tokens=output * per_request,
    )


def sum_deltas(pairs: Iterable[tuple[LatencyTotals, LatencyTotals]]) -> LatencyTotals:
    """The sum of the differences between the first and the second of each pair."""
    total = NO_LATENCIES._replace(buckets=_NO_BUCKETS)
    for before, after in pairs:
        if not after.buckets:
            continue
        bucket_pairs = zip(_fit_buckets(before.buckets), _fit_buckets(after.buckets), strict=True)
        added = tuple(max(0, b - a) for a, b in bucket_pairs)
        total = LatencyTotals(
            total.requests + max(0, after.requests - before.requests),
            total.sum_s + max(0.0, after.sum_s - before.sum_s),
            tuple(map(add, total.buckets, added)),
        )
    return total


def mean_s(latencies: LatencyTotals) -> float | None:
    """Their mean; None of none."""
    return latencies.sum_s / latencies.requests if latencies.requests else None


def quantile_s(latencies: LatencyTotals, q: float) -> float | None:
    """About the q-quantile, within the quarter that a bucket spans; None of none."""
    total = sum(latencies.buckets)
    if not total:
        return None
    rank, cumulative = q * total, 0
    edges = (0.0, *LATENCY_BUCKET_BOUNDS_S, LATENCY_BUCKET_BOUNDS_S[-1])
    for (low_s, high_s), count in zip(pairwise(edges), latencies.buckets, strict=True):
        if count and cumulative + count >= rank:
            return low_s + (high_s - low_s) * (rank - cumulative) / count
        cumulative += count
    return LATENCY_BUCKET_BOUNDS_S[-1]


def _fit_buckets(buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The same counts, where another version of baton has more edges, or fewer."""
    bucket_count = len(_NO_BUCKETS)
    if len(buckets) > bucket_count:
        return (*buckets[: bucket_count - 1], sum(buckets[bucket_count - 1 :]))
    return buckets + _NO_BUCKETS[len(buckets) :]


def report_problems(report: CoordinatorReport) -> Iterator[str]:
    """Everything that is wrong with a report, in words."""
    signed = {"at_s": report.at_s, "slack_s": report.slack_s or 0.0}
    non_negative: dict[str, float] = {"in_flight": report.in_flight, "queued": report.queued}
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
            yield f"{name} is {value}, expected a number from 0"
    for latencies in (report.ttft, report.tpot):
        if latencies.buckets and (
            len(latencies.buckets) < MIN_LATENCY_BUCKETS or min(latencies.buckets) < 0
        ):
            histogram = (
                f"{len(latencies.buckets)} buckets, the least of which holds"
                f" {min(latencies.buckets)}"
            )
            yield (
                f"a histogram has {histogram}; expected at least {MIN_LATENCY_BUCKETS}, each"
                " from 0 up"
            )
    for row in report.tallies:
        if not all(0 <= value < math.inf for value in row[4:]):
            yield f"a tally of class {row.slo_class!r} has a figure that is no number from 0"
