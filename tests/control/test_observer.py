"""Reports of coordinators, put together into what a scaling tick sees."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.autoscaling.autoscaler import unmet_preconditions
from baton.control.autoscaling.observer import ColdStartTimer, Observer, ObserverOptions, quantile_s
from baton.control.fleet.pool_views import PoolState
from baton.domain.demand import (
    LATENCY_BUCKET_BOUNDS_S,
    CoordinatorReport,
    DemandTotals,
    LatencyTotals,
    PoolReport,
    Tally,
)
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.observation import Demand, Observation, PoolObservation

OPTIONS = ObserverOptions(window_s=30.0, fast_window_s=5.0, stale_s=10.0)
SLOS = {
    "default": Slo(ttft_s=1.0, tpot_s=0.1, attainment_target=0.9),
    "strict": Slo(name="strict", ttft_s=0.2, attainment_target=0.95),
    "brisk": Slo(name="brisk", tpot_s=0.02),
}
DECODE = {"decode": PoolState(role=Role.DECODE)}


def report(name: str, at_s: float, asked: float = 0.0, **changes: object) -> CoordinatorReport:
    """Of somebody who was asked so many requests of 100 prompt tokens, 60 of them uncached."""
    made = CoordinatorReport(
        coordinator_id=name,
        at_s=at_s,
        demand=DemandTotals(int(asked), int(100 * asked), 60.0 * asked, 20.0 * asked),
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # tests name them right


def tally(name: str = "default", *, judged: int, good: int, **more: int) -> Tally:
    return Tally(name, "t", "m", "p", evaluated=judged, good=good, **more)


def pool(busy_s: float = 0.0, decode: int = 2, **changes: object) -> PoolReport:
    return PoolReport("decode", decode=decode, busy_s=busy_s)._replace(**changes)  # type: ignore[arg-type]


class Watch:
    """An observer and its clock; coordinators' clocks are ahead by what a test says."""

    def __init__(self, options: ObserverOptions = OPTIONS) -> None:
        self.observer = Observer(options, slos=SLOS)
        self.now_s = 1000.0

    def see(
        self,
        *reports: CoordinatorReport,
        after_s: float = 2.0,
        states: dict[str, PoolState] | None = None,
        missing: tuple[str, ...] = (),
    ) -> Observation:
        self.now_s += after_s
        return self.observer.observe(reports, states or {}, self.now_s, missing=missing)


# ------------------------------------------------------------------------------ demand


def test_rates_are_what_was_added_by_each_coordinators_own_clock() -> None:
    watch = Watch()
    watch.see(report("a", 5.0, 10), report("b", 900.0, 50))
    seen = watch.see(report("a", 7.0, 30), report("b", 904.0, 70))
    assert seen.demand == Demand(
        requests_per_s=15.0,
        prompt_tokens_per_s=900.0,
        output_tokens_per_s=300.0,
        mean_prompt_tokens=100.0,
        mean_uncached_tokens=60.0,
        mean_output_tokens=20.0,
    )
    assert (seen.window_s, seen.missing_inputs) == (4.0, ())


def test_a_rate_is_taken_over_the_window() -> None:
    watch = Watch()
    for step in range(40):
        seen = watch.see(report("a", 2.0 * step, min(step, 20) * 30))
    # The last 30 s are 15 steps; the last five of them with 30 requests are out of it by now.
    assert seen.window_s == pytest.approx(30.0)
    assert seen.demand.requests_per_s == 0.0
    watch = Watch()
    for step in range(40):
        seen = watch.see(report("a", 2.0 * step, max(0, step - 30) * 30))
    assert seen.demand.requests_per_s == pytest.approx(9 * 30 / 30.0)


def test_a_coordinator_counts_from_its_second_report_on() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, 0))
    seen = watch.see(report("a", 2.0, 10), report("b", 1.0, 99_999))
    assert seen.demand.requests_per_s == 5.0
    seen = watch.see(report("a", 4.0, 20), report("b", 3.0, 100_001))
    assert seen.demand.requests_per_s == 6.0


