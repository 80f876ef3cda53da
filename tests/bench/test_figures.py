"""A run's figures, worked out by hand; and when they are not to be believed."""

from __future__ import annotations

import math
import random
from array import array

import numpy as np
import pytest

from baton.bench.client.samples import Sample
from baton.bench.driver import Driven
from baton.bench.findings.metrics import Promise, figures, spread
from baton.bench.load import WarmUp
from baton.simulator.outcome import Objectives
from tests.bench.samples import failed, plan, sample


def promise(**limits: float) -> Promise:
    return Promise(objectives={"default": Objectives(**limits)})


def driven(*samples: Sample, **fields: object) -> Driven:
    return Driven(samples=list(samples), **fields)  # type: ignore[arg-type]  # a test's


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = sample(due_s=2.0, sent_s=2.5, first_s=3.0, last_s=5.0, ended_s=5.2)
    assert (late.late_s, late.ttft_s, late.sent_ttft_s, late.e2e_s) == (0.5, 1.0, 0.5, 3.0)
    assert late.tpot_s == 1.0
    found = figures(driven(late), plan(), Promise())
    assert (found.ttft.mean, found.ttft_from_send.mean) == (1.0, 0.5)
    assert (found.e2e.mean, found.e2e_from_send.mean) == (3.0, 2.5)


def test_rates_are_over_the_measured_window() -> None:
    found = figures(driven(sample(0, 10), sample(1, 12), sample(2, 14)), plan(), Promise())
    assert (found.from_s, found.until_s, found.window_s) == (10, 17, 7)
    assert found.offered_per_s == 0.5
    assert found.requests_per_s == 3 / 7
    assert found.output_tokens_per_s == 9 / 7
    assert found.total_tokens_per_s == 39 / 7


def test_what_is_of_the_warm_up_is_in_no_figure() -> None:
    samples = [sample(0, 0, first_s=9.0, last_s=11), sample(1, 4), sample(2, 6), sample(3, 8)]
    run = driven(*samples, lags_s=array("d", [0.0]))
    by_number = figures(run, plan(warm_up=WarmUp(requests=2)), Promise())
    by_time = figures(run, plan(warm_up=WarmUp(duration_s=6)), Promise())
    assert by_number == by_time
    assert (by_number.requests, by_number.warm_up_requests, by_number.from_s) == (2, 2, 6)
    assert by_number.ttft.most == 1


def test_a_failed_request_misses_every_objective_and_has_no_latency() -> None:
    samples = [sample(0), sample(1), sample(2), failed(3, kind="http 429"), failed(4)]
    found = figures(driven(*samples), plan(), promise(ttft_s=2, tpot_s=2))
    assert (found.requests, found.completed, found.failed) == (5, 3, 2)
    assert (found.met, found.attainment) == (3, 0.6)
    assert found.goodput_per_s == 3 / 5
    assert found.ttft.count == found.e2e.count == 3
    assert found.kinds == {"http 429": 1, "timeout": 1}
    assert found.failures == {"why: http 429": 1, "why: timeout": 1}


def test_where_nothing_is_promised_what_finishes_is_good() -> None:
    found = figures(driven(sample(0), failed(1)), plan(), Promise())
    assert (found.met, found.attainment) == (1, 0.5)


def test_an_objective_is_met_at_its_limit_and_missed_above_it() -> None:
    samples = [sample(0), sample(1, first_s=1.001), sample(2, last_s=3.001)]
    assert figures(driven(*samples), plan(), promise(ttft_s=1)).met == 2
    assert figures(driven(*samples), plan(), promise(tpot_s=1)).met == 2
    assert figures(driven(*samples), plan(), promise(ttft_s=1, tpot_s=1)).met == 1
    assert figures(driven(*samples), plan(), promise(e2e_s=3)).met == 2


def test_a_request_with_one_token_has_no_pace_and_keeps_any() -> None:
    short = sample(0, output_tokens=1, last_s=1.0, gaps_s=())
    found = figures(driven(short), plan(), promise(tpot_s=0.001))
    assert (found.met, found.tpot.count, found.itl.count) == (1, 0, 0)


def test_pace_counts_tokens_and_gaps_count_pieces() -> None:
    two_at_a_time = sample(0, output_tokens=5, last_s=5.0, gaps_s=(2.0, 2.0))
    found = figures(driven(two_at_a_time), plan(), Promise())
    assert (found.tpot.mean, found.itl.mean) == (1.0, 2.0)


def test_each_class_is_judged_by_its_own_objectives() -> None:
    what = Promise(
        objectives={"default": Objectives(ttft_s=0.5), "batch": Objectives(ttft_s=2)}, target=0.9
    )
    samples = [
        sample(0),
        sample(1, slo_class="batch"),
        sample(2, slo_class="batch"),
        sample(3, slo_class="other"),
    ]
    found = figures(driven(*samples), plan(), what)
    assert found.met == 2
    rows = {one.slo_class: (one.requests, one.met, one.attainment) for one in found.classes}
    assert rows == {"batch": (2, 2, 1), "default": (1, 0, 0), "other": (1, 0, 0)}


def test_quantiles_are_numpys() -> None:
    rng = random.Random(4)
    for size in (1, 2, 7, 1000):
        values = [rng.expovariate(3) for _ in range(size)]
        found = spread(values)
        for ours, theirs in (
            (found.p50, 50),
            (found.p90, 90),
            (found.p95, 95),
            (found.p99, 99),
            (found.p999, 99.9),
            (found.most, 100),
        ):
            assert ours == pytest.approx(float(np.percentile(values, theirs)))
        assert found.mean == pytest.approx(float(np.mean(values)))


def test_nothing_measured_is_no_figure_and_not_valid() -> None:
    found = figures(Driven(), plan(), promise(ttft_s=1))
    assert (found.requests, found.attainment, found.window_s) == (0, 0, 0)
    assert math.isnan(found.ttft.p50)
    assert found.invalid == ("no request of the measured window has ended",)


def test_a_client_that_keeps_up_is_believed() -> None:
    lags = array("d", [0.001] * 100)
    found = figures(driven(*map(sample, range(200)), lags_s=lags, busy=0.5), plan(), Promise())
    assert found.invalid == ()


def test_a_client_that_sends_late_is_not_believed() -> None:
    on_time = [sample(number) for number in range(98)]
    late = [sample(number, sent_s=0.03) for number in (98, 99)]
    found = figures(driven(*on_time, *late), plan(), Promise())
    assert found.client.late_sends == 2
    assert found.invalid[0].startswith("the client sent 2 of 100 requests more than 20 ms after")
    one = figures(driven(*on_time, sample(98), late[1]), plan(), Promise())
    assert one.invalid == ()


def test_a_client_that_reads_late_is_not_believed() -> None:
    lags = array("d", [0.001] * 95 + [0.05] * 5)
    found = figures(driven(sample(), lags_s=lags), plan(), Promise())
    assert "the client read late: its event loop was 50 ms behind" in found.invalid[0]


def test_a_client_without_a_core_to_spare_is_not_believed() -> None:
    assert "98% of a core" in figures(driven(sample(), busy=0.98), plan(), Promise()).invalid[0]


def test_other_lengths_than_were_asked_for_are_counted() -> None:
    samples = [
        sample(0, asked_prompt_tokens=10, asked_output_tokens=3),
        sample(1, asked_prompt_tokens=11, asked_output_tokens=4),
        sample(2, asked_prompt_tokens=0, asked_output_tokens=4, counted=False),
    ]
    found = figures(driven(*samples), plan(), Promise())
    assert (found.other_lengths, found.short_answers) == (1, 1)
