"""What the page is sent of the reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest

from baton.console.history import HISTORY_S, MIN_SPACING_S, History, make_point
from baton.console.views import (
    MAX_REQUEST_ID_CHARS,
    fleet_view,
    overview_view,
    request_row,
    service_view,
    tick_runs,
)
from tests.console.scripted_feed import OVERVIEW, request_report, tick


def replicas(report: dict[str, Any]) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", fleet_view(report)["replicas"])


def test_goodput_is_added_up_over_classes() -> None:
    assert service_view(OVERVIEW) == {
        "ended_per_s": 4.0,
        "goodput_per_s": 3.0,
        "good_fraction": 0.75,
    }


def test_where_nothing_ended_no_share_of_it_is_good() -> None:
    assert service_view({"classes": []})["good_fraction"] is None


def test_ingresses_are_added_up() -> None:
    view = cast("dict[str, Any]", overview_view(OVERVIEW)["ingresses"])
    assert view["count"] == 2
    assert view["healthy"] == 1
    assert view["in_flight"] == {"decode": 7}
    assert view["ended"] == {"finished": 15, "shed": 1}
    assert view["unjoined"] == {"b#d#2": "connecting"}


def test_ingresses_that_say_nothing_are_named() -> None:
    view = cast("dict[str, Any]", overview_view({**OVERVIEW, "unresponsive": ["i-3"]})["ingresses"])
    assert view["unresponsive"] == ["i-3"]


def test_the_overview_leaves_the_replicas_out() -> None:
    assert "members" not in overview_view(OVERVIEW)
    assert "b#p#1" not in str(overview_view(OVERVIEW))


def test_a_controller_that_has_seen_nothing_yet_has_an_overview() -> None:
    view = overview_view({"model": "tiny", "demand": None, "ingresses": []})
    assert view["classes"] == []
    assert view["pools"] == []
    assert view["demand"] is None


def test_a_replica_is_shown_as_the_first_ingress_sees_it_that_has_reached_it() -> None:
    row = replicas({**OVERVIEW})[0]
    assert row["role"] == "prefill"
    assert row["state"] == "draining"
    assert row["kv_used_fraction"] == 0.5
    assert row["index"] == "out of step"


def test_leases_of_all_ingresses_are_added_up() -> None:
    assert replicas({**OVERVIEW})[0]["leases"] == 3


def test_a_replica_that_no_ingress_has_reached_is_shown_as_such() -> None:
    row = replicas({**OVERVIEW})[1]
    assert row["replica_id"] == "b#d#2"
    assert row["state"] == "not joined"


def test_a_request_keeps_its_time_as_bars_and_leaves_its_placements_out() -> None:
    row = request_row(request_report("a", decisions=[{"policy": "predicted"}], tenant="t"))
    assert row["bars"] == [("prefill", 0.0, 0.25)]
    assert row["tenant"] == "t"
    assert "decisions" not in row


def test_an_id_that_is_too_long_is_cut() -> None:
    assert request_row(request_report("x" * 5000))["request_id"] == "x" * MAX_REQUEST_ID_CHARS


def test_ticks_that_decide_the_same_are_told_once_by_the_newest() -> None:
    runs = tick_runs([tick(6.0), tick(4.0), tick(2.0, 2, "start 1 of d")])
    assert [(run["ticks"], run["age_s"], run["first_age_s"]) for run in runs] == [
        (1, 2.0, 2.0),
        (2, 4.0, 6.0),
    ]


def test_a_point_has_rates_and_a_column_for_each_class_and_pool() -> None:
    point = make_point(OVERVIEW, 12.5)
    assert point["at_s"] == 12.5
    assert point["offered_per_s"] == 5.0
    assert point["goodput_per_s"] == 3.0
    assert point["attainment/fast"] == 0.9
    assert point["attainment/slow"] is None
    assert (point["desired/d"], point["ready/d"]) == (2, 1)


def test_without_classes_there_is_no_goodput_rather_than_none_of_it() -> None:
    assert make_point({**OVERVIEW, "classes": []}, 0.0)["goodput_per_s"] is None


def test_columns_of_a_history_are_of_one_length() -> None:
    history = History()
    history.add(OVERVIEW, 1.0)
    history.add({**OVERVIEW, "pools": []}, 3.0)
    columns = history.columns(3.0)
    assert columns["at_s"] == [1.0, 3.0]
    assert columns["ready/d"] == [1, None]
    assert {len(column) for column in columns.values()} == {2}


def test_a_history_covers_30_minutes_of_ticks_and_no_more() -> None:
    history = History()
    for number in range(2000):
        history.add(OVERVIEW, number * 2.0)
    at_s = history.columns(3998.0)["at_s"]
    assert (at_s[0], at_s[-1], len(at_s)) == (3998.0 - HISTORY_S, 3998.0, 901)


def test_ticks_in_quick_succession_take_no_more_room() -> None:
    history = History()
    for number in range(100_000):
        history.add(OVERVIEW, number * 0.1)
    assert len(history.columns(10_000.0)["at_s"]) <= HISTORY_S / MIN_SPACING_S


def test_points_older_than_the_chart_are_left_out() -> None:
    history = History()
    history.add(OVERVIEW, 0.0)
    history.add(OVERVIEW, 2000.0)
    assert history.columns(2001.0)["at_s"] == [2000.0]
    assert history.columns(4000.0) == {}


# -------------------------------------------------------------------- colours


STYLE = Path(__file__).parents[2] / "platform/baton/console/static/colours.css"
LEAST = 4.5
"""Source: WCAG 2.2, success criterion 1.4.3 (AA)."""
LEAST_OF_MARKS = 3.0
"""Source: WCAG 2.2, success criterion 1.4.11."""


def theme(opening: str) -> dict[str, str]:
    text = STYLE.read_text()
    block = text[text.index(opening) :].partition("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


THEMES = {"light": theme(":root {"), "dark": theme(':root[data-theme="dark"] {')}


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("ink", ["text", "soft", "faint", "good", "bad", "warn", "accent"])
@pytest.mark.parametrize("paper", ["ground", "raised"])
def test_words_stand_out(name: str, ink: str, paper: str) -> None:
    colours = THEMES[name]
    assert contrast(colours[ink], colours[paper]) >= LEAST


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize(
    "ink", ["lost", "prefill", "transfer", "decode", "queue", "mixed", "ink-2", "ink-3"]
)
def test_marks_stand_out(name: str, ink: str) -> None:
    colours = THEMES[name]
    assert contrast(colours[ink], colours["raised"]) >= LEAST_OF_MARKS


def test_the_dark_theme_is_the_same_by_choice_and_by_system() -> None:
    by_system = theme(':root:not([data-theme="light"]) {')
    assert by_system == THEMES["dark"]