@pytest.mark.parametrize("again", [report("a", 1.0, 3), report("a", 3.0, 3, tallies=())])
def test_a_coordinator_that_began_again_counts_as_new(again: CoordinatorReport) -> None:
    watch = Watch()
    watch.see(report("a", 0.0, 100, tallies=(tally(judged=5, good=5),)))
    watch.see(report("a", 2.0, 200, tallies=(tally(judged=9, good=9),)))
    seen = watch.see(again)
    assert seen.demand == Demand()
    assert any("no rates yet" in missing_input for missing_input in seen.missing_inputs)


def test_a_clock_that_goes_back_alone_says_that_it_is_another_life() -> None:
    watch = Watch()
    watch.see(report("a", 5.0, 100))
    watch.see(report("a", 7.0, 200))
    seen = watch.see(report("a", 6.0, 300))
    assert any("no rates yet" in missing_input for missing_input in seen.missing_inputs)


def test_a_coordinator_that_answers_twice_is_counted_once() -> None:
    watch = Watch()
    twice = report("a", 0.0, in_flight=3)
    assert watch.see(twice, twice).service.in_flight == 3


def test_totals_that_go_back_a_little_are_no_negative_rate() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, 10))
    fewer = DemandTotals(10, 1000, 590.0, 200.0)
    seen = watch.see(report("a", 2.0, demand=fewer))
    assert seen.demand.prompt_tokens_per_s == 0.0
    assert not any(unmet_preconditions(seen))


def test_a_coordinator_that_comes_back_after_a_long_time_counts_as_new() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, 0))
    watch.see(report("b", 0.0, 0), after_s=301.0)
    watch.see(report("a", 302.0, 3020), report("b", 2.0, 10))
    seen = watch.see(report("a", 304.0, 3024), report("b", 4.0, 20))
    assert seen.demand.requests_per_s == 7.0


def test_a_coordinator_that_repeats_its_report_stays_missing() -> None:
    watch = Watch()
    for _ in range(3):
        seen = watch.see(report("a", 0.0, 0), after_s=200.0)
    assert any("no new report" in missing_input for missing_input in seen.missing_inputs)


# ------------------------------------------------------------------------------ what is missing


def test_no_reports_at_all_are_missing() -> None:
    assert any(
        "no coordinator reports" in missing_input for missing_input in Watch().see().missing_inputs
    )


def test_answers_that_did_not_come_are_passed_on() -> None:
    watch = Watch()
    watch.see(report("a", 0.0))
    assert watch.see(report("a", 2.0), missing=("ingress b: no answer",)).missing_inputs == (
        "ingress b: no answer",
    )


def test_a_coordinator_that_repeats_itself_is_missing_after_a_while() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, 0))
    assert watch.see(report("a", 2.0, 10)).missing_inputs == ()
    same = report("a", 2.0, 10)
    assert watch.see(same, after_s=9.0).missing_inputs == ()
    assert any(
        "no new report for 11 s" in missing_input
        for missing_input in watch.see(same).missing_inputs
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"demand": DemandTotals(1, 1, math.nan, 1.0)},
        {"demand": DemandTotals(-1, 1, 1.0, 1.0)},
        {"at_s": math.inf},
        {"slack_s": math.nan},
        {"in_flight": -3},
        {"ttft": LatencyTotals(1, math.inf, ())},
        {"tpot": LatencyTotals(1, 1.0, (1, 2, 3))},
        {"ttft": LatencyTotals(1, 1.0, (-1, *(0,) * len(LATENCY_BUCKET_BOUNDS_S)))},
        {"tallies": (tally(judged=-1, good=0),)},
        {"pools": (pool(kv_used_fraction=math.nan),)},
        {"pools": (pool(decode=-1),)},
    ],
)
def test_nonsense_is_left_out_and_said(changes: dict[str, object]) -> None:
    watch = Watch()
    watch.see(report("a", 0.0, 0), report("b", 0.0, 0))
    made = {"at_s": 2.0} | changes
    bad = replace(report("b", 2.0, 50), **made)  # type: ignore[arg-type]  # tests name them right
    seen = watch.see(report("a", 2.0, 10), bad, states=DECODE)
    assert seen.demand.requests_per_s == 5.0
    (trouble,) = seen.missing_inputs
    assert trouble.startswith("coordinator b: ")
    assert not [
        unmet_precondition
        for unmet_precondition in unmet_preconditions(seen)
        if unmet_precondition != trouble
    ]


