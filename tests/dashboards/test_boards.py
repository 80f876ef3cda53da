"""What panels compare is of the same requests, pools and deployments."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton.telemetry import catalogue as c
from baton.telemetry.dashboards.boards import boards
from baton.telemetry.dashboards.choices import MODEL
from baton.telemetry.dashboards.model import Panel, Shape

BY = re.compile(r"by \(([^)]*)\)")
SELECTED = re.compile(r"(\w+)\{([^}]*)\}")
CHOSEN = re.compile(r"\$(class|model|pool|tenant)")
PROMISED = {c.SLO_TARGET.name, c.SLO_OBJECTIVE.name}
"""Every model of a class is promised the same."""


def panels() -> Iterator[Panel]:
    for board in boards():
        yield from board.panels()


def panel(title: str) -> Panel:
    return next(one for one in panels() if one.title == title)


def test_pools_and_classes_of_two_deployments_are_told_apart() -> None:
    mixed = [
        one.title
        for one in panels()
        if one.shape is not Shape.MATRIX  # it has no room for a third label
        for query in one.queries
        for by in BY.findall(query.expr.text)
        if {"pool", "slo_class"} & set(by.split(", ")) and "job" not in by.split(", ")
    ]
    assert mixed == []


@pytest.mark.parametrize(
    "title",
    [
        "Below what is wanted",
        "Attainment above target, over the target's window",
        "Prompt tokens: demand against capacity",
        "Output tokens: demand against capacity",
        "Forecast, prompt and output tokens",
        "Targets that answer",
        "Configuration in force",
    ],
)
def test_what_one_deployment_lacks_is_not_made_up_for_by_another(title: str) -> None:
    for query in panel(title).queries:
        assert "job" in query.expr.labels
        assert "{{job}}" in query.legend


def test_a_choice_narrows_both_sides_of_a_comparison_or_neither() -> None:
    narrowed = {
        one.title: {
            frozenset(CHOSEN.findall(matchers))
            for query in one.queries
            for name, matchers in SELECTED.findall(query.expr.text)
            if name not in PROMISED
        }
        for one in panels()
    }
    assert [title for title, choices in narrowed.items() if len(choices) > 1] == []


def test_models_are_chosen_among_those_that_requests_named() -> None:
    assert MODEL.query == f'label_values({c.REQUESTS.name}{{job=~"$job"}}, model)'
