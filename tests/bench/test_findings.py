"""What is written of a benchmark: one document, tables, a page."""

from __future__ import annotations

import json
import math
import random
import subprocess
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import baton
from baton.bench.client.samples import RequestSample
from baton.bench.driver import LoadResult
from baton.bench.findings.campaign import BenchmarkResult, BenchmarkRun
from baton.bench.findings.document import (
    BenchmarkContext,
    build_document,
    build_study,
    confidence_interval,
    request_lines,
)
from baton.bench.findings.metrics import SloObjectives, calculate_metrics, distribution
from baton.bench.knee import KneeOptions, KneeSearch
from baton.bench.load import WarmUp
from baton.bench.provenance import _git_describe, provenance
from baton.bench.report.tables import tables_of
from baton.bench.report.write import render_page
from baton.simulator.outcome import Objectives
from tests.bench.samples import failed_sample, plan, sample

PROMISE = SloObjectives(objectives={"default": Objectives(ttft_s=1.0, tpot_s=1.0)}, target=0.9)


def background(**fields: object) -> BenchmarkContext:
    whole = {
        "title": "tiny at http://x",
        "command": "baton bench http://x --rate 1,2",
        "endpoint": "http://x",
        "model": "tiny",
        "load": {"arrivals": "open loop, poisson", "seed": 3},
        "provenance": {"seed": 3, "git_sha": "abc"},
        "slo": PROMISE,
    }
    return BenchmarkContext(**whole | fields)  # type: ignore[arg-type]  # a test's


def run(
    *samples: RequestSample,
    rate: float | None = 1.0,
    repeat: int = 0,
    lag_s: float = 0.0,
    **fields: object,
) -> BenchmarkRun:
    driven = LoadResult(samples=list(samples), loop_lags_s=array("d", [lag_s]), **fields)  # type: ignore[arg-type]
    told = calculate_metrics(driven, plan(warm_up=WarmUp()), PROMISE)
    return BenchmarkRun(
        rate_per_s=rate,
        concurrency=None,
        repeat=repeat,
        metrics=told,
        samples=tuple(driven.samples),
    )


def sweep() -> BenchmarkResult:
    slow = [sample(number, number * 4.0) for number in range(5)]
    later = [sample(number, number * 2.0, first_token_s=number * 2.0 + 1.5) for number in range(4)]
    return BenchmarkResult(
        runs=[
            run(*slow),
            run(*slow[:4], failed_sample(4, 16.0, kind="http 429"), repeat=1),
            run(*later, sample(4, 8.0), rate=2.0),
        ]
    )


def whole(findings: BenchmarkResult, **fields: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(build_document(findings, background(**fields))))
    return told


def test_the_document_has_every_run_and_every_level_with_its_interval() -> None:
    told = whole(sweep())
    assert (told["kind"], told["schema_version"], told["valid"], told["partial"]) == (
        *("bench", 1, True, False),
    )
    assert [(item["level"], item["repeat"]) for item in told["runs"]] == [
        *(("1/s", 0), ("1/s", 1), ("2/s", 0)),
    ]
    slow, fast = told["levels"]
    assert (slow["repeats"], fast["repeats"]) == (2, 1)
    attainment = slow["figures"]["attainment"]
    assert attainment["values"] == [1.0, 0.8]
    assert attainment["mean"] == pytest.approx(0.9)
    assert attainment["low"] < 0.8
    assert fast["figures"]["attainment"]["low"] is None
    assert fast["figures"]["ttft_s.p99"]["mean"] == pytest.approx(1.5)
    assert told["runs"][1]["failure_kinds"] == {"http 429": 1}
    assert told["objectives"]["classes"]["default"]["ttft_s"] == 1.0
    assert told["provenance"]["git_sha"] == "abc"
    assert told["load"]["seed"] == 3


def test_a_value_that_is_no_number_is_null() -> None:
    told = whole(BenchmarkResult(runs=[run(failed_sample(0))]))
    assert told["runs"][0]["ttft"]["p50"] is None
    assert math.isnan(run(failed_sample(0)).metrics.ttft.p50)


