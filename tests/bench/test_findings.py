"""What is written of a benchmark: one document, tables, a page."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from baton.bench.client.samples import RequestSample
from baton.bench.driver import LoadResult
from baton.bench.findings.campaign import BenchmarkResult, BenchmarkRun
from baton.bench.findings.document import (
    BenchmarkContext,
    build_document,
    build_study,
    request_lines,
)
from baton.bench.findings.metrics import SloObjectives, calculate_metrics
from baton.bench.knee import KneeOptions, KneeSearch
from baton.bench.load import WarmUp
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


def test_what_is_no_number_is_null() -> None:
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
