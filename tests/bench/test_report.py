"""Reports as people and programs get them."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from baton.bench.formatting import NO_VALUE, format_number, format_percent, format_seconds
from baton.bench.report import (
    Curve,
    ScalingSummary,
    Study,
    Table,
    Tradeoff,
    check_report_path,
    print_study,
    study_to_dict,
    write_report,
)
from baton.bench.report.plots import (
    PlotsMissing,
    _seconds_axis,
    bin_by_arrival,
    count_in_flight,
    cumulative_distribution,
    panels_for,
)
from baton.bench.report.tables import format_objectives, tables_of
from baton.bench.report.write import ReportUnwritable
from baton.domain.names.distribution import pip_install
from baton.simulator.outcome import Objectives
from tests.bench.studies import NEVER, OBJECTIVES, failure, outcome, result, steady_result, study

PNG = b"\x89PNG\r\n\x1a\n"


def printed(shown: Study) -> str:
    file = StringIO()
    print_study(shown, file)
    return file.getvalue()


def rows(shown: Study, title: str) -> dict[str, list[str]]:
    (found,) = (table for table in tables_of(shown) if table.title.startswith(title))
    return {row[0].strip(): list(row[1:]) for row in found.rows}


SWEPT = study(
    steady_result(rate=10.0),
    steady_result(rate=20.0, late_fraction=0.5),
    steady_result("other", rate=10.0, late_fraction=0.2),
)
BARE = study(result(outcome(), outcome(1.0)), objectives=Objectives())


# ------------------------------------------------------------------ tables


def test_runs_stand_side_by_side_with_units() -> None:
    found = rows(study(steady_result(), steady_result("other", late_fraction=0.2)), "Figures")
    assert found["attainment"] == ["100 %", "80.0 %"]
    assert found["TTFT p50 / p90 / p99"] == ["150 ms / 189 ms / 198 ms", "170 ms / 900 ms / 900 ms"]
    assert found["handoffs"] == ["7", "7"]
    assert found["rate, requests/s"] == ["10", "10"]
    assert found["GPUs"] == ["2", "2"]


def test_several_rates_have_a_table_of_their_own_the_lowest_first() -> None:
    (by_rate,) = (table for table in tables_of(SWEPT) if table.title == "By rate")
    assert [row[:3] for row in by_rate.rows] == [
        ("predicted", "10", "5"),
        ("predicted", "20", "10"),
        ("other", "10", "5"),
    ]
    assert by_rate.columns[8] == "attainment"
    assert [row[8] for row in by_rate.rows] == ["100 %", "50.0 %", "80.0 %"]


def test_capacity_says_when_it_is_a_bound_of_the_tried_rates() -> None:
    below = Curve(name="below", points=((2.0, 0.5),))
    above = Curve(name="above", points=((1.0, 0.99), (2.0, 0.95)))
    found = rows(study(rate_curves=(above, below, *_curve(SWEPT))), "Capacity")
    assert found == {
        "above": ["at least 2 (the highest rate tried)"],
        "below": ["- (less than 2, the lowest rate tried)"],
        "predicted": ["6"],
    }


def _curve(shown: Study) -> tuple[Curve, ...]:
    from baton.bench.report.summary import rate_curves_for

    return rate_curves_for(shown)


def test_without_objectives_no_slo_is_evaluated() -> None:
    assert "attainment" not in printed(BARE)
    assert "goodput" not in printed(BARE)
    assert format_objectives(BARE) == "none"


def test_objectives_are_said_with_units_and_the_target_as_given() -> None:
    assert format_objectives(SWEPT) == "TTFT ≤ 500 ms, TPOT ≤ 50 ms for 90 % of requests"
    sharp = study(steady_result(), target=0.999, objectives=Objectives(e2e_s=20.0))
    assert format_objectives(sharp) == "E2E ≤ 20 s for 99.9 % of requests"


def test_the_terminal_says_whether_figures_are_simulated_and_where_they_come_from() -> None:
    text = printed(study(steady_result(), notes=("Engines are modelled.",)))
    assert "figures: (S) simulated" in text
    assert "seed: 7" in text
    assert "Figures (S)" in text
    assert "note: Engines are modelled." in text
    assert "\x1b" not in text


def test_text_in_brackets_is_no_markup() -> None:
    table = Table(title="a [b]", columns=("[red]", "x"), rows=(("[/]", ":smile:"),))
    text = printed(study(tables=(table,), title="[bold]t"))
    assert all(part in text for part in ("a [b]", "[red]", "[/]", ":smile:", "[bold]t"))


# ------------------------------------------------------------------ JSON


def test_json_has_no_number_that_is_none() -> None:
    odd = Tradeoff(name="odd", user_tokens_per_s=NEVER, device_tokens_per_s=1.0)
    report = study_to_dict(study(result(failure()), result(name="empty"), tradeoffs=(odd,)))
    text = json.dumps(report, allow_nan=False)
    first = json.loads(text)["results"][0]
    assert first["ttft"]["p50"] is None
    assert first["failed"] == 1


def test_json_says_its_version_where_it_comes_from_and_every_run() -> None:
    report = json.loads(json.dumps(study_to_dict(SWEPT), allow_nan=False))
    assert report["schema_version"] == 1
    assert report["provenance"]["evidence"] == "simulated"
    assert report["provenance"]["seed"] == "7"
    assert report["provenance"]["command"] == SWEPT.command
    assert report["objectives"] == {"ttft_s": 0.5, "tpot_s": 0.05, "e2e_s": None, "target": 0.9}
    assert [item["name"] for item in report["results"]] == ["predicted", "predicted", "other"]
    assert report["results"][1]["attainment"] == 0.5
    assert report["results"][1]["counts"] == {"handoffs": 7}
    (curve,) = report["attainment_by_rate"]
    assert curve["rate_per_device_and_attainment"] == [[5.0, 1.0], [10.0, 0.5]]
    assert curve["capacity_per_device"] == pytest.approx(6.0)


# ------------------------------------------------------------------ plots and pages


def test_a_study_has_the_plots_that_it_has_something_for() -> None:
    titles = {
        "rate": "Attainment against rate",
        "scale": "Attainment against SLO scale",
        "trades": "Throughput against interactivity",
        "latencies": "Latencies",
        "timeline": "Timeline",
    }
    assert [panel.title for panel in panels_for(SWEPT)] == list(titles.values())
    assert [panel.title for panel in panels_for(BARE)] == [titles["latencies"], titles["timeline"]]
    trade = Tradeoff(
        name="a", user_tokens_per_s=1.0, device_tokens_per_s=2.0, is_pareto_optimal=True
    )
    assert [panel.title for panel in panels_for(study(tradeoffs=(trade, trade)))] == [
        titles["trades"]
    ]
    assert panels_for(study()) == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "a.html"
    write_report(SWEPT, file)
    return file.read_text()


def test_a_page_is_one_file_that_asks_for_nothing_else(page: str) -> None:
    assert page.count("data:image/png;base64,iVBOR") == 5
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)


def test_a_page_shows_figures_origin_and_meanings(page: str) -> None:
    assert "<h1>four &lt;engines&gt;" in page
    assert "<code>baton simulate -c a.yaml --trace &#x27;b &amp; c.jsonl&#x27;</code>" in page
    assert 'class="badge simulated">simulated (S)' in page
    assert "<td>predicted</td><td>20</td>" in page
    assert "Attainment: the share of arrived requests" in page


def test_a_column_of_long_texts_wraps_so_that_the_others_stay_on_the_page(tmp_path: Path) -> None:
    fleet = "2 x prefill h100_sxm tp1 + 1 x decode h100_sxm tp2"
    table = Table(title="Fleets", columns=("kind", "fleet", "GPUs"), rows=(("a", fleet, "4"),))
    write_report(replace(SWEPT, tables=(table,)), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert f'<td>a</td><td class="text">{fleet}</td><td>4</td>' in text
    assert '<th class="text">fleet</th>' in text
    assert "td.text { text-align: left; white-space: normal;" in text


@pytest.mark.parametrize(("last_s", "scale"), [(0.15, "linear"), (0.6, "log")])
def test_a_narrow_range_of_latencies_has_an_axis_with_ticks(last_s: float, scale: str) -> None:
    axes = Figure().subplots()
    axes.plot([0.1, last_s], [0.0, 100.0])
    axes.set_xscale("log")
    _seconds_axis(axes)
    low, high = axes.get_xlim()
    assert axes.get_xscale() == scale
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2


def test_the_same_study_gives_the_same_page(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_report(BARE, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_png_is_one_picture_of_all_plots_and_odd_studies_can_be_drawn(tmp_path: Path) -> None:
    odd = study(result(failure(), outcome(output_tokens=1, tpot_s=0.0)), objectives=Objectives())
    write_report(odd, tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(PNG)
    write_report(study(), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(PNG)


def test_a_file_of_another_kind_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(ReportUnwritable, match=r"got '.pdf', expected .html or .png"):
        check_report_path(tmp_path / "a.pdf")
    with pytest.raises(ReportUnwritable, match="no folder"):
        write_report(SWEPT, tmp_path / "none" / "a.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ReportUnwritable, match="it is a folder"):
        check_report_path(tmp_path / "folder.html")


def test_a_disk_that_takes_no_more_is_said_with_the_file() -> None:
    with pytest.raises(ReportUnwritable, match=r"'/proc/self/none.png'") as caught:
        write_report(study(), Path("/proc/self/none.png"))
    assert "name another" in caught.value.remedy


def test_without_what_draws_plots_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotsMissing) as caught:
        write_report(SWEPT, tmp_path / "a.html")
    assert pip_install("report") in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ classes, tenants, autoscalers


def test_classes_and_tenants_have_a_table_of_their_own_where_there_are_several() -> None:
    base = outcome(0.0)
    mixed = result(
        base._replace(tenant="acme", slo_class="fast", slo_met=False),
        base._replace(tenant="acme", slo_class="fast"),
        base,
    )
    (table,) = [other for other in tables_of(study(mixed)) if "class and tenant" in other.title]
    assert table.columns == ("class", "tenant", "requests", "predicted")
    assert table.rows == (("default", "default", "1", "100 %"), ("fast", "acme", "2", "50.0 %"))
    assert not [
        other for other in tables_of(study(steady_result())) if "class and tenant" in other.title
    ]


def test_autoscaler_actions_are_among_the_figures() -> None:
    scaling = ScalingSummary(
        device_hours=12.5,
        actions=6,
        actions_per_hour=3.0,
        reversals_per_hour=0.5,
        ticks=100,
        paused_ticks=2,
    )
    scaled = replace(steady_result("hpa"), scaling=scaling)
    shown = study(scaled, steady_result("alone"))
    figures = rows(shown, "Figures")
    assert figures["GPU-hours"] == ["12.5", NO_VALUE]
    assert figures["scaling actions/h"] == ["3", NO_VALUE]
    assert figures["that undo the last"] == ["0.5", NO_VALUE]
    told = json.loads(json.dumps(study_to_dict(shown)))["results"]
    assert told[0]["scaling"]["paused_ticks"] == 2
    assert told[1]["scaling"] is None


# --------------------------------------------------------------------------- what plots draw
def test_a_distribution_ends_below_one_when_some_never_came() -> None:
    assert cumulative_distribution([0.3, NEVER, 0.1, 0.2], 4) == (
        [0.1, 0.2, 0.3],
        [0.25, 0.5, 0.75],
    )
    assert cumulative_distribution([NEVER], 1) == ([], [])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=1500))
def test_a_thinned_distribution_keeps_its_ends_and_says_the_truth_at_each_point(
    values: list[float],
) -> None:
    at, shares = cumulative_distribution(values, len(values))
    assert len(at) <= 500
    assert (at[0], at[-1], shares[-1]) == (min(values), max(values), 1.0)
    for value, share in list(zip(at, shares, strict=True))[::50]:
        below = sum(other < value for other in values) / len(values)
        up_to = sum(other <= value for other in values) / len(values)
        assert below < share <= up_to + 1e-12


def test_bins_count_arrivals_and_those_of_them_that_met_the_objectives() -> None:
    outcomes = [outcome(5.0 + at / 10, ttft_s=0.9 if at < 10 else 0.1) for at in range(41)]
    bins = bin_by_arrival(outcomes, OBJECTIVES)
    assert bins.width_s == pytest.approx(2.0)
    assert bins.arrivals_per_s == pytest.approx((10.0, 10.5))
    assert bins.attainment == pytest.approx((0.5, 1.0))
    assert bins.edges_s == pytest.approx((0.0, 2.0, 4.0))


def test_bins_of_nothing_and_of_one_moment() -> None:
    assert bin_by_arrival([], OBJECTIVES).attainment == ()
    assert bin_by_arrival([outcome(3.0)] * 3, OBJECTIVES).attainment == (1.0,)


_times = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=40)


@given(stays=_times, at_s=st.floats(0, 80))
def test_in_flight_counts_requests_that_arrived_and_have_not_ended(
    stays: list[tuple[float, float]], at_s: float
) -> None:
    outcomes = [failure(arrived_s, after_s=took_s) for arrived_s, took_s in stays]
    start_s = min(arrived_s for arrived_s, _ in stays)
    slow = sum(
        arrived_s - start_s <= at_s and not arrived_s - start_s + took_s <= at_s
        for arrived_s, took_s in stays
    )
    assert count_in_flight(outcomes, [at_s]) == [slow]


# ---------- figures as people read them
@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "never"),
        (0.0, "0 ms"),
        (0.2314, "231 ms"),
        (0.99951, "1 s"),
        (1.2351, "1.24 s"),
        (1234.0, "1230 s"),
    ],
)
def test_a_duration_has_three_digits_and_a_unit(duration_s: float | None, text: str) -> None:
    assert format_seconds(duration_s) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0 %"),
        (0.0004, "< 0.1 %"),
        (0.9321, "93.2 %"),
        (0.9996, "> 99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_a_share_is_whole_or_nothing_only_when_it_is(share: float | None, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "∞"),
        (0.01234, "0.0123"),
        (12.34, "12.3"),
        (12.0, "12"),
        (12031, "12,031"),
        (12031.4, "12,031"),
    ],
)
def test_a_number_has_three_digits_or_all_of_its_whole_part(
    number: float | None, text: str
) -> None:
    assert format_number(number) == text