def test_a_run_that_measured_the_client_is_not_valid() -> None:
    findings = BenchmarkResult(runs=[run(sample()), run(sample(), rate=2.0, lag_s=0.5)])
    told = whole(findings)
    assert not told["valid"]
    assert told["why_invalid"][0].startswith("2/s, run 1: the client read late")
    study = build_study(findings, background())
    assert study.facts["valid"].startswith("NO: 2/s, run 1")
    (table,) = [other for other in study.tables if other.title.startswith("The client")]
    assert [row[-1] for row in table.rows] == ["yes", "no"]


def test_nothing_run_is_not_valid() -> None:
    assert not whole(BenchmarkResult())["valid"]


def test_a_stopped_run_is_labelled() -> None:
    findings = BenchmarkResult(runs=[run(sample(), stopped=True, unfinished=4)])
    assert whole(findings)["partial"]
    study = build_study(findings, background())
    assert next(iter(study.facts)) == "partial"
    assert "4 requests were left when the run was stopped." in study.notes


def test_tables_show_what_was_measured() -> None:
    tables = {table.title: table for table in tables_of(build_study(sweep(), background()))}
    assert list(tables) == [
        "By load, means of repeats",
        "Figures",
        "The client itself, worst of repeats",
        "Failures",
    ]
    by_load = tables["By load, means of repeats"]
    assert [row[0] for row in by_load.rows] == ["1/s", "2/s"]
    assert [row[2] for row in by_load.rows] == ["1", "0"]
    figures_ = {row[0]: row[1:] for row in tables["Figures"].rows}
    assert figures_["requests measured"] == ("10", "5")
    assert figures_["TTFT p50"] == ("1 s ± 0 ms", "1.5 s")
    assert figures_["attainment"][1] == "20.0 %"
    assert tables["Failures"].rows == (("why: http 429", "1"),)


def test_classes_have_a_table_where_there_are_several() -> None:
    mixed = BenchmarkResult(runs=[run(sample(0), sample(1, slo_class="batch"))])
    titles = [table.title for table in build_study(mixed, background()).tables]
    assert "By class" in titles
    assert "By class" not in [table.title for table in build_study(sweep(), background()).tables]


def test_the_knee_is_shown_with_all_that_was_tried() -> None:
    search = KneeSearch(KneeOptions(initial_rate_per_s=1.0, target=0.9))
    search.add_probe(1.0, 1.0, valid=True)
    search.add_probe(2.0, 0.2, valid=True)
    findings = sweep()
    findings.knee = search.knee()
    assert whole(findings)["knee"]["probes"][1]["attainment"] == 0.2
    table = build_study(findings, background()).tables[0]
    assert table.title.startswith("Knee at attainment 0.9: not near enough: between 1/s and 2/s")
    assert [row[2] for row in table.rows] == ["met", "missed"]


def test_the_page_needs_nothing_else_and_says_what_its_words_mean() -> None:
    made = render_page(build_study(sweep(), background()))
    assert "http://x --rate 1,2" in made
    assert "Attainment against rate" in made
    assert made.count("<img") >= 3
    assert "as do the lines" in made
    assert 'src="http' not in made
    assert "<script" not in made


def test_every_measured_request_has_a_line() -> None:
    lines = list(request_lines(sweep()))
    assert len(lines) == 15
    assert lines[9] == lines[9] | {"ok": False, "ttft_s": None, "failure": "why: http 429"}
    assert (lines[0]["ttft_s"], lines[0]["worst_gap_s"]) == (1.0, 1.0)


def test_a_note_says_what_else_a_reader_must_know() -> None:
    told = run(
        sample(0, cached_tokens=5, requested_output_tokens=9),
        sample(1, requested_prompt_tokens=11),
        truncated_prompts=2,
        skipped_too_long=3,
        dropped_turns=4,
    )
    notes = "\n".join(build_study(BenchmarkResult(runs=[told]), background()).notes)
    for said in (
        "25.0 %",
        "1 answer ended",
        "1 prompt had",
        "2 prompts were cut",
        "3 req",
        "4 turns",
    ):
        assert said in notes
    assert "of a run's window is after" in notes


def test_objectives_of_several_classes_are_not_shown_as_one() -> None:
    several = replace(PROMISE, objectives={**PROMISE.objectives, "batch": Objectives(ttft_s=9)})
    study = build_study(sweep(), background(slo=several))
    assert not study.has_objectives
    assert [rate for rate, _ in study.rate_curves[0].points] == [1, 2]
    assert [met for _, met in study.rate_curves[0].points] == pytest.approx([0.9, 0.2])