def test_loads_that_are_too_old_are_missing() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, pools=(pool(oldest_report_age_s=1.0),)), states=DECODE)
    seen = watch.see(report("a", 2.0, pools=(pool(oldest_report_age_s=11.0),)), states=DECODE)
    assert seen.missing_inputs == ("pool decode: its load reports are 11 s old",)


def test_a_pool_that_no_coordinator_reports_is_missing_while_its_replicas_run() -> None:
    watch = Watch()
    states = {"decode": PoolState(role=Role.DECODE, running=2)}
    watch.see(report("a", 0.0), states=states)
    assert watch.see(report("a", 2.0), states=states).missing_inputs == (), (
        "they may be about to join"
    )
    watch.see(report("a", 4.0, pools=(pool(),)), states=states)
    seen = watch.see(report("a", 6.0), states=states)
    assert seen.missing_inputs == ("pool decode: no coordinator sees any of its 2 replicas",)


# ------------------------------------------------------------------------------ what requests got


def histogram(*latencies_s: float) -> LatencyTotals:
    buckets = [0] * (len(LATENCY_BUCKET_BOUNDS_S) + 1)
    for one_s in latencies_s:
        buckets[sum(edge < one_s for edge in LATENCY_BUCKET_BOUNDS_S)] += 1
    return LatencyTotals(len(latencies_s), sum(latencies_s), tuple(buckets))


def test_attainment_is_of_those_that_ended_in_the_window_over_all_coordinators() -> None:
    watch = Watch()
    watch.see(
        report("a", 0.0, tallies=(tally(judged=100, good=0),)),
        report("b", 0.0, tallies=(tally(judged=100, good=100),)),
    )
    seen = watch.see(
        report("a", 2.0, tallies=(tally(judged=110, good=8, shed=2, evicted=1),)),
        report("b", 2.0, tallies=(tally(judged=110, good=104), tally("x", judged=20, good=20))),
    )
    assert seen.service.attainment == pytest.approx((8 + 4 + 20) / 40)
    assert seen.service.rejected_per_s == 1.5


def test_without_an_end_there_is_no_attainment_and_no_latency() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, tallies=(tally(judged=5, good=5),)))
    service = watch.see(report("a", 2.0, tallies=(tally(judged=5, good=5),))).service
    assert (service.attainment, service.ttft_mean_s, service.tpot_p90_s) == (None, None, None)


def test_latencies_are_those_of_the_window() -> None:
    watch = Watch()
    old, new = (50.0, 50.0), tuple(0.1 * (number + 1) for number in range(20))
    watch.see(report("a", 0.0, ttft=histogram(*old)))
    service = watch.see(report("a", 2.0, ttft=histogram(*old, *new))).service
    assert service.ttft_mean_s == pytest.approx(1.05)
    assert service.ttft_p90_s == pytest.approx(1.8, rel=0.25)


@pytest.mark.parametrize(
    ("q", "wanted_s"),
    [
        (0.5, LATENCY_BUCKET_BOUNDS_S[3]),
        (0.25, (LATENCY_BUCKET_BOUNDS_S[2] + LATENCY_BUCKET_BOUNDS_S[3]) / 2),
        (1.0, LATENCY_BUCKET_BOUNDS_S[40]),
    ],
)
def test_a_quantile_lies_within_its_bucket(q: float, wanted_s: float) -> None:
    latencies = histogram(*[LATENCY_BUCKET_BOUNDS_S[3]] * 5, *[LATENCY_BUCKET_BOUNDS_S[40]] * 5)
    assert quantile_s(latencies, q) == pytest.approx(wanted_s)


