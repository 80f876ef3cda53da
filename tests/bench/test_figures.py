"""A run's figures, worked out by hand; and when they are not to be believed."""

from __future__ import annotations

import math
import random
from array import array

import numpy as np
import pytest

from baton.bench.client.samples import RequestSample
from baton.bench.driver import LoadResult
from baton.bench.findings.metrics import SloObjectives, calculate_metrics, distribution
from baton.bench.load import WarmUp
from baton.simulator.outcome import Objectives
from tests.bench.samples import failed_sample, plan, sample


def promise(**limits: float) -> SloObjectives:
    return SloObjectives(objectives={"default": Objectives(**limits)})


def driven(*samples: RequestSample, **fields: object) -> LoadResult:
    return LoadResult(samples=list(samples), **fields)  # type: ignore[arg-type]  # a test's


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = sample(due_s=2.0, sent_s=2.5, first_token_s=3.0, last_token_s=5.0, ended_s=5.2)
    assert (late.send_delay_s, late.ttft_s, late.ttft_from_send_s, late.e2e_s) == (
        0.5,
        1.0,
        0.5,
        3.0,
    )
    assert late.tpot_s == 1.0
    found = calculate_metrics(driven(late), plan(), SloObjectives())
    assert (found.ttft.mean, found.ttft_from_send.mean) == (1.0, 0.5)
    assert (found.e2e.mean, found.e2e_from_send.mean) == (3.0, 2.5)


def test_rates_are_over_the_measured_window() -> None:
    found = calculate_metrics(
        driven(sample(0, 10), sample(1, 12), sample(2, 14)), plan(), SloObjectives()
    )
    assert (found.window_start_s, found.window_end_s, found.window_s) == (10, 17, 7)
    assert found.offered_per_s == 0.5
    assert found.requests_per_s == 3 / 7
    assert found.output_tokens_per_s == 9 / 7
    assert found.total_tokens_per_s == 39 / 7


def test_what_is_of_the_warm_up_is_in_no_figure() -> None:
    samples = [
        sample(0, 0, first_token_s=9.0, last_token_s=11),
        sample(1, 4),
        sample(2, 6),
        sample(3, 8),
    ]
    run = driven(*samples, loop_lags_s=array("d", [0.0]))
    by_number = calculate_metrics(run, plan(warm_up=WarmUp(requests=2)), SloObjectives())
    by_time = calculate_metrics(run, plan(warm_up=WarmUp(duration_s=6)), SloObjectives())
    assert by_number == by_time
    assert (by_number.requests, by_number.warm_up_requests, by_number.window_start_s) == (2, 2, 6)
    assert by_number.ttft.maximum == 1


def test_a_failed_request_misses_every_objective_and_has_no_latency() -> None:
    samples = [sample(0), sample(1), sample(2), failed_sample(3, kind="http 429"), failed_sample(4)]
    found = calculate_metrics(driven(*samples), plan(), promise(ttft_s=2, tpot_s=2))
    assert (found.requests, found.completed, found.failed) == (5, 3, 2)
    assert (found.met_requests, found.attainment) == (3, 0.6)
    assert found.goodput_per_s == 3 / 5
    assert found.ttft.count == found.e2e.count == 3
    assert found.failure_kinds == {"http 429": 1, "timeout": 1}
    assert found.failures == {"why: http 429": 1, "why: timeout": 1}


def test_without_objectives_every_finished_request_is_good() -> None:
    found = calculate_metrics(driven(sample(0), failed_sample(1)), plan(), SloObjectives())
    assert (found.met_requests, found.attainment) == (1, 0.5)


def test_an_objective_is_met_at_its_limit_and_missed_above_it() -> None:
    samples = [sample(0), sample(1, first_token_s=1.001), sample(2, last_token_s=3.001)]
    assert calculate_metrics(driven(*samples), plan(), promise(ttft_s=1)).met_requests == 2
    assert calculate_metrics(driven(*samples), plan(), promise(tpot_s=1)).met_requests == 2
    assert (
        calculate_metrics(driven(*samples), plan(), promise(ttft_s=1, tpot_s=1)).met_requests == 1
    )
    assert calculate_metrics(driven(*samples), plan(), promise(e2e_s=3)).met_requests == 2