# ---------- intervals of confidence: known cases, and how often they hold what they should
def test_an_interval_is_students() -> None:
    found = confidence_interval([10.0, 12.0, 11.0, 13.0, 14.0])
    assert found.mean == 12
    # t(0.975, 4) = 2.776, s = sqrt(2.5)
    assert found.low == pytest.approx(12 - 2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert found.high == pytest.approx(12 + 2.776 * math.sqrt(2.5) / math.sqrt(5))


@pytest.mark.parametrize("values", [[3.0], [1.0, math.nan], [1.0, math.inf]])
def test_nothing_is_claimed_where_nothing_is_known(values: list[float]) -> None:
    assert (confidence_interval(values).low, confidence_interval(values).high) == (None, None)


def test_no_values_have_no_mean() -> None:
    assert math.isnan(confidence_interval([]).mean)


@pytest.mark.parametrize("repeats", [3, 5, 12])
def test_nineteen_of_twenty_intervals_hold_the_truth(repeats: int) -> None:
    rng = random.Random(repeats)
    held = 0
    for _ in range(2000):
        found = confidence_interval([rng.gauss(5, 2) for _ in range(repeats)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 5 <= found.high
    assert 0.935 <= held / 2000 <= 0.965


def test_the_table_goes_on_smoothly() -> None:
    def half(count: int) -> float:
        values = [(-1.0) ** number for number in range(count)]
        found = confidence_interval(values)
        assert found.high is not None
        spread = math.sqrt(count / (count - 1)) / math.sqrt(count)
        return (found.high - found.mean) / spread if count % 2 == 0 else math.nan

    # t(0.975, 29) = 2.045, t(0.975, 31) = 2.040, t(0.975, 99) = 1.984
    assert half(30) == pytest.approx(2.045)
    assert half(32) == pytest.approx(2.040, abs=0.001)
    assert half(100) == pytest.approx(1.984, abs=0.001)


# ---------- a run's figures, worked out by hand; and when they are not to be believed
def objectives(**limits: float) -> SloObjectives:
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


def test_the_warm_up_is_in_no_figure() -> None:
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
    found = calculate_metrics(driven(*samples), plan(), objectives(ttft_s=2, tpot_s=2))
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
    assert calculate_metrics(driven(*samples), plan(), objectives(ttft_s=1)).met_requests == 2
    assert calculate_metrics(driven(*samples), plan(), objectives(tpot_s=1)).met_requests == 2
    assert (
        calculate_metrics(driven(*samples), plan(), objectives(ttft_s=1, tpot_s=1)).met_requests
        == 1
    )
    assert calculate_metrics(driven(*samples), plan(), objectives(e2e_s=3)).met_requests == 2


def test_a_request_with_one_token_has_no_pace_and_keeps_any() -> None:
    short = sample(0, output_tokens=1, last_token_s=1.0, gaps_s=())
    found = calculate_metrics(driven(short), plan(), objectives(tpot_s=0.001))
    assert (found.met_requests, found.tpot.count, found.itl.count) == (1, 0, 0)


def test_pace_counts_tokens_and_gaps_count_pieces() -> None:
    two_at_a_time = sample(0, output_tokens=5, last_token_s=5.0, gaps_s=(2.0, 2.0))
    found = calculate_metrics(driven(two_at_a_time), plan(), SloObjectives())
    assert (found.tpot.mean, found.itl.mean) == (1.0, 2.0)


def test_each_class_is_evaluated_by_its_own_objectives() -> None:
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
    found = calculate_metrics(LoadResult(), plan(), objectives(ttft_s=1))
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


# ---------- figures say where they come from
def test_versions_and_the_machine_are_said() -> None:
    told = provenance()
    assert told["baton"] == baton.__version__
    assert {"python", "aiohttp", "git_sha"} <= told.keys()
    machine = told["machine"]
    assert isinstance(machine, dict)
    assert machine["cpus"] >= 1
    assert machine["memory_gib"] > 0


def test_a_checkout_has_a_commit_and_says_when_it_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    clean = _git_describe(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert _git_describe(tmp_path) == f"{clean}-dirty"


def test_where_there_is_no_checkout_or_no_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert _git_describe(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _git_describe(tmp_path) is None
