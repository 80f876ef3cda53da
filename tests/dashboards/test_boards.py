"""What panels compare is of the same requests, pools and deployments."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton.telemetry import catalogue as c
from tests.dashboards.pages import Page, pages, panels_of
from tests.dashboards.queries import asked

BY = re.compile(r"by \(([^)]*)\)")
SELECTED = re.compile(r"(\w+)\{([^}]*)\}")
CHOSEN = re.compile(r"\$(class|model|pool|tenant)")
OBJECTIVES = {c.SLO_TARGET.name, c.SLO_OBJECTIVE.name}
"""Models of a class have the same objectives."""


def panels() -> Iterator[Page]:
    for page in pages():
        yield from panels_of(page)


def is_matrix(panel: Page) -> bool:
    return "groupingToMatrix" in [change["id"] for change in panel.get("transformations", ())]


def test_pools_and_classes_of_two_deployments_are_distinguished() -> None:
    mixed = [
        panel["title"]
        for panel in panels()
        if not is_matrix(panel)  # it has no room for a third label
        for target in panel["targets"]
        for by in BY.findall(target["expr"])
        if {"pool", "slo_class"} & set(by.split(", ")) and "job" not in by.split(", ")
    ]
    assert mixed == []


@pytest.mark.parametrize(
    "title",
    [
        "Missing replicas",
        "Attainment minus target",
        "Prompt token demand and capacity",
        "Output token demand and capacity",
        "Token demand forecast",
        "Scrape targets up",
        "Configuration generation",
    ],
)
def test_missing_series_of_a_deployment_are_not_filled_from_another(title: str) -> None:
    panel = next(panel for panel in panels() if panel["title"] == title)
    for target in panel["targets"]:
        assert "job" in asked(target["expr"]).labels
        assert "{{job}}" in target["legendFormat"]


def test_a_choice_narrows_both_sides_of_a_comparison_or_neither() -> None:
    narrowed = {
        panel["title"]: {
            frozenset(CHOSEN.findall(matchers))
            for target in panel["targets"]
            for name, matchers in SELECTED.findall(target["expr"])
            if name not in OBJECTIVES
        }
        for panel in panels()
    }
    assert [title for title, choices in narrowed.items() if len(choices) > 1] == []


def test_models_are_chosen_among_those_that_requests_named() -> None:
    # Not by `baton_build_info`: of several models it tells all names as one.
    choices = [choice for page in pages() for choice in page["templating"]["list"]]
    queries = {choice["query"] for choice in choices if choice["name"] == "model"}
    assert queries == {f'label_values({c.REQUESTS.name}{{job=~"$job"}}, model)'}