def test_a_request_with_one_token_has_no_pace_and_keeps_any() -> None:
    short = sample(0, output_tokens=1, last_token_s=1.0, gaps_s=())
    found = calculate_metrics(driven(short), plan(), promise(tpot_s=0.001))
    assert (found.met_requests, found.tpot.count, found.itl.count) == (1, 0, 0)


def test_pace_counts_tokens_and_gaps_count_pieces() -> None:
    two_at_a_time = sample(0, output_tokens=5, last_token_s=5.0, gaps_s=(2.0, 2.0))
    found = calculate_metrics(driven(two_at_a_time), plan(), SloObjectives())
    assert (found.tpot.mean, found.itl.mean) == (1.0, 2.0)


def test_each_class_is_judged_by_its_own_objectives() -> None:
    what = SloObjectives(
        objectives={"default": Objectives(ttft_s=0.5), "batch": Objectives(ttft_s=2)}, target=0.9
    )
    samples = [
        sample(0),
        sample(1, slo_class="batch"),
        sample(2, slo_class="batch"),
        sample(3, slo_class="other"),
    ]
    found = calculate_metrics(driven(*samples), plan(), what)
    assert found.met_requests == 2
    rows = {
        class_.slo_class: (class_.requests, class_.met_requests, class_.attainment)
        for class_ in found.classes
    }
    assert rows == {"batch": (2, 2, 1), "default": (1, 0, 0), "other": (1, 0, 0)}


def test_quantiles_are_numpys() -> None:
    rng = random.Random(4)
    for size in (1, 2, 7, 1000):
        values = [rng.expovariate(3) for _ in range(size)]
        found = distribution(values)
        for ours, theirs in (
            (found.p50, 50),
            (found.p90, 90),
            (found.p95, 95),
            (found.p99, 99),
            (found.p999, 99.9),
            (found.maximum, 100),
        ):
            assert ours == pytest.approx(float(np.percentile(values, theirs)))
        assert found.mean == pytest.approx(float(np.mean(values)))


def test_nothing_measured_is_no_figure_and_not_valid() -> None:
    found = calculate_metrics(LoadResult(), plan(), promise(ttft_s=1))
    assert (found.requests, found.attainment, found.window_s) == (0, 0, 0)
    assert math.isnan(found.ttft.p50)
    assert found.invalid_reasons == ("no request of the measured window has ended",)


def test_a_client_that_keeps_up_is_believed() -> None:
    lags = array("d", [0.001] * 100)
    found = calculate_metrics(
        driven(*map(sample, range(200)), loop_lags_s=lags, busy_fraction=0.5),
        plan(),
        SloObjectives(),
    )
    assert found.invalid_reasons == ()


def test_a_client_that_sends_late_is_not_believed() -> None:
    on_time = [sample(number) for number in range(98)]
    late = [sample(number, sent_s=0.03) for number in (98, 99)]
    found = calculate_metrics(driven(*on_time, *late), plan(), SloObjectives())
    assert found.client.late_sends == 2
    assert found.invalid_reasons[0].startswith(
        "the client sent 2 of 100 requests more than 20 ms after"
    )
    one = calculate_metrics(driven(*on_time, sample(98), late[1]), plan(), SloObjectives())
    assert one.invalid_reasons == ()


def test_a_client_that_reads_late_is_not_believed() -> None:
    lags = array("d", [0.001] * 95 + [0.05] * 5)
    found = calculate_metrics(driven(sample(), loop_lags_s=lags), plan(), SloObjectives())
    assert "the client read late: its event loop was 50 ms behind" in found.invalid_reasons[0]


def test_a_client_without_a_core_to_spare_is_not_believed() -> None:
    assert (
        "98% of a core"
        in calculate_metrics(
            driven(sample(), busy_fraction=0.98), plan(), SloObjectives()
        ).invalid_reasons[0]
    )


def test_other_lengths_than_were_asked_for_are_counted() -> None:
    samples = [
        sample(0, requested_prompt_tokens=10, requested_output_tokens=3),
        sample(1, requested_prompt_tokens=11, requested_output_tokens=4),
        sample(2, requested_prompt_tokens=0, requested_output_tokens=4, has_usage=False),
    ]
    found = calculate_metrics(driven(*samples), plan(), SloObjectives())
    assert (found.prompt_length_mismatches, found.short_answers) == (1, 1)