@pytest.mark.parametrize("latency_s", [3_000.0, 7_000.0, 86_400.0])
def test_a_quantile_is_not_pinned_below_the_longest_timeout(latency_s: float) -> None:
    watch = Watch()
    watch.see(report("a", 0.0))
    service = watch.see(report("a", 2.0, ttft=histogram(*[latency_s] * 20))).service
    assert service.ttft_p90_s == pytest.approx(latency_s, rel=0.25)


@pytest.mark.parametrize("buckets", [65, 84, 100])
def test_latencies_of_another_version_with_more_edges_or_fewer_are_added_up(buckets: int) -> None:
    watch = Watch()
    first, then = [0] * buckets, [0] * buckets
    first[10], then[10], then[-1] = 1, 11, 1
    watch.see(report("a", 0.0, ttft=LatencyTotals(1, 1.0, tuple(first))), report("b", 0.0))
    ours = report("b", 2.0, ttft=histogram(*[LATENCY_BUCKET_BOUNDS_S[10]] * 10))
    seen = watch.see(report("a", 2.0, ttft=LatencyTotals(12, 9.0, tuple(then))), ours)
    assert seen.missing_inputs == ()
    assert seen.service.ttft_p90_s == pytest.approx(LATENCY_BUCKET_BOUNDS_S[10], rel=0.25)


def test_queued_requests_add_up_and_the_worst_slack_counts_for_a_while() -> None:
    watch = Watch()
    watch.see(report("a", 0.0))
    seen = watch.see(
        report("a", 2.0, in_flight=3, queued=1, slack_s=-0.5),
        report("b", 2.0, in_flight=4, queued=2),
    )
    assert (seen.service.in_flight, seen.service.queued_requests) == (7, 3)
    assert seen.service.min_ttft_slack_s == -0.5
    assert watch.see(report("a", 4.0, slack_s=0.7)).service.min_ttft_slack_s == -0.5
    assert watch.see(report("a", 7.0), after_s=3.0).service.min_ttft_slack_s == 0.7
    assert watch.see(report("a", 12.0), after_s=5.0).service.min_ttft_slack_s is None


def test_the_objectives_are_the_strictest_of_the_classes_in_use() -> None:
    watch = Watch()
    seen = watch.see(report("a", 0.0))
    assert (seen.ttft_s, seen.tpot_s, seen.attainment_target) == (1.0, 0.1, 0.9)
    used = (tally(judged=1, good=1), tally("strict", judged=1, good=1))
    seen = watch.see(report("a", 2.0, tallies=used))
    assert (seen.ttft_s, seen.tpot_s, seen.attainment_target) == (0.2, 0.1, 0.95)
    seen = watch.see(report("a", 40.0, tallies=used), after_s=38.0)
    seen = watch.see(report("a", 80.0, tallies=used), after_s=40.0)
    assert seen.ttft_s == 0.2, "while nothing is asked, those in use last count"


def test_classes_that_are_not_configured_any_more_have_no_objectives() -> None:
    watch = Watch()
    watch.see(report("a", 0.0))
    seen = watch.see(report("a", 2.0, tallies=(tally("gone", judged=1, good=1),)))
    assert (seen.ttft_s, seen.tpot_s, seen.attainment_target) == (None, None, 0.99)


# ------------------------------------------------------------------------------ pools


def test_pools_are_seen_once_however_many_coordinators_see_them() -> None:
    watch = Watch()
    told = pool(decode=2, running_requests=10.0, queued_tokens=6.0, kv_used_fraction=0.5)
    seen = watch.see(
        report("a", 0.0, pools=(told,)), report("b", 0.0, pools=(told,)), states=DECODE
    )
    one = seen.pools["decode"]
    assert (one.ready_replicas, one.running_requests, one.queued_tokens) == (2, 5.0, 3.0)
    assert one.kv_used_fraction == 0.5


