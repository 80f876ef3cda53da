"""What is written of a benchmark: one document, tables, a page."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from baton.bench.client.samples import Sample
from baton.bench.driver import Driven
from baton.bench.findings.campaign import Findings, Run
from baton.bench.findings.document import Background, document, request_lines, study_of
from baton.bench.findings.metrics import Promise, figures
from baton.bench.knee import KneeOptions, KneeSearch
from baton.bench.load import WarmUp
from baton.bench.report.page import page
from baton.bench.report.tables import tables_of
from baton.simulator.outcome import Objectives
from tests.bench.samples import failed, plan, sample

PROMISE = Promise(objectives={"default": Objectives(ttft_s=1.0, tpot_s=1.0)}, target=0.9)


def background(**fields: object) -> Background:
    whole = {
        "title": "tiny at http://x",
        "command": "baton bench http://x --rate 1,2",
        "endpoint": "http://x",
        "model": "tiny",
        "load": {"arrivals": "open loop, poisson", "seed": 3},
        "provenance": {"seed": 3, "git_sha": "abc"},
        "promise": PROMISE,
    }
    return Background(**whole | fields)  # type: ignore[arg-type]  # a test's


def run(
    *samples: Sample,
    rate: float | None = 1.0,
    repeat: int = 0,
    lag_s: float = 0.0,
    **fields: object,
) -> Run:
    driven = Driven(samples=list(samples), lags_s=array("d", [lag_s]), **fields)  # type: ignore[arg-type]
    told = figures(driven, plan(warm_up=WarmUp()), PROMISE)
    return Run(
        rate_per_s=rate, streams=None, repeat=repeat, figures=told, samples=tuple(driven.samples)
    )


def sweep() -> Findings:
    slow = [sample(number, number * 4.0) for number in range(5)]
    later = [sample(number, number * 2.0, first_s=number * 2.0 + 1.5) for number in range(4)]
    return Findings(
        runs=[
            run(*slow),
            run(*slow[:4], failed(4, 16.0, kind="http 429"), repeat=1),
            run(*later, sample(4, 8.0), rate=2.0),
        ]
    )


def whole(findings: Findings, **fields: object) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(document(findings, background(**fields))))
    return told


def test_the_document_has_every_run_and_every_level_with_its_interval() -> None:
    told = whole(sweep())
    assert (told["kind"], told["schema_version"], told["valid"], told["partial"]) == (
        *("bench", 1, True, False),
    )
    assert [(one["level"], one["repeat"]) for one in told["runs"]] == [
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
    assert told["runs"][1]["kinds"] == {"http 429": 1}
    assert told["objectives"]["classes"]["default"]["ttft_s"] == 1.0
    assert told["provenance"]["git_sha"] == "abc"
    assert told["load"]["seed"] == 3


def test_what_is_no_number_is_null() -> None:
    told = whole(Findings(runs=[run(failed(0))]))
    assert told["runs"][0]["ttft"]["p50"] is None
    assert math.isnan(run(failed(0)).figures.ttft.p50)


def test_a_run_that_measured_the_client_is_not_valid() -> None:
    findings = Findings(runs=[run(sample()), run(sample(), rate=2.0, lag_s=0.5)])
    told = whole(findings)
    assert not told["valid"]
    assert told["why_invalid"][0].startswith("2/s, run 1: the client read late")
    study = study_of(findings, background())
    assert study.facts["valid"].startswith("NO: 2/s, run 1")
    (table,) = [one for one in study.tables if one.title.startswith("The client")]
    assert [row[-1] for row in table.rows] == ["yes", "no"]


def test_nothing_run_is_not_valid() -> None:
    assert not whole(Findings())["valid"]


def test_a_stopped_run_is_labelled() -> None:
    findings = Findings(runs=[run(sample(), stopped=True, abandoned=4)])
    assert whole(findings)["partial"]
    study = study_of(findings, background())
    assert next(iter(study.facts)) == "partial"
    assert "4 requests were left when the run was stopped." in study.notes


def test_tables_show_what_was_measured() -> None:
    tables = {one.title: one for one in tables_of(study_of(sweep(), background()))}
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
    mixed = Findings(runs=[run(sample(0), sample(1, slo_class="batch"))])
    titles = [one.title for one in study_of(mixed, background()).tables]
    assert "By class" in titles
    assert "By class" not in [one.title for one in study_of(sweep(), background()).tables]


def test_the_knee_is_shown_with_all_that_was_tried() -> None:
    search = KneeSearch(KneeOptions(first_per_s=1.0, target=0.9))
    search.tell(1.0, 1.0, valid=True)
    search.tell(2.0, 0.2, valid=True)
    findings = sweep()
    findings.knee = search.knee()
    assert whole(findings)["knee"]["probes"][1]["attainment"] == 0.2
    table = study_of(findings, background()).tables[0]
    assert table.title.startswith("Knee at attainment 0.9: not near enough: between 1/s and 2/s")
    assert [row[2] for row in table.rows] == ["kept", "broken"]


def test_the_page_needs_nothing_else_and_says_what_its_words_mean() -> None:
    made = page(study_of(sweep(), background()))
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
        sample(0, cached_tokens=5, asked_output_tokens=9),
        sample(1, asked_prompt_tokens=11),
        clipped_prompts=2,
        too_long=3,
        dropped_turns=4,
    )
    notes = "\n".join(study_of(Findings(runs=[told]), background()).notes)
    for said in ("25.0 %", "1 answers", "1 prompts had", "2 prompts were cut", "3 req", "4 turns"):
        assert said in notes
    assert "of a run's window is after" in notes


def test_objectives_of_several_classes_are_not_shown_as_one() -> None:
    several = replace(PROMISE, objectives={**PROMISE.objectives, "batch": Objectives(ttft_s=9)})
    study = study_of(sweep(), background(promise=several))
    assert not study.judged
    assert [rate for rate, _ in study.curves[0].points] == [1, 2]
    assert [met for _, met in study.curves[0].points] == pytest.approx([0.9, 0.2])
