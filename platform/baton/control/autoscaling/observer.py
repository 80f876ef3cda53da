"""What coordinators report, put together over a window: the observation of a scaling tick.

*Theory of operation.* Whoever ticks an autoscaler gives each round of reports to `observe`, with
what it knows of pools from elsewhere (how many replicas are starting, how long that takes). Rates
come from two reports of one coordinator and that coordinator's own clock: the newest, and the one
from the beginning of the window; then they are added up over coordinators. So a lost report costs
nothing, a coordinator that is new counts from its second report on, and one that has started again
(its clock or its counts go back) counts as new. Pools are seen by all coordinators alike: the one
that knows most of a pool's replicas, and among those the freshest, is believed.

What may fail: reports that are missing, stale, repeated or nonsense. Such a one is left out, and
`Observation.missing` says so in words; whoever scales by it holds still. Memory is bounded by the
number of coordinators times the reports of one window, in which tenants are added up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from typing import NamedTuple, TypeAlias

from baton.control.accounting.class_counts import ClassCounts, by_class, sum_of
from baton.control.accounting.cluster_totals import Ledgers
from baton.control.autoscaling.cold_starts import ColdStarts
from baton.control.autoscaling.latencies import between, mean_s, quantile_s
from baton.control.autoscaling.report_checks import nonsense
from baton.control.fleet.pool_views import PoolState, capacities, most_telling, replicas, working
from baton.domain.demand import (
    CoordinatorReport,
    DemandTotals,
    LatencyTotals,
    PoolReport,
)
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, Service

_FORGOTTEN_WINDOWS = 10
"""A coordinator that has not been heard for so many windows is gone."""

_WINDOW_TICKS = 15
"""Thirty seconds of ticks every two seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverOptions:
    """Over which time, and what is too old."""

    window_s: float = 30.0
    """Long enough for a mean of bursty arrivals, short beside a cold start."""
    fast_window_s: float = 5.0
    """For slack: a request that was in danger so long ago still counts."""
    stale_s: float = 10.0
    """Loads, and coordinators that repeat themselves, are not believed any more after it; replicas
    report several times a second, and are given up by coordinators sooner."""

    @classmethod
    def of_ticks(cls, interval_s: float) -> ObserverOptions:
        """For who decides so often: who ticks faster sees changes sooner."""
        own = cls()
        return replace(own, window_s=max(own.fast_window_s, _WINDOW_TICKS * interval_s))

    def __post_init__(self) -> None:
        for name in ("window_s", "fast_window_s", "stale_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"observer: {name} is {value}, wanted more than 0")


_TARGET = Slo().attainment_target


class _Sample(NamedTuple):
    """What one report says in totals."""

    seen_at_s: float
    """By the observer's clock."""
    at_s: float
    """By the coordinator's."""
    demand: DemandTotals
    classes: Mapping[str, ClassCounts]
    ttft: LatencyTotals
    tpot: LatencyTotals
    busy_s: Mapping[str, float]
    """By pool."""


class _Watched:
    """One coordinator."""

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque()
        self.newest_at_s = -math.inf
        """When, by the observer's clock, it last said something new."""

    def take(self, report: CoordinatorReport, now_s: float, window_s: float) -> bool:
        """Take in a report; False when it has been heard before."""
        samples = self.samples
        if samples and report.at_s == samples[-1].at_s:
            return False
        made = _sample(report, now_s)
        if samples and _began_again(samples[-1], made):
            samples.clear()
        samples.append(made)
        self.newest_at_s = now_s
        while len(samples) > 2 and samples[1].seen_at_s <= now_s - window_s:  # noqa: PLR2004 - two
            samples.popleft()
        return True

    @property
    def span_s(self) -> float:
        """The time that rates are taken over; 0 for one report."""
        return self.samples[-1].at_s - self.samples[0].at_s


_Heard: TypeAlias = tuple[CoordinatorReport, _Watched]
"""A coordinator's last report, and what was kept of those before."""


class Observer:
    """See the module."""

    def __init__(
        self, options: ObserverOptions | None = None, *, slos: Mapping[str, Slo] | None = None
    ) -> None:
        """Begin with nothing; `slos` are the classes that there are, by name."""
        self._options = options or ObserverOptions()
        self._slos: dict[str, Slo] = {}
        self._watched: dict[str, _Watched] = {}
        self._slacks: deque[tuple[float, str, float]] = deque()
        self._starts: dict[str, ColdStarts] = {}
        self._known_pools: set[str] = set()
        self._in_use: dict[str, tuple[str, ...]] = {}
        self.ledgers = Ledgers()
        """What was since the beginning: classes over their own windows, usage."""
        self.reconfigure(slos=slos)

    def reconfigure(
        self, *, options: ObserverOptions | None = None, slos: Mapping[str, Slo] | None = None
    ) -> None:
        """Go on by other options and classes; None: as before."""
        self._options = options or self._options
        if slos is not None:
            self._slos = dict(slos)
            self.ledgers.remember_for(max((one.window_s for one in slos.values()), default=0.0))

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
        troubles = list(missing)
        sane = list(self._sane(reports, troubles))
        for report in sane:
            self._take(report, now_s, troubles)
        heard = [(report, self._watched[report.coordinator_id]) for report in sane]
        self._forget(now_s)
        if not sane:
            troubles.append("no coordinator reports")
        elif not any(one.span_s > 0 for _, one in heard):
            troubles.append("every coordinator has reported only once: there are no rates yet")
        seen = {
            name: self._pool(name, state, sane, now_s, troubles)
            for name, state in sorted(pools.items())
        }
        computed_s = {name: self._computed_s(name, pools[name], sane, now_s) for name in pools}
        self.ledgers.held(seen.values(), computed_s, now_s)
        self._note_slacks(sane, now_s)
        whole = replace(self._asked(heard, now_s), pools=seen, missing=tuple(troubles))
        return replace(whole, models=self._by_model(whole, heard, pools))

    def _asked(self, heard: Sequence[_Heard], now_s: float, *, model: str = "") -> Observation:
        """What was asked of some coordinators, and what they made of it; without pools."""
        rated = [one for _, one in heard if one.span_s > 0]
        in_use = self._objectives(rated, model)
        return Observation(
            at_s=now_s,
            window_s=max((one.span_s for one in rated), default=self._options.window_s),
            demand=_demand(rated),
            service=self._service(rated, [report for report, _ in heard]),
            ttft_s=min((slo.ttft_s for slo in in_use if slo.ttft_s is not None), default=None),
            tpot_s=min((slo.tpot_s for slo in in_use if slo.tpot_s is not None), default=None),
            attainment_target=max((slo.attainment_target for slo in in_use), default=_TARGET),
        )

    def _by_model(
        self, whole: Observation, heard: Sequence[_Heard], pools: Mapping[str, PoolState]
    ) -> dict[str, Observation]:
        """The same of each model's requests and pools; empty where there is only one."""
        models = sorted({state.model for state in pools.values()})
        if len(models) < 2:  # noqa: PLR2004 - several
            return {}
        return {
            model: replace(
                self._asked(
                    [one for one in heard if one[0].model == model], whole.at_s, model=model
                ),
                pools={
                    name: one for name, one in whole.pools.items() if pools[name].model == model
                },
                missing=whole.missing,
            )
            for model in models
        }

    def spans(self) -> Iterator[tuple[Mapping[str, ClassCounts], Mapping[str, ClassCounts], float]]:
        """Of each coordinator: classes when the window began and now, and how long that is."""
        for one in self._watched.values():
            yield one.samples[0].classes, one.samples[-1].classes, one.span_s

    # -------------------------------------------------------------- reports

    def _sane(
        self, reports: Sequence[CoordinatorReport], troubles: list[str]
    ) -> Iterator[CoordinatorReport]:
        """The reports that can be believed, one of each coordinator."""
        known: set[str] = set()
        for report in reports:
            wrong = next(nonsense(report), None)
            if wrong is not None:
                troubles.append(f"coordinator {report.coordinator_id}: {wrong}")
            elif report.coordinator_id not in known:
                known.add(report.coordinator_id)
                yield report

    def _take(self, report: CoordinatorReport, now_s: float, troubles: list[str]) -> None:
        name = report.coordinator_id
        watched = self._watched.setdefault(name, _Watched())
        if watched.take(report, now_s, self._options.window_s):
            self.ledgers.take(report, now_s)
        elif (age_s := now_s - watched.newest_at_s) > self._options.stale_s:
            troubles.append(f"coordinator {name}: has said nothing new for {age_s:.0f} s")

    def _forget(self, now_s: float) -> None:
        oldest_s = now_s - _FORGOTTEN_WINDOWS * self._options.window_s
        for name in [one for one, known in self._watched.items() if known.newest_at_s < oldest_s]:
            del self._watched[name]

    def _objectives(self, rated: Sequence[_Watched], model: str) -> list[Slo]:
        """What the classes promise in which requests have ended in the window, or did last."""
        used = {
            name
            for one in rated
            for name, counts in one.samples[-1].classes.items()
            if counts != one.samples[0].classes.get(name)
        }
        if used:
            self._in_use[model] = tuple(sorted(used))
        in_use = self._in_use.get(model, (DEFAULT_CLASS,))
        return [self._slos[name] for name in in_use if name in self._slos]

    # -------------------------------------------------------------- what requests got

    def _service(self, rated: Sequence[_Watched], sane: Sequence[CoordinatorReport]) -> Service:
        counts = ClassCounts()
        refused_per_s = 0.0
        for one in rated:
            done = sum_of(one.samples[-1].classes) - sum_of(one.samples[0].classes)
            counts += done
            refused_per_s += max(0, done.refused) / one.span_s
        ttft = between([(one.samples[0].ttft, one.samples[-1].ttft) for one in rated])
        tpot = between([(one.samples[0].tpot, one.samples[-1].tpot) for one in rated])
        return Service(
            attainment=counts.attainment,
            ttft_mean_s=mean_s(ttft),
            ttft_p90_s=quantile_s(ttft, 0.9),
            tpot_mean_s=mean_s(tpot),
            tpot_p90_s=quantile_s(tpot, 0.9),
            refused_per_s=refused_per_s,
            in_flight=sum(report.in_flight for report in sane),
            held=sum(report.held for report in sane),
            slack_s=self._slack_s({report.model for report in sane}),
        )

    def _note_slacks(self, sane: Sequence[CoordinatorReport], now_s: float) -> None:
        self._slacks.extend(
            (now_s, one.model, one.slack_s) for one in sane if one.slack_s is not None
        )
        while self._slacks and self._slacks[0][0] <= now_s - self._options.fast_window_s:
            self._slacks.popleft()

    def _slack_s(self, models: Collection[str]) -> float | None:
        return min((slack_s for _, model, slack_s in self._slacks if model in models), default=None)

    # -------------------------------------------------------------- pools

    def _pool(
        self,
        name: str,
        state: PoolState,
        sane: Sequence[CoordinatorReport],
        now_s: float,
        troubles: list[str],
    ) -> PoolObservation:
        best = most_telling(name, state, sane)
        found = PoolReport(name) if best is None else best[1]
        reported = replicas(found)
        if reported:
            self._known_pools.add(name)
            if found.stale_s > self._options.stale_s:
                troubles.append(f"pool {name}: its load reports are {found.stale_s:.0f} s old")
        elif sane and state.running and name in self._known_pools:
            troubles.append(f"pool {name}: no coordinator sees any of its {state.running} replicas")
        roles = working(found, state)
        ready = sum(roles.values())
        capacity = capacities(name, sane, found)
        # Those that run, and that no coordinator knows yet, are about to take work.
        starting = state.starting + max(0, (state.running or 0) - reported)
        starts = self._starts.setdefault(name, ColdStarts())
        up = ready if state.running is None else state.running
        starts.look(starting=state.starting, up=up, working=ready, now_s=now_s)
        each = 1 / ready if ready else 0.0
        measured_s = starts.measured_s
        return PoolObservation(
            name=name,
            role=state.role,
            prefill=roles[Role.PREFILL],
            decode=roles[Role.DECODE],
            mixed=roles[Role.MIXED],
            starting=starting,
            draining=max(state.draining, found.draining),
            gpus_per_replica=state.gpus_per_replica,
            cold_start_s=state.cold_start_s if measured_s is None else measured_s,
            cold_start_measured=measured_s is not None,
            starting_for_s=starts.starting_for_s(now_s),
            prefill_tokens_per_s=capacity.prefill_tokens_per_s,
            decode_tokens_per_s=capacity.decode_tokens_per_s,
            decode_streams=capacity.decode_streams,
            busy_fraction=None if best is None else self._busy(name, best[0], ready),
            running_requests=found.running_requests * each,
            queued_requests=found.queued_requests * each,
            queued_tokens=found.queued_tokens * each,
            kv_used_fraction=min(1.0, found.kv_used_fraction),
        )

    def _computed_s(
        self, pool: str, state: PoolState, sane: Sequence[CoordinatorReport], now_s: float
    ) -> float:
        """How long its replicas computed, all together, since the report before this one."""
        best = most_telling(pool, state, sane)
        if best is None:
            return 0.0
        one = self._watched[best[0].coordinator_id]
        if one.newest_at_s < now_s or one.span_s <= 0:
            return 0.0
        now, before = one.samples[-1].busy_s, one.samples[-2].busy_s
        return max(0.0, now.get(pool, 0.0) - before.get(pool, now.get(pool, 0.0)))

    def _busy(self, pool: str, report: CoordinatorReport, working: int) -> float | None:
        """What share of the window its replicas computed, as the one that is believed has it."""
        one = self._watched[report.coordinator_id]
        before, now = one.samples[0].busy_s.get(pool), one.samples[-1].busy_s.get(pool)
        if before is None or now is None or not working or one.span_s <= 0:
            return None
        return min(1.0, max(0.0, now - before) / (one.span_s * working))


# ------------------------------------------------------------------------------------- totals


def _sample(report: CoordinatorReport, now_s: float) -> _Sample:
    return _Sample(
        seen_at_s=now_s,
        at_s=report.at_s,
        demand=report.demand,
        classes=by_class(report.tallies),
        ttft=report.ttft,
        tpot=report.tpot,
        busy_s={pool.pool: pool.busy_s for pool in report.pools},
    )


def _began_again(before: _Sample, now: _Sample) -> bool:
    """Whether a coordinator's totals are those of another life: its clock or counts went back."""
    return now.at_s < before.at_s or sum_of(now.classes).ended < sum_of(before.classes).ended


def _demand(rated: Sequence[_Watched]) -> Demand:
    per_s = [0.0] * 4
    for one in rated:
        asked = map(sub, one.samples[-1].demand, one.samples[0].demand)
        # Expectations become facts, so a total may go back a little; nothing was given back.
        per_s = list(map(add, per_s, (max(0.0, more) / one.span_s for more in asked)))
    requests, prompt, uncached, output = per_s
    each = 1 / requests if requests else 0.0
    return Demand(
        requests_per_s=requests,
        prompt_tokens_per_s=uncached,
        output_tokens_per_s=output,
        mean_prompt_tokens=prompt * each,
        mean_uncached_tokens=uncached * each,
        mean_output_tokens=output * each,
    )