def test_the_report_that_knows_the_replicas_wins_and_then_the_freshest() -> None:
    watch = Watch()
    partial = pool(decode=1, oldest_report_age_s=0.0, running_requests=1.0)
    stale = pool(decode=3, oldest_report_age_s=2.0, running_requests=30.0)
    fresh = pool(decode=3, oldest_report_age_s=0.1, running_requests=60.0)
    told = [report(n, 0.0, pools=(p,)) for n, p in (("a", partial), ("b", stale), ("c", fresh))]
    assert watch.see(*told, states=DECODE).pools["decode"].running_requests == 20.0
    states = {"decode": PoolState(role=Role.DECODE, running=1)}
    assert watch.see(*told, states=states).pools["decode"].running_requests == 1.0


def test_running_replicas_that_no_coordinator_knows_are_starting() -> None:
    watch = Watch()
    states = {"decode": PoolState(role=Role.DECODE, running=3, starting=1, draining=2)}
    one = watch.see(report("a", 0.0, pools=(pool(decode=2),)), states=states).pools["decode"]
    assert (one.ready_replicas, one.starting, one.draining) == (2, 2, 2)


def test_replicas_that_were_told_to_stop_take_no_work_in_any_report() -> None:
    watch = Watch()
    states = {"decode": PoolState(role=Role.DECODE, running=2)}
    told = pool(decode=2, prefill=1, mixed=1)
    one = watch.see(report("a", 0.0, pools=(told,)), states=states).pools["decode"]
    assert (one.decode, one.prefill, one.mixed, one.starting) == (0, 1, 1, 0)


def test_a_pool_without_replicas_is_seen_too() -> None:
    seen = Watch().see(report("a", 0.0), states={"decode": PoolState(role=Role.DECODE, running=0)})
    assert (seen.pools["decode"].ready_replicas, seen.pools["decode"].utilization_fraction) == (
        0,
        None,
    )


def test_the_busy_share_is_of_the_replicas_that_take_work() -> None:
    watch = Watch()
    watch.see(report("a", 0.0, pools=(pool(100.0),)), states=DECODE)
    seen = watch.see(report("a", 4.0, pools=(pool(106.0),)), states=DECODE)
    assert seen.pools["decode"].utilization_fraction == 0.75


def test_computed_work_is_counted_once_however_often_it_is_reported() -> None:
    watch = Watch()
    for at_s, busy_s in ((0.0, 100.0), (2.0, 101.0), (4.0, 103.5), (4.0, 103.5), (6.0, 104.0)):
        told = [report(name, at_s, pools=(pool(busy_s),)) for name in ("a", "b")]
        watch.see(*told, states={"decode": PoolState(role=Role.DECODE, gpus_per_replica=2.0)})
    held = watch.observer.cluster_totals.pools()["decode"]
    assert (held.busy_s, held.device_s) == (2 * 4.0, 2 * 2 * 8.0)


def test_a_capacity_that_the_believed_one_lacks_is_taken_from_another() -> None:
    watch = Watch()
    known = pool(
        oldest_report_age_s=1.0,
        prefill_tokens_per_s=10.0,
        decode_tokens_per_s=20.0,
        decode_streams=3.0,
    )
    told = (report("a", 0.0, pools=(pool(),)), report("b", 0.0, pools=(known,)))
    one = watch.see(*told, states=DECODE).pools["decode"]
    assert (one.prefill_tokens_per_s, one.decode_tokens_per_s, one.decode_streams) == (10, 20, 3)


def test_cold_starts_are_measured_once_any_was_seen() -> None:
    watch = Watch()

    def seen(at_s: float, starting: int, running: int, known: int) -> float:
        state = PoolState(role=Role.DECODE, starting=starting, running=running, cold_start_s=60.0)
        told = report("a", at_s, pools=(pool(decode=known),))
        return watch.see(told, states={"decode": state}).pools["decode"].cold_start_s

    assert seen(0.0, 0, 1, 1) == 60.0
    assert seen(2.0, 1, 1, 1) == 60.0
    assert seen(4.0, 0, 2, 1) == 60.0
    assert seen(6.0, 0, 2, 2) == 4.0


def test_a_starting_replica_is_observed_with_the_age_of_its_start() -> None:
    watch = Watch()

    def seen(at_s: float, starting: int, running: int) -> PoolObservation:
        state = PoolState(role=Role.DECODE, starting=starting, running=running, cold_start_s=60.0)
        told = report("a", at_s, pools=(pool(decode=running),))
        return watch.see(told, states={"decode": state}).pools["decode"]

    assert seen(0.0, 0, 0).oldest_start_age_s is None
    assert seen(2.0, 1, 0).oldest_start_age_s == 0.0
    assert seen(4.0, 1, 0).oldest_start_age_s == 2.0
    assert seen(6.0, 1, 0).oldest_start_age_s == 4.0
    came = seen(8.0, 0, 1)
    assert (came.oldest_start_age_s, came.is_cold_start_measured, came.cold_start_s) == (
        None,
        True,
        6.0,
    )


# ------------------------------------------------------------------------------ in general

STEP = st.tuples(
    st.lists(st.integers(0, 50), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from([0.5, 2.0, 2.0, 7.0]),
)


@given(st.lists(STEP, min_size=1, max_size=40))
def test_rates_are_those_of_a_twin_that_keeps_everything(
    steps: list[tuple[list[int], list[bool], float]],
) -> None:
    """Three coordinators, any of which may not be heard in any round."""
    watch = Watch()
    heard: list[list[tuple[float, float, int]]] = [[], [], []]
    totals, clock_s = [0, 0, 0], 0.0
    for arrivals, answers, after_s in steps:
        clock_s += after_s
        totals = [had + more for had, more in zip(totals, arrivals, strict=True)]
        told = []
        for number in range(3):
            if answers[number]:
                told.append(report(str(number), clock_s + 100 * number, totals[number]))
                heard[number].append((watch.now_s + after_s, clock_s, totals[number]))
        seen = watch.see(*told, after_s=after_s)
        wanted = 0.0
        for number in range(3):
            if not answers[number]:
                continue
            mine = heard[number]
            older = [item for item in mine[:-1] if item[0] <= watch.now_s - 30.0]
            base = older[-1] if older else mine[0]
            if mine[-1][1] > base[1]:
                wanted += (mine[-1][2] - base[2]) / (mine[-1][1] - base[1])
        assert seen.demand.requests_per_s == pytest.approx(wanted)
        assert not [
            unmet_precondition
            for unmet_precondition in unmet_preconditions(seen)
            if unmet_precondition not in seen.missing_inputs
        ]


@given(
    st.permutations(["a", "b", "c"]),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 9.0)), min_size=3, max_size=3),
)
def test_the_order_of_reports_does_not_matter(
    order: list[str], pools: list[tuple[int, float]]
) -> None:
    def seen(names: list[str]) -> Observation:
        watch = Watch()
        for step in range(3):
            told = {
                name: report(
                    name,
                    2.0 * step,
                    step * (number + 1),
                    pools=(
                        pool(
                            decode=decode,
                            oldest_report_age_s=stale_s,
                            running_requests=float(number),
                        ),
                    ),
                )
                for number, (name, (decode, stale_s)) in enumerate(zip("abc", pools, strict=True))
            }
            found = watch.see(*(told[name] for name in names), states=DECODE)
        return found

    assert seen(order) == seen(["a", "b", "c"])


# ---------- how long starts take, from counts
def look(starts: ColdStartTimer, starting: int, working: int, now_s: float) -> None:
    """All that are up take work."""
    starts.observe(starting=starting, running=working, serving=working, now_s=now_s)


def test_a_replica_that_starts_at_the_first_look_is_not_measured() -> None:
    starts = ColdStartTimer()
    look(starts, 2, 0, 0.0)
    look(starts, 1, 1, 10.0)
    look(starts, 0, 2, 20.0)
    assert starts.measured_s is None


def test_starts_end_in_the_order_in_which_they_were_asked_for() -> None:
    starts = ColdStartTimer()
    for starting, working, now_s in ((0, 0, 0.0), (1, 0, 10.0), (2, 0, 20.0), (1, 1, 40.0)):
        look(starts, starting, working, now_s)
    assert starts.measured_s == 30.0
    look(starts, 0, 2, 60.0)
    assert starts.measured_s == 35.0


def test_a_start_that_is_given_up_is_forgotten() -> None:
    starts = ColdStartTimer()
    for starting, now_s in ((0, 0.0), (1, 10.0), (2, 20.0), (1, 30.0)):
        look(starts, starting, 1, now_s)
    look(starts, 0, 2, 40.0)
    assert starts.measured_s == 30.0
    look(starts, 0, 3, 50.0)
    assert starts.measured_s == 30.0, "one that nobody saw start measures nothing"


def test_a_replica_that_leaves_is_no_start() -> None:
    starts = ColdStartTimer()
    for working, now_s in ((3, 0.0), (2, 10.0), (3, 12.0)):
        look(starts, 0, working, now_s)
    assert starts.measured_s is None


def test_a_start_ends_when_it_takes_work_and_not_when_it_is_up() -> None:
    starts = ColdStartTimer()
    for starting, up, working, now_s in ((0, 1, 1, 0.0), (1, 1, 1, 10.0), (0, 2, 1, 30.0)):
        starts.observe(starting=starting, running=up, serving=working, now_s=now_s)
    assert starts.measured_s is None
    starts.observe(starting=0, running=2, serving=2, now_s=34.0)
    assert starts.measured_s == 24.0


def test_replicas_that_were_out_of_sight_are_no_starts() -> None:
    starts = ColdStartTimer()
    for working, now_s in ((3, 0.0), (0, 2.0), (3, 6.0)):
        starts.observe(starting=0, running=3, serving=working, now_s=now_s)
    assert starts.measured_s is None


def test_replicas_that_come_back_into_sight_do_not_end_a_start() -> None:
    starts = ColdStartTimer()
    for starting, working, now_s in ((0, 3, 0.0), (1, 3, 10.0), (1, 0, 12.0), (1, 3, 14.0)):
        starts.observe(starting=starting, running=3, serving=working, now_s=now_s)
    assert starts.measured_s is None
    starts.observe(starting=0, running=4, serving=4, now_s=70.0)
    assert starts.measured_s == 60.0


def test_one_slow_start_does_not_count_for_more_than_one() -> None:
    starts = ColdStartTimer()
    now_s, working = 0.0, 0
    look(starts, 0, 0, now_s)
    for took_s in (10.0, 11.0, 500.0, 12.0, 10.0):
        look(starts, 1, working, now_s)
        now_s, working = now_s + took_s, working + 1
        look(starts, 0, working, now_s)
    assert starts.measured_s == 11.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.0, 100.0)), max_size=30)
)
def test_no_start_takes_longer_than_the_observed_time(
    looks: list[tuple[int, int, float]],
) -> None:
    starts, now_s = ColdStartTimer(), 0.0
    for starting, working, gone_s in looks:
        now_s += gone_s
        look(starts, starting, working, now_s)
        measured_s = starts.measured_s
        assert measured_s is None or 0.0 <= measured_s <= now_s


@given(st.lists(st.tuples(st.floats(1.0, 50.0), st.floats(1.0, 50.0)), min_size=1, max_size=8))
def test_starts_one_after_the_other_are_measured_to_the_look(
    starts_s: list[tuple[float, float]],
) -> None:
    starts, now_s, took = ColdStartTimer(), 0.0, []
    look(starts, 0, 0, now_s)
    for number, (rest_s, took_s) in enumerate(starts_s):
        look(starts, 1, number, now_s + rest_s)
        look(starts, 0, number + 1, now_s + rest_s + took_s)
        now_s += rest_s + took_s
        took.append(took_s)
    ordered = sorted(took)
    assert starts.measured_s is not None
    assert ordered[0] - 1e-6 <= starts.measured_s <= ordered[-1] + 1e-6
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    assert starts.measured_s == pytest.approx(middle, abs=1e-6)
